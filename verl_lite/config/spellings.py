"""Translates the keys of verl and ROLL, which verl_keys.yaml, verl_sft_keys.yaml and roll_keys.yaml list.

The files explain the fields of an entry. Remove the entry of a key when an option of the same name is added here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Literal, TypedDict

import yaml

from verl_lite.config.fields import FreeDict
from verl_lite.config.option_table import Settings, is_interpolation, schema_of, value_text
from verl_lite.config.ppo import PPOConfig
from verl_lite.config.roll_options import (
    async_generation_ratio,
    colocate_async,
    dual_clip_loss,
    infer_correction,
    train_infer_correction,
    trains_on_prompts,
)
from verl_lite.config.supervised import SFTConfig

_ROLES = ("actor.", "ref.", "critic.", "reward_model.")
_FUNCTIONS = (async_generation_ratio, colocate_async, dual_clip_loss, infer_correction, train_infer_correction)
_COMPUTED = {function.__name__: function for function in _FUNCTIONS}


@dataclass(frozen=True)
class Entry:
    """The entry of a key in a file, with the fields of the file."""

    renamed: str | None = None
    no_effect: str | None = None
    refused: str | None = None
    computed: str | None = None
    on_prompts: str | None = None
    only_if: str | None = None
    values: dict[bool | int | float | str, object] = field(default_factory=dict)
    always: object = None
    is_list: bool = False
    must_equal: bool = False
    also: dict[str, object] = field(default_factory=dict)
    harmless: list[object] = field(default_factory=list)
    note: str | None = None

    def value_here(self, value: object) -> object:
        """Returns the value used here for a value of verl or ROLL; None if the key is ignored at this value."""
        if self.is_list and isinstance(value, str):
            return [part.strip() for part in value.split(",")]
        if isinstance(value, str | bool | int | float):
            # a file may have a switch as text
            word = str(value).lower()
            switch = {"true": True, "false": False}.get(word, value)
            value = self.values.get(switch, value)
        # `always` stands for all values of the key except those that are ignored
        if value is not None and self.always is not None:
            return self.always
        return value


@dataclass(frozen=True)
class Verdict:
    """The translation of a key: options to set, a note for the user, and the reason if the key is refused."""

    settings: Settings = field(default_factory=dict)
    note: str | None = None
    refusal: str | None = None


@dataclass(frozen=True)
class KeyTable:
    """The keys of verl and ROLL for the options of `root`, and the options whose values differ from verl's.

    Attributes:
        root: the dataclass of the options.
        entries: keys of other trainers.
        options: options of the same name whose values differ.
        groups: the files of verl that a section may select and that have the meaning of this trainer.
    """

    root: type
    entries: dict[str, Entry]
    options: dict[str, Entry]
    groups: dict[str, list[str]] = field(default_factory=dict)

    def translate(self, name: str, value: object, written: Settings) -> Verdict | None:
        """Returns the verdict on a key that is no option here; None if verl and ROLL do not have the key.

        Args:
            name: dotted key without `actor_rollout_ref.`.
            value: its value.
            written: all keys of the user, since the meaning of some keys of ROLL depends on others.
        """
        # the class of a section, which Hydra reads
        if name.rpartition(".")[2] == "_target_":
            return Verdict()
        match = _find(self.entries, name)
        if match is None:
            return None
        entry = match.entry
        # these entries describe one value, not a section with keys below it
        if match.rest and (entry.computed or entry.only_if):
            return None

        if entry.computed:
            settings = _COMPUTED[entry.computed](written)
            # None: the other keys give this key another meaning, which the rest of the entry describes
            if settings is not None:
                verdict = _sets(entry.computed, settings)
                if entry.note:
                    verdict = replace(verdict, note=f"{verdict.note}: {entry.note}")
                return verdict
        if entry.only_if and not written.get(entry.only_if):
            return Verdict(note=f"{name}={value_text(value)} has no effect here: {entry.only_if} is not true")

        target = entry.renamed
        if entry.on_prompts and trains_on_prompts(written):
            target = entry.on_prompts
        if target:
            own_name = target.replace("*", match.any_part) + match.rest
            return self._renamed(name, value, own_name, written, entry)
        if entry.no_effect:
            return Verdict(note=f"{name}={value_text(value)} has no effect here: {entry.no_effect}")
        return _refused(name, value, entry)

    def _renamed(self, name: str, value: object, target: str, written: Settings, entry: Entry) -> Verdict:
        """Returns the verdict on a key that has another name here.

        Args:
            name: the key of verl or ROLL.
            value: its value.
            target: its name here, which may again be a key of verl.
            written: all keys of the user.
            entry: the entry of the key.
        """
        new_value = entry.value_here(value)
        if new_value is None:
            return Verdict()
        further = self.translate(target, new_value, written)
        if further is not None:
            note = further.note
            if note:
                # the user knows only the first name of the chain
                note = note.replace(target, name, 1)
            return replace(further, note=note)
        if entry.refused and target not in schema_of(self.root).keys:
            return _refused(name, new_value, entry)
        return _sets(name, {target: new_value, **entry.also})

    def choose_group(self, name: str, value: object) -> Verdict | None:
        """Returns the verdict on Hydra's choice of a file for a section, as in `optim=fsdp`; None for all else."""
        if value not in self.groups.get(name, ()):
            return None
        return Verdict(note=f"{name}={value} has no effect here: it selects a file with verl's defaults")

    def same_meaning(self, name: str, value: object) -> tuple[object, str | None]:
        """Returns the value used here for verl's value of an option, and a note if the meaning differs."""
        entry = self.options.get(name)
        if entry is None:
            return value, None
        if isinstance(value, list):
            new_value: object = [entry.value_here(item) for item in value]
        else:
            new_value = entry.value_here(value)
        # a list, as the value of a list cannot be a key of the dictionary
        is_translated = new_value != value or value in list(entry.values)
        if entry.note is None or not is_translated:
            return new_value, None
        return new_value, f"{name}={value_text(value)}: {entry.note}"


