"""Training without a rollout: the loop and job that supervised fine-tuning and reward models share.

The driver draws rows in epochs, collates them, plans each batch once for all ranks and dispatches it to the workers.
The caller defines the network and the loss. The result is a folder in Hugging Face format, RUN/hf.
"""

from __future__ import annotations

import hashlib
import math
import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch

from trainer.checkpoint.resume import refuse_other_data
from trainer.data.preferences import Pair
from trainer.data.sft_dataset import Example, count_loss_tokens
from trainer.launch.resources import join_ray, resolve_slots, start_workers
from trainer.launch.run import Job, Report
from trainer.loop.saving import SavedByWorkers, Saver
from trainer.loop.steps import EpochSteps
from trainer.loop.training_loop import TrainingLoop
from trainer.observe.console import Console
from trainer.observe.final_report import FitResult, validation_line
from trainer.observe.picture import Panel, draw_curve
from trainer.observe.tracking import Tracking
from trainer.planner.batch import aligned
from trainer.planner.launched import device_memory_gib, launch_device, memory_rows, supervised_measured_line
from trainer.planner.memory_table import GIB, MemoryPlan
from trainer.planner.networks import checkpoint_bytes
from trainer.planner.supervised import batches_of, read_network, supervised_plan, supervised_rows
from trainer.recipe import recipe_modules
from verl_lite.config import ConfigError, SupervisedConfig, SupervisedDataConfig, written_value
from verl_lite.config.checks import section_problems
from verl_lite.config.idle_options import Situation
from verl_lite.config.supervised import EACH_EPOCH
from verl_lite.errors import UserError
from verl_lite.metrics import combine, values
from verl_lite.protocol import DataProto
from verl_lite.seqlen_balance import BatchPlan, compute_seqlen_metrics, plan_batch
from verl_lite.single_controller import ClassWithInitArgs
from verl_lite.single_controller.guard import guarded
from verl_lite.single_controller.worker_group import WorkerGroup
from workers.policy.adapter import base_note
from workers.policy.export import export
from workers.policy.loading import (
    NetworkSpec,
    Policy,
    check_network,
    check_sequence_parallel,
    load_model_config,
    longest_context,
    output_layer_note,
    packing_note,
)
from workers.supervised.worker import SupervisedWorker

EXPORT = "hf"  # subfolder of the run with the trained model
UNSAVED = ".shards"  # subfolder of the run with final weights that no checkpoint has, until they are exported
PLANNED_STEPS = 64  # of the first epoch, from which a plan is computed
CURVES: tuple[Panel, Panel, Panel] = (
    ("Loss in training", "loss", {"train/loss": ""}),
    ("Norm of the gradient", "norm", {"train/grad_norm": ""}),
    ("Learning rate", "rate", {"train/lr": ""}),
)
Row = TypeVar("Row", bound=Example | Pair)  # len(row): the number of tokens that a forward pass over the row reads
Options = TypeVar("Options", bound=SupervisedConfig)


@dataclass(frozen=True)
class Task(Generic[Row]):
    """The rows to train on and the functions that turn them into batches.

    Attributes:
        worker: The worker class, a `SupervisedWorker` that is constructed as worker(config, steps).
        train, val: The rows.
        collate: Builds a batch from rows.
        count: Returns (B,), the units that the loss counts in each row (tokens or pairs). Their sum over an optimizer
            step is meta_info["num_tokens"] of each of its micro-batches.
    """

    worker: type[SupervisedWorker]
    train: Sequence[Row]
    val: Sequence[Row]
    collate: Callable[[Sequence[Row]], DataProto]
    count: Callable[[DataProto], torch.Tensor]


@dataclass
class Trained(FitResult):
    """The result of a run.

    Attributes:
        steps: Training steps done.
        loss: Training loss of the last logged line.
        shards: Folder with the final model as the workers saved it.
    """

    steps: int = 0
    loss: float = float("nan")
    shards: Path | None = None


