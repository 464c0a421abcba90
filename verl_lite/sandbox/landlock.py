"""Which files untrusted code may open: the kernel's Landlock (Linux 5.13 and later), which needs no privilege.

Reading is allowed below the folders that are given, writing below one; everything else is refused, /proc included.
That a file exists, and how long it is, can still be seen. Imports the standard library only.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG, _PATH_BENEATH = 1, 1
_WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 1, 1 << 2, 1 << 3
_REMOVE_DIR, _REMOVE_FILE, _MAKE_DIR, _MAKE_FILE = 1 << 4, 1 << 5, 1 << 7, 1 << 8
_BASIC, _REFER, _TRUNCATE, _IOCTL = (1 << 13) - 1, 1 << 13, 1 << 14, 1 << 15
_TCP, _SIGNALS_AND_SOCKETS = 0b11, 0b11


def landlock_version(libc: ctypes.CDLL) -> int:
    """The kernel's version of Landlock, 0 if it has none or it is switched off."""
    return max(0, libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION_FLAG))


def restrict_files(libc: ctypes.CDLL, read: Sequence[str], write: str) -> None:
    """From now on this process opens files below `read` for reading, below the folder `write` for both, and no others.

    read: folders or files; those that do not exist are left out. Raises OSError where that is not possible.
    """
    version = landlock_version(libc)
    handled = _BASIC | (_REFER if version >= 2 else 0)
    handled |= (_TRUNCATE if version >= 3 else 0) | (_IOCTL if version >= 5 else 0)
    network, scoped = (_TCP if version >= 4 else 0), (_SIGNALS_AND_SOCKETS if version >= 6 else 0)
    attributes = struct.pack("=QQQ", handled, network, scoped)[: 24 if version >= 6 else 16 if version >= 4 else 8]
    ruleset = _checked(libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0))
    try:
        for path in read:
            _allow(libc, ruleset, path, _READ_FILE | _READ_DIR)
        for path in ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random"):
            _allow(libc, ruleset, path, _READ_FILE | (_WRITE_FILE if path == "/dev/null" else 0))
        own = _READ_FILE | _READ_DIR | _WRITE_FILE | _REMOVE_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_FILE
        _allow(libc, ruleset, write, (own | _REFER | _TRUNCATE) & handled)
        _checked(libc.syscall(_RESTRICT_SELF, ruleset, 0))
    finally:
        os.close(ruleset)


def _allow(libc: ctypes.CDLL, ruleset: int, path: str, access: int) -> None:
    try:
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:  # a machine without it: nothing to allow
        return
    try:
        if not os.path.isdir(path):
            access &= ~_READ_DIR
        rule = struct.pack("=Qi", access, opened)
        _checked(libc.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0))
    finally:
        os.close(opened)


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"Landlock refused: {os.strerror(number)}")
    return result
