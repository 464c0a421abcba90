"""Converts Ray's errors into short errors: the worker's own exception, the cause of its death, or where it stalled.

Ray's messages are long and contain guesses and internal names. The error has the known facts; details are in its notes.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ray import cloudpickle
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError

from verl_lite.errors import StalledError, WorkerDiedError, add_circumstances, circumstances

# enough for the stack of a crash in native code
_LAST_LOG_LINES = 40
# colours, and markers under omitted lines
_DECORATION = re.compile(r"\x1b\[[0-9;]*m|^ *\^+ *\n", re.MULTILINE)
# Texts in the error of a rank whose peer has ended: a consequence, not the cause.
_CONSEQUENCES = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL", "Gloo", "gloo")
_CAUSES = (
    (
        r"was (\S+) used / (\S+) limit",
        "the machine's memory ran out ({} of {} in use). Reduce the memory use (smaller micro-batches, "
        "rollout.kv_cache_memory_mb, trainer.n_gpus_per_node), or wait for other jobs on this machine to end",
    ),
    (
        # Ray only reports that the socket of the process has closed
        r"connection error code 2",
        "its process ended without an exception: kill -9, the kernel's out-of-memory killer (see `dmesg`), or a "
        "crash in native code (its log ends with a stack)",
    ),
    (r"exits with an exit code (\d+)", "its process called exit with code {}"),
    (r"The actor is dead because (.*?)(?: Some common causes|$)", "{}"),
)


def original_error(error: RayTaskError) -> Exception:
    """Returns the worker's exception, with its traceback as a note."""
    cause: Exception = error.cause
    text = _DECORATION.sub("", str(error)).strip()
    cause.add_note(f"remote traceback:\n{text}")
    add_circumstances(cause, traceback=text)
    return cause


def death(
    cause: str, role: str, rank: int | None, method: str, log: str | None, node: str | None = None, note: str = ""
) -> WorkerDiedError:
    """Returns the error of a worker's process that has ended.

    Args:
        cause: why the process ended, in one sentence.
        role: role of the worker, or class of the service.
        rank: rank of the worker; None for a service.
        method: method that was running.
        log: file with the output of the process; its end becomes a note.
        node: name of the machine.
        note: further details, added as a note.
    """
    who = role
    if rank is not None:
        who += f" rank {rank}"
    if node is not None:
        who += f" on node {node}"
    died = WorkerDiedError(f"{who} died in {method}: {cause}")
    add_circumstances(died, role=role, rank=rank, node=node, method=method, log=log)
    if note:
        died.add_note(note)
    if log is not None and Path(log).is_file():
        lines = Path(log).read_text(errors="replace").splitlines()
        tail = "\n".join(lines[-_LAST_LOG_LINES:])
        died.add_note(f"the end of {log}:\n{tail}")
    return died


def cause_of_death(error: RayError) -> str:
    """Returns the reason why a process ended in one sentence, without Ray's list of guesses."""
    if isinstance(error, ActorUnavailableError):
        return "the connection to its process was closed: the process has ended, or its machine has left the cluster"
    text = " ".join(str(error).split())
    for pattern, sentence in _CAUSES:
        if match := re.search(pattern, text):
            return sentence.format(*match.groups())
    return text


def is_consequence(error: Exception) -> bool:
    """Returns True if an error only reports that another rank has ended."""
    # a process that has ended is a cause, whatever its log contains
    if isinstance(error, WorkerDiedError):
        return False
    message = str(error)
    return any(sign in message for sign in _CONSEQUENCES)


def stalled(who: str, timeout_s: float, role: str, method: str, log: str | None, rank: int | None = None) -> Exception:
    """Returns the error of a call that did not return within the time limit.

    Args:
        who: beginning of the message, up to "not answered".
        timeout_s: the time limit, in seconds.
        role: role of the worker, or class of the service.
        method: method that was running.
        log: file with the output of the process.
        rank: rank of the worker; None for a service.
    """
    error = StalledError(
        f"{who} not answered for {timeout_s:g} s (trainer.stall_timeout_s). The stacks of its threads are at the end "
        f"of its log, {log}. Raise the limit if the work really takes longer"
    )
    add_circumstances(error, role=role, rank=rank, method=method, log=log)
    return error


@contextmanager
def portable_errors() -> Iterator[None]:
    """Turns an exception that cannot be pickled into a RuntimeError with the same text, notes and circumstances."""
    try:
        yield
    except Exception as error:
        try:
            # loaded, too: an exception whose constructor takes other arguments than it stores fails only then
            cloudpickle.loads(cloudpickle.dumps(error))
        except (TypeError, AttributeError, ValueError, KeyError, RuntimeError, cloudpickle.PicklingError) as reason:
            portable = RuntimeError(f"{type(error).__name__}: {error}")
            for note in getattr(error, "__notes__", ()):
                portable.add_note(note)
            portable.add_note(f"(the exception itself does not pickle: {reason})")
            vars(circumstances(portable)).update(vars(circumstances(error)))
            raise portable from error
        raise
