"""The sources of a configuration cut into single assignments: a command line, YAML files, the mapping of a recipe.

Takes arguments or file names; gives `Assignment`s, each `key=value` with where it stands. Whether the key exists and
the value fits is not decided here: that is `loader`'s part.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path as FilePath
from typing import Any, Literal, cast

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_lite.config.keys import Path, Schema, join, split
from verl_lite.config.verl_keys import PREFIX

COMMAND_LINE = "command line"
Action = Literal["run", "print", "help"]
Verbosity = Literal["quiet", "normal", "verbose"]


@dataclass(frozen=True)
class Assignment:
    """One `key=value` of one source; `raw` is its text on a command line, `reset` the operator ~."""

    path: Path
    value: Any
    source: str
    raw: str | None = None
    reset: bool = False
    created: bool = False

    def shown(self) -> str:
        return f"{join(self.path)}={self.raw if self.raw is not None else self.value} ({self.source})"


@dataclass
class CommandLine:
    """A command line in its parts: files to overlay in order, assignments, what is asked for, how much is to be shown,
    what is wrong."""

    files: list[str] = field(default_factory=list)
    assignments: list[Assignment] = field(default_factory=list)
    action: Action = "run"
    verbosity: Verbosity = "normal"
    problems: list[str] = field(default_factory=list)


# --- the command line -------------------------------------------------------------------------------------------


def parse_command_line(argv: Iterable[str], schema: Schema) -> CommandLine:
    """Cut a command line into its parts; nothing is raised, problems are listed."""
    line = CommandLine()
    arguments = iter(argv)
    for argument in arguments:
        if argument in ("--help-config", "--help", "-h"):
            line.action = "help"
        elif argument == "--print-config":
            line.action = "print" if line.action == "run" else line.action
        elif argument in ("--quiet", "--verbose"):
            line.verbosity = "quiet" if argument == "--quiet" else "verbose"
        elif argument == "--config" or argument.startswith("--config="):
            name = argument.partition("=")[2] if "=" in argument else next(arguments, "")
            if name:
                line.files.append(name)
            else:
                line.problems.append("--config needs a file: --config run.yaml")
        elif argument.startswith("-"):
            line.problems.append(
                f"{argument} is not known; options are key=value, and the switches --config FILE, "
                "--print-config, --help-config, --quiet and --verbose"
            )
        else:
            line.assignments.extend(_parse_override(argument, schema, line.problems))
    return line


def _parse_override(argument: str, schema: Schema, problems: list[str]) -> Iterator[Assignment]:
    """`key=value`, `+key=value`, `++key=value` or `~key` as assignments (several if the value is a mapping)."""
    if not is_unicode(argument):
        problems.append(f"{argument!r} is not UTF-8 text; its \\udc.. stand for bytes that are no character")
        return
    body = argument.lstrip("+~") if argument.strip() else ""
    operator = argument[: len(argument) - len(body)]
    name, equals, raw = _cut_at_equals(body)
    if operator not in ("", "+", "++", "~") or (not equals and operator != "~"):
        blank = "; is there a blank after a backslash at the end of a line?"
        hint = "" if argument.strip() else blank
        problems.append(f"{argument!r} is not key=value, written without blanks around the equals sign{hint}")
        return
    if "@" in name:
        problems.append(f"{argument}: config groups belong to hydra; set single keys, or use --config FILE")
        return
    try:
        path = split(name)
    except ValueError as error:
        problems.append(str(error))
        return
    if operator == "~":
        yield Assignment(path, None, COMMAND_LINE, reset=True)
        return
    value = parse_value(raw)
    assignment = Assignment(path, value, COMMAND_LINE, raw, created=bool(operator))
    kind = schema.kind_of(without_prefix(path))
    if isinstance(value, dict) and value and kind != "str":
        for below in flatten(value, path, COMMAND_LINE, schema):
            yield replace(below, created=bool(operator))
    elif len(split_choices(raw)) > 1 and kind not in ("list", "dict", None):
        quoted = f", or put it in quotes: '{name}=\"{raw}\"'" if kind in ("str", "free") else ""
        problems.append(f"{argument}: several values for one key are for sweeps; here give one value{quoted}")
    else:
        yield assignment


def is_unicode(text: str) -> bool:
    """Whether it has an encoding: half of a surrogate pair, which json can spell, has none."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _cut_at_equals(text: str) -> tuple[str, str, str]:
    """(key, "=", value) at the first equals sign outside quotes; the last two empty where there is none."""
    match = re.match(r"""((?:[^="']|"[^"]*"|'[^']*')*)=""", text)
    return (match.group(1), "=", text[match.end() :]) if match else (text, "", "")


