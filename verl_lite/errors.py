"""Error types: `UserError`, which the user can fix, and the circumstances that are attached to all other errors.

`UserError` is shown without a traceback. Any other exception that leaves a run carries `Circumstances`: the role, rank
and method of the worker that raised it, and the phase of the driver. The end of a run prints them as the cause.
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
_NOT_USER_CODE = (*_KERNEL, sysconfig.get_path("stdlib"), "<frozen")


class UserError(ValueError):
    """Wrong input. The message names the key or file, the value found, what was expected and what to change."""


class FinishedRunError(UserError):
    """A run was started again although all its steps are done. The message says how it can continue."""


class WorkerDiedError(RuntimeError):
    """A worker's process ended. The message names its role, rank and method, and the cause if it is known."""


class ClusterLostError(WorkerDiedError):
    """The whole Ray cluster of the run is lost, including this process's connection to it.

    Attributes:
        again: options with which the command starts again in a new process; None if it does not start again.
    """

    again: list[str] | None = None


class NoRoomError(UserError):
    """The cluster does not answer, or has fewer machines, devices or cores than the run requests."""


class TransferError(RuntimeError):
    """New weights did not reach all rollout engines. The message names those that are late."""


class StalledError(RuntimeError):
    """Workers did not answer within `trainer.stall_timeout_s`; their logs contain their stacks."""


@dataclass
class Circumstances:
    """Where an exception was raised. Unknown fields are None.

    Attributes:
        role, rank, method: the worker and its method.
        node: the worker's machine, in a run on several machines.
        phase, step: phase and step of the driver's loop.
        traceback: text of the worker's traceback.
        log: path of the worker's log.
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
        fields = (("", self.role), ("rank ", self.rank), ("on node ", self.node), ("in ", self.method))
        parts = []
        for word, value in fields:
            if value is not None:
                parts.append(f"{word}{value}")
        worker = ", ".join(parts)
        phase = ""
        if self.phase:
            phase = f"phase {self.phase}"
            if self.step is not None:
                phase += f" of step {self.step}"
        if worker and phase:
            return f"{worker} ({phase})"
        return worker or phase


def circumstances(error: BaseException) -> Circumstances:
    """Returns the circumstances of an exception, which can be changed. They are pickled with the exception."""
    if not hasattr(error, _ATTRIBUTE):
        # an attribute of the exception, so that pickle carries it from the worker to the driver
        setattr(error, _ATTRIBUTE, Circumstances())
    return getattr(error, _ATTRIBUTE)


def add_circumstances(error: BaseException, **fields: str | int | None) -> None:
    """Sets the fields of `Circumstances` that are still None."""
    origin = circumstances(error)
    for name, value in fields.items():
        # the innermost handler comes first and knows the origin best
        if getattr(origin, name) is None:
            setattr(origin, name, value)


@contextmanager
def during(phase: str, step: int | None = None) -> Iterator[None]:
    """Context manager that adds the phase and step of the driver's loop to every exception raised inside."""
    try:
        yield
    except BaseException as error:
        # the exception continues unchanged, so that callers can catch its type
        add_circumstances(error, phase=phase, step=step)
        raise


def user_traceback(error: BaseException) -> str:
    """Returns the traceback of an exception that user code raised, without the outer frames of this project and of the
    standard library. A traceback without a frame of user code is returned whole."""
    report = traceback.TracebackException.from_exception(error)
    for number, frame in enumerate(report.stack):
        if not frame.filename.startswith(_NOT_USER_CODE):
            del report.stack[:number]
            break
    return "".join(report.format())


def printable(text: str) -> str:
    """Returns text from data, user code or a model in a form that cannot control the terminal.

    Control characters (escapes, text direction, line ends other than `\\n`) are replaced by their escape sequences,
    such as `\\x1b`. Tabs and all kinds of spaces are kept.
    """
    characters = []
    for character in text:
        # isprintable is false for all spaces except the common one
        is_harmless = character.isprintable() or character in "\n\t" or unicodedata.category(character) == "Zs"
        if not is_harmless:
            character = character.encode("unicode_escape").decode()
        characters.append(character)
    return "".join(characters)
