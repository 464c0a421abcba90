"""Seconds from the start of `python -m trainer.main_ppo` to the beginning of the quickstart's first training step, with
the limit of 15 s on two quiet cores, and CPU seconds by kind of process. Run the quickstart once before, so that its
data and model are in the cache. This module is also the recipe of the run, whose trainer ends at the first step.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from recipes.quickstart.recipe import overrides, prepare
from tests.bench.frame import options, print_row

__all__ = ["overrides", "prepare"]
LIMIT_S = 15.0
RESULT = "VERL_LITE_STARTUP_RESULT"
KINDS = {"main_ppo": "driver", "worker_template": "template", "SlotProcess": "workers", "ServiceProcess": "service"}
KINDS |= {"child_main": "reward processes", "": "Ray and others"}


def __getattr__(name: str) -> Any:
    """Returns the recipe's trainer class, whose import must not precede those of the run."""
    if name != "trainer_class":
        raise AttributeError(name)
    from trainer.ray_trainer import RayPPOTrainer

    class EndsAtFirstStep(RayPPOTrainer):
        def collect_batch(self) -> Any:
            Path(os.environ[RESULT]).write_text(json.dumps([time.monotonic(), cpu_by_kind()]))
            raise KeyboardInterrupt

    return EndsAtFirstStep


def cpu_by_kind() -> dict[str, float]:
    """Returns the CPU seconds of this process, its descendants and their ended children, by kind of process."""
    seconds, own = dict.fromkeys(KINDS.values(), 0.0), psutil.Process()
    for process in (own, *own.children(recursive=True)):
        title = "main_ppo" if process == own else " ".join(process.cmdline())
        seconds[next(kind for text, kind in KINDS.items() if text in title)] += sum(process.cpu_times()[:4])
    return seconds


def main(argv: list[str]) -> None:
    """Prints seconds and CPU seconds of each run, their medians and ranges, and the ratio to the limit."""
    given, rows = options("startup", __doc__, argv, runs=5, engine="auto"), []
    print_row(("run", "seconds", "CPU seconds", *KINDS.values()), head=True)
    for run in range(1, given.runs + 1):
        with tempfile.TemporaryDirectory() as folder:
            words = f"recipe=tests.bench.startup rollout.name={given.engine} trainer.default_local_dir={folder}/run"
            command, file = [sys.executable, "-m", "trainer.main_ppo", *words.split()], Path(folder, "result.json")
            began = time.monotonic()
            ended = subprocess.run(command, env={**os.environ, RESULT: str(file)}, capture_output=True, text=True)
            if not file.exists():
                raise RuntimeError(f"the run did not reach its first step:\n{ended.stdout}\n{ended.stderr}")
            reached, cpu = json.loads(file.read_text())
        rows.append([reached - began, sum(cpu.values()), *cpu.values()])
        print_row([run, *(f"{value:.1f}" for value in rows[-1])])
    columns = list(zip(*rows, strict=True))
    print_row(["median", *(f"{median(column):.1f}" for column in columns)])
    print_row(["range", *(f"{min(column):.1f} to {max(column):.1f}" for column in columns)])
    print(f"\nmedian / limit of {LIMIT_S:g} s: {median(columns[0]) / LIMIT_S:.2f}")