def parse_value(raw: str) -> Any:
    """The text of a command line as YAML in OmegaConf's dialect (`1e-6` is a number); what is not YAML stays text."""
    try:
        parsed = OmegaConf.to_container(OmegaConf.from_dotlist(["value=" + raw]), resolve=False)
    except (yaml.YAMLError, OmegaConfBaseException):
        return raw
    return cast(dict[str, Any], parsed)["value"]


def split_choices(raw: str) -> list[str]:
    """`a,b,[c,d]` -> `a`, `b`, `[c,d]`: cut at the commas outside quotes and brackets."""
    choices, depth, quote, start = [], 0, "", 0
    for position, character in enumerate(raw):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in "[{(":
            depth += 1
        elif character in "]})":
            depth -= 1
        elif character == "," and depth == 0:
            choices.append(raw[start:position].strip())
            start = position + 1
    return [*choices, raw[start:].strip()]


def without_prefix(path: Path) -> Path:
    """A path without verl's `actor_rollout_ref.`."""
    return path[1:] if path[:1] == (PREFIX,) else path


# --- files ------------------------------------------------------------------------------------------------------


def read_files(names: Iterable[str], schema: Schema, problems: list[str]) -> list[Assignment]:
    """The assignments of YAML files, in order; a file's `base: other.yaml` (relative to it) comes before it."""
    return [assignment for name in names for assignment in _read_file(FilePath(name), name, schema, problems, ())]


def _read_file(
    path: FilePath, shown: str, schema: Schema, problems: list[str], including: tuple[FilePath, ...]
) -> list[Assignment]:
    """The assignments of one YAML file, after those of the files that its `base` names."""
    path = path.expanduser()
    source = f"file:{shown}"
    if path.resolve() in including:
        problems.append(f"{shown} includes itself through base:")
        return []
    try:
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except FileNotFoundError:
        problems.append(f"--config: there is no file {path.absolute()}")
        return []
    except (OSError, UnicodeDecodeError, yaml.YAMLError, OmegaConfBaseException) as error:
        problems.append(f"--config: {path.absolute()} cannot be read: {error}")
        return []
    if not isinstance(content, dict):
        problems.append(f"--config: {path.absolute()} is a list; a mapping of keys to values is expected")
        return []
    bases = content.pop("base", None) or []
    if content.pop("defaults", None) is not None:
        problems.append(f"{shown}: a defaults list belongs to hydra; name the file underneath with base: FILE")
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        problems.append(f"{shown}: base={bases} is no file; base: FILE or base: [FILE, FILE] is expected")
        bases = []
    assignments: list[Assignment] = []
    for base in bases:
        assignments += _read_file(
            path.parent / FilePath(base).expanduser(), base, schema, problems, (*including, path.resolve())
        )
    try:
        return assignments + list(flatten(content, (), source, schema))
    except ValueError as error:
        problems.append(f"{shown}: {error}")
        return assignments


def flatten(mapping: Mapping[Any, Any], prefix: Path, source: str, schema: Schema) -> Iterator[Assignment]:
    """The leaves of nested mappings; a key with dots is a path, except below a free dictionary."""
    for key, value in mapping.items():
        below_free = schema.find(without_prefix(prefix)) is not None
        path = (*prefix, *((str(key),) if below_free else split(str(key))))
        if isinstance(value, Mapping) and value:
            yield from flatten(value, path, source, schema)
        elif (
            not isinstance(value, Mapping)
            or schema.kind_of(without_prefix(path)) == "free"
            or not _is_known_group(path, schema)
        ):
            yield Assignment(path, value, source)


def _is_known_group(path: Path, schema: Schema) -> bool:
    """An empty mapping at a section or a free dictionary says nothing."""
    path = without_prefix(path)
    return not path or ".".join(path) in schema.sections or schema.kind_of(path) == "dict"
