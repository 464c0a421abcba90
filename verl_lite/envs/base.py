"""The environment protocol, the registry, and `EnvTemplate`, a checked entry of `agentic.custom_envs`.

An environment exchanges texts with the agent and returns rewards as floats; it is independent of tokens, groups and
models. trainer/AGENTIC.md shows how to write an environment in 30 lines. This package does not import torch.
"""

import inspect
import string
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import NoReturn, Protocol, TypeAlias

from verl_lite.errors import UserError
from verl_lite.json_types import JsonObject, KeywordArguments
from verl_lite.registry import Registry, did_you_mean, foreign_modules

Info: TypeAlias = JsonObject
"""Information that an environment returns in addition to the observation. All keys are optional:

env_instruction   in reset: description of the task, shown once before the first observation
suffix            text after the observation, {suffix} of agent_template
use_tool          true: the observation becomes a message with the role "tool", such as the result of a tool
metrics           {name: number or bool}; action_is_valid=false adds format_penalty; success is shown in charts
metrics_agg_mode  {name: mean | sum | min | max | last | first} over the steps of an episode; mean by default
state_hash        identifier of the state for gigpo; by default sha256 of the observation
"""


StepResult: TypeAlias = tuple[str, float, bool, bool, Info]
"""(observation, reward, terminated, truncated, info), as in gymnasium.

`terminated` is True if the task has ended in success or failure, `truncated` if the episode ends before that.
"""


class Env(Protocol):
    """An environment in which an agent acts by text. One object runs many episodes, one after the other.

    Optional methods: `close()` frees resources; `sample_random_action()` returns a valid action text for the dry run
    before training.
    """

    def reset(self, seed: int) -> tuple[str, Info]:
        """Starts the episode of `seed`, which is the same in each call. Returns (observation, info)."""
        ...

    def step(self, action: str) -> StepResult:
        """Responds to any text of the agent."""
        ...


EnvFactory = Callable[..., Env]
"""A class or function that creates an environment. Its keyword arguments are the entries of env_config."""

ENVS: Registry[EnvFactory] = Registry("environment")

register_env = ENVS.register
"""Decorator that registers an environment class: `@register_env("my_world")` enables `env_type: my_world`."""


def find_env(env_type: str) -> EnvFactory:
    """Returns the factory with this name or at pkg.module:object. Raises UserError with the nearest name if unknown."""
    try:
        return ENVS.get_fn(env_type)
    except ValueError as error:
        raise UserError(f"env_type={env_type!r}: {error}") from error


def make_env(env_type: str, env_config: KeywordArguments | None = None) -> Env:
    """Creates an environment. Raises UserError for an unknown env_type or key, or a missing reset or step method."""
    factory = find_env(env_type)
    # before the call, whose TypeError would not name the key of the configuration
    check_env_config(env_type, env_config or {})
    env = factory(**(env_config or {}))
    # the factory may be any function of the user
    if not (hasattr(env, "reset") and hasattr(env, "step")):
        raise UserError(f"env_type={env_type!r}: {type(env).__name__} needs the methods reset(seed) and step(action)")
    return env


def check_env_config(env_type: str, env_config: KeywordArguments) -> None:
    """Raises UserError if env_config has an unknown key or lacks a required key."""
    keywords = {}
    accepts_any_key = False
    for parameter in inspect.signature(find_env(env_type)).parameters.values():
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            keywords[parameter.name] = parameter
        elif parameter.kind is parameter.VAR_KEYWORD:
            accepts_any_key = True

    for key in env_config:
        if key not in keywords and not accepts_any_key:
            raise UserError(f"env_config.{key}: {env_type} has no such option{did_you_mean(key, list(keywords))}")
    # a missing key would otherwise be a TypeError of Python, without the name of the entry
    for name, parameter in keywords.items():
        if parameter.default is parameter.empty and name not in env_config:
            raise UserError(f"env_config.{name} is missing: {env_type} needs it")


