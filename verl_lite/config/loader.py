"""From a command line to a checked `PPOConfig`: defaults < recipe < files < command line, each value with its source.

Takes the arguments after `python -m trainer.main_ppo` (`key=value`, `+key=value`, `++key=value`, `~key`,
`--config FILE`); gives a `LoadedConfig`. verl's spellings are accepted (`verl_keys`). A key that does not exist
or a value of the wrong type is an error wherever it stands, and all errors of a command line are shown together.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_lite.config import verl_keys as compat
from verl_lite.config.keys import (
    ConfigError,
    Key,
    Path,
    Schema,
    WrongValue,
    convert,
    is_interpolation,
    join,
    schema_of,
)
from verl_lite.config.ppo import PPOConfig
from verl_lite.config.recipe_names import absolute_recipe, recipe_title
from verl_lite.config.sources import (
    COMMAND_LINE,
    Action,
    Assignment,
    CommandLine,
    Verbosity,
    flatten,
    parse_command_line,
    read_files,
    without_prefix,
)
from verl_lite.errors import UserError

C = TypeVar("C")
RecipeLoader = Callable[[str], Mapping[str, object]]
DEFAULT_RECIPE = "quickstart"
_SLIPS, _ANOTHER_COMMANDS = 1, 0.25  # a recipe's unknown settings, and share of them: more are no slips of the pen

_PATHS = frozenset(
    {
        "data.train_files",
        "data.val_files",
        "data.tools_path",
        "data.sampler.class_path",
        "data.custom_cls.path",
        "model.path",
        "model.tokenizer_path",
        "critic.model.path",
        "reward_model.model.path",
        "reward.custom_reward_function.path",
        "trainer.default_local_dir",
        "trainer.resume_from_path",
        "trainer.rollout_data_dir",
        "trainer.validation_data_dir",
    }
)
"""Keys whose values are paths: a leading ~/ is the home folder, as the shell leaves it in `key=~/data`."""

_MICRO_BATCH = {
    "actor.ppo_micro_batch_size_per_gpu": "actor.use_dynamic_bsz",
    "ref.log_prob_micro_batch_size_per_gpu": "ref.log_prob_use_dynamic_bsz",
    "rollout.log_prob_micro_batch_size_per_gpu": "rollout.log_prob_use_dynamic_bsz",
    "critic.ppo_micro_batch_size_per_gpu": "critic.use_dynamic_bsz",
    "critic.forward_micro_batch_size_per_gpu": "critic.use_dynamic_bsz",
    "reward_model.micro_batch_size_per_gpu": "reward_model.use_dynamic_bsz",
}


_SWITCHED = ("algorithm.filter_groups", "reward.overlong_buffer")


@dataclass
class LoadedConfig(Generic[C]):
    """A configuration and where it comes from.

    config: the resolved dataclasses. omega: the same before interpolations are resolved. provenance: for each dotted
    key "default", "recipe:NAME", "file:PATH", "command line" or another source. notes: sentences about keys of verl
    that were renamed or have no effect here. action: "run", "print" (--print-config) or "help" (--help-config).
    verbosity: how much the command shows, "quiet" (--quiet), "normal" or "verbose" (--verbose).
    """

    config: C
    omega: DictConfig
    provenance: dict[str, str]
    notes: list[str]
    action: Action = "run"
    verbosity: Verbosity = "normal"


@dataclass
class _State:
    """What the layers so far add up to; values holds leaves of the schema that differ from their default."""

    schema: Schema
    values: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    equal: list[tuple[Assignment, str]] = field(default_factory=list)
    """Keys of verl, and the key here that has to have the same value."""

    def __post_init__(self) -> None:
        self.provenance = dict.fromkeys(self.schema.keys, "default")

    @property
    def speaks_verl(self) -> bool:
        """Whether keys of verl's PPO trainer may be given."""
        return self.schema.root is PPOConfig


def load_config(argv: list[str], *, recipe_loader: RecipeLoader | None = None) -> LoadedConfig[PPOConfig]:
    """Read the command line of `trainer.main_ppo`.

    argv: the arguments, without the program. recipe_loader: from the name of a recipe to its overrides, nested or
    with dotted keys; without it no recipe is read. `recipe` is `quickstart` where neither it nor `model.path` nor
    `data.train_files` is given.

    Raises:
        ConfigError: every unknown key, wrong value, unreadable file or unresolved reference, together.
    """
    return load_schema(argv, PPOConfig, recipe_loader=recipe_loader, default_recipe=DEFAULT_RECIPE)


