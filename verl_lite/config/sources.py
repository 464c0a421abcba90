"""Reads the `key=value` assignments of the two sources that the user writes: the command line, and YAML files.

The loader (`loader.py`) translates and merges them.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_lite.config.option_table import Path, Schema, is_interpolation, split

Tree = Mapping[Any, object]
"""A nested mapping of a file, a recipe or a value. YAML also has keys that are no texts, such as numbers."""
COMMAND_LINE = "command line"
PREFIX = "actor_rollout_ref"
"""verl's prefix of the sections of the policy."""
SWITCHES = "--config FILE, --print-config, --help, --help-config [PREFIX], --quiet and --verbose"

# key=value, +key=value, ++key=value or ~key
_OVERRIDE = re.compile(r"(?:\+{0,2}([^=\s~]+)=(.*)|~([^=\s~]+))", re.DOTALL)
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
# at the beginning of a word, where YAML begins a comment
_COMMENT_SIGN = re.compile(r"(?<!\S)#")
# a character of private use, which YAML treats as a letter
_NO_COMMENT = "\ue000"
_VALUE_SHOWN = 200  # characters of a value in a message
# raw, YAML refuses them or reads them as ends of lines; as escapes, it reads them as they are
_RAW_UNREADABLE = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
# YAML 1.1 reads the first kind in base 8, so that 010 is 8, and the others in base 60, so that 1:30 is 90
_MISREAD = re.compile(r"[-+]?(?:0[0-7_]+|[1-9][0-9_]*(?::[0-5]?[0-9])+|[0-9][0-9_]*(?::[0-5]?[0-9])+\.[0-9_]*)")


@dataclass(frozen=True)
class Assignment:
    """A `key=value` of one source.

    Attributes:
        path: the parts of the key.
        value: the parsed value.
        source: where it was given, such as "command line".
        raw: the value's text on the command line.
        reset: True for `~key`, which restores the default.
    """

    path: Path
    value: object
    source: str
    raw: str | None = None
    reset: bool = False

    def shown(self) -> str:
        """Returns the assignment as the user wrote it, with its source, for a message."""
        text = str(self.value) if self.raw is None else self.raw
        if len(text) > _VALUE_SHOWN:
            text = f"{text[:_VALUE_SHOWN]}... ({len(text)} characters)"
        return f"{'.'.join(self.path)}={text} ({self.source})"


def parse_value(raw: str) -> object:
    """Parses the text of a value as YAML in OmegaConf's dialect (`1e-6` is a number). Invalid YAML remains text.

    Unlike a file, a value has no comments: `/data/run #2` is a path. As for Hydra, the colons of a mapping in braces
    need no space (`{a:1}`), and a number that YAML would read in base 8 or 60 (`010`, `16:9`) remains text.
    """
    if _MISREAD.fullmatch(raw.strip()):
        return raw.strip()
    try:
        dotlist = OmegaConf.from_dotlist(["value=" + _as_yaml(raw)])
        parsed = OmegaConf.to_container(dotlist, resolve=False)
    except (yaml.YAMLError, OmegaConfBaseException):
        return raw
    assert isinstance(parsed, dict)
    return _with_comment_signs(parsed["value"])


def written_value(value: object) -> str:
    """Returns the text that `parse_value` reads as this value. Objects that JSON lacks, such as paths, become texts.

    It is JSON without the escapes for characters above U+FFFF, such as emoji: JSON writes two escapes for one
    character, which YAML refuses.
    """
    text = json.dumps(value, ensure_ascii=False, default=str)
    return _RAW_UNREADABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _with_comment_signs(value: object) -> object:
    """Returns a parsed value with # in place of `_NO_COMMENT`."""
    if isinstance(value, str):
        return value.replace(_NO_COMMENT, "#")
    if isinstance(value, list):
        return [_with_comment_signs(item) for item in value]
    if isinstance(value, dict):
        return {_with_comment_signs(key): _with_comment_signs(entry) for key, entry in value.items()}
    return value


def _as_yaml(raw: str) -> str:
    """Returns the YAML of a value: without comments, and with the spaces that Hydra does not require."""
    without_comments = _COMMENT_SIGN.sub(_NO_COMMENT, raw)
    return _with_spaced_colons(without_comments)


