"""The environment protocol, the registry, and `EnvTemplate`: one entry of `agentic.custom_envs`, checked.

An environment talks in text and rewards in plain floats; it does not know of tokens, groups or models. How to write one
in 30 lines, and what the keys of `info` mean: trainer/AGENTIC.md. Nothing in this package imports torch.
"""

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

    Optional methods: `close()` frees what the object holds; `sample_random_action()` gives a legal action text, for the
    dry run before training.
    """

    def reset(self, seed: int) -> tuple[str, Info]:
        """Begins the episode that belongs to `seed`, the same each time."""
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
    if not (hasattr(env, "reset") and hasattr(env, "step")):
        raise UserError(f"env_type={env_type!r}: {type(env).__name__} has not both of reset(seed) and step(action)")
    return env


def check_env_config(env_type: str, env_config: Mapping[str, Any]) -> None:
    """Raises UserError for a key of env_config that the environment does not know, or one that is missing."""
    parameters = inspect.signature(find_env(env_type)).parameters
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

TRAJECTORY_FIELDS = ("observation", "env_instruction", "turn_idx", "suffix", "actions_left", "max_response_length")
STEP_FIELDS = ("history", "step_count", "history_length", "current_step", "current_observation")
MANAGERS = {"trajectory": "TrajEnvManager", "step": "StepEnvManager"}
"""Ways to make samples of an episode, and ROLL's names of them."""

_LEAST = {"max_steps": 1, "max_tokens_per_step": 1, "max_env_step_concurrent": 1, "history_length": 0}
_NOT_HERE = {
    "tool_wrapper": "tools are part of the environment here: see trainer/AGENTIC.md",
    "agent_runner_cls": "an agent in a process of its own is not supported",
    **dict.fromkeys(("max_env_step", "max_actions_per_traj"), "its name is max_steps"),
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
        name, known = str(self.env_manager_cls), [*MANAGERS, *MANAGERS.values()]
        managers = [key for key, roll in MANAGERS.items() if name == key or name.rpartition(".")[2] == roll]
        if not managers:
            self._refuse("env_manager_cls", f"{' | '.join(known)}{did_you_mean(name, known)}")
        object.__setattr__(self, "env_manager_cls", managers[0])
        for name, least in _LEAST.items():
            value, optional = getattr(self, name), name.startswith("max_") and name != "max_steps"
            is_number = isinstance(value, int) and not isinstance(value, bool) and value >= least
            if not is_number and not (optional and value is None):
                self._refuse(name, f"a whole number of at least {least}" + (" or null" if optional else ""))
        for name, kind in (("use_thread_lock", bool), ("agent_system_template", str | None), ("agent_template", str)):
            if not isinstance(getattr(self, name), kind):
                self._refuse(name, "true or false" if kind is bool else "text")
        known = [*TRAJECTORY_FIELDS, *(STEP_FIELDS if self.by_step else ())]
        try:
            unknown = sorted(self.fields - set(known))
        except ValueError as error:
            self._refuse("agent_template", f"text for str.format ({error})")
        if unknown:
            why = f"of which {{{unknown[0]}}} is no field: fields are {', '.join(known)}"
            more = "; for env_manager_cls: step " + ", ".join(STEP_FIELDS) if not self.by_step else ""
            hint = did_you_mean(unknown[0], known)
            self._refuse("agent_template", f"text {why}{more}{hint}; write other braces twice")
        with self._naming_it():
            check_env_config(self.env_type, self.env_config)

    @property
    def by_step(self) -> bool:
        """Whether each turn is a sample of its own."""
        return self.env_manager_cls == "step"

    @property
    def fields(self) -> frozenset[str]:
        """The fields that agent_template names."""
        named = [name for _, name, _, _ in string.Formatter().parse(self.agent_template) if name is not None]
        return frozenset(name.split(".")[0].split("[")[0] for name in named)

    def make(self) -> Env:
        """A new environment of this entry. Raises UserError naming the entry."""
        with self._naming_it():
            return make_env(self.env_type, self.env_config)

    @contextmanager
    def _naming_it(self) -> Iterator[None]:
        try:
            yield
        except UserError as error:
            raise UserError(f"agentic.custom_envs.{self.tag}.{error}") from error

    def _refuse(self, name: str, expected: str) -> NoReturn:
        raise UserError(f"agentic.custom_envs.{self.tag}.{name} is {getattr(self, name)!r}: expected {expected}")


def env_templates(custom_envs: Mapping[str, Any]) -> dict[str, EnvTemplate]:
    """`agentic.custom_envs`, checked, by tag.

    Raises UserError that names agentic.custom_envs.TAG.key: an unknown key (with the nearest), a wrong value, an
    unknown environment, an option that the environment does not have.
    """
    known, templates = [option.name for option in fields(EnvTemplate) if option.name != "tag"], {}
    for tag, entry in custom_envs.items():
        given = {str(key): value for key, value in entry.items()} if isinstance(entry, Mapping) else {}
        for key in list(given):
            if key in known or (key in _NOT_HERE and given.pop(key) is None):
                continue
            why = _NOT_HERE.get(key) or f"no such key; keys are {', '.join(known)}{did_you_mean(key, known)}"
            raise UserError(f"agentic.custom_envs.{tag}.{key}: {why}")
        if not isinstance(given.get("env_type"), str) or not isinstance(given.get("env_config") or {}, Mapping):
            raise UserError(
                f"agentic.custom_envs.{tag} is {entry!r}: expected a mapping with env_type, one of "
                f"{', '.join(sorted(ENVS))}, or pkg.module:Class; and env_config, a mapping"
            )
        templates[str(tag)] = EnvTemplate(tag=str(tag), **given)
    return templates