def load_schema(
    argv: list[str], root: type[C], *, recipe_loader: RecipeLoader | None = None, default_recipe: str | None = None
) -> LoadedConfig[C]:
    """Read a command line for any root dataclass of options. See `load_config`.

    default_recipe: the one where neither a recipe nor `model.path` nor `data.train_files` is given.
    """
    state = _State(schema_of(root))
    line = parse_command_line(argv, state.schema)
    if line.action == "help":
        return _finish(state, line)
    state.problems += line.problems
    given = read_files(line.files, state.schema, state.problems) + line.assignments
    given = [accepted for assignment in given for accepted in _translate(assignment, state)]
    layered = _choose_recipe(given, recipe_loader, default_recipe, state) + given
    for assignment in _prefer_own_names(layered):
        _assign(assignment, state)
    if state.speaks_verl:
        _refuse_silent_critic(state)
        _imply_fixed_micro_batches(state)
        _note_idle_reference(state)
        _note_switched_off(state)
        _refuse_unequal(state)
    if "trainer.experiment_name" in state.schema.keys:
        _name_experiment(state)
    loaded: LoadedConfig[C] = _finish(state, line)
    if state.problems:
        raise ConfigError(list(dict.fromkeys(state.problems)))
    return loaded


# --- recipe -----------------------------------------------------------------------------------------------------


def _choose_recipe(
    given: list[Assignment], loader: RecipeLoader | None, default: str | None, state: _State
) -> list[Assignment]:
    """The recipe's assignments: the one named last, or the default one where neither model nor data is named."""
    if "recipe" not in state.schema.keys:
        return []
    named = [assignment for assignment in given if assignment.path == ("recipe",)]
    names = {join(assignment.path) for assignment in given if assignment.value not in (None, [], "???")}
    recipe = None if not named or named[-1].value is None else str(named[-1].value)
    if default is not None and not named and not names & {"model.path", "data.train_files"} and loader is not None:
        recipe = default
        state.values["recipe"] = recipe
        state.provenance["recipe"] = "default, because neither model.path nor data.train_files is given"
    if recipe is None or loader is None:
        return []
    try:
        overrides = loader(recipe)
    except UserError as error:
        state.problems.append(str(error))
        return []
    recipe_source = f"recipe:{recipe}"
    flat = flatten(overrides, (), recipe_source, state.schema)
    accepted = [one for assignment in flat for one in _translate(assignment, state)]
    unknown = [join(one.path) for one in accepted if state.schema.find(one.path) is None]
    if len(unknown) > max(_SLIPS, len(accepted) * _ANOTHER_COMMANDS):
        state.problems.append(
            f"recipe={recipe}: {len(unknown)} of its {len(accepted)} settings are no options of this command, such as "
            f"{', '.join(unknown[:3])}: it is a recipe of another command"
        )
        return []
    return accepted


# --- one assignment ---------------------------------------------------------------------------------------------


def _translate(assignment: Assignment, state: _State) -> list[Assignment]:
    """The assignment under this project's name: none if verl's key has no effect here or is refused."""
    path = without_prefix(assignment.path)
    if not path:
        state.problems.append(f"{assignment.shown()}: {compat.PREFIX} is a group of options")
        return []
    value = _strip_prefix(assignment.value)
    assignment = replace(assignment, path=path, value=value)
    if value == "???":  # verl's mark for "to be given"
        return []
    name = ".".join(path)
    if name in state.schema.keys or assignment.reset or not state.speaks_verl:
        return [assignment]
    verdict = compat.judge(name, value)
    if verdict is None:
        return [assignment]
    state.notes += [verdict.note] if verdict.note and verdict.note not in state.notes else []
    state.equal += [(assignment, verdict.equals)] if verdict.equals is not None else []
    if verdict.refusal is not None:
        state.problems.append(f"{verdict.refusal} ({assignment.source})")
    if verdict.target is None:
        return []
    source = f"{assignment.source}, as {name}"
    raw = assignment.raw if verdict.value == value else None
    settings = [(verdict.target, verdict.value, raw), *((name, value, None) for name, value in verdict.also.items())]
    return [
        replace(assignment, path=tuple(name.split(".")), value=value, raw=raw, source=source)
        for name, value, raw in settings
    ]


def _strip_prefix(value: Any) -> Any:
    """References such as `${actor_rollout_ref.actor.optim.lr}` in the shorter spelling."""
    if is_interpolation(value):
        return re.sub(rf"(?<=[{{:,]){compat.PREFIX}\.", "", value)
    if isinstance(value, list):
        return [_strip_prefix(item) for item in value]
    return value


