"""Training from Python: `train(model, data, reward)` runs `trainer.main_ppo` in this process, returns a `TrainResult`.

In a notebook, a curve below the cell follows the run, and the interrupt button ends the run with a checkpoint. A call
leaves the process as it was: environment variables, exception hook and random generators.
"""

from __future__ import annotations

import secrets
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.api_inputs import (
    Prompts,
    RewardFunction,
    Rows,
    data_files,
    digest_of,
    prompt_rows,
    reward_settings,
    write_rows,
)
from trainer.cli import INTERRUPTED, process_variables
from verl_lite.errors import FinishedRunError, UserError

if TYPE_CHECKING:
    import pandas

    from trainer.callbacks import Callback
    from trainer.observe.health_checks import Finding

_BATCH = 64
"""Largest default of data.train_batch_size."""
_REDRAW_S = 3.0
"""Seconds between two looks at the metrics for the curve of a notebook."""

Options = dict[str, object]
"""Options by dotted key."""

_SETS = {
    "trainer.default_local_dir": "run_dir",
    "trainer.resume_mode": "run_dir",
    "model.path": "model",
    "data.train_files": "data (texts are files; prompts are rows such as {'prompt': 'What is 2 + 3?'})",
    "data.train_batch_size": "data (its number of rows, at most 64)",
    "data.data_source": "data",
    "data_source='data'": "data without the column data_source; it needs the argument reward",
    "data.val_files": "val_data",
    "reward.custom_reward_function": "reward",
    "reward.functions": "reward",
}
"""The options that `train` sets, and the argument that each of them comes from."""

_OTHER_NAMES = {
    "train_dataset": "data",
    "dataset": "data",
    "train_data": "data",
    "eval_dataset": "val_data",
    "eval_data": "val_data",
    "reward_funcs": "reward",
    "reward_fn": "reward",
    "reward_function": "reward",
    "model_path": "model",
    "output_dir": "run_dir",
    "config": "options",
    "args": "options",
}
"""Names of such arguments in other libraries, and the names here."""


