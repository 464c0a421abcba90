"""Runs of a command forked from a process that has imported the libraries, killed at will, and compared bit for bit.

`Forked` runs one command in one folder; `Runs` runs `trainer.main_ppo` inline on a tiny model and a few sums. What a
run leaves is compared by `differences` of `models_of` (weights, moments, counters, random states), `driver_state` and
`history` (metrics that do not tell the time).
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.tiny_model import tiny_qwen2
from tests.tiny_run import good_row, write_rows
from trainer.checkpoint.files import MARKER
from trainer.observe.tracking import read_metrics

PRELOADED = [
    "torch", "transformers", "trainer.launch.run", "workers.engines.hf_engine", "torch.distributed.checkpoint",
    "tensordict", "matplotlib.backends.backend_agg", "matplotlib.figure",
]  # fmt: skip
PATIENCE_S = 300
VOLATILE = (
    "timing",
    "perf/",
    "_per_second",
    "seconds",
    "_gb",
    "weight_sync",
    "idle_frac",
    "engine_busy",
    "engine_sequences",
)
ACTOR, CRITIC = ("actor",), ("actor", "critic")
COMMON = [
    "trainer.backend=inline", "trainer.device=cpu", "rollout.name=hf", "rollout.n=2", "reward.num_workers=0",
    "data.max_prompt_length=24", "data.max_response_length=6", "actor.optim.lr=1e-3", "trainer.save_freq=1",
    "actor.ppo_mini_batch_size=2", "trainer.logger=[jsonl]", "trainer.test_freq=0", "trainer.val_before_train=false",
]  # fmt: skip


def reward_by_length(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Something that differs from answer to answer."""
    return sum(map(ord, solution_str)) % 7 / 7


def main_in_child(module: str, argv: list[str], folder: str, log: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in the background
    os.chdir(folder)
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.exit(importlib.import_module(module).main(argv))


class Forked:
    """Starts runs of one command in one folder; they have `options`."""

    module, preloaded = "trainer.main_ppo", PRELOADED

    def __init__(self, folder: Path, options: list[str]) -> None:
        self.folder, self.options = folder, options
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(self.preloaded)

    def start(self, name: str, *options: str) -> tuple[BaseProcess, Path, Path]:
        """The process, its run folder, and the file of what it prints."""
        run_dir, log = self.folder / name, self.folder / f"{name}-{time.monotonic_ns()}.log"
        argv = [*self.options, f"trainer.default_local_dir={run_dir}", *options]
        process = self.context.Process(target=main_in_child, args=(self.module, argv, str(self.folder), str(log)))
        process.start()
        return process, run_dir, log

    def finish(self, name: str, *options: str) -> Path:
        """Runs to the end; gives the run folder."""
        process, run_dir, log = self.start(name, *options)
        process.join(PATIENCE_S)
        assert process.exitcode == 0, log.read_text()[-4000:]
        return run_dir

    def refused(self, name: str, *options: str) -> str:
        """What a run prints that ends at once with status 2."""
        process, _, log = self.start(name, *options)
        process.join(PATIENCE_S)
        assert process.exitcode == 2, log.read_text()[-4000:]
        return log.read_text()

    def end_after(self, step: int, name: str, number: signal.Signals, *options: str) -> tuple[Path, str]:
        """Sends a signal once the checkpoint of `step` is complete; gives the run folder and what was printed."""
        process, run_dir, log = self.start(name, *options)
        marker, deadline = run_dir / MARKER, time.monotonic() + PATIENCE_S
        while not (marker.exists() and int(marker.read_text()) >= step):
            assert process.is_alive() and time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.002)
        assert process.pid is not None
        os.kill(process.pid, number)
        process.join(PATIENCE_S)
        assert number is not signal.SIGKILL or process.exitcode == -number
        return run_dir, log.read_text()

    def kill_after(self, step: int, name: str, *options: str) -> Path:
        """Kills the run once the checkpoint of `step` is complete: it is in the next step by then."""
        return self.end_after(step, name, signal.SIGKILL, *options)[0]


class Runs(Forked):
    """Of `trainer.main_ppo`, inline, on a tiny model."""

    def __init__(self, folder: Path, rows: int, batch: int, options: list[str]) -> None:
        prompts = (good_row(row, ("odd", "even")[row % 2]) for row in range(rows))
        own = [
            *COMMON,
            f"model.path={tiny_qwen2(folder / 'model')}",
            f"data.train_files={write_rows(folder / 'train.jsonl', prompts)}",
            f"data.train_batch_size={batch}",
            f"reward.custom_reward_function.path={__file__}",
            "reward.custom_reward_function.name=reward_by_length",
        ]
        super().__init__(folder, [*own, *options])


def models_of(checkpoint: Path, parts: tuple[str, ...]) -> dict[str, Any]:
    """Weights, moments and counters, by name."""
    result = {}
    for part in parts:
        with tempfile.NamedTemporaryFile(suffix=".pt") as file:
            dcp_to_torch_save(checkpoint / part, file.name)
            state = torch.load(file.name, weights_only=False)
        result |= {f"{part}.{name}": value for name, value in state.items()}
        for random in sorted((checkpoint / part).glob("random_*.pt")):  # of each rank
            result[f"{part}.{random.stem}"] = torch.load(random, weights_only=False)
    return result


def assert_same_end(expected: Path, found: Path, step: int, parts: tuple[str, ...] = ACTOR) -> dict[str, Any]:
    """The checkpoints of a step of both runs are equal to the bit, and not the first step's. Gives the models."""
    ends = [run_dir / f"global_step_{step}" for run_dir in (expected, found)]
    models = [models_of(end, parts) for end in ends]
    assert len(models[0]) > 20 and differences(*models) == []
    states = [driver_state(end) for end in ends]
    assert {"steps", "random", "config"} <= set(states[0]) and differences(*states) == []
    if (first := expected / "global_step_1").exists():
        assert differences(models_of(first, parts), models[0]), "training changes nothing: equality shows nothing"
    return models[0]


def driver_state(checkpoint: Path) -> dict[str, Any]:
    state = torch.load(checkpoint / "data.pt", weights_only=False)
    free = ("trainer.default_local_dir", "trainer.resume_", "trainer.experiment_name", "trainer.total_training_steps")
    state["steps"].get("scheduler", {}).pop("metrics", None)  # times of samples that were started ahead
    state["config"] = {name: value for name, value in state["config"].items() if not name.startswith(free)}
    return state


def differences(left: Any, right: Any, path: str = "") -> list[str]:
    """Places at which two nested states are not bit-equal."""
    if isinstance(left, dict) and isinstance(right, dict):
        names = sorted({*left, *right}, key=str)
        lost = object()
        return [x for name in names for x in differences(left.get(name, lost), right.get(name, lost), f"{path}/{name}")]
    if isinstance(left, list | tuple) and isinstance(right, list | tuple) and len(left) == len(right):
        return [x for i, pair in enumerate(zip(left, right, strict=True)) for x in differences(*pair, f"{path}/{i}")]
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return [] if left.dtype == right.dtype and torch.equal(left, right) else [path]
    if hasattr(left, "shape") and hasattr(right, "shape"):
        return [] if left.shape == right.shape and (left == right).all() else [path]
    if hasattr(left, "__dict__") and type(left) is type(right):
        return differences(vars(left), vars(right), path)
    return [] if left == right else [path]


def history(run_dir: Path) -> dict[int, dict[str, float]]:
    return {
        step: {name: x for name, x in row.items() if not any(part in name for part in VOLATILE)}
        for step, row in read_metrics(run_dir / "metrics.jsonl").items()
    }