def _prefer_own_names(assignments: list[Assignment]) -> list[Assignment]:
    """Without the renamed keys that the same source also gives under the name they have here."""
    own = {(join(a.path), a.source) for a in assignments}
    return [a for a in assignments if (join(a.path), a.source.split(", as ")[0]) not in own or ", as " not in a.source]


def _assign(assignment: Assignment, state: _State) -> None:
    """Set, reset or delete one leaf, or note what is wrong with it."""
    found = state.schema.find(assignment.path)
    if found is None:
        name = ".".join(assignment.path)
        if name in state.schema.sections and assignment.reset:
            for member in state.schema.keys.values():
                if member.name.startswith(name + "."):
                    _reset(member, state)
        elif name in state.schema.sections:
            members = [key for key in state.schema.keys if key.startswith(f"{name}.")]
            state.problems.append(
                f"{assignment.shown()}: {name} is a group of options, such as {', '.join(members[:3])}"
            )
        else:
            state.problems.append(_unknown(assignment, state.schema))
        return
    key, rest = found
    if assignment.reset and not rest:
        _reset(key, state)
    elif rest:
        _assign_free(assignment, key, rest, state)
    else:
        try:
            value = convert(key, assignment.value, assignment.raw)
        except WrongValue as error:
            state.problems.append(
                f"{assignment.shown()}: {error}; {key.name} is {key.describe()}, for example {key.example()}"
            )
            return
        if key.kind == "dict":
            return
        value, note = compat.same_meaning(key.name, value) if state.speaks_verl else (value, None)
        state.notes += [note] if note else []
        state.values[key.name] = _path(key.name, value)
        state.provenance[key.name] = assignment.source


def _assign_free(assignment: Assignment, key: Key, rest: Path, state: _State) -> None:
    """Set or delete an entry below a free dictionary."""
    entries = state.values.setdefault(key.name, {})
    for part in rest[:-1]:
        inner = entries.get(part, {}) if assignment.reset else entries.setdefault(part, {})
        if not isinstance(inner, dict):
            state.problems.append(f"{assignment.shown()}: {part} is not a mapping, so nothing can be below it")
            return
        entries = inner
    name = join((*key.path, *rest))
    if not assignment.reset:
        entries[rest[-1]] = assignment.value
        for old in [known for known in state.provenance if known.startswith(name + ".")]:
            del state.provenance[old]
        state.provenance[name] = assignment.source
    elif rest[-1] in entries:
        del entries[rest[-1]]
        for old in [known for known in state.provenance if known == name or known.startswith(name + ".")]:
            del state.provenance[old]
    else:
        state.problems.append(f"~{name}: there is no such entry to delete")


def _reset(key: Key, state: _State) -> None:
    state.values.pop(key.name, None)
    for old in [known for known in state.provenance if known.startswith(key.name + ".")]:
        del state.provenance[old]
    state.provenance[key.name] = "default"


def _unknown(assignment: Assignment, schema: Schema) -> str:
    name = ".".join(assignment.path)
    suggestions = schema.nearest(name)
    hint = f"did you mean {' or '.join(suggestions)}?" if suggestions else "--help-config lists all keys."
    created = f" (+ creates keys only below {', '.join(schema.free_dicts)})" if assignment.created else ""
    if assignment.reset:
        return f"~{name}: there is no such key; {hint}"
    return f"{assignment.shown()}: there is no such key; {hint}{created}"


def _path(name: str, value: Any) -> Any:
    """The value of an option, as a path where it is one."""
    if name == "recipe" and value is not None:
        return absolute_recipe(value)
    return _expand(value) if name in _PATHS else value


def _expand(value: Any) -> Any:
    if isinstance(value, list):
        return [_expand(item) for item in value]
    return os.path.expanduser(value) if isinstance(value, str) and value.startswith("~/") else value


# --- what follows from what was given -----------------------------------------------------------------------------


def _rank(source: str) -> int:
    """The layer of a source: default, recipe, file, command line."""
    order = ("default", "recipe:", "file:", COMMAND_LINE)
    return next((rank for rank, start in enumerate(order) if source.startswith(start)), 0)


def _imply_fixed_micro_batches(state: _State) -> None:
    """As in verl, a micro-batch size asks for micro-batches of that size, unless use_dynamic_bsz is said as well."""
    for size, dynamic in _MICRO_BATCH.items():
        if state.values.get(size) is None or _rank(state.provenance[size]) <= _rank(state.provenance[dynamic]):
            continue
        state.values[dynamic] = False
        state.provenance[dynamic] = f"implied by {size}"
        state.notes.append(f"{dynamic}=false, because {size}={state.values[size]} is given")


