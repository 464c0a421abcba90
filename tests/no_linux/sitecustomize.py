"""Hides what only Linux has from this project's code, and vLLM from everybody: a stand-in for a Mac.

Python imports this module at its start where its folder is on PYTHONPATH, in the workers of Ray too. Paths below
`HIDDEN` do not exist for a caller in this project; libraries such as psutil and Ray still find them.
"""

from __future__ import annotations

import builtins
import ctypes
import io
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = str(Path(__file__).resolve().parents[2])
PRODUCT = tuple(f"{ROOT}/{top}/" for top in ("verl_lite", "workers", "trainer", "recipes"))
HIDDEN = ("/proc", "/sys/fs/cgroup", "/dev/shm")
PATH_MODULES = ("<frozen", os.path.dirname(os.__file__) + "/")


def _is_asked_by_the_product() -> bool:
    frame = sys._getframe(2)
    while (
        frame.f_back is not None
        and frame.f_code.co_filename.startswith(PATH_MODULES)
        and "site-packages" not in (frame.f_code.co_filename)
    ):
        frame = frame.f_back
    return frame.f_code.co_filename.startswith(PRODUCT)


def _hidden(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
        if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(HIDDEN) and _is_asked_by_the_product():
            raise FileNotFoundError(2, "hidden by tests/no_linux", os.fspath(path))
        return function(path, *args, **kwargs)

    return call


def _hide(module: ModuleType, *names: str) -> None:
    for name in names:
        setattr(module, name, _hidden(getattr(module, name)))


class _NoLinux(ctypes.CDLL):
    def __getattr__(self, name: str) -> Any:
        if name in ("prctl", "mallopt", "mallinfo2", "malloc_trim", "memfd_create", "syscall"):
            raise AttributeError(name)
        return super().__getattr__(name)


_hide(os, "stat", "listdir", "scandir", "readlink")
_hide(builtins, "open")
io.open = builtins.open
for name in ("sched_getaffinity", "sched_setaffinity", "memfd_create", "pidfd_open"):
    delattr(os, name)
platform.machine = lambda: "arm64"
ctypes.CDLL = _NoLinux  # type: ignore[misc]
sys.modules["vllm"] = None  # type: ignore[assignment]
