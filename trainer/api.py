"""Training from Python: `train(model, data, reward)` runs `trainer.main_ppo` in this process, returns a `TrainResult`.

In a notebook, a curve below the cell follows the run, and the interrupt button ends the run with a checkpoint.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.cli import INTERRUPTED, prepare_driver
from verl_lite.errors import UserError

if TYPE_CHECKING:
    import pandas

Rows = str | Iterable[str] | Iterable[Mapping[str, Any]]
"""Entries of data.train_files (a file, folder or hub name, or several), or rows: dicts in the forms of trainer/DATA.md,
such as a list, a pandas DataFrame or a dataset of `datasets`."""

_BATCH = 64
_REDRAW_S = 3.0
_REWARD = """\"\"\"Loads the reward function that was given to `trainer.train`.\"\"\"

import pathlib

import cloudpickle

compute_score = cloudpickle.loads(pathlib.Path(__file__).with_suffix(".pkl").read_bytes())
"""


@dataclass(frozen=True)
class TrainResult:
    """A finished or stopped run.

    run_dir: the run folder. is_stopped: True if the run was interrupted before its last step; `train` with the same
    arguments and this run_dir continues it.
    """

    run_dir: Path
    is_stopped: bool

    @property
    def metrics(self) -> pandas.DataFrame:
        """All logged metrics, with one row per step and one column per metric."""
        import pandas

        from trainer.tracking import read_metrics

        table = pandas.DataFrame.from_dict(read_metrics(self.run_dir / "metrics.jsonl"), orient="index")
        return table.rename_axis("step")

    @property
    def model_path(self) -> Path:
        """A Hugging Face folder of the newest checkpoint, which is written at the first access. Raises UserError if the
        run has no checkpoint."""
        from trainer.checkpoint import whole_steps
        from workers.engine.checkpoint import export

        checkpoint = next(whole_steps(self.run_dir, print), None)
        if checkpoint is None:
            raise UserError(f"{self.run_dir} has no checkpoint; train with trainer.save_freq=-1 or above 0")
        folder = checkpoint / "hf"
        if not (folder / "config.json").is_file():
            export(str(checkpoint / "actor"), str(folder))
        return folder

    def generate(self, prompts: Iterable[str | list[dict[str, str]]], n: int = 1, **keywords: Any) -> list[list[str]]:
        """Samples n answers to each prompt (text or chat messages) with the newest checkpoint.

        One answer is decoded greedily; several are sampled at temperature 1. keywords: options as in `train`, such as
        rollout__val_kwargs__temperature=0.7.
        """
        from trainer.data.sources import read_rows
        from trainer.main_generate import generate

        rows = [{"prompt": _messages(prompt), "data_source": "generate"} for prompt in prompts]
        sampling: dict[str, Any] = {"rollout.val_kwargs.n": n, "rollout.val_kwargs.do_sample": n > 1}
        sampling |= {"rollout.val_kwargs.temperature": 1.0} if n > 1 else {}
        options = ["~data.columns", *_words(sampling | _flat(keywords))]
        folder = self.run_dir / "generate" / _digest([rows, options])
        options.append(f"data.val_files=[{json.dumps(_written(rows, folder, 'prompts'))}]")
        _require_success(generate(str(self.run_dir), folder / "answers.parquet", options), "generate")
        answers = read_rows(str(folder / "answers.parquet"), "answers")
        return [[answer["output"] for answer in answers[start : start + n]] for start in range(0, len(answers), n)]

    def evaluate(self, data: Rows | None = None, **keywords: Any) -> dict[str, float]:
        """Validates the newest checkpoint and returns the metrics. data: rows with ground truths; None = the validation
        data of the run. keywords: options as in `train`."""
        from trainer.evaluate.evaluation import find_targets
        from trainer.main_eval import evaluate

        files = {} if data is None else {"data.val_files": _files(data, self.run_dir / "inputs", "evaluate")}
        [target] = find_targets(str(self.run_dir))
        status, metrics = evaluate(target, _words(files | _flat(keywords)))
        _require_success(status, "evaluate")
        return metrics


def train(
    model: str | Path | None = None,
    data: Rows | None = None,
    reward: Callable[..., Any] | str | None = None,
    *,
    val_data: Rows | None = None,
    run_dir: str | Path | None = None,
    options: Mapping[str, Any] | None = None,
    **keywords: Any,
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
        run_dir: run folder; an existing one is continued. None = a new folder in runs/.
        options: options by key, such as {"rollout.n": 8, "actor": {"optim": {"lr": 1e-6}}}.
        keywords: options with __ in place of dots, such as rollout__n=8.

    Raises:
        UserError: for invalid options, data or rewards.
    """
    prepare_driver()
    from trainer.build import run_ppo

    folder = Path(run_dir or f"runs/train-{time.strftime('%Y%m%d-%H%M%S')}").expanduser().absolute()
    given = _flat(options or {}) | _flat(keywords)
    settings: dict[str, Any] = {"trainer.default_local_dir": str(folder), "trainer.resume_mode": "auto"}
    if model is not None:
        settings["model.path"] = str(model)
    for key, rows in (("train", data), ("val", val_data)):
        if rows is not None:
            settings[f"data.{key}_files"] = files = _files(rows, folder / "inputs", key)
            if key == "train" and Path(files[0]).parent == folder / "inputs":
                size = min(_BATCH, Path(files[0]).read_text(encoding="utf-8").count("\n"))
                settings |= {"data.data_source": "data", "data.train_batch_size": size, "rollout.n": 8}
                settings["actor.ppo_mini_batch_size"] = given.get("data.train_batch_size", size)
    settings |= _reward_settings(reward, folder / "inputs")
    with _live_curve(folder):
        status = run_ppo(_words(settings | given))
    if status != INTERRUPTED:
        _require_success(status, "train")
    return TrainResult(folder, status == INTERRUPTED)


