"""The options as a flat table: every dotted key with its type, default and sentence.

Takes a root dataclass of `config.py`; gives its `Schema` (one `Key` for each leaf, and the nearest key to a misspelt
one), and the conversion of a value to a key's type. `loader` is built on it; so are the printed reference and
the architecture test that every option is read. Nothing here reads a command line or a file.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from verl_lite.config.fields import Range
from verl_lite.config.ppo import PPOConfig
from verl_lite.errors import UserError

Path = tuple[str, ...]
"""A key cut at its dots: `("actor", "optim", "lr")`; below a free dictionary a part may itself contain dots."""

_NUMBER = re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?")
_WORDS_TRUE = frozenset({"true", "yes", "on"})
_WORDS_FALSE = frozenset({"false", "no", "off"})


class ConfigError(UserError):
    """What is wrong with a configuration: every problem found, each naming key, value, expectation and remedy."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = list(problems)
        count = f"{len(problems)} problems" if len(problems) > 1 else "one problem"
        listing = "\n".join("  - " + problem.replace("\n", "\n    ") for problem in problems)
        super().__init__(f"the configuration has {count}:\n{listing}")


class WrongValue(ValueError):
    """A value does not have the type of its key; the message says what was expected, without naming the key."""


@dataclass(frozen=True)
class Key:
    """One leaf of the schema.

    kind: int | float | bool | str | list (of `item`) | dict (free: any entry may be added below it). expects: a
    number's range, or the words that a text may be.
    """

    path: Path
    kind: str
    item: str
    optional: bool
    default: Any
    doc: str
    expects: Range | tuple[str, ...] | None

    @property
    def name(self) -> str:
        return ".".join(self.path)

    def describe(self) -> str:
        """The type in words, with an example that can be pasted."""
        words = {
            "int": "a whole number",
            "float": "a number",
            "bool": "true or false",
            "str": "a text",
            "list": f"a list of {'numbers' if self.item in ('int', 'float') else 'texts'}",
            "dict": "a mapping",
        }[self.kind]
        return words + (" or null" if self.optional else "")

    def example(self) -> str:
        """`key=value` with the default, or with a plausible value where the default is null or empty."""
        if self.kind == "list":
            values = self.default or ["a.parquet", "b.parquet"]
            return f"'{self.name}=[{','.join(str(v) for v in values)}]'"
        if self.kind == "dict":
            return f"{self.name}.KEY=VALUE"
        plausible = {"int": 8, "float": 0.5, "bool": True, "str": "NAME"}[self.kind]
        value = plausible if self.default is None or self.default == "" else self.default
        return f"{self.name}={str(value).lower() if isinstance(value, bool) else value}"


def _kind(annotation: Any) -> tuple[str, str, bool]:
    """(kind, item kind, optional) of a field's annotation."""
    optional = False
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        members = [a for a in typing.get_args(annotation) if a is not type(None)]
        optional = len(members) < len(typing.get_args(annotation))
        if len(members) != 1:
            raise TypeError(f"config.py: {annotation} is not one type or null")
        annotation = members[0]
    origin = typing.get_origin(annotation) or annotation
    if origin is list:
        return "list", typing.get_args(annotation)[0].__name__, optional
    if origin in (dict, int, float, bool, str):
        return origin.__name__, "", optional
    raise TypeError(f"config.py: the type {annotation} is not one that a command line can give")


def _walk(cls: type, prefix: Path) -> typing.Iterator[Key]:
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        path, annotation = (*prefix, field.name), hints[field.name]
        if dataclasses.is_dataclass(annotation):
            yield from _walk(typing.cast(type, annotation), path)
            continue
        factory = field.default_factory
        default = factory() if factory is not dataclasses.MISSING else field.default
        yield Key(path, *_kind(annotation), default, field.metadata.get("doc", ""), field.metadata.get("expects"))


def join(path: Path) -> str:
    """A path as text; a part that contains a dot is quoted."""
    return ".".join(f'"{part}"' if "." in part else part for part in path)


_PART = r"""(?:"[^"]+"|'[^']+'|[^.\[\]"'\s]+)"""
_KEY = re.compile(rf"{_PART}(?:\.{_PART}|\[[^\[\]]+\])*")


