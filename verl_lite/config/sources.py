"""The sources of a configuration cut into single assignments: a command line, YAML files, the mapping of a recipe.

Whether a key exists and a value fits is not decided here: that is `loader`'s part.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any, Literal, cast

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_lite.config.schema import Path, Schema, join, split

COMMAND_LINE = "command line"
PREFIX = "actor_rollout_ref"
"""What stands before the policy's sections in verl."""
SWITCHES = "--config FILE, --print-config, --help, --help-config [PREFIX], --quiet and --verbose"
_OVERRIDE = re.compile(r"""([+~]*)((?:[^="']|"[^"]*"|'[^']*'|["'](?=[^=]*$))*)(=?)(.*)""", re.DOTALL)
"""Operator, key, equals sign outside quotes, value."""
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
    """A command line in its parts: files to overlay, assignments, what is asked for, and what is wrong.

    help_prefix: what of the reference is asked for; None = the screen of --help.
    """

    files: list[str] = field(default_factory=list)
    assignments: list[Assignment] = field(default_factory=list)
    action: Action = "run"
    verbosity: Verbosity = "normal"
    help_prefix: str | None = None
    problems: list[str] = field(default_factory=list)


def parse_command_line(argv: Iterable[str], schema: Schema) -> CommandLine:
    """Cut a command line into its parts; nothing is raised, problems are listed."""
    line, arguments = CommandLine(), list(argv)
    while arguments:
        argument = arguments.pop(0)
        name, equals, value = argument.partition("=")
        if name in ("--help", "-h", "--help-config"):
            line.action = "help"
            if name == "--help-config":
                follows = bool(arguments) and not arguments[0].startswith("-") and "=" not in arguments[0]
                line.help_prefix = value or (arguments.pop(0) if follows else "")
        elif argument == "--print-config":
            line.action = "print" if line.action == "run" else line.action
        elif argument in ("--quiet", "--verbose"):
            line.verbosity = "quiet" if argument == "--quiet" else "verbose"
        elif name == "--config":
            line.files.append(value if equals else arguments.pop(0) if arguments else "")
        elif name in ("--config-name", "--config-path", "--config-dir"):
            line.problems.append(f"{argument}: it belongs to hydra; give the file itself: --config FILE")
        elif argument.startswith("-"):
            line.problems.append(f"{argument} is not known; options are key=value, and the switches {SWITCHES}")
        else:
            line.assignments.extend(_parse_override(argument, schema, line.problems))
    return line


def _parse_override(argument: str, schema: Schema, problems: list[str]) -> Iterator[Assignment]:
    """`key=value`, `+key=value`, `++key=value` or `~key` as assignments (several if the value is a mapping)."""
    if not is_unicode(argument):
        problems.append(f"{argument!r} is not UTF-8 text; its \\udc.. stand for bytes that are no character")
        return
    operator, name, equals, raw = cast("re.Match[str]", _OVERRIDE.match(argument)).groups()
    if operator not in ("", "+", "++", "~") or (not equals and operator != "~"):
        hint = "" if argument.strip() else "; is there a blank after a backslash at the end of a line?"
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
    value, key = parse_value(raw), schema.find(without_prefix(path))
    is_free = key is not None and key.kind == "dict" and without_prefix(path) != key.path
    if isinstance(value, dict) and value and (key is None or key.kind != "str"):
        for one in flatten(value, path, COMMAND_LINE, schema):
            yield Assignment(one.path, one.value, COMMAND_LINE, created=bool(operator))
    elif len(split_choices(raw)) > 1 and key is not None and (is_free or key.kind not in ("list", "dict")):
        quoted = f", or put it in quotes: '{name}=\"{raw}\"'" if is_free or key.kind == "str" else ""
        problems.append(f"{argument}: several values for one key are for sweeps; here give one value{quoted}")
    else:
        yield Assignment(path, value, COMMAND_LINE, raw, created=bool(operator))


def is_unicode(text: str) -> bool:
    """True where it has an encoding: half of a surrogate pair, which json can spell, has none."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


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
        elif character in "[{()}]":
            depth += 1 if character in "[{(" else -1
        elif character == "," and depth == 0:
            choices.append(raw[start:position].strip())
            start = position + 1
    return [*choices, raw[start:].strip()]


def without_prefix(path: Path) -> Path:
    """A path without verl's `actor_rollout_ref.`."""
    return path[1:] if path[:1] == (PREFIX,) else path


def read_file(name: str, schema: Schema, problems: list[str], within: tuple[FilePath, ...] = ()) -> list[Assignment]:
    """The assignments of a YAML file, after those of the files that its `base` names (relative to it).

    Args:
        within: the files that include this one.
    """
    path = (within[-1].parent if within else FilePath()) / FilePath(name).expanduser()
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
    bases = [bases] if isinstance(bases, str) else bases
    if content.pop("defaults", None) is not None:
        problems.append(f"{name}: a defaults list belongs to hydra; name the file underneath with base: FILE")
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        problems.append(f"{name}: base={bases} is no file; base: FILE or base: [FILE, FILE] is expected")
        bases = []
    if path.resolve() in [file.resolve() for file in within]:
        problems.append(f"{name} includes itself through base:")
        return []
    assignments = [one for base in bases for one in read_file(base, schema, problems, (*within, path))]
    try:
        return assignments + list(flatten(content, (), f"file:{name}", schema))
    except ValueError as error:
        problems.append(f"{name}: {error}")
        return assignments


def flatten(mapping: Mapping[Any, Any], prefix: Path, source: str, schema: Schema) -> Iterator[Assignment]:
    """The leaves of nested mappings; a key with dots is a path, except below a free dictionary. An empty mapping at a
    section or a free dictionary says nothing."""
    is_free = schema.find(without_prefix(prefix)) is not None
    for name, value in mapping.items():
        path = (*prefix, *((str(name),) if is_free else split(str(name))))
        key = schema.find(without_prefix(path))
        dotted = ".".join(without_prefix(path))
        if isinstance(value, Mapping) and value:
            yield from flatten(value, path, source, schema)
        elif not isinstance(value, Mapping) or is_free or (dotted and key is None and dotted not in schema.sections):
            yield Assignment(path, value, source)
