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

if __name__ == "__main__":  # -P leaves out the folder of the project
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from verl_lite.machine import process_tree
from verl_lite.machine.process_tree import RUN_MARK, ProcessTree

COMMAND = (sys.executable, "-P", __file__)
KEPT = "PATH LANG LC_ALL LC_CTYPE TZ USER LOGNAME SHELL PYTHONPATH VIRTUAL_ENV SSL_CERT_FILE".split()
KEPT += [RUN_MARK]
"""Environment variables that programs inherit. All others may contain secrets of the trainer. RUN_MARK lets the guard
of the run end their processes if the trainer is killed."""

EXCEEDED = 125
_CHECK_S = 0.2


class Limits(TypedDict):
    """Limits of a command. key: digest of its API key."""

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

    if "PYTHONPATH" in environment:  # the command runs in another folder
        folders = environment["PYTHONPATH"].split(os.pathsep)
        environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(folder) for folder in folders)
    return environment


def main(limits: Limits, command: list[str]) -> int:
    """Runs the command. Returns its exit status, or EXCEEDED after a limit was exceeded."""
    parent = os.getppid()
    process_tree.become_subreaper()  # descendants whose parent ends become children of this process
    process_tree.hide_memory()
    for name, wanted in ((resource.RLIMIT_FSIZE, limits["file_mb"] << 20), (resource.RLIMIT_CORE, 0)):
        _, hard = resource.getrlimit(name)
        # no process may exceed the limit that it inherited
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(name, (limit, limit))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(kill_all()))
    try:
        tree = ProcessTree(command, os.environ)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return 127

    while (code := tree.wait(_CHECK_S)) is None:
        process_tree.reap_adopted(tree.process.pid)
        problem = "" if os.getppid() == parent else "the trainer's process has ended"
        memory, count = usage()
        if memory > limits["memory_mb"] << 20:
            problem = f"memory of {memory >> 20} MiB exceeds memory_mb={limits['memory_mb']}"
        if count > limits["processes"]:
            problem = f"{count} processes exceed processes={limits['processes']}"
        if problem:
            kill_all()
            print(f"killed: {problem} (agentic.program_options)", file=sys.stderr)
            return EXCEEDED
    kill_all()
    return code if code >= 0 else 128 - code


def usage() -> tuple[int, int]:
    """Returns the resident memory in bytes and the number of all descendants of this process."""
    sizes = []
    for status in process_tree.descendants(os.getpid()):
        with contextlib.suppress(psutil.NoSuchProcess):
            sizes.append(psutil.Process(status.pid).memory_info().rss)
    return sum(sizes), len(sizes)


def kill_all() -> int:
    """Kills all descendants of this process. Returns an exit status."""
    process_tree.end_below(os.getpid())
    return EXCEEDED


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1]), sys.argv[2:]))
