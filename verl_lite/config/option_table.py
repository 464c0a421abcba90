"""A flat table of options by dotted key, with type, default and help; converts values to the type of their key."""

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeGuard

from verl_lite.config.fields import Range
from verl_lite.errors import UserError

Path = tuple[str, ...]
"""The parts of a dotted key: `("actor", "optim", "lr")`. Keys of a free dictionary in a file may contain dots."""

Settings = Mapping[str, object]
"""Values by dotted key, of options or of the keys of another trainer."""

_WORDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text", "dict": "a mapping"}
_SWITCHES = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)
_LONGEST_VALUE = 200  # characters of a value in a message
# parts between dots, without brackets, quotation marks and blanks
_KEY = re.compile(r"""[^.\[\]"'\s]+(\.[^.\[\]"'\s]+)*""")


class ConfigError(UserError):
    """An invalid configuration. The message lists all problems, each with key, value, expectation and remedy."""

    def __init__(self, problems: list[str]) -> None:
        # two checks can find the same problem
        self.problems = list(dict.fromkeys(problems))
        count = "one problem"
        if len(self.problems) > 1:
            count = f"{len(self.problems)} problems"
        message = f"the configuration has {count}:"
        for problem in self.problems:
            # further lines of a problem are indented like its text
            indented = problem.replace("\n", "\n    ")
            message += f"\n  - {indented}"
        super().__init__(message)


@dataclass(frozen=True)
class Key:
    """One option.

    Attributes:
        path: the parts of its dotted key.
        kind: int | float | bool | str | list (of `item`) | dict (free dictionary, which accepts any entry).
        item: kind of the entries of a list.
        optional: whether null is a value of the option.
        default: value if nothing sets it.
        doc: help sentence.
        expects: range of a number, or valid values of a text.
    """

    path: Path
    kind: str
    item: str
    optional: bool
    default: object
    doc: str
    expects: Range | tuple[str, ...] | None

    @property
    def name(self) -> str:
        return ".".join(self.path)

    def describe(self) -> str:
        """Returns the type in words, with the default as an example."""
        if self.kind == "list":
            words = "a list of numbers" if self.item in ("int", "float") else "a list of texts"
        else:
            words = _WORDS[self.kind]
        if self.optional:
            words += " or null"
        text = f"{words} is expected"
        # an empty value shows nothing
        if self.default not in (None, "", {}, []):
            text += f", for example {self.name}={value_text(self.default)}"
        return text


@dataclass(frozen=True)
class Schema:
    """The options of a root dataclass, in the order of its fields."""

    root: type
    keys: dict[str, Key]

    @cached_property
    def sections(self) -> frozenset[str]:
        """Dotted names of all sections."""
        names = set()
        for key in self.keys.values():
            for depth in range(1, len(key.path)):
                section = key.path[:depth]
                names.add(".".join(section))
        return frozenset(names)

    def find(self, path: Path) -> Key | None:
        """Returns the option at `path`, or the free dictionary with the entry `path`; None if neither exists."""
        # the entries of a free dictionary are no keys of their own
        for depth in range(len(path), 0, -1):
            key = self.keys.get(".".join(path[:depth]))
            is_whole_path = depth == len(path)
            if key is not None and (is_whole_path or key.kind == "dict"):
                return key
        return None

    def nearest(self, name: str) -> list[str]:
        """Returns up to three keys with a similar last part, the most similar key first."""
        # by the last part first, which also finds an option of another section
        last_parts = {_last_part(key) for key in self.keys}
        close_parts = [_last_part(name)]
        if _last_part(name) not in last_parts:
            close_parts = difflib.get_close_matches(_last_part(name), last_parts, n=2, cutoff=0.75)
        # in the order of the options, which decides between equally similar keys
        candidates = [key for key in self.keys if _last_part(key) in close_parts]
        if not candidates:
            return difflib.get_close_matches(name, self.keys, n=1, cutoff=0.85)

        def similarity(key: str) -> float:
            return difflib.SequenceMatcher(None, name, key).ratio()

        candidates.sort(key=similarity, reverse=True)
        return candidates[:3]


_SCHEMAS: dict[type, Schema] = {}


def schema_of(root: type) -> Schema:
    """Returns the (cached) schema of a root dataclass such as `PPOConfig`."""
    if root not in _SCHEMAS:
        keys = {key.name: key for key in _walk(root, ())}
        _SCHEMAS[root] = Schema(root, keys)
    return _SCHEMAS[root]


def value_of(config: object, name: str) -> object:
    """Returns the value at a dotted key; None if the configuration has no such option."""
    value = config
    for part in name.split("."):
        value = getattr(value, part, None)
    return value


def setting_text(name: str, value: object) -> str:
    """Returns `key=value` as the user would write it.

    A free dictionary with entries is named without them, because they may hold secrets.
    """
    if isinstance(value, dict) and value:
        return name
    return f"{name}={value_text(value):.{_LONGEST_VALUE}}"


