"""The environment protocol, the registry, and `EnvTemplate`: one entry of `agentic.custom_envs`, checked.

An environment talks in text and rewards in plain floats; it does not know of tokens, groups or models. How to write one
in 30 lines, and what the keys of `info` mean: README.md beside this file. Nothing in this package imports torch.
"""

from __future__ import annotations

import inspect
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, TypeVar

from verl_lite.errors import UserError
from verl_lite.registry import Registry, did_you_mean, foreign_modules

Info = dict[str, Any]
"""What an environment says beside the observation. Keys that are read, all optional:

env_instruction   reset: the task in words, shown once before the first observation
suffix            text after the observation, {suffix} of agent_template
use_tool          true: the next observation is a message of the role "tool", e.g. a tool's answer
metrics           {name: number or bool}; action_is_valid false brings format_penalty; success is charted
metrics_agg_mode  {name: mean | sum | min | max | last | first} over the steps of an episode; mean where it is not named
state_hash        names the state for gigpo; else sha256 of the observation
"""


class Env(Protocol):
    """A world that is acted in by text. One object serves many episodes, one after the other.

    Optional methods: `render()` gives a text frame, or an RGB frame as numpy (H, W, 3) uint8; `close()` frees what the
    object holds; `sample_random_action()` gives a legal action text, for the dry run before training.
    """

    def reset(self, seed: int) -> tuple[str | None, Info]:
        """Begins the episode that belongs to `seed`, the same each time. (None, {}): a dataset has no more to give."""
        ...

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        """Answers what the agent wrote, whatever it is: (observation, reward, terminated, truncated, info).

        terminated: the task came to its end, well or badly. truncated: it was broken off. Either ends the episode.
        """
        ...


EnvFactory = Callable[..., Env]
"""A class of environments, or a function: keyword arguments are the entries of env_config."""

ENVS: Registry[EnvFactory] = Registry("environment")

register_env = ENVS.register
"""Decorator: `@register_env("my_world")` on a class makes `env_type: my_world` possible."""


def find_env(env_type: str) -> EnvFactory:
    """The factory of that name or at pkg.module:object. Raises UserError, with the nearest name, if there is none."""
    import_own_environments()
    try:
        return ENVS.get_fn(env_type)
    except ValueError as error:
        raise UserError(f"env_type={env_type!r}: {error}") from error


def make_env(env_type: str, env_config: Mapping[str, Any] | None = None) -> Env:
    """A new environment. Raises UserError for an unknown env_type, an unknown key or no reset/step."""
    factory = find_env(env_type)
    problem = env_config_problem(env_type, env_config or {})
    if problem:
        raise UserError(problem)
    env = factory(**(env_config or {}))
    missing = [name for name in ("reset", "step") if not callable(getattr(env, name, None))]
    if missing:
        raise UserError(
            f"env_type={env_type!r}: {type(env).__name__} has no method {' and no method '.join(missing)}; an "
            "environment has reset(seed) and step(action), see verl_lite/envs/README.md"
        )
    return env