def env_modules() -> list[str]:
    """Returns the modules outside this project that registered environments. Environment processes import them too."""
    return foreign_modules(ENVS.values())


# --------------------------------------------------------------------------------------------- agentic.custom_envs

TRAJECTORY_FIELDS = ("observation", "env_instruction", "turn_idx", "suffix", "actions_left", "max_response_length")
STEP_FIELDS = ("history", "step_count", "history_length", "current_step", "current_observation")
MANAGERS = {"trajectory": "TrajEnvManager", "step": "StepEnvManager"}
"""Ways to convert an episode to samples, with ROLL's names of them."""

_LEAST = {"max_steps": 1, "max_tokens_per_step": 1, "max_env_step_concurrent": 1, "history_length": 0}
"""Least value of each option that is a whole number."""
_OPTIONAL = ("max_tokens_per_step", "max_env_step_concurrent")
"""Those of them that can be null."""
_UNSUPPORTED = {
    "tool_wrapper": "not supported; make the tools part of the environment, see trainer/AGENTIC.md",
    "agent_runner_cls": "not supported; agents do not run in separate processes",
    **dict.fromkeys(("max_env_step", "max_actions_per_traj"), "use max_steps instead"),
}
"""Options of ROLL that are refused unless they are null, with the rest of the message."""


@dataclass(frozen=True)
class EnvTemplate:
    """An entry of `agentic.custom_envs`.

    Attributes:
        tag: Key of the entry.
        env_type, env_config: Name of a registered environment, or pkg.module:Class, and its keyword arguments.
        max_steps: Maximum number of turns in an episode.
        max_tokens_per_step: Maximum number of tokens in a turn; None = data.max_response_length.
        env_manager_cls: "trajectory" (an episode is one sample, a conversation) or "step" (each turn is a sample whose
            prompt contains the last `history_length` turns).
        agent_system_template: System message; None = no system message.
        agent_template: User message of a turn, with the fields of TRAJECTORY_FIELDS, and for "step" also of STEP_FIELDS
            (`observation` and `current_observation` are equal there). The environment's instruction precedes the
            message of the first turn, unless the template has the field {env_instruction}, which is empty in later
            turns of a trajectory.
        use_thread_lock: True to run the methods of this environment one at a time in a process.
        max_env_step_concurrent: Maximum number of concurrent steps of this tag.
    """

    tag: str
    env_type: str
    max_steps: int = 10
    max_tokens_per_step: int | None = None
    env_manager_cls: str = "trajectory"
    agent_system_template: str | None = None
    agent_template: str = "{observation}{suffix}"
    history_length: int = 3
    env_config: JsonObject = field(default_factory=dict)
    use_thread_lock: bool = False
    max_env_step_concurrent: int | None = None

    def __post_init__(self) -> None:
        # the class is frozen, so corrected values are set as `dataclasses` does it
        object.__setattr__(self, "env_config", dict(self.env_config or {}))
        object.__setattr__(self, "env_manager_cls", self._manager())
        self._check_values()
        self._check_template()
        with self._naming_the_entry():
            check_env_config(self.env_type, self.env_config)

    def _manager(self) -> str:
        """Returns env_manager_cls as a key of MANAGERS. ROLL's names, with or without their module, are accepted."""
        name = str(self.env_manager_cls)
        for manager, roll_class in MANAGERS.items():
            if name == manager or name.rpartition(".")[2] == roll_class:
                return manager
        names = [*MANAGERS, *MANAGERS.values()]
        self._refuse("env_manager_cls", f"{' | '.join(names)}{did_you_mean(name, names)}")

    def _check_values(self) -> None:
        """Refuses options of the wrong type, and numbers that are too small."""
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            # True and False are integers for Python
            is_number = isinstance(value, int) and not isinstance(value, bool)
            if not is_number or value < least:
                or_null = ""
                if name in _OPTIONAL:
                    or_null = " or null"
                self._refuse(name, f"a whole number of at least {least}{or_null}")
        if not isinstance(self.use_thread_lock, bool):
            self._refuse("use_thread_lock", "true or false")
        if not isinstance(self.agent_system_template, str | None):
            self._refuse("agent_system_template", "text")
        if not isinstance(self.agent_template, str):
            self._refuse("agent_template", "text")

    def _check_template(self) -> None:
        """Refuses an agent_template with fields that have no value."""
        available = [*TRAJECTORY_FIELDS]
        further_fields = ""
        if self.by_step:
            available += STEP_FIELDS
        else:
            further_fields = f"; with env_manager_cls: step also {', '.join(STEP_FIELDS)}"
        try:
            unknown = sorted(self.fields - set(available))
        except ValueError as error:
            self._refuse("agent_template", f"text for str.format ({error})")
        if not unknown:
            return
        hint = did_you_mean(unknown[0], available)
        expected = f"only the fields {', '.join(available)}{further_fields}"
        self._refuse("agent_template", f"{expected}; found {{{unknown[0]}}}{hint}; double other braces")

    @property
    def by_step(self) -> bool:
        """True if each turn is a separate sample."""
        return self.env_manager_cls == "step"

    @property
    def fields(self) -> frozenset[str]:
        """The fields in agent_template, without their attributes and indices."""
        names = set()
        for _, field_name, _, _ in string.Formatter().parse(self.agent_template):
            # None: text after the last field
            if field_name is None:
                continue
            name, _, _ = field_name.partition(".")
            name, _, _ = name.partition("[")
            names.add(name)
        return frozenset(names)

    def make(self) -> Env:
        """Creates an environment of this entry. Raises UserError, which names the entry."""
        with self._naming_the_entry():
            return make_env(self.env_type, self.env_config)

    @contextmanager
    def _naming_the_entry(self) -> Iterator[None]:
        try:
            yield
        except UserError as error:
            raise UserError(f"agentic.custom_envs.{self.tag}.{error}") from error

    def _refuse(self, name: str, expected: str) -> NoReturn:
        raise UserError(f"agentic.custom_envs.{self.tag}.{name} is {getattr(self, name)!r}: expected {expected}")


