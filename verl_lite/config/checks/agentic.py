"""Whether environments, groups, batch sizes and estimator of a run of agents fit each other: a part of `checks.config`.

Takes a `PPOConfig`; yields problems, each naming key, value, what was expected and what to change. An option that would
have no effect counts as a problem.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping

from verl_lite.config.agentic import EnvManagerConfig
from verl_lite.config.checks.run import runs_on_cpu
from verl_lite.config.checks.values import Problems, given, listed
from verl_lite.config.keys import unknown_value
from verl_lite.config.ppo import PPOConfig
from verl_lite.core_algos import ADV_ESTIMATOR_REGISTRY
from verl_lite.envs import EnvTemplate, env_templates, find_env
from verl_lite.errors import UserError
from verl_lite.group_filters import GROUP_FILTERS
from verl_lite.registry import takes

BY_STEP = frozenset({"gigpo", "step_reinforce"})
"""Estimators whose rows are the steps of episodes."""
BY_TRAJECTORY = frozenset({"gae", "agentic_reinforce"})
"""Estimators whose rows are whole episodes: the next turn stands in the same row."""
OF_GROUPS = frozenset(
    {"grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "opo", "gpg", "gigpo"}
    | {"reinforce_plus_plus_baseline"}
)
"""Estimators that compare the episodes of a group with each other."""

OF_EPISODES = ("data.max_prompt_length", "data.max_response_length", "data.apply_chat_template_kwargs")
"""What episodes read of `data`; its other keys are of a dataset of prompts."""

INSTEAD = {
    "data.train_files": "agentic.custom_envs and agentic.train_env_manager.tags",
    "data.val_files": "agentic.val_env_manager.tags",
    "data.train_batch_size": "agentic.rollout_batch_size",
    "data.val_batch_size": "agentic.val_batch_size",
    "trainer.total_epochs": "trainer.total_training_steps",
}
"""What there is in their place."""

OF_PROCESSES = ("agentic.env_pool.timeout_s", "agentic.env_pool.max_memory_mb")
"""Limits that only a process of its own can be held to."""

OF_ESTIMATORS = {
    "agentic.episode_reward_weight": ("gigpo",),
    "agentic.step_reward_weight": ("gigpo",),
    "agentic.step_reward_gamma": ("gigpo", "step_reinforce"),
}
"""Options of agentic that only these estimators read."""


def agentic(config: PPOConfig) -> Problems:
    """All that concerns agents; without environments, that no option of theirs is given."""
    if not config.is_agentic:
        if idle := given(config, "agentic."):
            yield (
                f"{listed(idle)}: without effect, because agentic.train_env_manager.tags is empty: name the "
                "environments of agentic.custom_envs to train in, or leave all agentic.* out"
            )
        return
    yield from _run(config)
    yield from _without_effect(config)
    templates = yield from _templates(config)
    options = config.agentic
    for name, manager, size_key in (
        ("train_env_manager", options.train_env_manager, "rollout_batch_size"),
        ("val_env_manager", options.val_env_manager, "val_batch_size"),
    ):
        if manager.tags:
            yield from _manager(config, name, manager, templates)
            yield from _sizes(name, manager, getattr(options, size_key), size_key)
    yield from _validation(config)
    yield from _estimator(config, templates)
    yield from _pool(config)


def _run(config: PPOConfig) -> Problems:
    """What the run as a whole needs."""
    rollout, trainer, ratio = config.rollout, config.trainer, config.agentic.async_generation_ratio
    if trainer.total_training_steps is None and not trainer.val_only:
        yield (
            "trainer.total_training_steps=null: environments have no end, so the number of steps has to be given, "
            "such as trainer.total_training_steps=200"
        )
    if rollout.n != 1:
        yield (
            f"rollout.n={rollout.n}: an environment takes one action at a time, so 1 is expected; how many episodes "
            "of a task are compared is agentic.train_env_manager.group_size"
        )
    if rollout.tensor_model_parallel_size > 1:
        yield (
            f"rollout.tensor_model_parallel_size={rollout.tensor_model_parallel_size}: each device has an engine and "
            "environments of its own where agents act, so 1 is expected"
        )
    frequency = config.agentic.model_update_frequency
    for name in ("test_freq", "save_freq"):
        every = getattr(trainer, name)
        if frequency > 1 and every > 0 and every % frequency:
            yield (
                f"trainer.{name}={every} with agentic.model_update_frequency={frequency}: a validation gives the "
                "engine the newest weights, and so does a resumed run, which would change the training between two "
                f"updates: set trainer.{name} to a multiple of {frequency}, or to -1 (at the end)"
            )
    if ratio > 0 and rollout.free_cache_engine and not runs_on_cpu(config.trainer.device):
        yield (
            f"agentic.async_generation_ratio={ratio} with rollout.free_cache_engine=true: the engine would sleep while "
            "training, when episodes go on: set rollout.free_cache_engine=false, and rollout.gpu_memory_utilization "
            "so that both fit; or async_generation_ratio=0"
        )


def _without_effect(config: PPOConfig) -> Problems:
    """Options of datasets and rewards."""
    of_a_dataset = [entry for entry in given(config, "data.") if entry[0] not in OF_EPISODES]
    for name, value in (*of_a_dataset, *given(config, "trainer.total_epochs")):
        instead = f": set {INSTEAD[name]} instead" if name in INSTEAD else ": leave it out"
        yield f"{name}={value} has no effect where agents act in environments, without a dataset{instead}"
    if rewards := [*given(config, "reward."), *given(config, "reward_model.")]:
        yield (
            f"{listed(rewards)}: without effect, because environments give the rewards "
            "(agentic.train_env_manager.tags): leave reward.* and reward_model.* out; limits of environments are "
            "agentic.env_pool.*"
        )
    samples = config.rollout.val_kwargs.n
    if samples != 1:
        yield (
            f"rollout.val_kwargs.n={samples} has no effect where agents act: set agentic.val_env_manager.group_size "
            "and agentic.val_batch_size"
        )
    chosen = config.algorithm.adv_estimator
    for name, value in given(config, "agentic.", OF_ESTIMATORS):
        readers = OF_ESTIMATORS[name]
        if chosen not in readers and ":" not in chosen:
            yield (
                f"{name}={value} has no effect with algorithm.adv_estimator={chosen}: it belongs to "
                f"{' and '.join(readers)}, so leave it out"
            )


# --------------------------------------------------------------------------------------------------------- environments


def _templates(config: PPOConfig) -> Generator[str, None, dict[str, EnvTemplate]]:
    """Problems of the entries of custom_envs; returns those that are sound."""
    found: dict[str, EnvTemplate] = {}
    for tag, entry in config.agentic.custom_envs.items():
        try:
            found |= env_templates({tag: entry})
        except UserError as error:
            yield str(error)
            continue
        yield from _methods(found[tag])
        longest, most = config.data.max_response_length, found[tag].max_tokens_per_step
        if most is not None and most > longest:
            yield (
                f"agentic.custom_envs.{tag}.max_tokens_per_step={most} is more than data.max_response_length="
                f"{longest}, which holds all turns of an episode (by steps: one turn): set at most {longest}"
            )
    return found


def _methods(template: EnvTemplate) -> Problems:
    """A class without reset or step is no environment; what a function makes is seen in the dry run."""
    factory = find_env(template.env_type)
    if not isinstance(factory, type):
        return
    missing = [name for name in ("reset", "step") if not callable(getattr(factory, name, None))]
    if missing:
        yield (
            f"agentic.custom_envs.{template.tag}.env_type={template.env_type}: {factory.__name__} has no method "
            f"{' and no method '.join(missing)}; reset(seed) and step(action) are expected, see "
            "trainer/AGENTIC.md"
        )


def _manager(config: PPOConfig, name: str, manager: EnvManagerConfig, templates: Mapping[str, EnvTemplate]) -> Problems:
    """Tags, their partition, and the filter."""
    key, known = f"agentic.{name}", config.agentic.custom_envs
    for tag in manager.tags:
        if tag not in known:
            yield unknown_value(f"{key}.tags", tag, list(known)) + "; they are the entries of agentic.custom_envs"
    if len(set(manager.tags)) < len(manager.tags):
        yield f"{key}.tags={manager.tags}: one is named twice; give its share in {key}.num_groups_partition"
    partition, groups = manager.num_groups_partition, manager.num_env_groups
    if partition and len(partition) != len(manager.tags):
        yield (
            f"{key}.num_groups_partition={partition}: one number for each of the {len(manager.tags)} tags "
            f"{manager.tags} is expected; or leave it out for equal shares"
        )
    elif partition and (sum(partition) != groups or min(partition) < 1):
        yield (
            f"{key}.num_groups_partition={partition} adds up to {sum(partition)}: numbers of at least 1 that add up to "
            f"{key}.num_env_groups={groups} are expected; or leave it out for equal shares"
        )
    elif groups < len(manager.tags):
        yield (
            f"{key}.num_env_groups={groups} is less than the {len(manager.tags)} tags {manager.tags}: at least one "
            "group for each tag is expected"
        )
    chosen = manager.group_filter_cls
    if chosen is not None and ":" not in chosen and chosen not in GROUP_FILTERS:
        yield unknown_value(f"{key}.group_filter_cls", chosen, GROUP_FILTERS) + "; or pkg.module:Class"
    if chosen is None and manager.max_replaced_groups != -1:
        yield (
            f"{key}.max_replaced_groups={manager.max_replaced_groups} has no effect without {key}.group_filter_cls: "
            "name a filter, or leave it out"
        )


def _sizes(name: str, manager: EnvManagerConfig, size: int, batch_key: str) -> Problems:
    """A batch is made of whole groups, which the environments may run."""
    if size < 1 or manager.group_size < 1 or manager.num_env_groups < 1:
        return
    key = f"agentic.{name}"
    if size % manager.group_size:
        nearest = max(1, round(size / manager.group_size)) * manager.group_size
        yield (
            f"{key}.group_size={manager.group_size} does not divide agentic.{batch_key}={size}: a batch is made of "
            f"whole groups; set {batch_key}={nearest}, or another group size"
        )
    each = math.ceil(size / (manager.num_env_groups * manager.group_size))
    if 0 <= manager.max_traj_per_env < each:
        yield (
            f"{key}.max_traj_per_env={manager.max_traj_per_env}: agentic.{batch_key}={size} takes {each} episodes of "
            f"each of {manager.num_env_groups} x {manager.group_size} environments: set at least {each}, or -1, or "
            "more num_env_groups"
        )


def _validation(config: PPOConfig) -> Problems:
    manager = config.agentic.val_env_manager
    if not manager.tags:
        names = ("agentic.val_env_manager.", "agentic.val_batch_size", "agentic.render_save_dir")
        for name, value in (entry for start in names for entry in given(config, start)):
            yield (
                f"{name}={value} has no effect without agentic.val_env_manager.tags: name the environments to validate "
                "in, or leave it out"
            )
        return
    if manager.group_size_redundancy:
        yield (
            f"agentic.val_env_manager.group_size_redundancy={manager.group_size_redundancy}: only episodes that end "
            "early would be measured: leave it out"
        )
    if manager.group_size > 1 and not config.rollout.val_kwargs.do_sample:
        yield (
            f"agentic.val_env_manager.group_size={manager.group_size} with rollout.val_kwargs.do_sample=false would "
            f"run {manager.group_size} equal episodes of each task: set do_sample=true and a temperature, or "
            "group_size=1"
        )
    if manager.group_filter_cls is not None:
        yield (
            f"agentic.val_env_manager.group_filter_cls={manager.group_filter_cls}: a validation measures all groups: "
            "leave it out"
        )


def _pool(config: PPOConfig) -> Problems:
    if config.agentic.env_pool.num_workers == 0:
        for name, value in given(config, "agentic.env_pool.", OF_PROCESSES):
            yield (
                f"{name}={value} needs a process of the environments, and with "
                "agentic.env_pool.num_workers=0 there is none: set num_workers to at least 1, or leave it out"
            )


# ----------------------------------------------------------------------------------------------------------- estimators


def _estimator(config: PPOConfig, templates: Mapping[str, EnvTemplate]) -> Problems:
    """Whether the samples are what the estimator reads."""
    chosen, manager = config.algorithm.adv_estimator, config.agentic.train_env_manager
    key = f"algorithm.adv_estimator={chosen}"
    for estimators, by_step, what in (
        (BY_STEP, True, "compares the steps of episodes"),
        (BY_TRAJECTORY, False, "follows an episode from turn to turn within a sample"),
    ):
        expected = "step" if by_step else "trajectory"
        for tag in manager.tags:
            if chosen in estimators and tag in templates and templates[tag].by_step is not by_step:
                yield (
                    f"agentic.custom_envs.{tag}.env_manager_cls={templates[tag].env_manager_cls}: {key} {what}, so "
                    f"{expected} is expected: set agentic.custom_envs.{tag}.env_manager_cls={expected}, or use one of "
                    f"{', '.join(sorted(BY_TRAJECTORY if by_step else BY_STEP))}"
                )
    if chosen in OF_GROUPS and manager.group_size == 1 and not config.trainer.val_only:
        yield (
            f"agentic.train_env_manager.group_size=1: {chosen} compares the episodes of a group with each other, and "
            "one episode teaches nothing: set group_size to at least 2, such as 8"
        )
    function = ADV_ESTIMATOR_REGISTRY.get(chosen)
    if function is not None and takes(function, "reward_baselines"):
        yield f"{key} needs a greedy answer to each prompt, which episodes do not have: use grpo or agentic_reinforce"
    if chosen == "gdpo":
        yield f"{key} needs the values of a reward function's dict, which episodes do not have: use grpo"
