"""The frame of every training loop: restore, validate, run the steps, log, validate, save and finish.

`RayPPOTrainer` and the trainers in `trainer.supervised.loop` and `trainer.diffusion.loop` add the steps.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from codetiming import Timer

from trainer.callbacks import Callbacks, RunState
from trainer.checkpoint.files import saved_steps
from trainer.checkpoint.resume import profile_folder
from trainer.loop.saving import Saver
from trainer.loop.steps import StepCounter
from trainer.observe.final_report import FitResult, write_early_end
from trainer.observe.tracking import METRICS, Tracking, logged_validations
from trainer.validation.sample import Sample
from verl_lite.config import RunConfig
from verl_lite.errors import during
from verl_lite.machine import profiling
from verl_lite.protocol import DataProto
from verl_lite.single_controller.worker_group import WorkerGroup

CALLBACKS = "callbacks"  # the states of the callbacks in a checkpoint
Steps = TypeVar("Steps", bound=StepCounter)
Result = TypeVar("Result", bound=FitResult)


class TrainingLoop(Generic[Steps, Result]):
    """Base class of the trainers. A subclass defines `train_step` or its own `fit`, and the other methods as needed.

    options: section `trainer` of the configuration. result: results so far. metrics, timing, usage: metrics, and by
    phase seconds and `WorkerGroup.usage`, of the current step. step_data: the item of `steps` for the current step;
    None before the first step. scored_batch: the sampled and scored batch of the current step; None before that, or
    if the step samples nothing. callbacks: the user's callbacks, which `trainer.launch.run` sets.
    """

    val_only = False  # True: validate once, and run no step

    def __init__(self, options: RunConfig, steps: Steps, tracking: Tracking, saver: Saver, result: Result) -> None:
        self.options = options
        self.steps = steps
        self.tracking = tracking
        self.saver = saver
        self.result = result
        self.metrics: dict[str, Any] = {}
        self.timing: dict[str, float] = {}
        self.usage: dict[str, Any] = {}
        self.step_data: Any = None
        self.scored_batch: DataProto | None = None
        self.callbacks = Callbacks()
        self.ended_early = False  # a callback has ended the run before its last step

    def fit(self) -> Result:
        """Runs all remaining training steps. Returns the results for the final report."""
        for data in self.training_steps():
            with self.timed("step"):
                batch = self.train_step(data)
            self.end_step(batch)
        return self.result

    def training_steps(self) -> Iterator[Any]:
        """Yields the data of each remaining step. Calls `begin` before the first step; completes `result` at the end.
        Call `end_step` after each step."""
        self.begin()
        if self.callbacks.control.should_training_stop:
            self.end_early()
        for data in () if self.val_only else self.steps:
            self.metrics = {}
            self.timing = {}
            self.usage = {}
            self.step_data = data
            self.scored_batch = None
            if self.steps.global_step in self.options.profile_steps:
                self.start_profile()
            yield data
        if self.callbacks:
            self.saver.finish()  # a callback may have requested a checkpoint shortly before the end
        self.result.checkpoint = self.saver.newest
        self.result.stopped = self.steps.stopping
        if self.ended_early and not self.result.stopped:
            write_early_end(self.saver.run_dir, self.steps.global_step)
        self.report_checkpoints()
        self.call_callbacks("on_run_end")

    def begin(self) -> None:
        """Restores the checkpoint, if there is one, and validates."""
        self.resume()
        self.validate_first()

    def validate_first(self) -> None:
        """Validates before the first step, if the options require it, and logs the metrics. A resumed run takes the
        validations that it has logged before."""
        if not self.validates or not (self.options.val_before_train or self.val_only):
            return
        step = self.steps.global_step
        logged = {} if self.val_only or step == 0 else logged_validations(self.saver.run_dir / METRICS, step)
        if logged:
            self.result.before_step = min(logged)
            self.result.before = logged[self.result.before_step]
            self.result.after = logged[max(logged)]
            return
        self.result.before_step = step
        self.result.before = self.result.after = self.validate(self.result)
        self.tracking.log(self.result.before, step=step)
        self.report_validation(self.result.before)

    def end_step(self, batch: DataProto) -> None:
        """Validates if due, logs the step, calls the callbacks, and saves a checkpoint if due or requested."""
        if self.steps.global_step in self.options.profile_steps:
            self.stop_profile()
        validation: dict[str, float] = {}
        if self.validates and self.steps.due(self.options.test_freq):
            with self.timed("testing"):
                validation = self.result.after = self.validate(self.result)
        self.log_step(batch, validation)
        must_save = self.callbacks_of_step(batch, validation) if self.callbacks else False
        if self.saver.is_due(self.steps) or must_save:
            self.save()  # after logging, so that a resumed run finds the metrics of all earlier steps
        self.report_checkpoints()

    # -------------------------------------------------------------------------------------------------- callbacks

    def callbacks_of_step(self, batch: DataProto, validation: Mapping[str, float]) -> bool:
        """Calls the callbacks of a logged step, and validates or ends the run if they request it.

        Args:
            batch: the batch of the step.
            validation: the metrics of its validation; empty if none was due.

        Returns:
            True if a callback requests a checkpoint.
        """
        if validation:
            self.report_validation(validation)
        self.call_callbacks("on_step_end", partial(self.training_samples, batch))
        is_validated = bool(validation)
        if self.callbacks.control.should_evaluate and not is_validated:
            self.validate_again()
            is_validated = True

        requests = self.callbacks.take_requests()
        if requests.should_training_stop and not self.steps.is_last:
            self.end_early()
            if self.validates and self.steps.due(self.options.test_freq) and not is_validated:
                self.validate_again()
                requests.should_save |= self.callbacks.take_requests().should_save  # of this validation
        return requests.should_save

    def validate_again(self) -> None:
        """Validates after the step was logged, and adds the metrics to those of the step."""
        with self.timed("testing"):
            self.result.after = self.validate(self.result)
        testing = {"timing_s/testing": self.timing["testing"]}
        self.tracking.log(self.result.after | testing, step=self.steps.global_step)
        self.report_validation(self.result.after)

    def end_early(self) -> None:
        """Makes the current step the last one."""
        step, total = self.steps.global_step, self.steps.total
        self.tracking.note(f"The run ends after step {step} of {total}, as {self.callbacks.stopped_by} requests")
        self.ended_early = True
        self.steps.total = step

    def report_validation(self, metrics: Mapping[str, float]) -> None:
        """Calls `on_validation_end`. metrics: those of the validation."""
        self.call_callbacks("on_validation_end", lambda: self.result.samples, metrics)

    def report_checkpoints(self) -> None:
        """Calls `on_checkpoint` for each checkpoint that was completed since the last call."""
        for folder in self.saver.take_completed():
            self.call_callbacks("on_checkpoint", checkpoint=folder)

    def call_callbacks(
        self,
        event: str,
        read_samples: Callable[[], Sequence[Sample]] = list,
        metrics: Mapping[str, float] | None = None,
        checkpoint: Path | None = None,
    ) -> None:
        """Calls one hook of all callbacks.

        Args:
            event: name of the hook.
            read_samples: returns the samples of the state.
            metrics: metrics of the state; None = those that were logged for the current step.
            checkpoint: checkpoint of the state; None = the newest one.
        """
        if not self.callbacks:
            return
        step = self.steps.global_step
        if metrics is None:
            metrics = self.tracking.logged_at(step)
        state = RunState(
            global_step=step,
            max_steps=self.steps.total,
            run_dir=self.saver.run_dir,
            metrics=metrics,
            checkpoint=checkpoint or self.saver.newest,
            validates=self.validates,
            note=self.tracking.note,
            read_samples=read_samples,
            val_only=self.val_only,
        )
        try:
            self.callbacks.call(event, state)
        except Exception:
            if self.step_data is not None:
                self.save_completed_step()
            raise

    def save_completed_step(self) -> None:
        """Saves the current step, which is complete, before an error of a callback ends the run."""
        self.step_data = None  # the crash dump then offers no replay: the step itself did not fail
        self.saver.finish()
        if self.options.save_freq != 0 and self.steps.global_step not in saved_steps(self.saver.run_dir):
            self.saver.save(self.steps, self.state_dict() | {CALLBACKS: self.callbacks.readable_states()})
            self.saver.finish()

    def training_samples(self, batch: DataProto) -> list[Sample]:
        """Returns the answers of a training batch with their scores; none in runs that generate no text."""
        return []

    # -------------------------------------------------------------------------------------- what subclasses define

    def train_step(self, data: Any) -> DataProto:
        """Runs one step and stores its metrics in `metrics`. Returns the batch that the step trained on."""
        raise NotImplementedError

    @property
    def validates(self) -> bool:
        """True if the run validates."""
        raise NotImplementedError

    def validate(self, result: Result) -> dict[str, float]:
        """Returns the metrics of a validation. May store samples in `result`."""
        raise NotImplementedError

    def log_step(self, batch: DataProto, validation: dict[str, float]) -> None:
        """Sends the metrics of the step to the trackers. validation: metrics of its validation, empty if not due."""
        raise NotImplementedError

    @contextmanager
    def timed(self, name: str, within: str | None = None) -> Iterator[None]:
        """Adds the block's seconds to timing_s/<name>, and its use of workers to `usage`. Exceptions raised inside name
        this phase and the step.

        within: the enclosing phase, which is still running; seconds and use are subtracted from it.
        """
        usage_before = self.groups[0].usage
        timer = Timer(name=name, logger=None)
        with timer, during(name, self.steps.global_step), profiling.span(name):
            yield
        used = self.groups[0].usage - usage_before
        self.timing[name] = self.timing.get(name, 0.0) + timer.last
        self.usage[name] = self.usage.get(name, 0.0) + used
        if within is not None:
            self.timing[within] = self.timing.get(within, 0.0) - timer.last
            self.usage[within] = self.usage.get(within, 0.0) - used

    @property
    def groups(self) -> list[WorkerGroup]:
        """The worker groups of the trained models, and of rollout engines in separate pools. All roles except those
        engines share the processes of the first group."""
        return [group for learner in self.saver.learners.values() for group in learner.groups]

    def usage_metrics(self) -> dict[str, float]:
        """Returns perf/idle_frac and perf/moved_mb of the step and of each phase that called workers."""
        metrics: dict[str, float] = {}
        num_ranks = self.groups[0].world_size
        for phase, (busy_s, moved_bytes) in self.usage.items():
            if busy_s <= 0:
                continue
            suffix = "" if phase == "step" else f"/{phase}"
            busy_share = busy_s / (num_ranks * self.timing[phase])
            metrics[f"perf/idle_frac{suffix}"] = max(0.0, 1.0 - busy_share)
            metrics[f"perf/moved_mb{suffix}"] = moved_bytes / 1e6
        return metrics

    def start_profile(self) -> None:
        """Starts a profile of the current step in all worker processes and in this process."""
        folder = profile_folder(self.saver.run_dir, self.steps.global_step)
        for group in self.groups:
            group.start_profile(str(folder))
        profiling.start_profile(folder / "driver")  # does nothing if the workers are in this process

    def stop_profile(self) -> None:
        """Writes the profiles into the run folder, and shows the table of the first rank."""
        tables = [table for group in self.groups for table in group.stop_profile()]
        profiling.stop_profile()
        step = self.steps.global_step
        self.tracking.show(f"profile of step {step}: {profile_folder(self.saver.run_dir, step)}\n{tables[0]}")

    def save(self) -> None:
        """Writes a checkpoint of this step and logs the seconds that training waited for it."""
        try:
            states = self.callbacks.state_dict()
        except Exception:
            self.save_completed_step()
            raise
        with self.timed("save_checkpoint"):
            self.saver.save(self.steps, self.state_dict() | {CALLBACKS: states})
        self.tracking.log({"timing_s/save_checkpoint": self.timing["save_checkpoint"]}, step=self.steps.global_step)

    def resume(self) -> None:
        """Restores the checkpoint that `trainer.resume_mode` selects, if there is one. The callbacks learn that the run
        begins."""
        state = self.saver.restore(self.steps)
        if state is not None:
            self.load_state_dict(state)
            self.callbacks.load_state_dict(state.get(CALLBACKS, {}))
        self.call_callbacks("on_run_begin")
        self.callbacks.state_dict()  # a state that no checkpoint can hold is an error now and not at the first save

    def state_dict(self) -> dict[str, Any]:
        """Returns the trainer's own state for a checkpoint, without models and steps."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the result of `state_dict`."""
