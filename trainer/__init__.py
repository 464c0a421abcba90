"""The driver process: data, training loop, validation, tracking and commands. `trainer.train` is the Python API."""

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
