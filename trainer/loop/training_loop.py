"""The frame of every training loop: restore, validate, run the steps, log, validate, save and finish.

`RayPPOTrainer` and the trainers in `trainer.supervised.loop` and `trainer.diffusion.loop` add the steps.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from codetiming import Timer

from trainer.callbacks import Callbacks, CallbackState, RunState
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

    Attributes:
        options: Section `trainer` of the configuration.
        result: Results so far.
        metrics: Metrics of the current step.
        timing: Seconds of the current step, by phase.
        usage: Use of the workers in the current step, by phase; see `WorkerGroup.usage`.
        step_data: Item of `steps` for the current step; None before the first step.
        scored_batch: Sampled and scored batch of the current step; None before that, or if the step samples nothing.
        callbacks: The user's callbacks, which `trainer.launch.run` sets.
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
        self.usage: dict[str, np.ndarray] = {}
        self.step_data: Any = None  # its type depends on the steps of the subclass
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
        """Yields the data of each remaining step. The caller has to call `end_step` after each.

        Calls `begin` before the first step, and completes `result` at the end.
        """
        self.begin()
        # a callback can end the run in on_run_begin or after the first validation, before there is a step
        if self.callbacks.control.should_training_stop:
            self.end_early()

        if not self.val_only:
            for data in self.steps:
                self._reset_step(data)
                # the workers profile until `end_step`, so the profile shows neither validation nor checkpoint
                if self.steps.global_step in self.options.profile_steps:
                    self.start_profile()
                yield data
        self._complete_result()

    def _reset_step(self, data: object) -> None:
        """Forgets the previous step. data: the item of `steps` for the new step."""
        self.metrics = {}
        self.timing = {}
        self.usage = {}
        self.step_data = data
        self.scored_batch = None

    def _complete_result(self) -> None:
        """Completes `result` after the last step, and tells the callbacks that the run has ended."""
        # the last step waits for its own checkpoint. One that a callback requested shortly before the end may still be
        # written in the background
        if self.callbacks:
            self.saver.finish()
        self.result.checkpoint = self.saver.newest
        self.result.stopped = self.steps.stopping

        # a run that its user stopped in the same step is reported as stopped
        if self.ended_early and not self.result.stopped:
            write_early_end(self.saver.run_dir, self.steps.global_step)

        # on_run_end is the last hook: it comes after on_checkpoint of the last checkpoint
        self.report_checkpoints()
        self.call_callbacks("on_run_end")

    def begin(self) -> None:
        """Restores the checkpoint, if there is one, and validates."""
        self.resume()
        self.validate_first()

    def validate_first(self) -> None:
        """Validates before the first step, if the options require it, and logs the metrics.

        A resumed run takes the validations that it has logged before.
        """
        is_required = self.options.val_before_train or self.val_only
        if not self.validates or not is_required:
            return

        # the final report of a resumed run compares with the run's first validation, not with one at the checkpoint
        step = self.steps.global_step
        is_resumed = step > 0 and not self.val_only
        if is_resumed:
            logged = logged_validations(self.saver.run_dir / METRICS, step)
            if logged:
                self.result.before_step = min(logged)
                self.result.before = logged[min(logged)]
                self.result.after = logged[max(logged)]
                return

        metrics = self.validate(self.result)
        self.result.before_step = step
        self.result.before = metrics
        self.result.after = metrics
        self.tracking.log(metrics, step=step)
        self.report_validation(metrics)

    def end_step(self, batch: DataProto) -> None:
        """Validates if due, logs the step, calls the callbacks, and saves a checkpoint if due or requested."""
        if self.steps.global_step in self.options.profile_steps:
            self.stop_profile()

        validation: dict[str, float] = {}
        if self.validates and self.steps.due(self.options.test_freq):
            with self.timed("testing"):
                validation = self.validate(self.result)
            self.result.after = validation
        self.log_step(batch, validation)

        # callbacks read the logged metrics, and the checkpoint contains the state that they have after this step
        must_save = False
        if self.callbacks:
            must_save = self.callbacks_of_step(batch, validation)

        # saved after logging, so that a resumed run finds the metrics of all earlier steps. `is_due` is called in any
        # case, because it also decides whether a run that is to stop ends with this step
        is_due = self.saver.is_due(self.steps)
        if is_due or must_save:
            self.save()
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
        if not requests.should_training_stop or self.steps.is_last:
            return requests.should_save

        # the step has become the last one, and any test_freq except 0 validates in the last step
        self.end_early()
        must_save = requests.should_save
        if self.validates and self.steps.due(self.options.test_freq) and not is_validated:
            self.validate_again()
            requests_of_validation = self.callbacks.take_requests()
            must_save = must_save or requests_of_validation.should_save
        return must_save

    def validate_again(self) -> None:
        """Validates after the step was logged, and adds the metrics to those of the step."""
        with self.timed("testing"):
            metrics = self.validate(self.result)
        self.result.after = metrics
        testing = {"timing_s/testing": self.timing["testing"]}
        self.tracking.log(metrics | testing, step=self.steps.global_step)
        self.report_validation(metrics)

    def end_early(self) -> None:
        """Makes the current step the last one."""
        step = self.steps.global_step
        total = self.steps.total
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
            # hooks are called between steps; before the first one there is nothing to save
            if self.step_data is not None:
                self.save_completed_step()
            raise

    def save_completed_step(self) -> None:
        """Saves the current step, which is complete, before an error of a callback ends the run."""
        self.step_data = None  # the crash dump then offers no replay: the step itself did not fail
        self.saver.finish()
        is_saved = self.steps.global_step in saved_steps(self.saver.run_dir)
        if self.options.save_freq == 0 or is_saved:
            return

        # only the readable states: the error can be that of a callback whose state cannot be read
        self.save_checkpoint(self.callbacks.readable_states())
        self.saver.finish()

    def save_checkpoint(self, callback_states: Mapping[str, CallbackState]) -> None:
        """Writes a checkpoint of the current step with the trainer's state and those of the callbacks."""
        self.saver.save(self.steps, self.state_dict() | {CALLBACKS: callback_states})

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
        """Adds the block's seconds to timing_s/<name>, and its use of workers to `usage`.

        Exceptions raised inside name this phase and the step.

        Args:
            name: the phase.
            within: the enclosing phase, which is still running; seconds and use are subtracted from it.
        """
        # the roles that share processes share one transport, so the first group counts the calls of all of them
        usage_before = self.groups[0].usage
        timer = Timer(name=name, logger=None)
        with timer, during(name, self.steps.global_step), profiling.span(name):
            yield
        used = self.groups[0].usage - usage_before
        self._add_to_phase(name, timer.last, used)
        if within is not None:
            self._add_to_phase(within, -timer.last, -used)

    def _add_to_phase(self, name: str, seconds: float, used: np.ndarray) -> None:
        # a phase can run several times in a step, such as the rewards of each group that is sampled
        seconds_before = self.timing.get(name, 0.0)
        self.timing[name] = seconds_before + seconds
        used_before = self.usage.get(name, np.zeros(2))
        self.usage[name] = used_before + used

    @property
    def groups(self) -> list[WorkerGroup]:
        """The worker groups of the trained models, and of rollout engines in separate pools.

        All roles except those engines share the processes of the first group.
        """
        groups = []
        for learner in self.saver.learners.values():
            groups += learner.groups
        return groups

    def usage_metrics(self) -> dict[str, float]:
        """Returns perf/idle_frac and perf/moved_mb of the step and of each phase that called workers."""
        metrics: dict[str, float] = {}
        num_ranks = self.groups[0].world_size
        for phase, (busy_s, moved_bytes) in self.usage.items():
            if busy_s <= 0:
                continue
            suffix = "" if phase == "step" else f"/{phase}"
            # a call counts in the phase that waits for its result, so one that began earlier can make this more than 1
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
        tables: list[str] = []
        for group in self.groups:
            tables += group.stop_profile()
        profiling.stop_profile()
        step = self.steps.global_step
        folder = profile_folder(self.saver.run_dir, step)
        self.tracking.show(f"profile of step {step}: {folder}\n{tables[0]}")

    def save(self) -> None:
        """Writes a checkpoint of this step and logs the seconds that training waited for it."""
        # read outside the phase, so that an error of a callback is not reported as one of the checkpoint
        try:
            states = self.callbacks.state_dict()
        except Exception:
            self.save_completed_step()
            raise
        with self.timed("save_checkpoint"):
            self.save_checkpoint(states)
        waited = {"timing_s/save_checkpoint": self.timing["save_checkpoint"]}
        self.tracking.log(waited, step=self.steps.global_step)

    def resume(self) -> None:
        """Restores the checkpoint that `trainer.resume_mode` selects, if there is one.

        The callbacks learn that the run begins.
        """
        state = self.saver.restore(self.steps)
        if state is not None:
            self.load_state_dict(state)
            # checkpoints from before there were callbacks have no states
            self.callbacks.load_state_dict(state.get(CALLBACKS, {}))
        self.call_callbacks("on_run_begin")
        self.callbacks.state_dict()  # a state that no checkpoint can hold is an error now and not at the first save

    def state_dict(self) -> dict[str, Any]:
        """Returns the trainer's own state for a checkpoint, without models and steps."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the result of `state_dict`."""
