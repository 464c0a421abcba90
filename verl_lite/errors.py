"""What goes wrong: the error a user can mend, and where in a run an error was raised.

`UserError` is shown without a traceback. Any other exception that leaves a run carries `Circumstances`: the role, rank
and method of the worker that raised it, and what the driver was doing, so that the end of a run can name its cause.
"""

import os
import sysconfig
import traceback
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_ATTRIBUTE = "verl_lite_circumstances"
_KERNEL = tuple(f"{Path(__file__).parents[1] / name}{os.sep}" for name in ("verl_lite", "workers"))
_NOT_THE_USERS = (*_KERNEL, sysconfig.get_path("stdlib"), "<frozen")


class UserError(ValueError):
    """Wrong input. The message names the key or file, the value found, what was expected and what to change."""


class WorkerDiedError(RuntimeError):
    """A worker's process ended. The message names role, rank and method, and what is known of the cause."""


class ClusterLostError(WorkerDiedError):
    """The Ray cluster of the run is gone as a whole. again: options with which the process's command is to start once
    more, since this process's part of Ray is lost with it; None = not at all."""

    again: list[str] | None = None


class NoRoomError(UserError):
    """The cluster is not there, or has fewer machines, devices or cores than the run asks for."""


class StalledError(RuntimeError):
    """Workers did not answer for longer than they may; their stacks are in their logs."""


@dataclass
class Circumstances:
    """Where an exception was raised, as far as is known. What is set first stays: the innermost knows best.

    role, rank, method: of the worker. node: its machine, where there are several. phase, step: of the driver's loop.
    traceback: the worker's own, as text. log: file with what the worker's process printed.
    """

    role: str | None = None
    rank: int | None = None
    node: str | None = None
    method: str | None = None
    phase: str | None = None
    step: int | None = None
    traceback: str | None = None
    log: str | None = None

    def __str__(self) -> str:
        """`actor_rollout, rank 1, in update_actor (phase update_actor of step 3)`; empty if nothing is known."""
        parts = (("", self.role), ("rank ", self.rank), ("on node ", self.node), ("in ", self.method))
        worker = ", ".join(f"{word}{value}" for word, value in parts if value is not None)
        phase = f"phase {self.phase}" + ("" if self.step is None else f" of step {self.step}") if self.phase else ""
        return f"{worker} ({phase})" if worker and phase else worker or phase


def circumstances(error: BaseException) -> Circumstances:
    """Those of an exception, to read and to add to; they travel with it between processes."""
    if not hasattr(error, _ATTRIBUTE):
        setattr(error, _ATTRIBUTE, Circumstances())
    return getattr(error, _ATTRIBUTE)


def add_circumstances(error: BaseException, **known: str | int | None) -> None:
    """Fills in what is not known yet; names are those of `Circumstances`."""
    place = circumstances(error)
    for name, value in known.items():
        if getattr(place, name) is None:
            setattr(place, name, value)


@contextmanager
def during(phase: str, step: int | None = None) -> Iterator[None]:
    """What is raised inside was raised in this phase of the driver's loop."""
    try:
        yield
    except BaseException as error:
        add_circumstances(error, phase=phase, step=step)
        raise


def user_traceback(error: BaseException) -> str:
    """The traceback of an exception that user code raised, without the frames of this project and of the standard
    library that called the user's file. A traceback without a frame of the user stays whole."""
    shown = traceback.TracebackException.from_exception(error)
    first = next((i for i, frame in enumerate(shown.stack) if not frame.filename.startswith(_NOT_THE_USERS)), 0)
    del shown.stack[:first]
    return "".join(shown.format())


def printable(text: str) -> str:
    """Text of data, user code or a model for a terminal: characters that control it (escapes, the direction of writing,
    line ends other than `\\n`) are written out, as `\\x1b`. Tabs and spaces of all kinds stay."""
    stays = (x.isprintable() or x in "\n\t" or unicodedata.category(x) == "Zs" for x in text)
    return "".join(x if is_so else x.encode("unicode_escape").decode() for x, is_so in zip(text, stays, strict=True))