@cache
def ppo_keys() -> KeyTable:
    """Returns the keys of verl's PPO trainer and of ROLL."""
    entries = _read("verl_keys") | _read("roll_keys")
    options = _read("verl_keys", "options")
    groups = _content("verl_keys")["groups"]
    return KeyTable(PPOConfig, entries, options, groups)


@cache
def sft_keys() -> KeyTable:
    """Returns the keys of verl's SFT trainers."""
    content = _content("verl_sft_keys")
    entries = _read("verl_keys", prefixes=("",), below=tuple(content["shared"]))
    for name, entry in list(entries.items()):
        # the computed options are options of PPO
        if entry.computed:
            del entries[name]
    entries |= _read("verl_sft_keys")
    options = _read("verl_keys", "options", prefixes=("",)) | _read("verl_sft_keys", "options")
    return KeyTable(SFTConfig, entries, options, content["groups"])


def left_out(written: Settings, value: Callable[[str], object], source: Callable[[str], str]) -> list[str]:
    """Returns a note on omitted keys with another default in ROLL, for files of ROLL (which set `pretrain`).

    Args:
        written: all keys of the user.
        value: returns the value of an option.
        source: returns the source of the value of an option.
    """
    if "pretrain" not in written:
        return []
    differences = []
    for key, roll_default in _content("roll_keys")["defaults"].items():
        if source(key) == "default":
            default = value_text(value(key))
            differences.append(f"{key}={default} (ROLL: {value_text(roll_default)})")
    if not differences:
        return []
    return [f"left out, and another default here: {', '.join(differences)}"]


class _Content(TypedDict):
    """The content of verl_keys.yaml, which has no `shared`, of roll_keys.yaml or of verl_sft_keys.yaml.

    The files explain the sections.
    """

    keys: dict[str, FreeDict]
    options: dict[str, FreeDict]
    groups: dict[str, list[str]]
    defaults: dict[str, object]
    shared: list[str]


@cache
def _content(file: str) -> _Content:
    """Returns the content of a file of keys, which is named without its suffix."""
    text = Path(__file__).with_name(f"{file}.yaml").read_text(encoding="utf-8")
    # libyaml is many times faster than PyYAML's own loader, but some installations lack it
    loader = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
    content: _Content = yaml.load(text, loader)
    return content


def _read(
    file: str,
    section: Literal["keys", "options"] = "keys",
    prefixes: tuple[str, ...] = _ROLES,
    below: tuple[str, ...] = ("",),
) -> dict[str, Entry]:
    """Reads the entries of a file.

    Args:
        file: its name without suffix.
        section: "keys" for keys of other trainers, or "options" for options whose values differ from verl's.
        prefixes: beginnings of keys; an entry of `*.NAME` becomes an entry of each prefix.
        below: beginnings of the keys in the file; entries of other keys are left out.
    """
    entries: dict[str, Entry] = {}
    for name, fields in _content(file)[section].items():
        entry = Entry(**fields)
        if not name.startswith(below):
            continue
        if not name.startswith("*."):
            entries[name] = entry
            continue
        for prefix in prefixes:
            renamed = entry.renamed
            if renamed is not None:
                renamed = renamed.replace("*.", prefix, 1)
            full_name = name.replace("*.", prefix, 1)
            entries[full_name] = replace(entry, renamed=renamed)
    return entries


@dataclass(frozen=True)
class _Match:
    """An entry that applies to a name.

    Attributes:
        entry: the entry.
        rest: the part of the name below the entry's key.
        any_part: the part of the name that a `*` in the key stands for.
    """

    entry: Entry
    rest: str
    any_part: str = ""


def _find(entries: Mapping[str, Entry], name: str) -> _Match | None:
    """Returns the entry of the longest key that is `name` or above `name`."""
    parts = name.split(".")
    for depth in range(len(parts), 0, -1):
        key_parts = parts[:depth]
        key = ".".join(key_parts)
        rest = name.removeprefix(key)
        if key in entries:
            return _Match(entries[key], rest)
        # a `*` stands for one part between the first and the last
        for index in range(1, depth - 1):
            pattern_parts = key_parts.copy()
            pattern_parts[index] = "*"
            pattern = ".".join(pattern_parts)
            if pattern in entries:
                return _Match(entries[pattern], rest, any_part=parts[index])
    return None


def _sets(name: str, settings: Settings) -> Verdict:
    """Returns the verdict on a key that sets these options here."""
    if not settings:
        return Verdict(note=f"{name} is off, and has no effect")
    new_names = [f"{key}={value_text(value)}" for key, value in settings.items()]
    return Verdict(dict(settings), f"{name} is called {', with '.join(new_names)} here")


def _refused(name: str, value: object, entry: Entry) -> Verdict:
    """Returns the verdict on a key that would change the run at all values except null and `entry.harmless`."""
    if value is None:
        return Verdict()
    # the key of a reference has its own verdict
    if is_interpolation(value) or value in entry.harmless:
        note = f"{name}={value_text(value)} has no effect here; other values are refused: {entry.refused}"
        return Verdict(note=note)
    accepted = [value_text(harmless) for harmless in (*entry.harmless, None)]
    return Verdict(refusal=f"{entry.refused}. Accepted here: {' or '.join(accepted)}")