class SupervisedTrainer(TrainingLoop[EpochSteps, Trained], Generic[Row]):
    """The training loop on the driver. Each call to the workers plans a batch and dispatches it."""

    def __init__(
        self,
        config: SupervisedConfig,
        task: Task[Row],
        steps: EpochSteps,
        group: WorkerGroup,
        tracking: Tracking,
        run_dir: Path,
    ) -> None:
        self.config = config
        self.task = task
        self.group = group
        self.run_dir = run_dir
        self.model = SavedByWorkers(group)
        saver = Saver(run_dir, config, {"model": self.model}, expected_bytes=0, log=tracking.note)
        super().__init__(config.trainer, steps, tracking, saver, Trained())
        self.unlogged: list[dict[str, float]] = []  # metrics of each step since the last logged line

    def fit(self) -> Trained:
        """Trains for the configured number of steps, and saves the model unless the last checkpoint contains it."""
        result = super().fit()
        # a stopped run exports nothing: it is not trained to the end, and its checkpoint continues it
        if not result.stopped and result.checkpoint is not None:
            result.shards = result.checkpoint / "model"
        elif not result.stopped:
            result.shards = self.run_dir / UNSAVED / "model"
            self.model.save(str(result.shards))
        return result

    def train_step(self, data: int) -> DataProto:
        """Takes one optimizer step.

        Args:
            data: Number of the step, which determines its rows.
        """
        rows = [self.task.train[row] for row in self.steps.rows_of(data)]
        batch = self.task.collate(rows)
        plan = self._plan(rows, batch)
        loss_metrics = self._dispatch(self.group.train, plan, batch)
        self.metrics = {f"train/{name}": value for name, value in loss_metrics.items()}
        self.metrics |= packing_metrics(plan, rows, self._micro_batch_tokens())
        return batch

    @property
    def validates(self) -> bool:
        """True if there are validation rows."""
        return bool(self.task.val)

    def validate(self, result: Trained) -> dict[str, float]:
        """Returns the loss metrics of the validation rows, named val/<metric>."""
        rows = self.task.val
        batch = self.task.collate(rows)
        plan = self._plan(rows, batch)
        loss_metrics = self._dispatch(self.group.measure, plan, batch)
        return {f"val/{name}": value for name, value in loss_metrics.items()}

    def log_step(self, batch: DataProto, validation: dict[str, float]) -> None:
        """Logs the validation, and every `trainer.log_freq` steps the means since the last logged line."""
        seconds = self.timing["step"]
        tokens_per_second = self.metrics["perf/total_num_tokens"] / seconds
        metrics = self.metrics | {"timing_s/step": seconds}
        # verl's name of the same number
        metrics["perf/time_per_step"] = seconds
        metrics |= self.usage_metrics()
        metrics["perf/throughput"] = tokens_per_second / self.group.world_size
        self.unlogged.append(metrics)

        step = self.steps.global_step
        means: dict[str, float] = {}
        is_due = step % self.config.trainer.log_freq == 0
        # the last steps, too, even if there are fewer than log_freq, so that no step is missing in the means
        if is_due or self.steps.is_last or self.steps.stop_asked:
            means = self.means_since_last_line()
        if means or validation:
            self.tracking.log(means | validation, step=step)

    def means_since_last_line(self) -> dict[str, float]:
        """Returns the means of the metrics over the steps since the last logged line, and updates the result."""
        step = self.steps.global_step
        means = {"training/global_step": float(step), "training/epoch": float(self.steps.epoch)}
        for name in self.unlogged[0]:
            # a step without validation lacks those of its workers, such as perf/idle_frac/testing
            values_of_steps = [metrics[name] for metrics in self.unlogged if name in metrics]
            means[name] = float(np.mean(values_of_steps))
        self.unlogged = []
        self.result.steps = step
        self.result.loss = means["train/loss"]
        return means

    def end_early(self) -> None:
        """Makes the current step the last one, and logs the steps since the last line."""
        super().end_early()
        if self.unlogged:
            means = self.means_since_last_line()
            self.tracking.log(means, step=self.steps.global_step)

    def _plan(self, rows: Sequence[Row], batch: DataProto) -> BatchPlan:
        """Divides a batch into ranks and micro-batches."""
        lengths = [len(row) for row in rows]
        return plan_batch(
            np.array(lengths),
            world_size=self.group.mesh("train").dp_size,
            mini_batch_size=None,  # one optimizer step
            max_token_len=self._micro_batch_tokens(),
            num_tokens=self.task.count(batch).numpy(),
        )

    def _micro_batch_tokens(self) -> int:
        """Returns the limit of tokens in a micro-batch, which the ranks of a sequence-parallel group share."""
        return self.config.data.max_token_len_per_gpu * self.config.ulysses_sequence_parallel_size

    def _dispatch(
        self,
        call: Callable[[DataProto], list[DataProto]],
        plan: BatchPlan,
        batch: DataProto,
    ) -> dict[str, float]:
        """Runs a method of the workers on all ranks, and returns their combined metrics."""
        planned_batch = plan.apply(batch)
        results = call(planned_batch)
        metrics_by_rank = [result.meta_info["metrics"] for result in results]
        return values(combine(metrics_by_rank))


