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
import os
import sys
import traceback
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
_LONGEST_REASON = 500
_MOST_FRAMES = 3


class Registry(dict[str, T]):
    """A dictionary from names to objects of one kind, such as `Registry[Callable]("policy loss")`.

    Names are case-sensitive.

    Attributes:
        kind: kind of the objects in words, for error messages.
        facts: by name, the properties that an entry declared when it was registered, such as the columns it needs.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.facts: dict[str, dict[str, object]] = {}

    def register(self, name: str | Enum, **facts: object) -> Callable[[T], T]:
        """Returns a decorator that registers an object. Registering the same object twice is allowed.

        Args:
            name: name of the entry.
            facts: properties of the entry, see `Registry`.

        Raises:
            ValueError: another object has the name.
        """
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
            UserError: for an unknown name (the message lists the nearest and all known names) or a path that does not
                lead to a callable, see `object_at`.
        """
        key = _key(name)
        kind = kind or self.kind
        if key in self:
            return self[key]
        if ":" in key:
            try:
                return object_at(key)
            except UserError as error:
                raise UserError(f"{kind} {key!r} cannot be imported: {error}. Expected pkg.module:object.") from error
        names = ", ".join(sorted(self)) or "none"
        near = did_you_mean(key, self)
        raise UserError(f"Unknown {kind}: {key}{near}. Known: {names}; or a path pkg.module:object.")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns `; did you mean X` if a known name is similar, else an empty text."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    if not close:
        return ""
    return f"; did you mean {close[0]}"


def is_own(entry: object) -> bool:
    """Returns True if a package of this project defines the entry; False for code of users."""
    return _package_of(_module_name(entry)) in OWN_PACKAGES


def foreign_modules(entries: Iterable[object]) -> list[str]:
    """Returns the modules outside this project that define some of these entries. Another process imports them to
    register the same entries. Entries defined in `__main__` are left out, because it cannot be imported by name."""
    modules = set()
    for entry in entries:
        name = _module_name(entry)
        if _package_of(name) not in (*OWN_PACKAGES, "__main__"):
            modules.add(name)
    return sorted(modules)


def _module_name(entry: object) -> str:
    return getattr(entry, "__module__", "__main__")


def _package_of(module_name: str) -> str:
    return module_name.partition(".")[0]


def import_modules(modules: Iterable[str]) -> None:
    """Imports modules, which register their entries on import."""
    for module in modules:
        importlib.import_module(module)


@contextmanager
def importing() -> Iterator[None]:
    """Context manager that imports modules with the garbage collector switched off, which saves a sixth of the time.
    Later collections ignore the imported objects."""
    # otherwise native libraries report leaks at exit
    atexit.register(gc.unfreeze)
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def takes(function: Callable[..., object], name: str) -> bool:
    """Returns True if the function has a parameter of this name; `**kwargs` does not count."""
    return name in inspect.signature(function).parameters


def accepts(function: Callable[..., object], name: str) -> bool:
    """Returns True if the function can be called with this keyword, by a parameter of this name or by `**kwargs`."""
    if takes(function, name):
        return True
    parameters = inspect.signature(function).parameters.values()
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)


def object_at(path: str) -> Any:
    """Returns the callable at pkg.module:name, or at pkg.module:Class.name.

    Raises:
        UserError: the module does not exist or cannot be imported, or it has no such callable. The message gives only
            the reason, to which the caller adds the option.
    """
    module_name, _, attributes = path.partition(":")
    if module_name.endswith(".py") or os.sep in module_name:
        stem = Path(module_name).stem
        raise UserError(
            f"{module_name} is a file: write its module, {stem}:{attributes}, with its folder in PYTHONPATH"
        )
    if not module_name or not attributes:
        raise UserError("the module in front of the colon, or the name behind it, is missing")
    module = _imported(module_name)
    try:
        # a path such as Class.name, which getattr does not follow
        target = operator.attrgetter(attributes)(module)
    except AttributeError:
        raise UserError(f"{module_name} has no {attributes}{_own_callables(module, attributes)}") from None
    if not callable(target):
        raise UserError(f"{path} is {_kind_of(target)}, not a function or class{_own_callables(module, '')}")
    return target


def load_object(path: str, name: str, path_key: str, name_key: str) -> Any:
    """Loads the callable `name` from a Python file or a module pkg://package.module.

    Args:
        path: the file or module; its code runs once, in this call.
        name: name of the callable.
        path_key, name_key: configuration keys of the two, for error messages.

    Raises:
        UserError: if there is no such file, module or callable, or if its code raises an exception.
    """
    return object_of(load_module(path, path_key), path, name, name_key)


