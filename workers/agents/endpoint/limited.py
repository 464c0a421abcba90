"""`python limited.py LIMITS COMMAND...`: runs a command with limits on memory, processes and files.

LIMITS is JSON with memory_mb, processes and file_mb, and perhaps the digest of the command's API key, which
`workers.agents.endpoint.callers` reads. The command inherits standard input, output and error, and its
exit status is returned. This program adds up the memory of the command and all its descendants, and kills all of them
if a limit is exceeded, or if the parent of this program ends. It does not confine the command: a command can read all
files of the user and open network connections.
"""

import contextlib
import json
import os
import resource
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NotRequired, TypedDict

import psutil

if __name__ == "__main__":
    # -P leaves out the folder of the project
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from verl_lite.machine import process_tree
from verl_lite.machine.process_tree import RUN_MARK, ProcessTree

COMMAND = (sys.executable, "-P", __file__)
KEPT = "PATH LANG LC_ALL LC_CTYPE TZ USER LOGNAME SHELL PYTHONPATH VIRTUAL_ENV SSL_CERT_FILE".split()
KEPT += [RUN_MARK]
"""Environment variables that programs inherit. All others may contain secrets of the trainer. RUN_MARK lets the guard
of the run end their processes if the trainer is killed."""

EXCEEDED = 125
"""Exit status after a limit was exceeded."""
_CHECK_S = 0.2
"""Seconds between two looks at the limits."""


class CommandLimits(TypedDict):
    """Limits of a command, written as JSON in the arguments of this program.

    Attributes:
        memory_mb: Resident memory of the command and all its descendants.
        processes: Number of these processes.
        file_mb: Size of each file that they write.
        key: Digest of the command's API key.
    """

    memory_mb: int
    processes: int
    file_mb: int
    key: NotRequired[str]


def base_environment(names: Iterable[str]) -> dict[str, str]:
    """Returns the variables of this process that programs inherit: `KEPT` and these names."""
    # without the first variable, a program would see all devices of the machine
    environment = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    for name in (*KEPT, *names):
        if name in os.environ:
            environment[name] = os.environ[name]

    # relative folders would be those of another folder, in which the command runs
    if "PYTHONPATH" in environment:
        folders = environment["PYTHONPATH"].split(os.pathsep)
        absolute_folders = [os.path.abspath(folder) for folder in folders]
        environment["PYTHONPATH"] = os.pathsep.join(absolute_folders)
    return environment


def main(limits: CommandLimits, command: list[str]) -> int:
    """Runs the command. Returns its exit status, or EXCEEDED after a limit was exceeded."""
    # another parent later means that this one has ended
    parent = os.getppid()
    # descendants whose parent ends become children of this process
    process_tree.become_subreaper()
    process_tree.hide_memory()
    _limit_resource(resource.RLIMIT_FSIZE, limits["file_mb"] << 20)
    _limit_resource(resource.RLIMIT_CORE, 0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(kill_all()))
    try:
        tree = ProcessTree(command, os.environ)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        # the status with which a shell answers an unknown command
        return 127

    while (code := tree.wait(_CHECK_S)) is None:
        process_tree.reap_adopted(tree.process.pid)
        problem = _exceeded(limits)
        if os.getppid() != parent:
            problem = problem or "the trainer's process has ended"
        if problem:
            kill_all()
            print(f"killed: {problem} (agentic.program_options)", file=sys.stderr)
            return EXCEEDED

    # the command has ended, but its descendants may still run
    kill_all()
    # a negative code is the number of a signal, to which shells add 128
    return code if code >= 0 else 128 - code


def _limit_resource(kind: int, limit: int) -> None:
    """Limits a resource of this process, which the command inherits."""
    _, hard = resource.getrlimit(kind)
    # no process may exceed the limit that it inherited
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(kind, (limit, limit))


def _exceeded(limits: CommandLimits) -> str:
    """Returns which limit the descendants of this process exceed; empty if they exceed none."""
    memory, count = usage()
    if count > limits["processes"]:
        return f"{count} processes exceed processes={limits['processes']}"
    if memory > limits["memory_mb"] << 20:
        return f"memory of {memory >> 20} MiB exceeds memory_mb={limits['memory_mb']}"
    return ""


def usage() -> tuple[int, int]:
    """Returns the resident memory in bytes and the number of all descendants of this process."""
    sizes = []
    for status in process_tree.descendants(os.getpid()):
        # a process may end between the two looks
        with contextlib.suppress(psutil.NoSuchProcess):
            sizes.append(psutil.Process(status.pid).memory_info().rss)
    return sum(sizes), len(sizes)


def kill_all() -> int:
    """Kills all descendants of this process. Returns EXCEEDED, the exit status after that."""
    process_tree.end_below(os.getpid())
    return EXCEEDED


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1]), sys.argv[2:]))