def env_config_problem(env_type: str, env_config: Mapping[str, Any]) -> str | None:
    """What is wrong with the keys of env_config: unknown to the environment, or missing. None if nothing is."""
    try:
        parameters = inspect.signature(find_env(env_type)).parameters
    except (TypeError, ValueError):  # some callables written in C have no signature
        return None
    named = [p for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    known = [parameter.name for parameter in named]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for key in env_config:
        if key not in known and not takes_any:
            return f"env_config.{key}: {env_type} has no such option.{did_you_mean(key, known)}"
    missing = [p.name for p in named if p.default is p.empty and p.name not in env_config]
    if missing:
        return f"env_config.{missing[0]} is missing: {env_type} needs it"
    return None


def env_modules() -> list[str]:
    """Modules outside this project that registered environments here; an environment process imports them too."""
    return foreign_modules(ENVS.values())


def import_own_environments() -> None:
    """Registers the environments of this package; they are imported here, so that this module can be read alone."""
    import verl_lite.envs  # noqa: F401


# --------------------------------------------------------------------------------------------- agentic.custom_envs

TRAJECTORY_FIELDS = (
    "observation",
    "env_instruction",
    "turn_idx",
    "suffix",
    "actions_left",
    "max_response_length",
)
STEP_FIELDS = ("history", "step_count", "history_length", "current_step", "current_observation")
MANAGERS = {"trajectory": "TrajEnvManager", "step": "StepEnvManager"}
"""Ways to make samples of an episode, and ROLL's names of them."""

_NOT_HERE = {
    "tool_wrapper": "tools are part of the environment here: see verl_lite/envs/README.md",
    "agent_runner_cls": "an agent in a process of its own is not supported",
    "max_env_step": "its name is max_steps",
    "max_actions_per_traj": "its name is max_steps",
}


@dataclass(frozen=True)
class EnvTemplate:
    """What an entry of `agentic.custom_envs` says.

    tag: its name there. env_type: a registered environment, or pkg.module:Class. env_config: its keyword arguments.
    max_steps: turns of an episode at most. max_tokens_per_step: tokens of a turn; None = data.max_response_length.
    env_manager_cls: "trajectory" (an episode is one sample, a conversation) or "step" (each turn is a sample whose
    prompt tells the last `history_length` turns).
    agent_system_template: the system message; None = none. agent_template: the user message of a turn, in
    str.format's fields: those of TRAJECTORY_FIELDS, and for "step" those of STEP_FIELDS too (there `observation` and
    `current_observation` are the same). In the first turn the environment's instruction stands before it, unless it has
    the field {env_instruction} itself; that field is empty in the later turns of a trajectory.
    use_thread_lock: this environment's methods run one at a time in a process. max_env_step_concurrent: steps of this
    tag that run at one time at most.
    """

    tag: str
    env_type: str
    max_steps: int = 10
    max_tokens_per_step: int | None = None
    env_manager_cls: str = "trajectory"
    agent_system_template: str | None = None
    agent_template: str = "{observation}{suffix}"
    history_length: int = 3
    env_config: dict[str, Any] = field(default_factory=dict)
    use_thread_lock: bool = False
    max_env_step_concurrent: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "env_config", dict(self.env_config or {}))
        object.__setattr__(self, "env_manager_cls", self._manager())
        for name, least in (("max_steps", 1), ("max_tokens_per_step", 1), ("max_env_step_concurrent", 1)):
            self._check_count(name, least, optional=name != "max_steps")
        self._check_count("history_length", 0, optional=False)
        self._check_text("agent_template", required=True)
        self._check_text("agent_system_template", required=False)
        if not isinstance(self.use_thread_lock, bool):
            self._refuse("use_thread_lock", self.use_thread_lock, "true or false")
        find = _naming(self.tag, "env_type", find_env)
        find(self.env_type)
        problem = env_config_problem(self.env_type, self.env_config)
        if problem:
            raise UserError(f"agentic.custom_envs.{self.tag}.{problem}")

    @property
    def by_step(self) -> bool:
        """Whether each turn is a sample of its own."""
        return self.env_manager_cls == "step"

    @property
    def fields(self) -> frozenset[str]:
        """The fields that agent_template names."""
        return frozenset(_format_fields(self.agent_template))

    def make(self) -> Env:
        """A new environment of this entry. Raises UserError naming the entry."""
        return _naming(self.tag, "env_type", make_env)(self.env_type, self.env_config)

    def _manager(self) -> str:
        name = str(self.env_manager_cls)
        for manager, class_name in MANAGERS.items():
            if name == manager or name.rpartition(".")[2] == class_name:
                return manager
        expected = " | ".join([*MANAGERS, *MANAGERS.values()])
        self._refuse("env_manager_cls", name, f"{expected}.{did_you_mean(name, [*MANAGERS, *MANAGERS.values()])}")
        raise AssertionError("unreachable")

    def _check_count(self, name: str, least: int, *, optional: bool) -> None:
        value = getattr(self, name)
        if optional and value is None:
            return
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            self._refuse(name, value, f"a whole number of at least {least}" + (" or null" if optional else ""))

    def _check_text(self, name: str, *, required: bool) -> None:
        text = getattr(self, name)
        if text is None and not required:
            return
        if not isinstance(text, str):
            self._refuse(name, text, "text")
        known = [*TRAJECTORY_FIELDS, *(STEP_FIELDS if self.by_step else ())] if required else []
        try:
            named = _format_fields(text)
        except ValueError as error:
            self._refuse(name, text, f"text for str.format, where a brace is written twice ({error})")
        for found in named if required else []:
            if found not in known:
                why = "is for env_manager_cls: step" if found in STEP_FIELDS else "is no field of it"
                raise UserError(
                    f"agentic.custom_envs.{self.tag}.{name}: {{{found}}} {why}; fields are {', '.join(known)}"
                    f" (a brace that is meant as such is written twice).{did_you_mean(found, known)}"
                )

    def _refuse(self, name: str, value: object, expected: str) -> None:
        raise UserError(f"agentic.custom_envs.{self.tag}.{name} is {value!r}: expected {expected}")


def env_templates(custom_envs: Mapping[str, Any]) -> dict[str, EnvTemplate]:
    """`agentic.custom_envs`, checked, by tag.

    Raises UserError that names agentic.custom_envs.TAG.key: an unknown key (with the nearest), a wrong value, an
    unknown environment, an option that the environment does not have.
    """
    return {str(tag): _template(str(tag), entry) for tag, entry in custom_envs.items()}


def _template(tag: str, entry: Any) -> EnvTemplate:
    if not isinstance(entry, Mapping):
        raise UserError(f"agentic.custom_envs.{tag} is {entry!r}: expected a mapping with env_type")
    known = [option.name for option in fields(EnvTemplate) if option.name != "tag"]
    given = {str(key): value for key, value in entry.items()}
    for key in list(given):
        if key in _NOT_HERE:
            if given.pop(key) is not None:
                raise UserError(f"agentic.custom_envs.{tag}.{key}: {_NOT_HERE[key]}")
        elif key not in known:
            raise UserError(
                f"agentic.custom_envs.{tag}.{key}: no such key; keys are {', '.join(known)}.{did_you_mean(key, known)}"
            )
    if not isinstance(given.get("env_type"), str):
        raise UserError(
            f"agentic.custom_envs.{tag}.env_type is {given.get('env_type')!r}: expected an environment, one of "
            f"{', '.join(sorted(known_envs()))}, or pkg.module:Class"
        )
    if not isinstance(given.get("env_config") or {}, Mapping):
        raise UserError(f"agentic.custom_envs.{tag}.env_config is {given['env_config']!r}: expected a mapping")
    return EnvTemplate(tag=tag, **given)


def known_envs() -> list[str]:
    """Names of all environments registered so far."""
    import_own_environments()
    return sorted(ENVS)


def _format_fields(text: str) -> list[str]:
    return [name.split(".")[0].split("[")[0] for _, name, _, _ in string.Formatter().parse(text) if name is not None]


R = TypeVar("R")


def _naming(tag: str, key: str, function: Callable[..., R]) -> Callable[..., R]:
    """The function, whose UserErrors name the entry too."""

    def call(*args: Any) -> R:
        try:
            return function(*args)
        except UserError as error:
            raise UserError(f"agentic.custom_envs.{tag}.{key}: {error}") from error

    return call