def _note_idle_reference(state: _State) -> None:
    """`ref.*` where there is no reference model of its own: scripts for verl give it all the same."""
    given = [name for name, source in state.provenance.items() if name.startswith("ref.") and _rank(source) > 1]
    if not (state.values.get("actor.use_kl_loss") or state.values.get("algorithm.use_kl_in_reward")):
        why = "there is no reference: neither actor.use_kl_loss nor algorithm.use_kl_in_reward is set"
    elif rank := state.values.get("model.lora_rank"):
        given = [name for name in given if name.startswith("ref.fsdp_config.")]
        why = f"with model.lora_rank={rank} the reference is the policy without its adapter (actor.fsdp_config)"
    else:
        return
    if given:
        state.notes.append(f"{', '.join(given)}: without effect, because {why}")


def _refuse_silent_critic(state: _State) -> None:
    """verl's default estimator has a critic (gae), this project's has none (grpo): `critic.*` alone must not mean
    GRPO, not even where it asks for a default value, which `checks.config` cannot see."""
    given = [name for name, source in state.provenance.items() if name.startswith("critic.") and _rank(source) > 1]
    if given and state.provenance["algorithm.adv_estimator"] == "default":
        state.problems.append(
            f"{', '.join(given)}: a critic is trained where algorithm.adv_estimator needs values, and the default here "
            "is grpo (verl's is gae), which has none: say algorithm.adv_estimator=gae, or leave all critic.* out"
        )


def _note_switched_off(state: _State) -> None:
    """verl's scripts give the options of a part and switch it off beside them: these are left out, with a sentence."""
    for section in _SWITCHED:
        if state.values.get(f"{section}.enable") is False:
            for name in [name for name in state.values if name.startswith(section) and name != f"{section}.enable"]:
                state.notes.append(f"{name}={state.values[name]} has no effect: {section}.enable=false was given")
                del state.values[name], state.provenance[name]


def _refuse_unequal(state: _State) -> None:
    """verl gives some numbers in two places, of which one is read here: they have to agree."""
    for assignment, name in state.equal:
        value = state.values.get(name, state.schema.keys[name].default)
        if assignment.value != value and not is_interpolation(value):
            state.problems.append(
                f"{assignment.shown()}: here it is {name}, which is {value}: give both the same value, or leave it out"
            )


def _name_experiment(state: _State) -> None:
    """A run without a name gets a new one; then there is nothing that it could resume."""
    if state.values.get("trainer.experiment_name") is not None:
        return
    if state.values.get("trainer.resume_mode") == "auto" and "trainer.default_local_dir" not in state.values:
        state.problems.append(
            "trainer.resume_mode=auto continues the newest checkpoint of trainer.default_local_dir, but without "
            "trainer.experiment_name that folder is a new one in every run: give trainer.experiment_name"
        )
    recipe = recipe_title(state.values.get("recipe") or "run")
    stamp = time.strftime("%Y%m%d-%H%M%S")
    # Two runs may start within one second in the same folder; their folders must differ.
    state.values["trainer.experiment_name"] = f"{recipe}-{stamp}-{os.urandom(2).hex()}"
    state.provenance["trainer.experiment_name"] = "made from recipe, date and time"


def _finish(state: _State, line: CommandLine) -> LoadedConfig[Any]:
    """The dataclasses of what was gathered; references that lead nowhere become problems."""
    omega = OmegaConf.structured(state.schema.root)
    for name, value in state.values.items():
        try:
            OmegaConf.update(omega, name, value, merge=False, force_add=True)
        except OmegaConfBaseException as error:
            state.problems.append(f"{name}={value} ({state.provenance[name]}): {_first_line(error)}")
    try:
        config = cast(Any, OmegaConf.to_object(omega))
    except OmegaConfBaseException:
        state.problems += _unresolved(omega, state)
        config = state.schema.root()
    provenance = {
        name: source
        for name, source in state.provenance.items()
        if name not in state.schema.free_dicts or not state.values.get(name)
    }
    return LoadedConfig(config, omega, provenance, state.notes, line.action, line.verbosity)


def _unresolved(omega: DictConfig, state: _State) -> Iterator[str]:
    """The keys whose references lead nowhere, or to a value of another type."""
    for name, key in state.schema.keys.items():
        try:
            value = OmegaConf.select(omega, name, throw_on_resolution_failure=True)
            if OmegaConf.is_config(value):
                OmegaConf.to_container(value, resolve=True)
        except OmegaConfBaseException as error:
            shown = state.values.get(name, key.default)
            source = state.provenance.get(name, "default")
            yield f"{name}={shown} ({source}) cannot be resolved: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