@dataclass(frozen=True)
class TrainResult:
    """A finished or stopped run.

    Attributes:
        run_dir: the run folder.
        is_stopped: True if the run was interrupted before its last step; `train` with the same arguments and this
            run_dir continues it.
    """

    run_dir: Path
    is_stopped: bool

    @property
    def metrics(self) -> pandas.DataFrame:
        """All logged metrics, with one row per step and one column per metric."""
        import pandas

        from trainer.observe.tracking import read_metrics

        metrics_by_step = read_metrics(self.run_dir / "metrics.jsonl")
        table = pandas.DataFrame.from_dict(metrics_by_step, orient="index")
        return table.rename_axis("step")

    @property
    def findings(self) -> list[Finding]:
        """The findings of the run report, the worst first. `print` shows a finding with its cause and its remedy."""
        from trainer.observe.health import findings_of
        from trainer.observe.run_data import read_run

        run = read_run(self.run_dir)
        return findings_of(run)

    def samples(self, step: int | None = None) -> pandas.DataFrame:
        """Returns the answers that a step was trained on, with their scores.

        Args:
            step: a step of the training; None = the last one that has samples.

        Returns:
            One row per answer, with the columns prompt (the last message), answer, ground_truth, score (NaN if the
            reward failed), tokens, finish_reason, and one column for each other entry that the reward returned.

        Raises:
            UserError: if the run has no samples of this step.
        """
        import pandas

        from trainer.observe.recorded_answers import groups

        by_step = {}
        for group in groups(self.run_dir):
            # others are samples of validations
            if group.kind == "train":
                by_step[group.step] = group
        sampled_step = step
        if sampled_step is None:
            sampled_step = max(by_step, default=0)
        if sampled_step not in by_step:
            existing = "no samples"
            if by_step:
                existing = f"samples of the steps {min(by_step)} to {max(by_step)}"
            raise UserError(
                f"step: found {step}, but {self.run_dir} has {existing}. "
                "Beyond trainer.samples_max_mb a run deletes the samples of every other step"
            )
        group = by_step[sampled_step]
        all_answers = range(len(group.uids))
        rows = []
        for answer in group.read(all_answers):
            _, last_message = answer.prompt[-1]
            row: dict[str, object] = {
                "prompt": last_message,
                "answer": answer.output,
                "ground_truth": answer.gts,
                "score": answer.score,
                "tokens": answer.response_length,
                "finish_reason": answer.finish_reason,
            }
            rows.append(row | answer.parts)
        # None becomes NaN
        return pandas.DataFrame(rows).astype({"score": float})

    @property
    def model_path(self) -> Path:
        """A Hugging Face folder of the newest checkpoint, which is written at the first access. Raises UserError if the
        run has no checkpoint."""
        from trainer.checkpoint.files import whole_steps
        from workers.policy.export import export

        checkpoint = next(whole_steps(self.run_dir, print), None)
        if checkpoint is None:
            raise UserError(f"{self.run_dir} has no checkpoint; train with trainer.save_freq=-1 or above 0")
        folder = checkpoint / "hf"
        # an export writes the config after the weights, so that one without all weights is repeated
        if not (folder / "config.json").is_file():
            export(str(checkpoint / "actor"), str(folder))
        return folder

    def generate(self, prompts: Prompts, n: int = 1, **keywords: object) -> list[list[str]]:
        """Samples answers with the newest checkpoint.

        Args:
            prompts: one prompt or several. A prompt is a text or a chat, that is, a list of messages.
            n: number of answers to each prompt. One answer is decoded greedily; several are sampled at temperature 1.
            keywords: options as in `train`, such as rollout__val_kwargs__temperature=0.7.

        Returns:
            For each prompt the list of its answers; one list for a single prompt.
        """
        from trainer.data.sources import read_rows
        from trainer.evaluate.generation import generate

        # not isinstance, because a bool is an int, too
        if type(n) is not int:
            raise UserError(f"n: found {n!r:.100}; expected the number of answers to each prompt, such as n=4")
        rows = prompt_rows(prompts)
        sampling: Options = {"rollout.val_kwargs.n": n, "rollout.val_kwargs.do_sample": n > 1}
        # greedy answers to one prompt would be equal
        if n > 1:
            sampling["rollout.val_kwargs.temperature"] = 1.0
        # without data.columns of the run: the prompts have the names of our columns
        options = ["~data.columns", *_words(sampling | _flat(keywords))]
        # equal calls share a folder, so that an interrupted one continues
        folder = self.run_dir / "generate" / digest_of([rows, options])
        answers_file = folder / "answers.parquet"
        with _called_from_python({}), _removed_if_refused(folder):
            prompts_file = write_rows(rows, folder, "prompts")
            options += _words({"data.val_files": [prompts_file]})
            status = generate(str(self.run_dir), answers_file, options)
            _require_success(status, "generate")
        rows_of_answers = read_rows(str(answers_file), "answers")
        answers = [row["output"] for row in rows_of_answers]
        # the answers to one prompt follow each other
        return [answers[start : start + n] for start in range(0, len(answers), n)]

    def evaluate(self, data: Rows | None = None, **keywords: object) -> dict[str, float]:
        """Validates the newest checkpoint and returns the metrics.

        Args:
            data: rows with ground truths; None = the validation data of the run.
            keywords: options as in `train`.
        """
        from trainer.evaluate.evaluation import evaluate
        from trainer.evaluate.targets import find_targets

        inputs = self.run_dir / "inputs"
        with _called_from_python({"data.val_files": "data"}), _removed_if_refused(inputs):
            files: Options = {}
            if data is not None:
                files["data.val_files"] = data_files(data, inputs, "evaluate")
            # of a run folder, this is the newest checkpoint
            [target] = find_targets(str(self.run_dir))
            status, metrics = evaluate(target, _words(files | _flat(keywords)))
            _require_success(status, "evaluate")
        return metrics