def _with_spaced_colons(raw: str) -> str:
    """Returns a value with a space after the colon of each key of a mapping in braces.

    Without it, YAML reads `{a:1}` as the key `a:1` with the value null.
    """
    spaced = ""
    openings: list[str] = []  # of the brackets that are open
    quote = ""  # the open quotation mark
    closed = ""  # the quotation mark, if the last character closed it
    is_escaped = False  # True after a backslash in double quotation marks
    is_key = False
    last = ""  # the last character that is no blank
    for character in raw:
        spaced += character
        before = closed
        closed = ""
        if quote:
            if character == quote and not is_escaped:
                closed = quote
                quote = ""
            is_escaped = quote == '"' and character == "\\" and not is_escaped
        # two single quotation marks within a quoted text stand for one
        elif character == before == "'":
            quote = character
        elif character in "'\"" and last in ("", "{", "[", ",", ":"):
            # inside a word, as in don't, it is an apostrophe
            quote = character
        elif character in "{[":
            # a reference such as ${model.path} is no mapping
            is_reference = last == "$"
            is_key = character == "{" and not is_reference
            openings.append("$" if is_reference else character)
        elif character in "]}":
            openings = openings[:-1]
            is_key = False
        elif character == ",":
            is_key = openings[-1:] == ["{"]
        elif character == ":" and is_key:
            spaced += " "
            is_key = False
        if not character.isspace():
            last = character
    return spaced


def misread_numbers(text: str) -> Iterator[str]:
    """Yields a sentence for each unquoted number in a YAML text that YAML 1.1 reads in base 8 or 60.

    Raises yaml.YAMLError if the text is no YAML.
    """
    for event in yaml.parse(text, yaml.SafeLoader):
        is_plain = isinstance(event, yaml.ScalarEvent) and event.implicit[0]
        if is_plain and _MISREAD.fullmatch(event.value):
            line = event.start_mark.line + 1
            number = yaml.safe_load(event.value)
            yield (
                f"line {line}: YAML reads {event.value} as {number}: write a number without leading zeros and colons, "
                f"and a text in quotes, as '{event.value}'"
            )


def repeated_keys(text: str) -> Iterator[str]:
    """Yields a sentence for each key that a mapping of a YAML text has twice, of which PyYAML keeps the last.

    Raises yaml.YAMLError if the text is no YAML.
    """
    root = yaml.compose(text, yaml.SafeLoader)
    nodes = [root] if root else []
    seen: set[int] = set()  # an alias is a node again
    while nodes:
        node = nodes.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            nodes += node.value
        elif isinstance(node, yaml.MappingNode):
            lines: dict[str, int] = {}
            for key, value in node.value:
                nodes.append(value)
                line = key.start_mark.line + 1
                if isinstance(key, yaml.ScalarNode):
                    if key.value in lines:
                        yield f"line {line}: {key.value} is also in line {lines[key.value]}: leave one of them out"
                    lines[key.value] = line


def split_choices(raw: str) -> list[str]:
    """Splits at commas outside quotes and brackets: `a,b,[c,d]` becomes `a`, `b`, `[c,d]`."""
    choices = [""]
    depth = 0  # open brackets
    quote = ""  # the open quotation mark
    for character in raw:
        if character == "," and not depth and not quote:
            choices.append("")
            continue
        choices[-1] += character
        if quote:
            if character == quote:
                quote = ""
        elif character in "'\"":
            quote = character
        elif character in "[{(":
            depth += 1
        elif character in ")}]":
            depth -= 1
    return [choice.strip() for choice in choices]


def is_unicode(text: str) -> bool:
    """Returns True if `text` can be encoded. Half of a surrogate pair, which json can contain, cannot."""
    return text.encode(errors="ignore").decode() == text


