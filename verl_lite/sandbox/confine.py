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
from verl_lite.sandbox.system_calls import filter_calls, forbid_new_rights, is_known_machine, prepare

NOBODY = 65534
_PR_SET_PDEATHSIG = 1
_CAPABILITIES_VERSION_3 = 0x20080522
_LONGEST_CPU_S = 3600
READ = "read every file that this user may read"


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
    """What holds on this machine, tried out by a confined process. could: what it could do. layers: what hinders it
    from doing more."""

    could: tuple[str, ...]
    layers: tuple[str, ...]

    @property
    def is_safe(self) -> bool:
        """Whether nothing outside can be changed or reached. (Reading alone is no escape: nothing can be sent away.)"""
        return set(self.could) <= {READ}


def confine(limits: Limits, folder: str, readable: Sequence[str], *, is_long: bool = False) -> None:
    """Gives up all that code in `folder` does not need. readable: folders from which it may import. is_long: whether
    cpu_s is for one of many tests, so that the kernel cannot see to it.

    Layers that the machine lacks are left out; `probe` says what that means.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getppid()
    os.setsid()
    os.chdir(folder)
    cpu_s = _LONGEST_CPU_S if is_long else math.ceil(limits.cpu_s) + 1  # the server ends it at cpu_s, if it is awake
    for name, value in (
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, limits.memory_mb << 20),
        (resource.RLIMIT_FSIZE, limits.file_mb << 20),
        (resource.RLIMIT_NOFILE, limits.open_files),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
    ):
        hard = resource.getrlimit(name)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(name, (value, value))
    _give_up_user(folder, readable)
    libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))  # a change of user takes it back: so after that
    if os.getppid() != parent:
        os._exit(1)
    libc.capset(struct.pack("=Ii", _CAPABILITIES_VERSION_3, 0), struct.pack("=6I", *[0] * 6))
    has_landlock = landlock_version(libc) > 0
    forbid_new_rights(libc)
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
        found = pipe.read()
    os.waitpid(child, 0)
    if not found:
        return Protection(("not be tried: a confined process died",), ())
    return Protection(tuple(json.loads(found)), tuple(_layers(readable)))


def _attempts() -> list[str]:
    """What succeeds."""
    outside = f"/tmp/verl_lite-sandbox-probe-{os.getpid()}"

    def fork() -> None:
        if os.fork() == 0:
            os._exit(0)

    def write() -> None:
        with open(outside, "w"):
            os.unlink(outside)

    attempts: dict[str, tuple[Callable[[], object], ...]] = {
        "open network connections": (lambda: socket.socket().close(), socket.socketpair),
        "start processes": (fork, lambda: os.posix_spawn("/bin/true", ["true"], {})),
        "signal other processes": (lambda: os.kill(os.getppid(), 0),),
        "write files outside its folder": (write,),
        READ: (lambda: open("/etc/passwd").close(), lambda: os.listdir("/proc")),
    }
    return [name for name, ways in attempts.items() if not all(map(_fails, ways))]


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