def train(
    model: str | Path | None = None,
    data: Rows | None = None,
    reward: RewardFunction | str | None = None,
    *,
    val_data: Rows | None = None,
    run_dir: str | Path | None = None,
    callbacks: Sequence[Callback | str] = (),
    options: Mapping[str, object] | None = None,
    **keywords: object,
) -> TrainResult:
    """Trains a language model by reinforcement learning with the options of `python -m trainer.main_ppo`.

    Without arguments it runs the recipe quickstart. An interrupt (Ctrl-C, or the button of a notebook) ends the run
    with a checkpoint after the current step.

    Args:
        model: Hugging Face folder or cached hub name (model.path).
        data: training prompts, see `Rows`. Rows without a `ground_truth` get an empty one.
        reward: function f(data_source, solution_str, ground_truth, extra_info) that returns a number or a dict with
            `score`, or in TRL's form f(prompts, completions, **columns) a list of numbers; FILE.py or FILE.py:FUNCTION;
            or the name of a built-in reward, such as "math_verify". None: the data_source of a row selects its reward.
            Functions are copied to the reward processes with cloudpickle.
        val_data: validation prompts.
        run_dir: run folder. A run that exists there is continued; the result of a finished one is returned. None = a
            new folder in runs/.
        callbacks: objects of subclasses of `trainer.callbacks.Callback`, or FILE.py:CLASS.
        options: options by key, such as {"rollout.n": 8, "actor": {"optim": {"lr": 1e-6}}}.
        keywords: options with __ in place of dots, such as rollout__n=8.

    Raises:
        UserError: for invalid arguments, options, data or rewards. Such a call leaves no files.
    """
    _refuse_other_names(keywords)
    folder = _folder_of(run_dir)
    if options is not None and not isinstance(options, Mapping):
        raise UserError(f"options: found {options!r:.200}; expected a dictionary such as {{'rollout.n': 8}}")
    if isinstance(callbacks, str) or not isinstance(callbacks, Sequence):
        raise UserError(f"callbacks: found {callbacks!r:.200}; expected a list of callbacks")
    try:
        # BaseException, because an interrupt before the start must leave no files either
        with _called_from_python(_SETS), _removed_if_refused(folder, BaseException):
            from trainer.callbacks import require_callbacks
            from trainer.launch.ppo_job import run_ppo

            # a keyword has priority over the same option in `options`
            caller_options = _flat(options or {}) | _flat(keywords)
            named_callbacks: list[str] = []
            callback_objects: list[Callback] = []
            for callback in callbacks:
                if isinstance(callback, str):
                    named_callbacks.append(callback)
                else:
                    callback_objects.append(callback)
            own_callbacks = require_callbacks(callback_objects, "callbacks")
            with _folder_problems(folder):
                settings = _settings(model, data, val_data, reward, folder, caller_options)
            if named_callbacks:
                settings["trainer.callbacks"] = named_callbacks
            words = _words(settings | caller_options)
            with _live_curve(folder):
                status = run_ppo(words, callbacks=own_callbacks, is_command=False)
            # an interrupted run ended with a checkpoint, and `is_stopped` tells the caller
            if status != INTERRUPTED:
                _require_success(status, "train")
    except FinishedRunError as finished:
        # `_removed_if_refused` has restored the files of that run, such as its reward
        print(f"{finished}\ntrain() returns the result of that run. For a new run, choose another run_dir")
        return TrainResult(folder, is_stopped=False)
    return TrainResult(folder, status == INTERRUPTED)


def _folder_of(run_dir: object) -> Path:
    """Returns the run folder of the argument `run_dir`."""
    if run_dir is not None and not isinstance(run_dir, str | Path):
        raise UserError(f"run_dir: found {run_dir!r:.200}; expected the path of a folder")
    if not run_dir:
        now = time.strftime("%Y%m%d-%H%M%S")
        # the random part distinguishes calls of two processes in the same second
        run_dir = f"runs/train-{now}-{secrets.token_hex(2)}"
    return Path(run_dir).expanduser().absolute()


@contextmanager
def _folder_problems(folder: Path) -> Iterator[None]:
    """Turns an error of the file system below `folder` into a UserError."""
    try:
        yield
    except OSError as error:
        file = Path(str(error.filename))
        # a parent folder, too, may forbid writing
        if not (file.is_relative_to(folder) or folder.is_relative_to(file)):
            raise
        raise UserError(
            f"run_dir={folder} cannot be written to ({error.strerror}: {file}): give a folder of yours"
        ) from error


def _settings(
    model: str | Path | None,
    data: Rows | None,
    val_data: Rows | None,
    reward: RewardFunction | str | None,
    folder: Path,
    caller_options: Mapping[str, object],
) -> Options:
    """Returns the options that the arguments of `train` stand for. Rows and functions become files of the run.

    Args:
        model, data, val_data, reward: see `train`.
        folder: the run folder.
        caller_options: options of the caller.
    """
    inputs = folder / "inputs"
    settings: Options = {
        "trainer.default_local_dir": str(folder),
        # continues a run that exists in the folder
        "trainer.resume_mode": "auto",
    }
    if model is not None:
        settings["model.path"] = str(model)
    if data is not None:
        files = data_files(data, inputs, "train")
        settings["data.train_files"] = files
        # files of the caller come with their own options; rows get the name and the sizes that `_SETS` describes
        has_rows = Path(files[0]).parent == inputs
        if has_rows:
            # jsonl: one line for each row
            text = Path(files[0]).read_text(encoding="utf-8")
            batch_size = min(_BATCH, text.count("\n"))
            settings |= {"data.data_source": "data", "data.train_batch_size": batch_size, "rollout.n": 8}
            settings["actor.ppo_mini_batch_size"] = caller_options.get("data.train_batch_size", batch_size)
    if val_data is not None:
        settings["data.val_files"] = data_files(val_data, inputs, "val")
    return settings | reward_settings(reward, inputs)


def _refuse_other_names(keywords: Mapping[str, object]) -> None:
    """Raises UserError if an argument has the name that another library gives it."""
    for name in keywords:
        if name in _OTHER_NAMES:
            raise UserError(f"train() has no argument {name}; here it is {_OTHER_NAMES[name]}")


