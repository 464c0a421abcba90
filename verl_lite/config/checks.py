"""Checks a configuration before a run starts, and reports all problems in one `ConfigError`.

`section_problems` checks the options alone: ranges, the `check` methods of the sections, and the table of conflicts
(`verl_lite/config/conflicts`). The other functions check options against the machine, files and imported code. All of
them reject options that cannot work or would give other results than requested. `idle_options` reports options
without effect.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from verl_lite.config.conflicts import conflict_problems
from verl_lite.config.data import python_file
from verl_lite.config.fields import Options, Problems, unknown_value
from verl_lite.config.option_table import ConfigError, Key, schema_of, value_of
from verl_lite.config.pools import device_noun, divisors, pool_problems
from verl_lite.config.ppo import PPOConfig
from verl_lite.config.reward import RewardConfig
from verl_lite.config.run import RunOptions
from verl_lite.config.user_calls import (
    ENGINE_CALL,
    ESTIMATOR_CALL,
    FILTER_CALL,
    LOSS_CALL,
    UserCall,
    registered_problems,
)
from verl_lite.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY
from verl_lite.envs import env_templates
from verl_lite.errors import UserError
from verl_lite.group_filters import GROUP_FILTERS
from verl_lite.rewards import code, judge
from verl_lite.rewards.scoring import part_problems, reward_parts

FOREIGN_ENGINES = ("sglang", "trtllm")
"""verl engines whose `rollout.engine_kwargs` entries are accepted and ignored."""
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


@dataclass(frozen=True)
class NamedCode:
    """An option whose value is the name of registered code, or the path of code of the user.

    Attributes:
        key: the option.
        registered: the registered objects by name.
        kind: what a path leads to, "function" or "Class".
        call: how the trainer calls it.
    """

    key: str
    registered: Mapping[str, object]
    kind: str
    call: UserCall

    def problems(self, config: object) -> Problems:
        """Yields a problem if the value is neither registered nor the path of a callable that fits."""
        value = value_of(config, self.key)
        if value is None:
            return
        yield from registered_problems(self.key, str(value), self.registered, self.kind, self.call)


LOSS_CODE = NamedCode("actor.policy_loss.loss_mode", POLICY_LOSS_REGISTRY, "function", LOSS_CALL)
_ESTIMATOR_CODE = NamedCode("algorithm.adv_estimator", ADV_ESTIMATOR_REGISTRY, "function", ESTIMATOR_CALL)
_FILTER_CODE = NamedCode("agentic.train_env_manager.group_filter_cls", GROUP_FILTERS, "Class", FILTER_CALL)


def validate(
    config: PPOConfig, *, engines: Collection[str], slots: int | None = None, available: int | None = None
) -> None:
    """Checks a whole configuration of `trainer.main_ppo`. Trackers are checked by `trainer.tracking.check_trackers`.

    Args:
        config: the options of the run.
        engines: valid values of `rollout.name`, see `workers.engines.base.engine_names`.
        slots: number of devices of the run; None = n_gpus_per_node * nnodes.
        available: number of GPUs of this machine (of cores for a run on the CPU); None = not checked.

    Raises:
        ConfigError: with all problems.
    """
    if slots is None and config.trainer.n_gpus_per_node is not None:
        slots = config.trainer.n_gpus_per_node * config.trainer.nnodes
    problems = [
        *section_problems(config),
        *LOSS_CODE.problems(config),
        *_ESTIMATOR_CODE.problems(config),
        *reward_problems(config.reward),
        *_engine_problems(config, slots, engines),
        *pool_problems(config, slots, available),
        *machine_problems(config, slots, available),
        *_model_folder_problems(config),
    ]
    if not config.reads_prompts:
        problems += [*_environment_problems(config), *_FILTER_CODE.problems(config)]
    if problems:
        raise ConfigError(problems)


def section_problems(options: object) -> Problems:
    """Yields the problems that can be seen in the options alone, without the machine and files.

    These are values outside their range or choices, what each section's `check` finds, and conflicts between options.
    Of an option with a number outside its range nothing else is reported.
    """
    out_of_range: dict[str, str] = {}
    for key in schema_of(type(options)).keys.values():
        value = value_of(options, key.name)
        if value is None or key.expects is None:
            continue
        if isinstance(key.expects, tuple):
            yield from _choice_problems(key, value)
        elif not key.expects.holds(value):
            out_of_range[key.name] = f"{key.name}={value}"
            yield f"{key.name}={value}: {key.expects.words}"

    for section in _sections_of(options):
        for problem in section.check():
            # a consequence of a value outside its range is no second problem
            is_consequence = any(setting in problem for setting in out_of_range.values())
            if not is_consequence:
                yield problem
    yield from conflict_problems(options, out_of_range)


def _choice_problems(key: Key, value: object) -> Problems:
    """Yields a problem if the option does not declare this value."""
    assert isinstance(key.expects, tuple)
    if value in key.expects:
        return
    problem = unknown_value(key.name, value, key.expects)
    if key.optional:
        problem += "; or null"
    yield problem


def _sections_of(options: object) -> list[Options]:
    """Returns a section with all sections below it. The root may be any dataclass."""
    # a root of another class, which `load_schema` accepts, has no `check`
    sections = [options] if isinstance(options, Options) else []
    for value in vars(options).values():
        if isinstance(value, Options):
            sections += _sections_of(value)
    return sections


def machine_problems(config: RunOptions, count: int | None, available: int | None) -> Problems:
    """Checks the number of devices (on a CPU: worker slots) against machine and backend, for all commands that train.

    Args:
        config: the options of the command.
        count: number of devices of the run; None = unknown.
        available: number of devices of this machine; None = not checked.
    """
    trainer = config.trainer
    address = config.ray_kwargs.ray_init.address
    if trainer.nnodes > 1 and address is None:
        yield f"trainer.nnodes={trainer.nnodes} needs a Ray cluster: set ray_kwargs.ray_init.address=HOST:PORT"
    # numbers below 1 are reported by their ranges
    if count is None or trainer.nnodes < 1 or count < 1:
        return

    per_node = count // trainer.nnodes
    if trainer.backend == "inline" and count > 1:
        yield f"trainer.backend=inline runs in one process and cannot use {count} devices: set trainer.backend=ray"
    if available is not None and address is None and per_node > available:
        yield (
            f"trainer.n_gpus_per_node={per_node} is more than this machine has: set at most its {available} "
            f"{device_noun(trainer.device)}"
        )

    for key in schema_of(type(config)).keys.values():
        name = key.path[-1]
        if name not in ("fsdp_size", "ulysses_sequence_parallel_size"):
            continue
        size = value_of(config, key.name)
        # -1 stands for all devices
        if isinstance(size, int) and size > 0 and count % size:
            all_devices = "-1 or " if name == "fsdp_size" else ""
            yield f"{key.name}={size} does not divide the {count} devices; use {all_devices}one of {divisors(count)}"


def reward_problems(reward: RewardConfig) -> Problems:
    """Checks the parts of `reward` and the file of a custom function without running them."""
    yield from python_file("reward.custom_reward_function.path", reward.custom_reward_function.path)
    invalid_parts = list(part_problems(reward.functions))
    yield from invalid_parts
    # `reward_parts` would raise an exception
    if invalid_parts:
        return
    for part in reward_parts(reward.functions):
        yield from python_file(f"{part.option}.path", part.path)
        if part.path is not None:
            continue
        kwargs_option = f"{part.option}.kwargs"
        if part.reward in ("code", "rule/code"):
            yield from code.time_problems(part.kwargs, reward.timeout_s, kwargs_option)
        if part.reward in ("judge", "rule/judge"):
            yield from judge.option_problems(part.kwargs, kwargs_option)


def _engine_problems(config: PPOConfig, count: int | None, engines: Collection[str]) -> Problems:
    """Checks that the rollout engine exists, its extra arguments, and that its devices belong to one machine."""
    rollout = config.rollout
    yield from registered_problems("rollout.name", rollout.name, engines, "Class", ENGINE_CALL)
    names_of_engines = {*engines, *FOREIGN_ENGINES}
    for name, entries in rollout.engine_kwargs.items():
        if name not in names_of_engines or not isinstance(entries, dict):
            yield f"rollout.engine_kwargs.{name}={entries}: expected an engine's name, as in engine_kwargs.vllm.KEY"

    if not count or config.trainer.nnodes < 1:
        return
    per_node = count // config.trainer.nnodes
    parallel = rollout.tensor_model_parallel_size
    # the engine hf has one device, and `pool_problems` checks engines with devices of their own
    if rollout.name == "hf" or not config.hybrid_engine:
        return
    if parallel > 1 and per_node % parallel:
        yield f"rollout.tensor_model_parallel_size={parallel}: set one of {divisors(per_node)}"


def _environment_problems(config: PPOConfig) -> Problems:
    """Checks the environments, their answers' length, and the rows that the estimator reads."""
    estimator = config.algorithm.adv_estimator
    # "step" or "trajectory"; None for either
    rows_of_estimator = ADV_ESTIMATOR_REGISTRY.facts.get(estimator, {}).get("rows")
    longest = config.data.max_response_length
    for tag, entry in config.agentic.custom_envs.items():
        try:
            template = env_templates({tag: entry})[tag]
        except UserError as error:
            yield str(error)
            continue

        at = f"agentic.custom_envs.{tag}"
        limit = template.max_tokens_per_step
        if limit is not None and limit > longest:
            yield f"{at}.max_tokens_per_step={limit} exceeds data.max_response_length={longest}: set at most {longest}"

        # a validation computes no advantages
        is_trained = tag in config.agentic.train_env_manager.tags
        needs_steps = rows_of_estimator == "step"
        if is_trained and rows_of_estimator and template.by_step is not needs_steps:
            yield (
                f"{at}.env_manager_cls={template.env_manager_cls}: algorithm.adv_estimator={estimator} reads rows of "
                f"one {rows_of_estimator} each: set {rows_of_estimator}"
            )


def _model_folder_problems(config: PPOConfig) -> Problems:
    """Checks that model folders exist. Names in the form of the Hugging Face hub are looked up when they are loaded."""
    folders = {
        "model.path": config.model.path,
        "model.tokenizer_path": config.model.tokenizer_path,
        "reward_model.model.path": config.reward_model.model.path,
        "critic.model.path": config.critic.model.path,
    }
    for teacher in config.distillation.valid_teachers():
        folders[f"distillation.teachers.{teacher.name}.path"] = teacher.path
    for key, name in folders.items():
        if name is None:
            continue
        folder = Path(name)
        if name and not folder.is_dir() and not _HUB_NAME.fullmatch(name):
            yield f"{key}={name}: there is no folder {folder.absolute()}"