def _require_success(status: int, what: str) -> None:
    if status:
        raise RuntimeError(f"{what} ended with exit status {status}; its output has the reason")


def _flat(options: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested options, and those of keywords, by dotted key."""
    flat: dict[str, Any] = {}
    for name, value in options.items():
        key = prefix + name.replace("__", ".")
        flat |= _flat(value, f"{key}.") if isinstance(value, Mapping) and value else {key: value}
    return flat


def _words(options: Mapping[str, Any]) -> list[str]:
    return [f"{key}={json.dumps(value, default=str)}" for key, value in options.items()]


def _messages(prompt: str | list[dict[str, str]]) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _digest(content: Any) -> str:
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=6).hexdigest()


def _files(data: Rows, folder: Path, name: str) -> list[str]:
    """Returns entries of data.train_files or data.val_files. Rows are written to a file in `folder`."""
    if isinstance(data, str | Path):
        return [str(data)]
    entries: list[Any] = list(data.to_dict("records") if hasattr(data, "to_dict") and hasattr(data, "iloc") else data)
    if entries and all(isinstance(entry, str | Path) for entry in entries):
        return [str(entry) for entry in entries]
    for index, row in enumerate(entries):
        if not isinstance(row, Mapping):
            raise UserError(f"data: row {index} is {row!r:.100}, expected a dict of columns such as prompt")
    return [_written([_with_truth(row, folder, f"{name}-{index}") for index, row in enumerate(entries)], folder, name)]


def _with_truth(row: Mapping[str, Any], folder: Path, name: str) -> dict[str, Any]:
    """Returns a row as JSON values, with a ground truth, and with its images as files in `folder`."""
    from trainer.data.images import read_image
    from trainer.evaluate.sample import plain_value

    images = row.get("images") or ([row["image"]] if row.get("image") is not None else [])
    paths = []
    for place, image in enumerate(images):
        folder.mkdir(parents=True, exist_ok=True)
        paths.append(f"{name}-{place}.image")
        (folder / paths[-1]).write_bytes(read_image(image, Path.cwd(), f"data: {name}, image {place}"))
    found = plain_value({key: value for key, value in row.items() if key not in ("image", "images")})
    truth = {} if "ground_truth" in found or "reward_model" in found else {"ground_truth": ""}
    return {**found, **truth, **({"images": paths} if paths else {})}


def _written(rows: list[dict[str, Any]], folder: Path, name: str) -> str:
    """Writes rows to folder/NAME.jsonl and returns the path. Raises UserError without rows."""
    if not rows:
        raise UserError(f"{name}: there are no rows; expected at least one")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(folder / f"{name}.jsonl")


def _reward_settings(reward: Callable[..., Any] | str | None, folder: Path) -> dict[str, Any]:
    """Returns the options that select the reward. A function is stored in `folder`."""
    own = "reward.custom_reward_function"
    if reward is None:
        return {}
    if isinstance(reward, str):
        file, _, name = reward.partition(":")
        if not file.endswith(".py"):
            return {"reward.functions": {"reward": {"reward": reward}}}
        return {f"{own}.path": str(Path(file).expanduser().absolute())} | ({f"{own}.name": name} if name else {})
    import cloudpickle

    module = sys.modules.get(getattr(reward, "__module__", "") or "")
    is_local = module is not None and module.__name__ != "__main__" and "site-packages" not in str(module.__file__)
    with _by_value(cloudpickle, module if is_local else None):
        code = cloudpickle.dumps(reward)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "reward.pkl").write_bytes(code)
    (folder / "reward.py").write_text(_REWARD, encoding="utf-8")
    style = {f"{own}.style": "trl"} if "completions" in inspect.signature(reward).parameters else {}
    return {f"{own}.path": str(folder / "reward.py")} | style


@contextmanager
def _by_value(cloudpickle: Any, module: Any) -> Iterator[None]:
    """Makes cloudpickle copy the functions of a module, which reward processes may be unable to import."""
    if module is None:
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


@contextmanager
def _live_curve(run_dir: Path) -> Iterator[None]:
    """In a notebook, shows the curve of the run below the cell and redraws it while the block runs."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is None or not hasattr(shell, "kernel"):
        yield
        return
    from IPython.display import Image, display

    from trainer.picture import draw_curve

    ended, handle, drawn = threading.Event(), display(display_id=True), 0.0

    def draw() -> None:
        nonlocal drawn
        with suppress(OSError):  # there are no metrics yet
            changed = (run_dir / "metrics.jsonl").stat().st_mtime
            if changed > drawn and (picture := draw_curve(run_dir)) is not None:
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
        draw()
