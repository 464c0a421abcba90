"""Registries, which map a name in the configuration to a loss, an estimator, a reward or an engine.

User code can also be named by a path `pkg.module:object`, a Python file, or a module pkg://package.module. This module
imports no heavy package.
"""

import atexit
import difflib
import gc
import importlib
import importlib.util
import inspect
import operator
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from verl_lite.errors import UserError

T = TypeVar("T")
OWN_PACKAGES = ("verl_lite", "workers", "trainer")
MODULE_PREFIX = "pkg://"


class Registry(dict[str, T]):
    """A dictionary from names to objects of one kind, e.g. `Registry[Callable]("policy loss")`. Names are
    case-sensitive.

    facts: properties that an entry declares when it is registered, such as the columns it needs, by name.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.facts: dict[str, dict[str, Any]] = {}

    def register(self, name: str | Enum, **facts: Any) -> Callable[[T], T]:
        """Decorator that registers an object. Registering the same object twice is allowed; ValueError if another
        object has the name."""
        key = _key(name)

        def decorate(item: T) -> T:
            if self.setdefault(key, item) is not item:
                raise ValueError(
                    f"{self.kind} {key!r} is already registered as {self[key]}; {item} needs another name."
                )
            if facts:
                self.facts[key] = facts
            return item

        return decorate

    def get_fn(self, name: str | Enum, kind: str = "") -> T:
        """Returns the entry of that name, or the object at "pkg.module:object".

        Args:
            name: a registered name or a path.
            kind: replaces the registry's kind in the error message.

        Raises:
            ValueError: for an unknown name (the message lists the nearest and all known names) or a path that does not
                resolve.
        """
        key, kind = _key(name), kind or self.kind
        if key in self:
            return self[key]
        module_name, is_path, attributes = key.partition(":")
        if is_path:
            try:
                return operator.attrgetter(attributes)(importlib.import_module(module_name))
            except (ImportError, AttributeError, ValueError) as error:
                raise ValueError(f"{kind} {key!r} cannot be imported: {error}. Expected pkg.module:object.") from error
        known = ", ".join(sorted(self)) or "none"
        near = did_you_mean(key, self)
        raise ValueError(f"Unknown {kind}: {key}{near}. Known: {known}; or a path pkg.module:object.")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns `; did you mean X` if a known name is similar, else an empty text."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}" if close else ""


def is_own(entry: object) -> bool:
    """True if a package of this project defines the entry; False for code of users."""
    return getattr(entry, "__module__", "__main__").partition(".")[0] in OWN_PACKAGES


def foreign_modules(entries: Iterable[object]) -> list[str]:
    """Returns the modules outside this project that define some of these entries. Another process imports them to
    register the same entries. Entries defined in `__main__` are left out, because it cannot be imported by name."""
    modules = {getattr(entry, "__module__", "__main__") for entry in entries}
    return sorted(name for name in modules if name.partition(".")[0] not in (*OWN_PACKAGES, "__main__"))


def import_modules(modules: Iterable[str]) -> None:
    """Imports modules, which register their entries on import."""
    for module in modules:
        importlib.import_module(module)


@contextmanager
def importing() -> Iterator[None]:
    """Context manager that imports modules with the garbage collector switched off, which saves a sixth of the time.
    Later collections ignore the imported objects."""
    atexit.register(gc.unfreeze)  # otherwise native libraries report leaks at exit
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def takes(function: Callable[..., Any], name: str) -> bool:
    """Returns True if the function has a parameter of this name; `**kwargs` does not count."""
    return name in inspect.signature(function).parameters


def accepts(function: Callable[..., Any], name: str) -> bool:
    """Returns True if the function can be called with this keyword, by a parameter of this name or by `**kwargs`."""
    kinds = {parameter.kind for parameter in inspect.signature(function).parameters.values()}
    return takes(function, name) or inspect.Parameter.VAR_KEYWORD in kinds


def load_object(path: str, name: str, path_key: str, name_key: str) -> Any:
    """Loads the callable `name` from a Python file or a module pkg://package.module.

    Args:
        path: the file or module; its code runs once, in this call.
        name: name of the callable.
        path_key, name_key: configuration keys of the two, for error messages.

    Raises:
        UserError: if there is no such file, module or callable. Exceptions of the loaded code pass through.
    """
    return object_of(load_module(path, path_key), path, name, name_key)


def object_of(module: ModuleType, path: str, name: str, name_key: str) -> Any:
    """Returns the callable `name` of a module loaded from `path`. Raises UserError, which lists the callables found."""
    found = getattr(module, name, None)
    if not callable(found):
        own = (k for k, v in vars(module).items() if callable(v) and getattr(v, "__module__", None) == module.__name__)
        raise UserError(
            f"{name_key}={name!r}: {path} defines nothing of that name; found: {', '.join(sorted(own)) or 'nothing'}. "
            f"Set {name_key} to one of them"
        )
    return found


def load_module(path: str, key: str) -> ModuleType:
    """Runs a Python file as a module, or imports pkg://package.module. key: the configuration key, for error messages.

    Raises UserError if there is no such file or module. Exceptions of the loaded code pass through.
    """
    file, name = Path(path).expanduser(), path.removeprefix(MODULE_PREFIX)
    problem = "no such file" if not file.is_file() else "not a Python file"
    if name != path:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not name.startswith(error.name or " "):  # the module exists, and one of its own imports is missing
                raise
            problem = str(error)
    module_name = f"user_code_{file.stem}_{zlib.crc32(str(file.absolute()).encode()):08x}"
    spec = importlib.util.spec_from_file_location(module_name, file) if file.is_file() else None
    if spec is None or spec.loader is None:
        raise UserError(
            f"{key}={path!r}: {problem} (looked in {Path.cwd()}). Expected a Python file NAME.py or pkg://package.module"
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # set first, because dataclasses and pickle look up the module by name
    spec.loader.exec_module(module)
    return module


def _key(name: str | Enum) -> str:
    return str(name.value) if isinstance(name, Enum) else name