def value_text(value: object) -> str:
    """Returns a value as the user would write it: `null`, `true`, `[a,b]`, or the text itself."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        items = ",".join(map(value_text, value))
        return f"[{items}]"
    return str(value)


def _last_part(key: str) -> str:
    return key.rpartition(".")[2]


def _walk(cls: type, prefix: Path) -> Iterator[Key]:
    """Yields the options of a dataclass and of its sections."""
    # unlike `__annotations__`, with base classes, and with types in place of annotations that are text
    annotations = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        path = (*prefix, field.name)
        annotation = annotations[field.name]
        if dataclasses.is_dataclass(annotation):
            yield from _walk(typing.cast(type, annotation), path)
            continue

        # the type of an option is a plain type, or `type | None`
        is_optional = isinstance(annotation, types.UnionType)
        members = typing.get_args(annotation) if is_optional else (annotation,)
        (plain,) = (member for member in members if member is not type(None))
        kind = typing.get_origin(plain) or plain
        item = typing.get_args(plain)[0].__name__ if kind is list else ""
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        yield Key(
            path=path,
            kind=kind.__name__,
            item=item,
            optional=is_optional,
            default=default,
            doc=field.metadata.get("doc", ""),
            expects=field.metadata.get("expects"),
        )


def split(text: str) -> Path:
    """Splits a dotted key. Raises ValueError for empty parts, blanks, quotes and brackets."""
    text = text.strip()
    if not _KEY.fullmatch(text):
        raise ValueError(f"{text!r} is not a key: parts separated by single dots are expected, such as actor.optim.lr")
    return tuple(text.split("."))


def is_interpolation(value: object) -> TypeGuard[str]:
    """Returns True for a text with a reference to another key, such as `${model.path}`."""
    return isinstance(value, str) and "${" in value


def is_quoted(raw: str | None) -> bool:
    """Returns True if the text of a value on the command line begins with a quotation mark."""
    return raw is not None and raw.strip()[:1] in ("'", '"')


def convert(key: Key, value: object, raw: str | None = None) -> object:
    """Converts `value`, as parsed from YAML, to the type of `key`.

    A single value becomes a list of length one if the key is a list; nested lists are flattened; numbers that YAML
    parsed as text (`"1e-6"`) become numbers. A text keeps its characters from the command line (`0012`, `{prompt} #`)
    unless it is quoted or null. Interpolations are returned unchanged and converted when they are resolved.

    Args:
        key: the option.
        value: the parsed value.
        raw: the value's text on the command line; None = it comes from a file.

    Raises:
        ValueError: the value cannot have that type.
    """
    if key.kind == "list":
        return _items(key.item, value, raw)
    # null empties a free dictionary
    if key.kind == "dict" and isinstance(value, dict | None):
        return value or {}
    if key.kind == "str" and raw is not None and not is_interpolation(value):
        # YAML would turn `0012` into 12 and cut `{prompt} #` off, so the text itself counts
        text = raw.strip()
        is_null = value is None and text[:1] not in ("", "#")
        if not is_null and not is_quoted(text):
            return text
    if value is None and key.optional:
        return None
    return _scalar(key.kind, value)


def _items(kind: str, value: object, raw: str | None) -> list[object]:
    """Converts a value to a list of entries of one kind. For the arguments see `convert`."""
    if value is None:
        return []
    # a quoted text is one entry, commas included
    is_unquoted = raw is not None and raw.strip()[:1] not in ("", "'", '"')
    if isinstance(value, str) and is_unquoted and not is_interpolation(value):
        # brackets that YAML did not parse, because ` #` in an entry begins a comment there
        if value.startswith("[") and value.endswith("]"):
            value = value[1:-1]
        value = [part.strip() for part in value.split(",") if part.strip()]
    if not isinstance(value, list):
        value = [value]

    items: list[object] = []
    for entry in value:
        if isinstance(entry, list):
            items += entry
        else:
            items.append(entry)
    return [_scalar(kind, item) for item in items]


def _scalar(kind: str, value: object) -> object:
    """Converts a value to a kind that is no list. Raises ValueError if it cannot have this kind."""
    if is_interpolation(value):
        return value
    if kind == "bool" and isinstance(value, bool | int | str):
        word = str(value).lower()
        if word in _SWITCHES:
            return _SWITCHES[word]
    # True is an int for Python, but neither a number nor a text for a user
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError
    # NaN, the only value that differs from itself, is no value of an option
    if value != value:
        raise ValueError
    if kind == "str":
        return str(value)
    # not by way of float, which has no place for the last digits of a large number
    if kind == "int" and isinstance(value, int):
        return value
    if kind in ("int", "float"):
        number = float(value)
        # the text may be "nan"
        if kind == "float" and not math.isnan(number):
            return number
        if kind == "int" and number.is_integer():
            return int(number)
    raise ValueError