def split(text: str) -> Path:
    """`a.b."c.d"` or `a[b]` -> parts.

    Raises:
        ValueError: an empty part, a blank, or an open quote or bracket.
    """
    text = text.strip()
    if not _KEY.fullmatch(text):
        raise ValueError(f"{text!r} is not a key: parts separated by single dots are expected, such as actor.optim.lr")
    return tuple(part.strip("\"'[]") for part in re.findall(rf"\[[^\[\]]+\]|{_PART}", text))


SYNONYMS = {
    "learning_rate": "actor.optim.lr",
    "num_generations": "rollout.n",
    "beta": "actor.kl_loss_coef",
    "epochs": "trainer.total_epochs",
    "num_train_epochs": "trainer.total_epochs",
    "steps": "trainer.total_training_steps",
    "max_steps": "trainer.total_training_steps",
    "batch_size": "data.train_batch_size",
    "max_completion_length": "data.max_response_length",
    "output_dir": "trainer.default_local_dir",
    "model_name_or_path": "model.path",
}
"""What other trainers call these options, for suggestions only."""


@dataclass(frozen=True)
class Schema:
    """The keys of one root class of options, in the order of its fields."""

    root: type
    keys: dict[str, Key]

    @cached_property
    def sections(self) -> frozenset[str]:
        """Dotted names of the groups of options."""
        paths = [key.path for key in self.keys.values()]
        return frozenset(".".join(path[:depth]) for path in paths for depth in range(1, len(path)))

    @cached_property
    def free_dicts(self) -> tuple[str, ...]:
        """Keys below which any entry may be added."""
        return tuple(name for name, key in self.keys.items() if key.kind == "dict")

    def find(self, path: Path) -> tuple[Key, Path] | None:
        """The leaf that `path` names and the rest below it (only free dictionaries have a rest), or None."""
        for depth in range(len(path), 0, -1):
            key = self.keys.get(".".join(path[:depth]))
            if key is not None and (depth == len(path) or key.kind == "dict"):
                return key, path[depth:]
        return None

    def kind_of(self, path: Path) -> str | None:
        """The kind of the leaf, "free" below a free dictionary, None for a key that does not exist."""
        found = self.find(path)
        if found is None:
            return None
        return "free" if found[1] else found[0].kind

    def nearest(self, name: str) -> list[str]:
        """At most three keys that `name` may have meant: same last part first, then likeness of the whole path."""
        leaf = name.rsplit(".", 1)[-1]
        meant = [SYNONYMS[match] for match in difflib.get_close_matches(leaf, list(SYNONYMS), n=1, cutoff=0.9)]
        if meant and meant[0] in self.keys:
            return meant
        by_leaf = [known for known in self.keys if known.rsplit(".", 1)[-1] == leaf]
        if "." in name:
            by_leaf.sort(key=lambda known: (-difflib.SequenceMatcher(None, name, known).ratio(), known))
        else:
            # A bare name says nothing about its section; the actor's options are those most often meant.
            by_leaf.sort(key=lambda known: not known.startswith("actor."))
        if by_leaf:
            return by_leaf[:3]
        whole = difflib.get_close_matches(name, list(self.keys), n=1, cutoff=0.85)
        leaves: dict[str, list[str]] = {}
        for known in self.keys:
            leaves.setdefault(known.rsplit(".", 1)[-1], []).append(known)
        close = difflib.get_close_matches(leaf, list(leaves), n=2, cutoff=0.75)
        return list(dict.fromkeys(whole + [known for match in close for known in leaves[match]]))[:3]


_SCHEMAS: dict[type, Schema] = {}


def schema_of(root: type) -> Schema:
    """The schema of a root dataclass such as `PPOConfig`."""
    if root not in _SCHEMAS:
        _SCHEMAS[root] = Schema(root, {key.name: key for key in _walk(root, ())})
    return _SCHEMAS[root]


KEYS: dict[str, Key] = schema_of(PPOConfig).keys


