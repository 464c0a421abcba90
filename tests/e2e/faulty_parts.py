"""Parts of a run that fail on rank 1, at a chosen place: what `test_faults.py` puts into real runs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import ray
import torch

from verl_lite.core_algos import compute_policy_loss_vanilla
from workers.rollout.base import Completion
from workers.rollout.hf_engine import HFEngine

DYING = "rank 1 dies at "


def die() -> None:
    """As by kill -9, after a line that says when."""
    if os.environ["RANK"] == "1":
        print(f"{DYING}{time.time()}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


class DiesGenerating(HFEngine):
    def step(self) -> list[Completion]:
        die()
        return super().step()


class DiesInSync(HFEngine):
    """In the middle of the second weight update: the first comes before all steps."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        super().load_weights(dying_after(3, weights) if version > 0 else weights, version)


def dying_after(count: int, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    for place, weight in enumerate(weights):
        if place == count:
            die()
        yield weight


def loss_that_dies_twice(*args: Any, **kwargs: Any) -> Any:
    """In the second step, where the file named by DIED does not exist yet, and in the third of the process after it."""
    calls.append(1)
    died = Path(os.environ["DIED"])
    if os.environ["RANK"] == "1" and len(calls) == (3 if died.exists() else 2):
        died.touch()
        die()
    return compute_policy_loss_vanilla(*args, **kwargs)


calls: list[int] = []


def raising_loss(*args: Any, **kwargs: Any) -> Any:
    if os.environ["RANK"] == "1":
        raise LookupError("the user's loss\nhas two lines")
    return compute_policy_loss_vanilla(*args, **kwargs)


def loss_that_pauses(*args: Any, **kwargs: Any) -> Any:
    """In the second step, as long as the file named by PAUSE exists; each rank says so, and where it is."""
    calls.append(1)
    pause = Path(os.environ["PAUSE"])
    if len(calls) == 2 and pause.exists():
        told = pause.with_name(f"paused-{os.environ['RANK']}")
        told.write_text(f"{ray.get_runtime_context().get_node_id()} {os.environ['MASTER_ADDR']} {os.getpid()}")
        while pause.exists():
            time.sleep(0.05)
    return compute_policy_loss_vanilla(*args, **kwargs)
