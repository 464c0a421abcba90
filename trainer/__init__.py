"""The driver process: commands, the training loop, and everything that a run needs besides its workers.

Read `ray_trainer.py` first: `fit` is the training loop, and each stage is one method. The files beside it are the
commands (`main_ppo.py` and others), the Python API (`trainer.train`) and what a user's code imports. The folders,
from top to bottom: `launch/` starts a run from its options; `agentic/`, `supervised/` and `diffusion/` have the other
trainers; `rollout/`, `ppo/` and `loop/` are the parts of a trainer; `evaluate/`, `sweeps/` and `planner/` belong to
commands of these names; `observe/`, `validation/`, `rewards/`, `data/` and `checkpoint/` are used by all of them.

This folder imports `workers` and `verl_lite`, never `recipes`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.api import TrainResult as TrainResult
    from trainer.api import train as train

__all__ = ["TrainResult", "train"]


def __getattr__(name: str) -> Any:
    """Imports the API at its first use, because every command imports this package."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from trainer import api

    return getattr(api, name)
