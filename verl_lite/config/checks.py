"""Checks a configuration before a run starts, and reports all problems in one `ConfigError`.

The checks cover ranges, the `check` methods of the sections, and everything that depends on the machine, the files or
a registry. They reject options that cannot work or would give other results than requested. `idle_options`
reports options without effect.
"""

import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from verl_lite.config.data import python_file
from verl_lite.config.fields import Options, Problems, unknown_value
from verl_lite.config.learners import ActorConfig
from verl_lite.config.option_table import ConfigError, schema_of, value_of
from verl_lite.config.pools import divisors, pool_problems
from verl_lite.config.ppo import PPOConfig
from verl_lite.config.run import RunOptions
from verl_lite.config.user_calls import ENGINE_CALL, ESTIMATOR_CALL, FILTER_CALL, LOSS_CALL, registered_problems
from verl_lite.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY
from verl_lite.device import is_on_cpu
from verl_lite.envs import env_templates
from verl_lite.errors import UserError
from verl_lite.group_filters import GROUP_FILTERS
from verl_lite.registry import takes
from verl_lite.rewards import code, judge
from verl_lite.rewards.scoring import part_problems, reward_parts

PROGRAM_ESTIMATORS = ("grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "gpg")
"""Estimators with one advantage per row that depends only on the scores of the group."""
FOREIGN_ENGINES = ("sglang", "trtllm")
"""verl engines whose `rollout.engine_kwargs` entries are accepted and ignored."""


def validate(
    config: PPOConfig, *, engines: Collection[str], slots: int | None = None, available: int | None = None
) -> None:
    """Checks a whole configuration of `trainer.main_ppo`. Trackers are checked by `trainer.tracking.check_trackers`.

    Args:
        engines: valid values of `rollout.name`, see `workers.rollout.base.engine_names`.
        slots: number of devices of the run; None = n_gpus_per_node * nnodes.
        available: number of GPUs of this machine (of cores for a run on the CPU); None = not checked.

    Raises:
        ConfigError: with all problems.
    """
    if slots is None and config.trainer.n_gpus_per_node is not None:
        slots = config.trainer.n_gpus_per_node * config.trainer.nnodes
    problems = [
        *section_problems(config),
        *loss_problems(config.actor),
        *estimator_problems(config),
        *reward_problems(config.reward, alone=not config.reward_model.enable),
        *_engine(config, slots, engines),
        *(() if config.reads_prompts else _agent(config)),
        *_async_training(config),
        *pool_problems(config, slots, available),
        *machine_problems(config, slots, available),
        *_models(config),
    ]
    if problems:
        raise ConfigError(problems)


def section_problems(options: Any) -> Problems:
    """Yields values outside their range or choices, and the problems that each section's `check` finds.

    Problems of `check` that mention a number outside its range are omitted.
    """
    wrong = []
    for key in schema_of(type(options)).keys.values():
        value = value_of(options, key.name)
        if value is None or key.expects is None:
            continue
        if isinstance(key.expects, tuple):
            if value not in key.expects:
                yield unknown_value(key.name, value, key.expects) + ("; or null" if key.optional else "")
        elif not key.expects.holds(value):
            wrong.append(f"{key.name}={value}")
            yield f"{wrong[-1]}: {key.expects.words}"
    sections = [options]
    for section in sections:
        sections += [inner for inner in vars(section).values() if isinstance(inner, Options)]
        for problem in section.check() if isinstance(section, Options) else ():
            if not any(given in problem for given in wrong):
                yield problem


def machine_problems(config: RunOptions, count: int | None, available: int | None) -> Problems:
    """Checks the number of devices (on a CPU: worker slots) against machine and backend, for all commands that train.

    Args:
        count: number of devices of the run; None = unknown.
        available: number of devices of this machine; None = not checked.
    """
    trainer, address = config.trainer, config.ray_kwargs.ray_init.address
    if trainer.nnodes > 1 and address is None:
        yield f"trainer.nnodes={trainer.nnodes} needs a Ray cluster: set ray_kwargs.ray_init.address=HOST:PORT"
    if count is None or trainer.nnodes < 1 or count < 1:
        return
    here = count // trainer.nnodes
    if trainer.backend == "inline" and count > 1:
        yield f"trainer.backend=inline runs in one process and cannot use {count} devices: set trainer.backend=ray"
    if available is not None and address is None and here > available:
        noun = "cores" if is_on_cpu(trainer.device) else "GPUs"
        yield f"trainer.n_gpus_per_node={here} is more than this machine has: set at most its {available} {noun}"
    for key in schema_of(type(config)).keys.values():
        all_devices = {"fsdp_size": "-1 or ", "ulysses_sequence_parallel_size": ""}.get(key.path[-1])
        size = -1 if all_devices is None else value_of(config, key.name)
        if size is not None and size > 0 and count % size:
            yield f"{key.name}={size} does not divide the {count} devices; use {all_devices}one of {divisors(count)}"


def loss_problems(actor: ActorConfig) -> Problems:
    """Checks the policy loss and the requirements of its registration."""
    mode = actor.policy_loss.loss_mode
    facts = POLICY_LOSS_REGISTRY.facts.get(mode, {})
    yield from registered_problems("actor.policy_loss.loss_mode", mode, POLICY_LOSS_REGISTRY, "function", LOSS_CALL)
    for name in facts.get("needs", ()):
        if getattr(actor.policy_loss, name) is None:
            yield f"actor.policy_loss.loss_mode={mode} needs actor.policy_loss.{name}, which is null: set a number"
    expected = facts.get("loss_agg_mode") or actor.loss_agg_mode
    if actor.loss_agg_mode != expected:
        yield f"actor.loss_agg_mode={actor.loss_agg_mode} with actor.policy_loss.loss_mode={mode}: set {expected}"


def estimator_problems(config: PPOConfig) -> Problems:
    """Checks the advantage estimator and the requirements of its registration and its parameters."""
    algorithm, chosen = config.algorithm, config.algorithm.adv_estimator
    key, acts = f"algorithm.adv_estimator={chosen}", config.is_agentic
    facts = ADV_ESTIMATOR_REGISTRY.facts.get(chosen, {})
    option = "algorithm.adv_estimator"
    invalid = list(registered_problems(option, chosen, ADV_ESTIMATOR_REGISTRY, "function", ESTIMATOR_CALL))
    yield from invalid
    function = None if invalid else ADV_ESTIMATOR_REGISTRY.get_fn(chosen)
    if acts and config.reads_prompts and chosen not in PROGRAM_ESTIMATORS:
        known = ", ".join(PROGRAM_ESTIMATORS)
        yield f"{key} with agentic.program: expected an estimator with one advantage per episode: {known}"
    elif facts.get("rows") == "step" and config.reads_prompts:
        yield f"{key} needs the steps of episodes: name environments in agentic.train_env_manager.tags"
    if acts and function is not None and (takes(function, "reward_baselines") or chosen == "gdpo"):
        yield f"{key} needs greedy answers or a reward function's dict: for episodes set grpo or agentic_reinforce"
    if function is not None and takes(function, "sum_pi_squared") and algorithm.rollout_correction.bypass_mode:
        yield f"{key} needs the pass that algorithm.rollout_correction.bypass_mode=true omits: set it to false"
    if config.trainer.critic_warmup > 0 and function is not None and not takes(function, "values"):
        yield f"trainer.critic_warmup={config.trainer.critic_warmup}: {chosen} has no critic to train: set 0"
    if facts.get("raw_scores"):
        for name in ("norm_mean_type", "norm_std_type", "reward_clip", "whiten_rewards"):
            if getattr(algorithm, name):
                yield f"algorithm.{name}={getattr(algorithm, name)} with {key}, which reads raw scores: remove it"
    if not config.trainer.val_only and not config.distillation.replaces_rewards:
        yield from _groups(config, chosen if facts.get("groups") else None)


def _groups(config: PPOConfig, estimator: str | None) -> Problems:
    """Checks that groups have at least two members if anything compares the members of a group."""
    algorithm, filters = config.algorithm, config.algorithm.filter_groups.enable
    shaped = [name for name in ("norm_mean_type", "norm_std_type") if getattr(algorithm, name) == "group"]
    user = estimator or (f"algorithm.{shaped[0]}=group" if shaped else "algorithm.filter_groups" if filters else None)
    if user is None:
        return
    key, size = "rollout.n", config.rollout.n
    if not config.reads_prompts:
        key, size = "agentic.train_env_manager.group_size", config.agentic.train_env_manager.group_size
    single = [name for name, entry in config.data.sources.items() if isinstance(entry, Mapping) and entry.get("n") == 1]
    for name in [key] * (size == 1) + [f"data.sources.{name}.n" for name in single]:
        yield f"{name}=1: {user} compares the members of a group: set at least 2, such as 8"


def reward_problems(reward: Any, alone: bool = True) -> Problems:
    """Checks the parts of `reward` and the file of a custom function without running them.

    Args:
        reward: a `RewardConfig`.
        alone: True if no reward model scores in addition.
    """
    yield from python_file("reward.custom_reward_function.path", reward.custom_reward_function.path)
    problems = list(part_problems(reward.functions))
    yield from problems
    parts = [] if problems else reward_parts(reward.functions)
    for part in parts:
        yield from python_file(f"{part.option}.path", part.path)
        if part.path is None and part.reward in ("code", "rule/code"):
            yield from code.time_problems(part.kwargs, reward.timeout_s, f"{part.option}.kwargs")
        if part.path is None and part.reward in ("judge", "rule/judge"):
            yield from judge.option_problems(part.kwargs, f"{part.option}.kwargs")
    if parts and alone and all(part.weight == 0 for part in parts):
        yield "reward.functions: every weight is 0, so every score would be 0: set a weight above 0"


def _engine(config: PPOConfig, count: int | None, engines: Collection[str]) -> Problems:
    """Checks the rollout engine, its tensor parallelism and its extra arguments."""
    rollout, parallel = config.rollout, config.rollout.tensor_model_parallel_size
    yield from registered_problems("rollout.name", rollout.name, engines, "Class", ENGINE_CALL)
    here = count // config.trainer.nnodes if count and config.trainer.nnodes > 0 else 0
    if parallel > 1 and (rollout.name == "hf" or (config.hybrid_engine and here % parallel)):
        fits = "1 with rollout.name=hf" if rollout.name == "hf" else f"one of {divisors(here)}"
        yield f"rollout.tensor_model_parallel_size={parallel}: set {fits}"
    for name, entries in rollout.engine_kwargs.items():
        if name not in (*engines, *FOREIGN_ENGINES) or not isinstance(entries, dict):
            yield f"rollout.engine_kwargs.{name}={entries}: expected an engine's name, as in engine_kwargs.vllm.KEY"


def _agent(config: PPOConfig) -> Problems:
    """Checks the environments and the group filter of an agentic run, and the estimator's row format."""
    options, manager, chosen = config.agentic, config.agentic.train_env_manager, config.algorithm.adv_estimator
    longest, expected = config.data.max_response_length, ADV_ESTIMATOR_REGISTRY.facts.get(chosen, {}).get("rows")
    for tag, entry in options.custom_envs.items():
        try:
            template = env_templates({tag: entry})[tag]
        except UserError as error:
            yield str(error)
            continue
        at, most = f"agentic.custom_envs.{tag}", template.max_tokens_per_step
        if most is not None and most > longest:
            yield f"{at}.max_tokens_per_step={most} exceeds data.max_response_length={longest}: set at most {longest}"
        if tag in manager.tags and expected and template.by_step is not (expected == "step"):
            shown = f"{at}.env_manager_cls={template.env_manager_cls}"
            yield f"{shown}: algorithm.adv_estimator={chosen} reads rows of one {expected} each: set {expected}"
    if manager.group_filter_cls is not None:
        key = "agentic.train_env_manager.group_filter_cls"
        yield from registered_problems(key, manager.group_filter_cls, GROUP_FILTERS, "Class", FILTER_CALL)


def _async_training(config: PPOConfig) -> Problems:
    """Checks that a run with stale samples corrects for them, and has room for both engines."""
    options, correction = config.async_training, config.algorithm.rollout_correction
    threshold, mode = options.max_off_policy_threshold, config.actor.policy_loss.loss_mode
    key = f"async_training.max_off_policy_threshold={threshold}"
    sleeps = config.hybrid_engine and config.rollout.free_cache_engine and not is_on_cpu(config.trainer.device)
    if options.depth and sleeps and not config.spans_updates:
        yield (
            f"{key} samples during training, which needs the engine's memory: set rollout.free_cache_engine=false, and "
            "a rollout.gpu_memory_utilization that leaves memory for training; or "
            "async_training.partial_rollout=true, which interrupts the samples instead"
        )
    if options.partial_rollout and not config.spans_updates:
        yield (
            f"async_training.partial_rollout=true with {key} and rollout.oversample={config.rollout.oversample}: no "
            "sample is running when the weights change: set async_training.max_off_policy_threshold=1"
        )
    if config.spans_updates and config.rollout.router_replay:
        yield (
            f"{key} with rollout.router_replay=true: samples that continue under new weights have experts of several "
            "versions: set async_training.partial_rollout=false"
        )
    if config.spans_updates and config.rollout.top_k > 0:
        yield (
            f"{key} with rollout.top_k={config.rollout.top_k}: samples that continue under new weights do not keep the "
            "tokens that could be sampled before: set async_training.partial_rollout=false, or rollout.top_k=-1"
        )
    every, surplus = config.agentic.model_update_frequency, config.rollout.oversample - 1
    carried = math.ceil(surplus) if config.spans_updates else 0
    if threshold < (needed := options.depth + carried + every - 1):
        shown = f"rollout.oversample={config.rollout.oversample} and " if carried else ""
        yield (
            f"{key} with {shown}agentic.model_update_frequency={every}: samples are up to {needed} weight updates old: "
            f"set async_training.max_off_policy_threshold={needed} async_training.batches_ahead={options.depth}"
        )
    if mode == "a3po" and (not correction.bypass_mode or correction.rollout_is is not None):
        yield (
            "actor.policy_loss.loss_mode=a3po weighs the rollout's log-probs itself: set algorithm.rollout_correction."
            "bypass_mode=true and algorithm.rollout_correction.rollout_is=null"
        )
    is_bounded = POLICY_LOSS_REGISTRY.facts.get(mode, {}).get("bounds_ratio") and correction.loss_type == "ppo_clip"
    if threshold and not is_bounded and correction.rollout_is is None and correction.rollout_rs is None:
        bounded = sorted(name for name, facts in POLICY_LOSS_REGISTRY.facts.items() if facts.get("bounds_ratio"))
        shown = f"actor.policy_loss.loss_mode={mode}" if correction.loss_type == "ppo_clip" else "loss_type=reinforce"
        yield (
            f"{key} with {shown}, which does not bound the ratio of policy and rollout, so that stale samples can have "
            f"any weight: set loss_mode to one of {', '.join(bounded)}, or truncate the weights with "
            "algorithm.rollout_correction.rollout_is=token"
        )


def _models(config: PPOConfig) -> Problems:
    """Checks that model folders exist. Names in the form of the Hugging Face hub are looked up when they are loaded."""
    names = ("model.path", "model.tokenizer_path", "reward_model.model.path", "critic.model.path")
    folders = {name: value_of(config, name) for name in names}
    if not any(config.distillation.check()):
        folders |= {f"distillation.teachers.{one.name}.path": one.path for one in config.distillation.named_teachers()}
    for name, value in folders.items():
        if value and not Path(value).is_dir() and not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", value):
            yield f"{name}={value}: there is no folder {Path(value).absolute()}"