def packing_metrics(plan: BatchPlan, rows: Sequence[Row], budget: int) -> dict[str, float]:
    """Returns the number of tokens of a step, their share in the loss, and how full its micro-batches are.

    Args:
        plan: The plan of one optimizer step.
        rows: The planned rows.
        budget: Maximum number of tokens of a micro-batch.
    """
    lengths = np.array([len(row) for row in rows])
    tokens = float(lengths.sum())
    [[step]] = plan.schedule  # one optimizer step
    budget_of_step = step.num_micro_batches * plan.world_size * budget
    balance = compute_seqlen_metrics(plan, lengths)
    return balance | {
        "perf/total_num_tokens": tokens,
        "train/micro_batches": float(step.num_micro_batches),
        "train/micro_batch_fill": tokens / budget_of_step,
        "train/loss_tokens_frac": count_loss_tokens(rows) / tokens,
    }


def _largest_token(rows: Sequence[Row]) -> int:
    """Returns the largest token id of the rows; 0 without rows."""
    largest = 0
    for row in rows:
        for text in row.texts:
            largest = max(largest, *text.prompt, *text.response)
    return largest


def _longest_text(rows: Sequence[Row]) -> int:
    """Returns the number of tokens of the longest sequence in the rows; 0 without rows."""
    longest = 0
    for row in rows:
        for text in row.texts:
            longest = max(longest, len(text))
    return longest


def fingerprint_of(rows: Sequence[Row]) -> str:
    """Returns the number of rows and a digest of their tokens and masks, in their order."""
    digest = hashlib.blake2b(digest_size=8)
    for row in rows:
        for text in row.texts:
            # the separators make tokens that move from one list to the next change the digest
            for numbers in (text.prompt, text.response, text.mask):
                content = np.asarray(numbers, dtype=np.int64).tobytes()
                digest.update(content + b"|")
        margin = row.margin if isinstance(row, Pair) else 0.0
        digest.update(f"{margin};".encode())
    return f"{len(rows)} rows, {digest.hexdigest()}"


