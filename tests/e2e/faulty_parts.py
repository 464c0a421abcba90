"""Parts of a run that fail on rank 1, or wait, at a chosen place: what other tests put into real runs."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import ray

from verl_lite.core_algos import compute_policy_loss_vanilla
from workers.engines.base import Completion
from workers.engines.hf_engine import HFEngine

DYING = "rank 1 dies at "


class DiesGenerating(HFEngine):
    """As by kill -9, after a line that says when."""

    def step(self) -> list[Completion]:
        if os.environ["RANK"] == "1":
            print(f"{DYING}{time.time()}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step()


def raising_loss(*args: Any, **kwargs: Any) -> Any:
    if os.environ["RANK"] == "1":
        raise LookupError("the user's loss\nhas two lines")
    return compute_policy_loss_vanilla(*args, **kwargs)


calls: list[int] = []


def loss_that_pauses(*args: Any, **kwargs: Any) -> Any:
    """In the second step, as long as the file named by PAUSE exists; each rank says so, and where it is. In the first
    step the loss is called four times: to check it, and to train."""
    calls.append(1)
    pause = Path(os.environ["PAUSE"])
    if len(calls) == 5 and pause.exists():
        told = pause.with_name(f"paused-{os.environ['RANK']}")
        told.write_text(f"{ray.get_runtime_context().get_node_id()} {os.environ['MASTER_ADDR']} {os.getpid()}")
        while pause.exists():
            time.sleep(0.05)
    return compute_policy_loss_vanilla(*args, **kwargs)
