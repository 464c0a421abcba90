"""The environment protocol, the registry, and `EnvTemplate`: one entry of `agentic.custom_envs`, checked.

An environment talks in text and rewards in plain floats; it does not know of tokens, groups or models. How to write one
in 30 lines, and what the keys of `info` mean: trainer/AGENTIC.md. Nothing in this package imports torch.
"""

from __future__ import annotations

import inspect
import string
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn, Protocol

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
    try:
        return ENVS.get_fn(env_type)
    except ValueError as error:
        raise UserError(f"env_type={env_type!r}: {error}") from error


def make_env(env_type: str, env_config: Mapping[str, Any] | None = None) -> Env:
    """A new environment. Raises UserError for an unknown env_type, an unknown key or no reset/step."""
    factory = find_env(env_type)
    check_env_config(env_type, env_config or {})
    env = factory(**(env_config or {}))
    missing = [name for name in ("reset", "step") if not callable(getattr(env, name, None))]
    if missing:
        raise UserError(
            f"env_type={env_type!r}: {type(env).__name__} has no method {' and no method '.join(missing)}; an "
            "environment has reset(seed) and step(action), see trainer/AGENTIC.md"
        )
    return env


def check_env_config(env_type: str, env_config: Mapping[str, Any]) -> None:
    """Raises UserError for a key of env_config that the environment does not know, or one that is missing."""
    try:
        parameters = inspect.signature(find_env(env_type)).parameters
    except (TypeError, ValueError):  # some callables written in C have no signature
        return
    named = {p.name: p for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for key in [] if takes_any else env_config:
        if key not in named:
            raise UserError(f"env_config.{key}: {env_type} has no such option{did_you_mean(key, list(named))}")
    for name, parameter in named.items():
        if parameter.default is parameter.empty and name not in env_config:
            raise UserError(f"env_config.{name} is missing: {env_type} needs it")


def env_modules() -> list[str]:
    """Modules outside this project that registered environments here; an environment process imports them too."""
    return foreign_modules(ENVS.values())


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

_LEAST = {"max_steps": 1, "max_tokens_per_step": 1, "max_env_step_concurrent": 1, "history_length": 0}
_NOT_HERE = {
    "tool_wrapper": "tools are part of the environment here: see trainer/AGENTIC.md",
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
        for name, least in _LEAST.items():
            self._check_count(name, least, optional=name.startswith("max_") and name != "max_steps")
        if not isinstance(self.use_thread_lock, bool):
            self._refuse("use_thread_lock", "true or false")
        if not isinstance(self.agent_system_template, str | None):
            self._refuse("agent_system_template", "text")
        self._check_template()
        with _naming(f"{self.tag}.env_type: "):
            find_env(self.env_type)
        with _naming(f"{self.tag}."):
            check_env_config(self.env_type, self.env_config)

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
        with _naming(f"{self.tag}.env_type: "):
            return make_env(self.env_type, self.env_config)

    def _manager(self) -> str:
        name, known = str(self.env_manager_cls), [*MANAGERS, *MANAGERS.values()]
        found = [key for key, class_name in MANAGERS.items() if name == key or name.rpartition(".")[2] == class_name]
        return (
            found[0] if found else self._refuse("env_manager_cls", f"{' | '.join(known)}{did_you_mean(name, known)}")
        )

    def _check_count(self, name: str, least: int, *, optional: bool) -> None:
        value = getattr(self, name)
        is_number = isinstance(value, int) and not isinstance(value, bool) and value >= least
        if not is_number and not (optional and value is None):
            self._refuse(name, f"a whole number of at least {least}" + (" or null" if optional else ""))

    def _check_template(self) -> None:
        if not isinstance(self.agent_template, str):
            self._refuse("agent_template", "text")
        try:
            named = _format_fields(self.agent_template)
        except ValueError as error:
            self._refuse("agent_template", f"text for str.format, where a brace is written twice ({error})")
        known = [*TRAJECTORY_FIELDS, *(STEP_FIELDS if self.by_step else ())]
        for found in named:
            if found not in known:
                why = "is for env_manager_cls: step" if found in STEP_FIELDS else "is no field of it"
                raise UserError(
                    f"agentic.custom_envs.{self.tag}.agent_template: {{{found}}} {why}; fields are {', '.join(known)}"
                    f" (a brace that is meant as such is written twice){did_you_mean(found, known)}"
                )

    def _refuse(self, name: str, expected: str) -> NoReturn:
        raise UserError(f"agentic.custom_envs.{self.tag}.{name} is {getattr(self, name)!r}: expected {expected}")


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
                f"agentic.custom_envs.{tag}.{key}: no such key; keys are {', '.join(known)}{did_you_mean(key, known)}"
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
    return sorted(ENVS)


def _format_fields(text: str) -> list[str]:
    return [name.split(".")[0].split("[")[0] for _, name, _, _ in string.Formatter().parse(text) if name is not None]


@contextmanager
def _naming(entry: str) -> Iterator[None]:
    """A UserError inside names the entry, too."""
    try:
        yield
    except UserError as error:
        raise UserError(f"agentic.custom_envs.{entry}{error}") from error
