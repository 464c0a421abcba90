"""The user's own reward function, from a file or an installed module."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import zlib
from pathlib import Path
from types import ModuleType

from verl_lite.errors import UserError
from verl_lite.rewards.dispatch import RewardFunction

_MODULE_PREFIX = "pkg://"


def load_reward_function(path: str, name: str, option: str = "reward.custom_reward_function") -> RewardFunction:
    """The function `name` of `path`.

    path: a Python file, or pkg://package.module. The code runs once, here; what it raises is raised.
    option: the group of keys that names it. Raises UserError if there is no such file, or no such function (with those
    found).
    """
    return function_of(load_module(path, option), path, name, option)


def load_module(path: str, option: str) -> ModuleType:
    """Runs a Python file, or imports pkg://package.module. Raises UserError if there is no such file."""
    if path.startswith(_MODULE_PREFIX):
        return importlib.import_module(path.removeprefix(_MODULE_PREFIX))
    file = _existing_file(path, option)
    module_name = f"custom_reward_{file.stem}_{zlib.crc32(str(file.absolute()).encode()):08x}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise UserError(f"{option}.path={path!r} is not a Python file; expected NAME.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # before it runs: dataclasses and pickle look their module up here
    spec.loader.exec_module(module)
    return module


def function_of(module: ModuleType, path: str, name: str, option: str) -> RewardFunction:
    """The function `name` of a module that came from `path`. Raises UserError if there is none, with those found."""
    function = getattr(module, name, None)
    if not callable(function):
        found = sorted(key for key, value in vars(module).items() if inspect.isroutine(value) and key[0] != "_")
        raise UserError(
            f"{option}.name={name!r}: {path} defines no such function; "
            f"functions found: {', '.join(found) or 'none'}. Set {option}.name to one of them."
        )
    return function


def _existing_file(path: str, option: str) -> Path:
    file = Path(path).expanduser()
    if not file.is_file():
        raise UserError(
            f"{option}.path={path!r}: no such file (looked for {file.absolute()}). "
            "Give a Python file or pkg://package.module."
        )
    return file