def did_you_mean(name: str, known: typing.Iterable[str]) -> str:
    """`; did you mean X?` if a known name is near, else nothing."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def unknown_value(name: str, value: Any, known: typing.Collection[str]) -> str:
    """The problem of a key whose value is none of the known ones."""
    return f"{name}={value} is not known; known: {', '.join(sorted(known))}{did_you_mean(str(value), known)}"


def is_interpolation(value: Any) -> bool:
    return isinstance(value, str) and "${" in value


def convert(key: Key, value: Any, raw: str | None = None) -> Any:
    """`value` (as YAML understood it) in the type of `key`; `raw` is the text of a command line.

    A single value becomes a list of one where a list is expected, nested lists of files are flattened, numbers that
    YAML read as text (`"1e-6"`) become numbers, and a text that YAML read as something else (`experiment_name=0012`)
    stays the text that was typed, with any # and line end in it. Interpolations pass: they are converted when they are
    resolved.

    Raises:
        WrongValue: the value cannot have that type.
    """
    if key.kind == "str" and raw is not None and _is_typed_text(value, raw):
        return raw.strip()
    if value is None:
        if key.kind == "list":
            return []
        if key.kind == "dict":
            return {}
        if key.optional:
            return None
        if key.kind == "str" and raw is not None and not raw.strip():
            return ""
        raise WrongValue("null is not a value of this key")
    if key.kind == "list":
        return _convert_list(key, value, raw)
    return _convert_scalar(key.kind, value, raw)


def _is_typed_text(value: Any, raw: str) -> bool:
    """Whether the text of a command line is meant as it was typed, although YAML reads less in it or something else: a
    # begins no comment there, and {prompt} is a place in a text."""
    text = raw.strip()
    if isinstance(value, dict):
        return text[:1] == "{" and set(value.values()) == {None}
    if value is None:
        return text[:1] == "#"
    return isinstance(value, str) and text[:1] not in "'\"|>&!" and not is_interpolation(value)


def _convert_list(key: Key, value: Any, raw: str | None) -> list[Any]:
    if isinstance(value, str) and raw is not None and not is_interpolation(value) and raw.strip()[:1] not in "'\"":
        value = [part.strip() for part in value.split(",") if part.strip()]
    if isinstance(value, dict):
        raise WrongValue("it is a mapping")
    flat: list[Any] = []
    for item in value if isinstance(value, list) else [value]:
        flat.extend(item if isinstance(item, list) else [item])
    if any(item is None or isinstance(item, dict | list) for item in flat):
        raise WrongValue("its entries are not plain values")
    return [_convert_scalar(key.item, item, None) for item in flat]


def _convert_scalar(kind: str, value: Any, raw: str | None) -> Any:
    if is_interpolation(value):
        return value
    if isinstance(value, dict | list) and not (kind == "str" and raw is not None and raw.strip()[:1] not in "[{"):
        if kind == "dict" and isinstance(value, dict):
            return value
        raise WrongValue(f"it is a {'mapping' if isinstance(value, dict) else 'list'}")
    if kind == "str":
        if isinstance(value, str):
            return value
        if raw is not None:
            return raw.strip()
        if isinstance(value, bool):
            raise WrongValue("YAML reads it as true or false; put it in quotes")
        return str(value)
    word = value.strip().lower() if isinstance(value, str) else None
    if kind == "bool":
        return _to_bool(value, word)
    if kind in ("int", "float") and not isinstance(value, bool):
        if word is not None and _NUMBER.fullmatch(word):
            digits = word.replace("_", "")
            value = int(digits) if digits.lstrip("+-").isdigit() else float(digits)
        if isinstance(value, int | float) and value == value:
            if kind == "float":
                return float(value)
            if value in (float("inf"), float("-inf")) or int(value) != value:
                raise WrongValue("it is not whole")
            return int(value)
    raise WrongValue(f"it is {'true or false' if isinstance(value, bool) else 'not a number'}")


def _to_bool(value: Any, word: str | None) -> bool:
    if isinstance(value, bool):
        return value
    if value in (0, 1) or word in ("0", "1"):
        return bool(int(value))
    if word in _WORDS_TRUE or word in _WORDS_FALSE:
        return word in _WORDS_TRUE
    raise WrongValue("it is neither true nor false")
