"""Weights & Biases. Without an account it writes RUN/wandb, which `wandb sync` uploads later; WANDB_MODE decides where
it is set. The run's id is kept in RUN/wandb_id.txt: a resumed run continues there."""

from __future__ import annotations

import netrc
import os
from collections.abc import Mapping, Sequence
from typing import Any, cast

from trainer.evaluate.sample import Sample
from trainer.trackers.base import TrackedRun

_INIT_TIMEOUT_S = 30.0
_STEP = "training/global_step"


class Adapter:
    """Numbers over training/global_step, and samples as the table val/generations."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        mode = os.environ.get("WANDB_MODE") or ("online" if _has_account() else "offline")
        self._wandb = wandb
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run.keep_id("wandb", run.kept_id("wandb")),
            resume="allow" if mode == "online" else None,
            dir=str(run.run_dir),
            config=dict(run.options),
            mode=cast(Any, mode),
            settings=wandb.Settings(console="off", silent=True, init_timeout=_INIT_TIMEOUT_S),
        )
        self._run.define_metric("*", step_metric=_STEP)  # its own counter goes on in a resumed run

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log({**metrics, _STEP: step})

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        columns: list[str | int] = ["step", "data_source", "input", "output", "gts", "score"]
        rows = [[getattr(sample, str(name)) for name in columns] for sample in samples]
        self._run.log({"val/generations": self._wandb.Table(columns, rows), _STEP: step})

    def finish(self) -> None:
        self._run.finish()
        if self._wandb.run is None:  # nobody else's: its service ends here in good order, not killed with the run
            self._wandb.teardown()


def _has_account() -> bool:
    """Whether wandb would find an API key, so that it need not ask for one."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("//")[-1].split("/")[0]
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