def env_templates(custom_envs: Mapping[str, object]) -> dict[str, EnvTemplate]:
    """Returns the checked entries of `agentic.custom_envs` by tag.

    Raises:
        UserError: Names agentic.custom_envs.TAG.key, for an unknown key (with the nearest key), a wrong value, an
            unknown environment, or an option that the environment does not have.
    """
    templates: dict[str, EnvTemplate] = {}
    for tag, entry in custom_envs.items():
        options = _options_of_entry(str(tag), entry)
        has_type = isinstance(options.get("env_type"), str)
        has_config = isinstance(options.get("env_config") or {}, Mapping)
        if not has_type or not has_config:
            raise UserError(
                f"agentic.custom_envs.{tag} is {entry!r}: expected a mapping with env_type, one of "
                f"{', '.join(sorted(ENVS))}, or pkg.module:Class; and env_config, a mapping"
            )
        templates[str(tag)] = EnvTemplate(tag=str(tag), **options)
    return templates


def _options_of_entry(tag: str, entry: object) -> JsonObject:
    """Returns the options of an entry for `EnvTemplate`. Options of ROLL that are null are left out."""
    # no options, and so no env_type: `env_templates` refuses the entry
    if not isinstance(entry, Mapping):
        return {}
    names = [option.name for option in fields(EnvTemplate) if option.name != "tag"]
    options = {}
    for key, value in entry.items():
        name = str(key)
        if name in names:
            options[name] = value
        elif name not in _UNSUPPORTED:
            problem = f"unknown key; keys are {', '.join(names)}{did_you_mean(name, names)}"
            raise UserError(f"agentic.custom_envs.{tag}.{name}: {problem}")
        elif value is not None:
            raise UserError(f"agentic.custom_envs.{tag}.{name}: {_UNSUPPORTED[name]}")
    return options