@contextmanager
def _called_from_python(sets: Mapping[str, str]) -> Iterator[None]:
    """Leaves the process as it was, and makes messages speak of arguments instead of a command line.

    Args:
        sets: options that the call sets itself, with the argument that each comes from.
    """
    # torch.distributed installs its own and never removes it
    hook = sys.excepthook
    with process_variables():
        from verl_lite.machine.random_state import get_random_state, set_random_state

        random_state = get_random_state()
        try:
            yield
        except UserError as error:
            # the caller has neither a command line nor --help-config
            text = str(error).replace(" (command line)", "")
            text = text.replace("--help-config lists", "python -m trainer.main_ppo --help-config lists")
            origins = [f"{key} comes from {argument}" for key, argument in sets.items() if key in text]
            if origins:
                text += f"\n(In this call, {'; '.join(origins)}.)"
            error.args = (text,)
            raise
        finally:
            sys.excepthook = hook
            set_random_state(random_state)


@contextmanager
def _removed_if_refused(folder: Path, errors: type[BaseException] = UserError) -> Iterator[None]:
    """Restores a folder if the block raises one of `errors` before a run has started in it.

    The folder of a new call is removed. Of an existing one, new files of `inputs` are removed and changed ones get
    their old content.
    """
    parent_existed = folder.parent.exists()
    existed = folder.exists()
    inputs = folder
    if folder.name != "inputs":
        inputs = folder / "inputs"
    contents = {}
    for file in inputs.glob("*"):
        if file.is_file():
            contents[file] = file.read_bytes()
    started_before = _start_time(folder)
    try:
        yield
    except errors:
        # once the run has started, it reads the files
        if _start_time(folder) != started_before:
            raise
        if not existed:
            shutil.rmtree(folder, ignore_errors=True)
            if not parent_existed:
                # a folder that is not empty is used by another call
                with suppress(OSError):
                    folder.parent.rmdir()
        else:
            for file in inputs.glob("*"):
                if file.is_file() and file not in contents:
                    file.unlink()
            for file, content in contents.items():
                file.write_bytes(content)
        raise


def _start_time(folder: Path) -> int | None:
    """Returns the time (ns) at which a run last started in the folder, and wrote config.yaml; None without a run."""
    file = folder / "config.yaml"
    if not file.is_file():
        return None
    return file.stat().st_mtime_ns


def _require_success(status: int, call: str) -> None:
    """Raises RuntimeError, which names the call, for an exit status other than 0."""
    if status:
        raise RuntimeError(f"{call} ended with exit status {status}; its output has the reason")


def _flat(options: Mapping[str, object], prefix: str = "") -> Options:
    """Returns options by dotted key. In `options`, a key may have __ for a dot, and a value may be a dictionary of the
    options below the key.

    The value of an option that is a dictionary stays whole, because the names in it are the user's: `v1.5` is one name
    there.
    """
    # not before `process_variables`: this import reads the environment
    from verl_lite.config import KEYS

    flat: Options = {}
    for name, value in options.items():
        if not isinstance(name, str):
            raise UserError(f"options: found the key {name!r:.200}; expected an option, such as 'rollout.n'")
        key = prefix + name.replace("__", ".")
        option = KEYS.get(key.removeprefix("actor_rollout_ref."))
        is_dictionary = option is not None and option.kind == "dict"
        if isinstance(value, Mapping) and value and not is_dictionary:
            flat |= _flat(value, f"{key}.")
        else:
            # also an empty section, such as reward.functions={}
            flat[key] = value
    return flat


def _words(options: Mapping[str, object]) -> list[str]:
    """Returns options as words of a command line, key=value."""
    # not before `process_variables`: this import reads the environment
    from verl_lite.config import written_value

    return [f"{key}={written_value(value)}" for key, value in options.items()]


@contextmanager
def _live_curve(run_dir: Path) -> Iterator[None]:
    """In a notebook, shows the curve of the run below the cell and redraws it while the block runs."""
    shell = None
    if "IPython" in sys.modules:
        shell = sys.modules["IPython"].get_ipython()
    # IPython in a terminal has no kernel, and cannot replace a picture that it has shown
    if shell is None or not hasattr(shell, "kernel"):
        yield
        return
    from IPython.display import Image, display

    from trainer.observe.picture import draw_curve

    ended = threading.Event()
    handle = display(display_id=True)
    drawn = 0.0  # time of the metrics in the curve that is shown

    def draw() -> None:
        nonlocal drawn
        # without the file, there are no metrics yet
        with suppress(OSError):
            changed = (run_dir / "metrics.jsonl").stat().st_mtime
            if changed <= drawn:
                return
            picture = draw_curve(run_dir)
            if picture is not None:
                handle.update(Image(filename=str(picture)))
                drawn = changed

    def follow() -> None:
        while not ended.wait(_REDRAW_S):
            draw()

    thread = threading.Thread(target=follow, name="live-curve", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        # the last steps, since the thread has drawn the curve last
        draw()
