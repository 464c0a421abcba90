"""From a command line to a `PPOConfig`: defaults < recipe < files < command line, each value with its source.

Takes the arguments after `python -m trainer.main_ppo` (`key=value`, `+key=value`, `++key=value`, `~key`,
`--config FILE`); gives a `LoadedConfig`. verl's and ROLL's spellings are accepted (`spellings`). A key that does not
exist or a value of the wrong type is an error wherever it stands, and all errors are shown together.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_lite.config import spellings
from verl_lite.config.ppo import PPOConfig
from verl_lite.config.recipe_names import absolute_recipe, recipe_title
from verl_lite.config.schema import ConfigError, Path, Schema, convert, is_interpolation, join, schema_of
from verl_lite.config.sources import (
    COMMAND_LINE,
    PREFIX,
    Action,
    Assignment,
    Verbosity,
    flatten,
    parse_command_line,
    read_file,
    without_prefix,
)
from verl_lite.errors import UserError

C = TypeVar("C")
RecipeLoader = Callable[[str], Mapping[str, object]]
DEFAULT_RECIPE = "quickstart"
_SLIPS, _ANOTHER_COMMANDS = 1, 0.25  # a recipe's unknown settings, and share of them: more are no slips of the pen

_PATHS = re.compile(r"(^|_|\.)(path|files|dir)$|class_path$")
"""Keys whose values are paths: a leading ~/ is the home folder, as the shell leaves it in `key=~/data`."""

_MICRO_BATCH = {
    "actor.ppo_micro_batch_size_per_gpu": "actor.use_dynamic_bsz",
    "ref.log_prob_micro_batch_size_per_gpu": "ref.log_prob_use_dynamic_bsz",
    "rollout.log_prob_micro_batch_size_per_gpu": "rollout.log_prob_use_dynamic_bsz",
    "critic.ppo_micro_batch_size_per_gpu": "critic.use_dynamic_bsz",
    "critic.forward_micro_batch_size_per_gpu": "critic.use_dynamic_bsz",
    "reward_model.micro_batch_size_per_gpu": "reward_model.use_dynamic_bsz",
}


@dataclass
class LoadedConfig(Generic[C]):
    """A configuration and where it comes from.

    config: the resolved dataclasses. omega: the same before interpolations are resolved. provenance: for each dotted
    key "default", "recipe:NAME", "file:PATH", "command line" or another source. notes: sentences about keys of verl
    that were renamed or have no effect here. action: "run", "print" (--print-config) or "help"; help_prefix: what of
    the reference --help-config asks for. verbosity: "quiet" (--quiet), "normal" or "verbose" (--verbose).
    """

    config: C
    omega: DictConfig
    provenance: dict[str, str]
    notes: list[str]
    action: Action = "run"
    verbosity: Verbosity = "normal"
    help_prefix: str | None = None

    def given(self) -> list[str]:
        """The dotted keys that the user set, in a file or on the command line."""
        return [name for name, source in self.provenance.items() if source.startswith(("file:", COMMAND_LINE))]


def load_config(argv: list[str], *, recipe_loader: RecipeLoader | None = None) -> LoadedConfig[PPOConfig]:
    """Reads the command line of `trainer.main_ppo`.

    Args:
        argv: the arguments, without the program.
        recipe_loader: from the name of a recipe to its overrides, nested or with dotted keys; without it no recipe is
            read. `recipe` is `quickstart` where neither it nor `model.path` nor `data.train_files` is given.

    Raises:
        ConfigError: every unknown key, wrong value, unreadable file or unresolved reference, together.
    """
    return load_schema(argv, PPOConfig, recipe_loader=recipe_loader, default_recipe=DEFAULT_RECIPE)


def load_schema(
    argv: list[str], root: type[C], *, recipe_loader: RecipeLoader | None = None, default_recipe: str | None = None
) -> LoadedConfig[C]:
    """Reads a command line for any root dataclass of options. See `load_config`.

    Args:
        default_recipe: the one where neither a recipe nor `model.path` nor `data.train_files` is given.
    """
    merge = _Merge(schema_of(root))
    line = parse_command_line(argv, merge.schema)
    if line.action != "help":
        merge.problems += line.problems
        files = [one for name in line.files for one in read_file(name, merge.schema, merge.problems)]
        given = [accepted for one in files + line.assignments for accepted in merge.translate(one)]
        for assignment in [*merge.recipe(given, recipe_loader, default_recipe), *given]:
            merge.assign(assignment, given)
        merge.derive()
    config, omega = merge.resolve()
    problems = list(dict.fromkeys([*merge.problems, *merge.refused()]))
    if problems:
        raise ConfigError(problems)
    return LoadedConfig(config, omega, merge.provenance(), merge.notes, line.action, line.verbosity, line.help_prefix)


@dataclass
class _Merge:
    """What the layers so far add up to; given holds the last assignment of each leaf that some layer sets."""

    schema: Schema
    given: dict[Path, Assignment] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    equal: list[tuple[Assignment, str]] = field(default_factory=list)
    """Keys of verl, and the key here that has to have the same value."""
    refusals: dict[str, list[str]] = field(default_factory=dict)
    """By sentence the assignments that it refuses, so that it is said once."""

    @property
    def speaks_verl(self) -> bool:
        """True where keys of verl's PPO trainer may be given."""
        return self.schema.root is PPOConfig

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def value(self, name: str) -> Any:
        """The value of a leaf so far."""
        assignment = self.given.get(tuple(name.split(".")))
        return self.schema.keys[name].default if assignment is None else assignment.value

    def source(self, name: str) -> str:
        assignment = self.given.get(tuple(name.split(".")))
        return "default" if assignment is None else assignment.source

    def recipe(
        self, given: list[Assignment], loader: RecipeLoader | None, default: str | None
    ) -> list[Assignment]:
        """The recipe's assignments: the one named last, or the default one where neither model nor data is named."""
        if "recipe" not in self.schema.keys or loader is None:
            return []
        named = [one for one in given if one.path == ("recipe",)]
        names = {join(one.path) for one in given if one.value not in (None, [])}
        if default is not None and not named and not names & {"model.path", "data.train_files"}:
            source = "default, because neither model.path nor data.train_files is given"
            named = [Assignment(("recipe",), default, source)]
            self.given["recipe",] = named[0]
        if not named or named[-1].value is None:
            return []
        recipe = str(named[-1].value)
        try:
            overrides = loader(recipe)
        except UserError as error:
            self.problems.append(str(error))
            return []
        flat = flatten(overrides, (), f"recipe:{recipe}", self.schema)
        accepted = [one for assignment in flat for one in self.translate(assignment)]
        unknown = [join(one.path) for one in accepted if self.schema.find(one.path) is None]
        if len(unknown) > max(_SLIPS, len(accepted) * _ANOTHER_COMMANDS):
            self.problems.append(
                f"recipe={recipe}: {len(unknown)} of its {len(accepted)} settings are no options of this command, such "
                f"as {', '.join(unknown[:3])}: it is a recipe of another command"
            )
            return []
        return accepted

    def translate(self, assignment: Assignment) -> list[Assignment]:
        """The assignment under this project's name: none if verl's key has no effect here or is refused."""
        path, value = without_prefix(assignment.path), _strip_prefix(assignment.value)
        assignment = replace(assignment, path=path, value=value)
        name = ".".join(path)
        if value == "???":  # verl's mark for "to be given"
            return []
        if not self.speaks_verl or assignment.reset or name in self.schema.keys or not path:
            return [assignment]
        verdict = spellings.translate(name, value)
        if verdict is None:
            return [assignment]
        if verdict.refusal:
            self.refusals.setdefault(verdict.refusal, []).append(assignment.shown())
        if verdict.note:
            self.note(verdict.note)
        self.equal += [(assignment, verdict.equals)] if verdict.equals else []
        source = f"{assignment.source}, as {name}"
        return [
            Assignment(tuple(to.split(".")), new, source, assignment.raw if new == value else None)
            for to, new in verdict.settings.items()
        ]

    def assign(self, assignment: Assignment, given: list[Assignment]) -> None:
        """Sets, resets or deletes one leaf, or notes what is wrong with it. given: all that files and command line say,
        of which a key under its own name wins over one under verl's."""
        key, name = self.schema.find(assignment.path), ".".join(assignment.path)
        start, _, renamed = assignment.source.partition(", as ")
        if renamed and any(one.path == assignment.path and one.source == start for one in given):
            return
        if assignment.reset and (key is not None or name in self.schema.sections):
            below = [path for path in self.given if path[: len(assignment.path)] == assignment.path]
            for path in below:
                del self.given[path]
            if not below and key is not None and assignment.path != key.path:
                self.problems.append(f"~{join(assignment.path)}: there is no such entry to delete")
        elif key is None:
            self.problems.append(self._unknown(assignment))
        elif assignment.path != key.path or key.kind == "dict":
            self._assign_entry(assignment)
        else:
            try:
                value = convert(key, assignment.value, assignment.raw)
            except ValueError:
                self.problems.append(f"{assignment.shown()}: {name} is {key.describe()}, for example {key.example()}")
                return
            value, note = spellings.same_meaning(name, value) if self.speaks_verl else (value, None)
            if note:
                self.note(note)
            self.given[key.path] = replace(assignment, value=_expand(name, value))

    def _assign_entry(self, assignment: Assignment) -> None:
        """Sets an entry of a free dictionary, or the whole."""
        path, key = assignment.path, self.schema.find(assignment.path)
        if key is not None and path == key.path:
            if not isinstance(assignment.value, dict | None):
                self.problems.append(f"{assignment.shown()}: {key.name} is a mapping, for example {key.example()}")
            return
        for other in list(self.given):
            if other != path and (other[: len(path)] == path or path[: len(other)] == other):
                del self.given[other]
        self.given[path] = assignment

    def _unknown(self, assignment: Assignment) -> str:
        name, shown = ".".join(assignment.path), assignment.shown()
        if not name or name in self.schema.sections:
            members = [key for key in self.schema.keys if key.startswith(f"{name}.")]
            return f"{shown}: {name or PREFIX} is a group of options, such as {', '.join(members[:3])}"
        suggestions = self.schema.nearest(name)
        hint = f"did you mean {' or '.join(suggestions)}?" if suggestions else "--help-config lists all keys."
        if assignment.reset:
            return f"~{name}: there is no such key; {hint}"
        created = f" (+ creates keys only below {', '.join(self.schema.free_dicts)})" if assignment.created else ""
        return f"{shown}: there is no such key; {hint}{created}"

    def set(self, name: str, value: Any, source: str) -> None:
        path = tuple(name.split("."))
        self.given[path] = Assignment(path, value, source)

    def derive(self) -> None:
        """What follows from what was given."""
        if self.speaks_verl:
            self._imply_fixed_micro_batches()
            critic = [join(path) for path, one in self.given.items() if path[0] == "critic" and _rank(one.source) > 1]
            if critic and self.source("algorithm.adv_estimator") == "default":
                self.problems.append(
                    f"{', '.join(critic)}: a critic is trained where algorithm.adv_estimator needs values, and the "
                    "default here is grpo (verl's is gae), which has none: say algorithm.adv_estimator=gae, or leave "
                    "all critic.* out"
                )
            for said, name in self.equal:
                if said.value != self.value(name) and not is_interpolation(said.value):
                    self.problems.append(
                        f"{said.shown()}: here it is {name}, which is {self.value(name)}: give both the same value"
                    )
        if "trainer.experiment_name" in self.schema.keys and self.value("trainer.experiment_name") is None:
            if self.value("trainer.resume_mode") == "auto" and self.source("trainer.default_local_dir") == "default":
                self.problems.append(
                    "trainer.resume_mode=auto continues the newest checkpoint of trainer.default_local_dir, but "
                    "without trainer.experiment_name that is a new folder in every run: give trainer.experiment_name"
                )
            title = recipe_title((self.value("recipe") if "recipe" in self.schema.keys else None) or "run")
            # two runs may start within one second in the same folder; their folders must differ
            name = f"{title}-{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(2).hex()}"
            self.set("trainer.experiment_name", name, "made from recipe, date and time")

    def _imply_fixed_micro_batches(self) -> None:
        """As in verl, a micro-batch size asks for batches of that size, unless use_dynamic_bsz is said as well."""
        for size, dynamic in _MICRO_BATCH.items():
            if self.value(size) is not None and _rank(self.source(size)) > _rank(self.source(dynamic)):
                self.set(dynamic, False, f"implied by {size}")
                self.note(f"{dynamic}=false, because {size}={self.value(size)} is given")

    def refused(self) -> list[str]:
        return [f"{', '.join(shown)}: {sentence}" for sentence, shown in self.refusals.items()]

    def resolve(self) -> tuple[Any, DictConfig]:
        """The dataclasses of what was gathered; references that lead nowhere become problems."""
        nested: dict[str, Any] = {}
        for path, one in self.given.items():
            inner = nested
            for part in path[:-1]:
                inner = inner.setdefault(part, {})
            inner[path[-1]] = one.value
        omega = OmegaConf.structured(self.schema.root)
        try:
            omega = cast(DictConfig, OmegaConf.merge(omega, nested))
            return OmegaConf.to_object(omega), omega
        except OmegaConfBaseException as error:
            before = len(self.problems)
            for name in self.schema.keys:
                try:
                    value = OmegaConf.select(omega, name, throw_on_resolution_failure=True)
                    OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else None
                except OmegaConfBaseException as cause:
                    shown = f"{name}={self.value(name)} ({self.source(name)})"
                    self.problems.append(f"{shown} cannot be resolved: {str(cause).splitlines()[0]}")
            if len(self.problems) == before:
                self.problems.append(str(error).splitlines()[0])
            return self.schema.root(), omega

    def provenance(self) -> dict[str, str]:
        """The source of each key, and of each entry of a free dictionary."""
        above = {path[:depth] for path in self.given for depth in range(1, len(path))}
        defaults = {name: "default" for name, key in self.schema.keys.items() if key.path not in above}
        return defaults | {join(path): one.source for path, one in self.given.items()}


def _strip_prefix(value: Any) -> Any:
    """References such as `${actor_rollout_ref.actor.optim.lr}` in the shorter spelling."""
    if is_interpolation(value):
        return re.sub(rf"(?<=[{{:,]){PREFIX}\.", "", value)
    return [_strip_prefix(item) for item in value] if isinstance(value, list) else value


def _expand(name: str, value: Any) -> Any:
    """The value of an option, as a path where it is one."""
    if name == "recipe" and value is not None:
        return absolute_recipe(value)
    if isinstance(value, list):
        return [_expand(name, item) for item in value]
    is_home = isinstance(value, str) and value.startswith("~/") and _PATHS.search(name)
    return os.path.expanduser(value) if is_home else value


def _rank(source: str) -> int:
    """The layer of a source: default, recipe, file, command line."""
    order = ("default", "recipe:", "file:", COMMAND_LINE)
    return next((rank for rank, start in enumerate(order) if source.startswith(start)), 0)
