"""Gives up rights, for good, before untrusted code runs: limits, user, capabilities, files, system calls.

`confine` applies every layer that this machine has, `probe` tries in a child what a confined process still can do.
Imports the standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import json
import math
import os
import resource
import signal
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from verl_lite.sandbox.landlock import landlock_version, restrict_files
from verl_lite.sandbox.system_calls import filter_calls, is_known_machine, prepare

NOBODY = 65534
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_CAPABILITIES_VERSION_3 = 0x20080522


@dataclass(frozen=True)
class Limits:
    """What one run of untrusted code may use.

    cpu_s: seconds of processor time for one test, of all its threads together; wall_s: by the clock, which is for those
    that sleep. memory_mb: address space, MiB. output_kb: what it prints. file_mb: each file; folder_mb: its folder,
    looked at ten times a second.
    """

    cpu_s: float = 4.0
    wall_s: float = 12.0
    memory_mb: int = 1024
    output_kb: int = 4096
    file_mb: int = 16
    folder_mb: int = 64
    open_files: int = 64
    threads: int = 64


@dataclass(frozen=True)
class Protection:
    """What holds on this machine, tried out by a confined process. True means: it could not.

    network: open a socket. processes: start a process, or another program. signals: signal its parent. writing: write
    outside its folder. reading: read files outside Python's own folders. layers: what sees to it, in words.
    """

    network: bool
    processes: bool
    signals: bool
    writing: bool
    reading: bool
    layers: tuple[str, ...]

    @property
    def is_safe(self) -> bool:
        """Whether nothing outside can be changed or reached. (Reading alone is no escape: nothing can be sent away.)"""
        return self.network and self.processes and self.signals and self.writing

    def missing(self) -> list[str]:
        """What untrusted code could do, in words."""
        could = {
            "open network connections": self.network,
            "start processes": self.processes,
            "signal other processes": self.signals,
            "write files outside its folder": self.writing,
            "read every file that this user may read": self.reading,
        }
        return [name for name, is_kept in could.items() if not is_kept]


def confine(limits: Limits, folder: str, readable: Sequence[str]) -> None:
    """Gives up all that code in `folder` does not need. readable: folders from which it may import.

    Layers that the machine lacks are left out; `probe` says what that means.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getppid()
    if os.getsid(0) != os.getpid():
        os.setsid()
    os.chdir(folder)
    for name, value in _resources(limits):
        hard = resource.getrlimit(name)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(name, (value, value))
    _give_up_user(folder, readable)
    libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))  # a change of user takes it back: so after that
    if os.getppid() != parent:
        os._exit(1)
    libc.capset(struct.pack("=Ii", _CAPABILITIES_VERSION_3, 0), struct.pack("=6I", *[0] * 6))
    zero = ctypes.c_ulong(0)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), zero, zero, zero)
    has_landlock = landlock_version(libc) > 0
    if has_landlock:
        restrict_files(libc, readable, folder)
    if is_known_machine():
        with contextlib.suppress(OSError):  # a kernel without seccomp: the probe finds out
            filter_calls(libc, may_write=has_landlock)


def probe(folder: str, readable: Sequence[str]) -> Protection:
    """What a confined child still can do on this machine."""
    if is_known_machine():
        prepare()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            confine(Limits(), folder, readable)
            os.write(writer, json.dumps(_attempts()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    if not answer:
        return Protection(False, False, False, False, False, ("it could not be tried: a confined process died",))
    kept: dict[str, bool] = json.loads(answer)
    return Protection(**kept, layers=tuple(_layers(readable)))


def _attempts() -> dict[str, bool]:
    outside = f"/tmp/verl_lite-sandbox-probe-{os.getpid()}"

    def fork() -> None:
        if os.fork() == 0:
            os._exit(0)

    def write() -> None:
        with open(outside, "w"):
            os.unlink(outside)

    return {
        "network": _fails(lambda: socket.socket().close()) and _fails(lambda: socket.socketpair()),
        "processes": _fails(fork) and _fails(lambda: os.posix_spawn("/bin/true", ["true"], {})),
        "signals": _fails(lambda: os.kill(os.getppid(), 0)),
        "writing": _fails(write),
        "reading": _fails(lambda: open("/etc/passwd").close()) and _fails(lambda: os.listdir("/proc")),
    }


def _fails(attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except OSError as error:
        return error.errno not in (errno.EMFILE, errno.ENFILE)  # no file left to open: nobody has forbidden it
    return False


def _layers(readable: Sequence[str]) -> list[str]:
    libc = ctypes.CDLL(None, use_errno=True)
    layers = ["limits of time, memory, output and files", "no capabilities"]
    if is_known_machine():
        layers.append("a list of allowed system calls (seccomp)")
    if (version := landlock_version(libc)) > 0:
        layers.append(f"files by Landlock, version {version}")
    else:
        layers.append("no file opened for writing (seccomp; this kernel has no Landlock)")
    if os.getuid() == 0:
        is_nobody = all(_is_open_to_all(path) for path in readable)
        layers.append(f"user {NOBODY}" if is_nobody else "still user 0: Python's folder is closed to other users")
    return layers


def _resources(limits: Limits) -> list[tuple[int, int]]:
    return [
        (resource.RLIMIT_CPU, math.ceil(limits.cpu_s) + 1),  # the parent ends it at cpu_s, if it is awake
        (resource.RLIMIT_AS, limits.memory_mb << 20),
        (resource.RLIMIT_FSIZE, limits.file_mb << 20),
        (resource.RLIMIT_NOFILE, limits.open_files),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
    ]


def _give_up_user(folder: str, readable: Sequence[str]) -> None:
    """As root: becomes nobody, where nobody can still import what the code may import."""
    if os.getuid() != 0 or not all(_is_open_to_all(path) for path in readable):
        return
    os.chown(folder, NOBODY, NOBODY)
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


@functools.cache
def _is_open_to_all(path: str) -> bool:
    """Whether other users can go there; a path that does not exist is no obstacle."""
    if not os.path.exists(path):
        return True
    parts = [path]
    while os.path.dirname(parts[-1]) != parts[-1]:
        parts.append(os.path.dirname(parts[-1]))
    needed = {part: 0o005 if os.path.isdir(part) else 0o004 for part in parts}
    return all(os.stat(part).st_mode & bits == bits for part, bits in needed.items())
