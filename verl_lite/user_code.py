"""Code of the user's own: a Python file, or a module given as pkg://package.module. Imports nothing heavy."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import zlib
from pathlib import Path
from types import ModuleType
from typing import Any

from verl_lite.errors import UserError

MODULE_PREFIX = "pkg://"


def load_object(path: str, name: str, path_key: str, name_key: str) -> Any:
    """The callable `name` of `path`. path_key, name_key: the configuration keys, for messages.

    The code runs once, here; what it raises is raised. Raises UserError if there is no such file, module or callable.
    """
    return object_of(load_module(path, path_key), path, name, name_key)


def object_of(module: ModuleType, path: str, name: str, name_key: str) -> Any:
    """The callable `name` of a module that came from `path`. Raises UserError if there is none, with those found."""
    found = getattr(module, name, None)
    if not callable(found):
        own = (k for k, v in vars(module).items() if callable(v) and getattr(v, "__module__", None) == module.__name__)
        raise UserError(
            f"{name_key}={name!r}: {path} defines nothing of that name; found: {', '.join(sorted(own)) or 'nothing'}. "
            f"Set {name_key} to one of them"
        )
    return found


def load_module(path: str, key: str) -> ModuleType:
    """Runs a Python file, or imports pkg://package.module. key: the configuration key, for messages.

    Raises UserError if there is no such file or module; what the code raises is raised.
    """
    file, name = Path(path).expanduser(), path.removeprefix(MODULE_PREFIX)
    problem = "no such file" if not file.is_file() else "not a Python file"
    if name != path:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not name.startswith(error.name or " "):  # it was found, and something that it imports was not
                raise
            problem = str(error)
    module_name = f"user_code_{file.stem}_{zlib.crc32(str(file.absolute()).encode()):08x}"
    spec = importlib.util.spec_from_file_location(module_name, file) if file.is_file() else None
    if spec is None or spec.loader is None:
        raise UserError(
            f"{key}={path!r}: {problem} (looked in {Path.cwd()}). Expected a Python file NAME.py or pkg://package.module"
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # before it runs: dataclasses and pickle look their module up here
    spec.loader.exec_module(module)
    return module
