"""Drops rights irrevocably before untrusted code runs: limits, user, capabilities, files (Landlock), system calls.

Applies every layer that the machine supports. Imports only the standard library.
"""

import contextlib
import ctypes
import functools
import os
import resource
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from verl_lite.machine.process_tree import die_with_parent
from verl_lite.sandbox.system_calls import filter_calls, is_known_machine

NOBODY = 65534
_PR_SET_NO_NEW_PRIVS = 38
_CAPABILITIES_VERSION_3 = 0x20080522
_LONGEST_CPU_S = 3600


@dataclass(frozen=True)
class Limits:
    """Resource limits of one process that runs untrusted code. MB are MiB, KB are KiB.

    Attributes:
        cpu_s: processor time of one test in seconds, summed over threads.
        wall_s: wall-clock time of one test in seconds, which also limits programs that sleep.
        memory_mb: address space.
        output_kb: size of stdout, and of stderr.
        file_mb: size of each file.
        folder_mb: size of the program's folder, checked ten times a second.
        open_files: number of open files.
        threads: number of threads.
    """

    cpu_s: float = 4.0
    wall_s: float = 12.0
    memory_mb: int = 1024
    output_kb: int = 4096
    file_mb: int = 16
    folder_mb: int = 64
    open_files: int = 64
    threads: int = 64


def confine(limits: Limits, folder: str, readable: Sequence[str]) -> None:
    """Drops all rights that a program does not need.

    Skips layers that the machine lacks; `Sandbox.could` lists the consequences. The fork server enforces the limits of
    time, output, threads and the folder.

    Args:
        limits: limits of the program.
        folder: folder in which it may write.
        readable: folders from which it may import.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getppid()
    # a group of its own, which the server kills as a whole
    os.setsid()
    os.chdir(folder)

    for name, value in (
        (resource.RLIMIT_CPU, _LONGEST_CPU_S),
        (resource.RLIMIT_AS, limits.memory_mb << 20),
        (resource.RLIMIT_FSIZE, limits.file_mb << 20),
        (resource.RLIMIT_NOFILE, limits.open_files),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
    ):
        _, hard = resource.getrlimit(name)
        # nobody but root may raise a hard limit
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        resource.setrlimit(name, (value, value))

    # only if the user nobody can import these packages
    if os.getuid() == 0 and all(map(_is_open_to_all, readable)):
        os.chown(folder, NOBODY, NOBODY)
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    # after the change of user, which resets it
    die_with_parent(parent)
    # the kernel's two structs of capset: this process, and three empty sets of 64 capabilities
    header = struct.pack("=Ii", _CAPABILITIES_VERSION_3, 0)
    no_capabilities = struct.pack("=6I", 0, 0, 0, 0, 0, 0)
    libc.capset(header, no_capabilities)

    has_landlock = landlock_version(libc) > 0
    # Landlock and seccomp require it
    libc.prctl(_PR_SET_NO_NEW_PRIVS, *map(ctypes.c_ulong, (1, 0, 0, 0)))
    if has_landlock:
        _restrict_files(libc, readable, folder)
    # last, since the filter refuses most of the calls above
    if is_known_machine():
        # the kernel lacks seccomp, which `Sandbox.could` detects
        with contextlib.suppress(OSError):
            filter_calls(libc, may_write=has_landlock)


@functools.cache
def _is_open_to_all(path: str) -> bool:
    """Returns True if other users can read the path, or if it does not exist."""
    if not os.path.exists(path):
        return True
    for part in (Path(path), *Path(path).parents):
        # reading a folder needs two rights: to list it, and to enter it
        needed = 0o005 if part.is_dir() else 0o004
        mode = part.stat().st_mode
        if mode & needed != needed:
            return False
    return True


# constants of the kernel's linux/landlock.h; its system calls have the same numbers on both machines
_CREATE_RULESET = 444
_ADD_RULE = 445
_RESTRICT_SELF = 446
_VERSION_FLAG = 1
_PATH_BENEATH = 1
_WRITE_FILE = 1 << 1
_READ_FILE = 1 << 2
_READ_DIR = 1 << 3
_REMOVE_FILE = 1 << 5
_MAKE_FILE = 1 << 8
# all 13 actions of version 1
_BASIC = (1 << 13) - 1
_REFER = 1 << 13
_TRUNCATE = 1 << 14
_IOCTL = 1 << 15
# to bind a TCP socket, and to connect it
_TCP = 0b11
# connections to abstract Unix sockets of processes outside, and signals to them
_SIGNALS_AND_SOCKETS = 0b11


def landlock_version(libc: ctypes.CDLL) -> int:
    """Returns the kernel's version of Landlock (Linux 5.13 and later), or 0 if Landlock is missing or disabled."""
    version = libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION_FLAG)
    # -1 is an error
    return max(0, version)


def _restrict_files(libc: ctypes.CDLL, read: Sequence[str], write: str) -> None:
    """Restricts this process to reading files below `read`, and to reading and writing files in the folder `write`.

    It cannot open other files, /proc included, but it can still see whether a file exists, and its size.
    """
    # Landlock forbids these actions except where a rule below allows them; later versions know more of them
    version = landlock_version(libc)
    handled = _BASIC
    if version >= 2:
        handled |= _REFER
    if version >= 3:
        handled |= _TRUNCATE
    if version >= 5:
        handled |= _IOCTL
    # a kernel refuses fields that it does not know
    attributes = struct.pack("=Q", handled)
    if version >= 4:
        attributes += struct.pack("=Q", _TCP)
    if version >= 6:
        attributes += struct.pack("=Q", _SIGNALS_AND_SOCKETS)
    size = ctypes.c_size_t(len(attributes))
    ruleset = _checked(libc.syscall(_CREATE_RULESET, attributes, size, 0))

    allowed = dict.fromkeys(("/dev/zero", "/dev/urandom", "/dev/random"), _READ_FILE)
    for path in read:
        allowed[path] = _READ_FILE | _READ_DIR
    allowed["/dev/null"] = _READ_FILE | _WRITE_FILE
    # no folders, links or devices: `folder_mb` counts the files of this folder only
    allowed[write] = _READ_FILE | _READ_DIR | _WRITE_FILE | _REMOVE_FILE | _MAKE_FILE
    # a rule may only allow what the ruleset handles
    allowed[write] |= _TRUNCATE & handled
    for path, access in allowed.items():
        try:
            opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            # the machine does not have this path
            continue
        # the kernel refuses rights of folders for a file
        if not os.path.isdir(path):
            access &= ~_READ_DIR
        rule = struct.pack("=Qi", access, opened)
        _checked(libc.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0))
        os.close(opened)
    _checked(libc.syscall(_RESTRICT_SELF, ruleset, 0))
    os.close(ruleset)


def _checked(result: int) -> int:
    """Returns the result of a system call. Raises OSError if it has failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"Landlock refused: {os.strerror(number)}")
    return result