class SupervisedJob(Job[Options]):
    """A supervised training job. A subclass reads the rows.

    Attributes:
        next_options: Options of the `trainer.main_ppo` command that continues with the trained model; {} is its folder.
        num_rows: Number of training rows; None until `read_data` has read them.
    """

    next_options: ClassVar[str]
    replays_steps = True
    num_rows: int | None = None

    @staticmethod
    def build_policy(spec: NetworkSpec) -> Policy:
        """Builds the trained network."""
        raise NotImplementedError

    def read_task(self) -> Task[Any]:
        """Returns the tokenized and checked rows. Raises UserError for invalid input."""
        raise NotImplementedError

    def check(self, available: int | None) -> None:
        """Raises UserError for invalid options, before anything is read."""
        if not self.config.data.train_files or self.config.model.path is None:
            raise UserError("data.train_files and model.path: give parquet, json or jsonl files, and a model's folder")
        problems = list(section_problems(self.config))
        if problems:
            raise ConfigError(problems)
        trainer = self.config.trainer
        if trainer.backend == "inline" and (trainer.n_gpus_per_node or 1) > 1:
            raise UserError(
                f"trainer.n_gpus_per_node={trainer.n_gpus_per_node} with trainer.backend=inline: one process is one "
                "rank; set trainer.backend=ray"
            )

    def check_models(self) -> None:
        """Checks the model folder, and notes properties of the model that the user should know."""
        model = self.config.model
        check_network(model, self.build_policy, trains=True, chat_template=self.config.data.chat_template)
        # the option is in no section, unlike that of the roles in main_ppo
        check_sequence_parallel(model, role="", size=self.config.ulysses_sequence_parallel_size)
        notes = [packing_note(model), base_note(model), output_layer_note(model)]
        for note in notes:
            if note:
                self.console.note(note)

    def situation(self) -> Situation:
        return Situation(self.config, devices=self.slots, rows=self.num_rows)

    def read_data(self) -> int:
        """Reads the rows, checks their tokens and plans the steps. Returns the number of steps of the whole run."""
        self.task = self.read_task()
        self.device = launch_device(self.config)
        data: SupervisedDataConfig = self.config.data
        all_rows = [*self.task.train, *self.task.val]
        longest = max(len(row) for row in all_rows)
        # a row is never divided between micro-batches
        if longest > data.max_token_len_per_gpu:
            raise UserError(
                f"data.max_token_len_per_gpu={data.max_token_len_per_gpu}: the longest row has {longest} tokens, "
                "which a micro-batch has to hold; raise it, or lower data.max_length"
            )
        self.check_vocabulary()
        self.check_positions()

        row_count = len(self.task.train)
        if data.train_max_samples >= 0:
            row_count = min(row_count, data.train_max_samples)
        self.num_rows = row_count
        dataset = fingerprint_of(self.task.train[:row_count])
        trainer = self.config.trainer
        self.steps = EpochSteps(row_count, data.train_batch_size, trainer, shuffle=data.shuffle, dataset=dataset)

        # the length of an epoch is known only now
        steps_per_epoch = self.steps.per_epoch
        if trainer.test_freq == EACH_EPOCH:
            trainer.test_freq = steps_per_epoch
        if trainer.save_freq == EACH_EPOCH:
            trainer.save_freq = steps_per_epoch

        # steps that are spread over the epoch, because without shuffling the rows may be sorted by length
        planned_steps = range(1, steps_per_epoch + 1, math.ceil(steps_per_epoch / PLANNED_STEPS))
        self.batches = batches_of(self.task.train, map(self.steps.rows_of, planned_steps))
        return self.steps.total

    def _rows_by_option(self) -> dict[str, Sequence[Any]]:
        """Returns the rows by the option that names their files, for messages."""
        return {"data.train_files": self.task.train, "data.val_files": self.task.val}

    def check_vocabulary(self) -> None:
        """Raises UserError if a row has a token that the model's embedding lacks."""
        # on a GPU, an index outside of the embedding would be an assertion of the device without the row or the token
        text_config = load_model_config(self.config.model).get_text_config()
        size = text_config.vocab_size
        for option, rows in self._rows_by_option().items():
            largest = _largest_token(rows)
            if largest >= size:
                raise UserError(
                    f"{option}: the tokenizer writes token {largest}, and the model {self.config.model.path!r} has an "
                    f"embedding of {size} tokens (vocab_size): use the model's own tokenizer, or enlarge its embedding "
                    "(resize_token_embeddings)"
                )

    def check_positions(self) -> None:
        """Raises UserError if a row is longer than the model's maximum number of positions."""
        # learned positions end with an index error of the device; rotary ones would be trained without a word
        positions = longest_context(load_model_config(self.config.model))
        if positions is None:
            return
        for option, rows in self._rows_by_option().items():
            longest = _longest_text(rows)
            if longest > positions:
                raise UserError(
                    f"{option}: the longest row has {longest} tokens, more than the {positions} positions of "
                    f"model.path={self.config.model.path!r} (max_position_embeddings): set data.max_length={positions} "
                    "with data.truncation=drop, or take a model with a longer context"
                )

    def checkpoint_bytes(self) -> int:
        return checkpoint_bytes(self.config)

    def check_folder(self) -> None:
        """Raises UserError if the run folder belongs to other rows, or if the result could not be written to it."""
        refuse_other_data(self.config.trainer, self.run_dir, self.steps.dataset)
        require_writable_target(self.run_dir / EXPORT)

    def memory_plan(self) -> MemoryPlan:
        """Returns the memory that the run needs on a device for its rows.

        Raises:
            UserError: If the model's shapes are unknown.
        """
        largest_batch = max(self.batches, key=lambda step: step.tokens)
        validation_batch = None
        if self.task.val:
            all_rows = range(len(self.task.val))
            [validation_batch] = batches_of(self.task.val, [all_rows])
        network = read_network(self.config, self.slots, self.device)
        return supervised_plan(self.config, network, self.slots, self.device, largest_batch, validation_batch)

    def plan(self) -> str:
        """Returns the table at launch: batches, memory and disk space."""
        total_steps = self.steps.total
        rows = supervised_rows(self.config, self.slots, total_steps, self.batches)
        rows += memory_rows(self.config, self.memory_plan, total_steps, samples_max_mb=0)
        return aligned(rows)

    def full_plan(self) -> tuple[str, bool]:
        """Returns the table at launch with the memory of all phases, and True if the run fits this machine."""
        plan = self.plan()
        # without known shapes there is no prediction, which counts as fitting; the row in `plan` gives the reason
        try:
            memory = self.memory_plan()
        except UserError:
            return plan, True

        # devices of a CPU share the memory of their machine, so the number of slots on one machine matters
        slots_here = max(1, self.slots // self.config.trainer.nnodes)
        memory_gib = device_memory_gib(self.device, slots_here)
        lines = memory.lines(self.device.name, memory_gib)
        text = "\n".join([plan, *lines])
        return text, memory.fits(memory_gib * GIB)

    @contextmanager
    def build(self, tracking: Tracking) -> Iterator[TrainingLoop[EpochSteps, Trained]]:
        """Starts the workers and yields the trainer. Ends the workers with the context."""
        config = self.config
        with ExitStack() as stack:
            join_ray(config, self.run_dir.name, tracking.note, stack)
            roles = {"model": ClassWithInitArgs(self.task.worker, config, self.steps.total)}
            log_folder = self.run_dir / "logs"
            groups = start_workers(config, roles, recipe_modules(config), log_folder, stack)
            group = groups["model"]
            yield SupervisedTrainer(config, self.task, self.steps, group, tracking, self.run_dir)

    def report(self, trainer: object, result: Trained) -> Report:
        """Exports the model after a complete run, and returns the lines and commands at the end of the output."""
        if result.shards is None:
            return Report()
        folder = self.export(result)
        line = f"wrote {folder} after {result.steps} steps, loss {result.loss:.3f}"
        validation = validation_line(result.after)
        if validation:
            line += f", validation {validation}"

        next_options = self.next_options.format(shlex.quote(str(folder)))
        next_command = f"python -m trainer.main_ppo {next_options}"
        template_arguments = self.config.data.apply_chat_template_kwargs
        # the template itself is in the exported folder, its arguments are not
        if template_arguments:
            next_command += f" data.apply_chat_template_kwargs={shlex.quote(written_value(template_arguments))}"
        commands = {
            "look": f"python -m trainer.report {shlex.quote(str(self.run_dir))}",
            "train on": next_command,
        }
        measured = supervised_measured_line(self.memory_plan, self.device, self.run_dir)
        curve = draw_curve(self.run_dir, *CURVES)
        return Report([line, measured], {"picture": curve}, commands)

    def export(self, result: Trained) -> Path:
        """Writes the trained model in Hugging Face format and returns its folder.

        Call it after the workers have ended.
        """
        assert result.shards is not None
        folder = self.run_dir / EXPORT
        # after any error: the training is complete, and the message has to name its weights
        try:
            export(str(result.shards), str(folder), trust_remote_code=self.config.model.trust_remote_code)
        except Exception as error:
            command = ["python", "-m", "trainer.export", str(result.shards.parent), "--out", str(folder)]
            again = shlex.join(command)
            error.add_note(
                f"{folder} could not be written. The trained weights are in {result.shards}. To export them when the "
                f"cause is removed:\n  {again}"
            )
            raise
        # a checkpoint stays
        if result.shards.parent == self.run_dir / UNSAVED:
            shutil.rmtree(result.shards.parent)
        return folder


def require_writable_target(folder: Path) -> None:
    """Raises UserError if the trained model could not be written to `folder`, which need not exist."""
    nearest = folder
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir():
        problem = "is not a folder"
    elif not os.access(nearest, os.W_OK | os.X_OK):
        problem = "cannot be written to"
    else:
        return
    raise UserError(
        f"{nearest} {problem}, and the trained model is written to {folder}: move it away, or choose another "
        "trainer.experiment_name or trainer.default_local_dir"
    )


def train_within(
    job_class: type[SupervisedJob[Options]], config: Options, report: Callable[[str], None]
) -> tuple[Path, Trained]:
    """Trains inside another run or in a user's program. Returns the folder of the model and the result of the run.

    Args:
        job_class: the kind of training.
        config: its configuration.
        report: called with each line of progress.
    """

    class ReportingConsole(Console):
        def progress(self, text: str) -> None:
            report(text)

    console = ReportingConsole()
    job = job_class(config, resolve_slots(config), console)
    job.check(available=None)
    job.check_models()
    total_steps = job.read_data()
    console.start(total_steps)
    job.run_dir.mkdir(parents=True, exist_ok=True)
    # the guard ends the workers, even if this process is killed
    with guarded(), Tracking(job.run_dir, config, console) as tracking, job.build(tracking) as trainer:
        result = trainer.fit()
    # the workers must have ended, see `export`
    return job.export(result), result