def object_of(module: ModuleType, path: str, name: str, name_key: str) -> Any:
    """Returns the callable `name` of a module loaded from `path`. Raises UserError, which lists the module's own
    callables."""
    target = None
    if name:
        target = getattr(module, name, None)
    if callable(target):
        return target
    problem = "defines nothing of that name"
    if target is not None:
        problem = f"defines {_kind_of(target)} of that name"
    raise UserError(
        f"{name_key}={name!r}: {path} {problem}{_own_callables(module, name)}. Set {name_key} to a callable"
    )


def load_module(path: str, key: str) -> ModuleType:
    """Runs a Python file as a module, or imports pkg://package.module.

    Args:
        path: the file or module.
        key: the configuration key, for error messages.

    Raises:
        UserError: if there is no such file or module, or if its code raises an exception.
    """
    try:
        if path.startswith(MODULE_PREFIX):
            return _imported(path.removeprefix(MODULE_PREFIX))
        return _module_of_file(Path(path).expanduser())
    except UserError as error:
        raise UserError(f"{key}={path!r}: {error}. Expected a Python file NAME.py or pkg://package.module") from error


def require_call(function: Callable[..., object], expected: str, *arguments: object, **named: object) -> None:
    """Raises UserError if a function or class of the user cannot be called with these arguments.

    Args:
        expected: the call in words, for the message, such as "f(group) -> bool".
        arguments, named: the arguments of the call; only their number and names matter.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        # a callable written in C does not always have a signature
        return
    try:
        signature.bind(*arguments, **named)
    except TypeError as error:
        name = getattr(function, "__qualname__", str(function))
        raise UserError(f"{name}{signature} cannot be called as needed: {error}. Expected {expected}") from None


def _imported(name: str) -> ModuleType:
    """Imports a module. Raises UserError if it does not exist, or if its code raises an exception."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # the module itself or a package above it, and not one of its own imports
        if error.name and f"{name}.".startswith(f"{error.name}."):
            raise UserError(
                f"there is no module {error.name}; Python looks in the current folder ({Path.cwd()}), in PYTHONPATH "
                "and among installed packages"
            ) from None
        raise UserError(_import_failure(name, error)) from error
    except (Exception, SystemExit) as error:
        raise UserError(_import_failure(name, error)) from error


def _module_of_file(file: Path) -> ModuleType:
    """Runs a Python file as a module of its own name. Raises UserError like `_imported`."""
    if not file.is_file():
        raise UserError(f"no such file (looked in {Path.cwd()})")
    # two files of one name are two modules
    absolute_path = str(file.absolute())
    path_checksum = zlib.crc32(absolute_path.encode())
    module_name = f"user_code_{file.stem}_{path_checksum:08x}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise UserError(f"not a Python file (looked in {Path.cwd()})")

    module = importlib.util.module_from_spec(spec)
    # set first, because dataclasses and pickle look up the module by name
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        raise UserError(_import_failure(str(file), error)) from error
    return module


def _import_failure(name: str, error: BaseException) -> str:
    """Describes an exception of a module's own code: its text, and the user's lines that raised it."""
    if isinstance(error, SyntaxError):
        line = (error.text or "").strip()
        return f"{error.filename}, line {error.lineno}, is not Python ({error.msg}): `{line}`"
    first_line, _, _ = str(error).partition("\n")
    reason = first_line[:_LONGEST_REASON]

    import_machinery = ("<frozen", importlib.__file__, __file__)
    lines = []
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(import_machinery):
            lines.append(f"{frame.filename}, line {frame.lineno}: `{frame.line}`")
    origin = ""
    if lines:
        innermost = ", called in ".join(lines[:_MOST_FRAMES])
        origin = f" (raised in {innermost})"
    return f"importing {name} raises {type(error).__name__}: {reason}{origin}"


def _own_callables(module: ModuleType, name: str) -> str:
    """Returns the names of the functions and classes that the module defines, the nearest to `name` first, in words."""
    names = []
    for key, value in vars(module).items():
        # imported names do not count
        if callable(value) and getattr(value, "__module__", None) == module.__name__:
            names.append(key)
    near = did_you_mean(name, names)
    definitions = ", ".join(sorted(names)) or "no function or class"
    return f"{near}; it defines: {definitions}"


def _kind_of(value: object) -> str:
    """Returns the type of a value in words, such as `a module` or `the int 3`."""
    if isinstance(value, ModuleType):
        return "a module"
    return f"the {type(value).__name__} {value!r:.40}"


def _key(name: str | Enum) -> str:
    if isinstance(name, Enum):
        return str(name.value)
    return name