@dataclass
class SourceReader:
    """Reads assignments, and collects the problems of what cannot be read.

    Attributes:
        schema: the options of the command.
        problems: sentences that refuse the configuration.
        variables: names that files define for their own references.
    """

    schema: Schema
    problems: list[str] = field(default_factory=list)
    variables: set[str] = field(default_factory=set)

    def parse_words(self, words: Iterable[str]) -> list[Assignment]:
        """Returns the assignments of the command line; adds a problem for each word that is none."""
        assignments: list[Assignment] = []
        for word in words:
            assignments += self.parse_word(word)
        return assignments

    def parse_word(self, word: str) -> Iterator[Assignment]:
        """Parses `key=value`, `+key=value`, `++key=value` or `~key`. A mapping gives one assignment per leaf."""
        if word.startswith("-"):
            problem = f"{word} is not known; options are key=value, and the switches {SWITCHES}"
            # Hydra's --config-path and --config-name select a file of verl
            if word.startswith("--config-"):
                problem += "; verl's files are not read, its keys are: paste them"
            self.problems.append(problem)
            return
        match = _OVERRIDE.fullmatch(word)
        if match is None or not is_unicode(word):
            self.problems.append(f"{word!r} is not key=value in UTF-8, without blanks around the equals sign")
            return
        name, raw, reset_name = match.groups()
        try:
            path = without_prefix(split(name or reset_name))
        except ValueError as error:
            self.problems.append(str(error))
            return
        if reset_name:
            yield Assignment(path, None, COMMAND_LINE, reset=True)
            return
        key = self.schema.find(path)
        value = parse_value(raw)
        # a text such as {prompt} is YAML of a mapping
        is_text = key is not None and key.kind == "str"
        if isinstance(value, dict | list) and not is_text:
            self.problems += [f"{name}={raw}: {problem}" for problem in misread_numbers(_as_yaml(raw))]
        if isinstance(value, dict) and value and not is_text:
            yield from self.flatten(value, path, COMMAND_LINE)
        else:
            yield Assignment(path, value, COMMAND_LINE, raw)

    def read_file(self, name: str) -> list[Assignment]:
        """Returns the assignments of a YAML file; adds a problem if the file cannot be read."""
        path = FilePath(name).expanduser().absolute()
        try:
            # not resolved, because a reference may name an option that a later source sets
            content = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
            if not isinstance(content, dict):
                raise ValueError("it is a list; a mapping of keys to values is expected")
            text = path.read_text(encoding="utf-8")
            self.problems += [f"--config: {path}: {problem}" for problem in misread_numbers(text)]
            # references are looked up without verl's prefix
            below_prefix = content.get(PREFIX)
            values = {**below_prefix, **content} if isinstance(below_prefix, dict) else content
            followed = {key: self.follow(entry, values) for key, entry in content.items()}
            assignments = self.flatten(followed, (), f"file:{name}")
            return list(assignments)
        except FileNotFoundError:
            self.problems.append(f"--config: there is no file {path}")
        except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
            self.problems.append(f"--config: {path} cannot be read: {error}")
        return []

    def follow(self, value: object, content: Tree) -> object:
        """Replaces references in a file's value to names that are not keys here.

        These are variables of the file, and keys of verl and ROLL. References to keys remain, because a later source
        may set these keys.

        Args:
            value: a value in the file.
            content: the whole file.
        """
        if isinstance(value, dict):
            return {name: self.follow(entry, content) for name, entry in value.items()}
        if isinstance(value, list):
            return [self.follow(entry, content) for entry in value]
        if not is_interpolation(value):
            return value
        # a whole value keeps the type of the value that it refers to; a part of a text becomes text
        whole = _REFERENCE.fullmatch(value)
        if whole:
            return self._referenced(whole, content)
        return _REFERENCE.sub(lambda reference: str(self._referenced(reference, content)), value)

    def _referenced(self, reference: re.Match[str], content: Tree) -> object:
        """Returns the value in the file that a reference names, or the text of a reference to a key."""
        name = tuple(reference[1].split("."))
        path = without_prefix(name)
        if self.exists(".".join(path)):
            return reference[0]
        value: object = content
        for part in path:
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is None:
            return reference[0]
        if not self.exists(path[0]):
            self.variables.add(path[0])
        # None ends a cycle; resolving reports it
        return self.follow(value, {**content, path[0]: None})

    def flatten(self, mapping: Tree, prefix: Path, source: str) -> Iterator[Assignment]:
        """Yields the leaves of nested mappings.

        A key with dots is a path, except below a free dictionary. An empty mapping in place of a section gives no
        assignment.

        Args:
            mapping: the mapping.
            prefix: path of the mapping.
            source: source of the assignments.
        """
        # below a free dictionary the names are the user's, and may contain dots
        is_free = self.schema.find(prefix) is not None
        for name, value in mapping.items():
            parts = (str(name),) if is_free else split(str(name))
            path = without_prefix((*prefix, *parts))
            if not isinstance(value, Mapping):
                yield Assignment(path, value, source)
                continue
            if value:
                yield from self.flatten(value, path, source)
                continue
            is_section = not is_free and (not path or self.exists(".".join(path)))
            if not is_section:
                yield Assignment(path, value, source)

    def exists(self, dotted: str) -> bool:
        """Returns True for the key of an option or of a section."""
        return dotted in self.schema.keys or dotted in self.schema.sections


def without_prefix(path: Path) -> Path:
    """Returns a path without verl's prefix, which is optional here."""
    if path[:1] == (PREFIX,):
        return path[1:]
    return path
