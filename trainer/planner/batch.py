"""The arithmetic of a run, before it starts: from prompts to optimizer steps to micro-batches on one device.

Takes the configuration and the number of devices; gives rows of (what, how many, which options), and the same as plain
text. `python -m trainer.plan key=value ...` prints it for a cluster of any size, with memory and time
(`planner.command`). The words for sizes that users mix up are fixed here: a batch and a mini-batch count prompts,
a sample is one answer, and a row is a sample on a device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.requirements import (
    is_on_policy,
    needs_critic,
    needs_greedy_baseline,
    needs_old_log_prob,
    needs_reward_function,
)
from verl_lite.config import PPOConfig
from verl_lite.rewards.scoring import reward_parts
from workers.policy.loading import count_parameters, count_trained
from workers.rollout.base import resolve_engine_name


@dataclass(frozen=True)
class PlanRow:
    """One line of the table: what is counted, its value, and the options it follows from."""

    what: str
    value: str
    options: str


def launch_table(
    config: PPOConfig, slots: int, total_steps: int | None = None, expected: Sequence[PlanRow] = ()
) -> str:
    """The plan of a run as aligned text. See `launch_rows`; expected: more rows at its end."""
    rows = [*launch_rows(config, slots, total_steps), *expected]
    widths = [max(len(getattr(row, column)) for row in rows) for column in ("what", "value")]
    return "\n".join(f"{row.what:<{widths[0]}}  {row.value:>{widths[1]}}   {row.options}" for row in rows)


def launch_rows(config: PPOConfig, slots: int, total_steps: int | None = None) -> list[PlanRow]:
    """The plan of a run.

    slots: devices of the whole run. total_steps: training steps, where the size of the data is known.
    """
    first = _episode_rows(config) if config.is_agentic else _prompt_rows(config, slots)
    trainer = config.trainer
    engines = max(1, slots // config.rollout.tensor_model_parallel_size)
    return [
        *first,
        _on_policy_row(config),
        *_score_rows(config),
        PlanRow("passes before the update", *_passes(config)),
        PlanRow(
            "training steps",
            "?" if total_steps is None else f"{total_steps}",
            f"trainer.total_epochs={trainer.total_epochs}"
            if trainer.total_training_steps is None
            else f"trainer.total_training_steps={trainer.total_training_steps}",
        ),
        PlanRow("rollout engine", f"{engines} x {resolve_engine_name(config.rollout.name)}", "rollout.name"),
        *_adapter_rows(config),
    ]


def _prompt_rows(config: PPOConfig, slots: int) -> list[PlanRow]:
    """From prompts to micro-batches."""
    data, actor = config.data, config.actor
    samples = data.train_batch_size * config.rollout.n
    mini_batches, named = _mini_batches(actor.ppo_mini_batch_size, data.train_batch_size)
    updates = mini_batches * actor.ppo_epochs
    prompts = data.train_batch_size if mini_batches == 1 else actor.ppo_mini_batch_size
    rows_per_rank = math.ceil(prompts * config.rollout.n / slots)
    beside = "; and one greedy answer, whose score is the baseline" if needs_greedy_baseline(config) else ""
    return [
        PlanRow("prompts per training step", f"{data.train_batch_size}", "data.train_batch_size"),
        PlanRow("x samples per prompt", f"{config.rollout.n}", f"rollout.n{_own_numbers(config)}{beside}"),
        PlanRow(
            "= samples per training step",
            f"about {samples}" if _own_numbers(config) else f"{samples}",
            _length_limit(config),
        ),
        *_filter_rows(config),
        PlanRow(
            "optimizer steps per training step",
            f"{updates}",
            f"{mini_batches} mini-batch{'es' * (mini_batches > 1)} of {named}, actor.ppo_epochs={actor.ppo_epochs}",
        ),
        *_critic_rows(config),
        PlanRow("rows per device and mini-batch", f"{rows_per_rank}", f"{slots} device{'s' * (slots > 1)}"),
        PlanRow("micro-batches per device and mini-batch", *_micro_batches(config, rows_per_rank)),
    ]


def _mini_batches(size: int, prompts: int) -> tuple[int, str]:
    """How many mini-batches `prompts` give, and what each is."""
    if size == -1:
        return 1, "all prompts (actor.ppo_mini_batch_size=-1)"
    return math.ceil(prompts / size), f"actor.ppo_mini_batch_size={size} prompts"


def _episode_rows(config: PPOConfig) -> list[PlanRow]:
    """From environments to optimizer steps; an episode gives one row, or one for each of its steps."""
    agentic, actor = config.agentic, config.actor
    envs, episodes = agentic.train_env_manager, agentic.rollout_batch_size
    partition = envs.num_groups_partition or [envs.num_env_groups // len(envs.tags)] * len(envs.tags)
    shares = " + ".join(f"{count} of {tag}" for tag, count in zip(envs.tags, partition, strict=False))
    size, spare = envs.group_size, envs.group_size_redundancy
    redundancy = f" ({spare} more are started, and the last to end dropped)" * (spare > 0)
    mini = actor.ppo_mini_batch_size
    return [
        PlanRow("episodes per training step", f"{episodes}", "agentic.rollout_batch_size"),
        PlanRow("in groups of", f"{size}", f"agentic.train_env_manager.group_size{redundancy}"),
        PlanRow("groups at one time", f"{envs.num_env_groups}", shares),
        PlanRow("steps from sampling to training", f"{agentic.async_generation_ratio}", _overlap(config)),
        PlanRow("a row has at most", f"{config.data.max_prompt_length + config.data.max_response_length}", "tokens"),
        PlanRow(
            "optimizer steps per training step",
            f"{actor.ppo_epochs}" if mini == -1 else f"{actor.ppo_epochs} x rows / {mini}",
            "all rows in one (actor.ppo_mini_batch_size=-1)"
            if mini == -1
            else f"actor.ppo_mini_batch_size={mini} rows",
        ),
    ]


def _overlap(config: PPOConfig) -> str:
    ratio = config.agentic.async_generation_ratio
    name = f"agentic.async_generation_ratio={ratio}"
    return f"{name}: episodes of a later step run while this one is trained on" if ratio else name


def _own_numbers(config: PPOConfig) -> str:
    """Sources whose prompts have another number of samples."""
    own = [f"{name} {options['n']}" for name, options in config.data.sources.items() if options.get("n")]
    return f" for most prompts; data.sources: {', '.join(own)}" if own else ""


def _filter_rows(config: PPOConfig) -> list[PlanRow]:
    """What dynamic sampling adds to a step."""
    options = config.algorithm.filter_groups
    if not options.enable:
        return []
    metric = options.metric or "acc, else score"
    text = f"algorithm.filter_groups: until the prompts have answers that differ in {metric}"
    return [PlanRow("generation batches per training step", f"1 to {options.max_num_gen_batches}", text)]


def _on_policy_row(config: PPOConfig) -> PlanRow:
    """Whether all that is learnt from was sampled with the weights that learn, and if not, why."""
    name, correction = "strictly on-policy", config.algorithm.rollout_correction
    if config.is_agentic and config.agentic.async_generation_ratio:
        corrected = correction.rollout_is is not None or correction.bypass_mode
        how = "corrected" if corrected else "uncorrected; algorithm.rollout_correction.rollout_is=token corrects"
        return PlanRow(name, "no", f"samples are of earlier weights, {how}")
    if is_on_policy(config):
        return PlanRow(name, "yes", "one optimizer step per batch")
    return PlanRow(name, "no", "later optimizer steps learn from samples of older weights")


def _adapter_rows(config: PPOConfig) -> list[PlanRow]:
    """How much of the policy learns, where that is an adapter."""
    model = config.model
    if not model.lora_rank:
        return []
    trained, whole = count_trained(model), count_parameters(model)
    options = f"of {whole:,}: model.lora_rank={model.lora_rank} on {', '.join(model.target_modules)}"
    return [PlanRow("parameters that learn", f"{trained:,}", options)]


def _critic_rows(config: PPOConfig) -> list[PlanRow]:
    """Optimizer steps of the critic, where there is one."""
    if not needs_critic(config):
        return []
    actor, critic, warmup = config.actor, config.critic, config.trainer.critic_warmup
    mini_batch_size, epochs = (
        critic.ppo_mini_batch_size or actor.ppo_mini_batch_size,
        critic.ppo_epochs or actor.ppo_epochs,
    )
    mini_batches, _ = _mini_batches(mini_batch_size, config.data.train_batch_size)
    size = "all" if mini_batch_size == -1 else mini_batch_size
    options = f"mini-batches of {size} prompts, {epochs} epoch{'s' * (epochs > 1)}"
    if warmup:
        options += f"; the policy learns from step {warmup + 1} on (trainer.critic_warmup={warmup})"
    return [PlanRow("of the critic", f"{mini_batches * epochs}", options)]


def _score_rows(config: PPOConfig) -> list[PlanRow]:
    """What an answer's score is made of, where it has several parts."""
    has_function, functions = needs_reward_function(config), reward_parts(config.reward.functions)
    terms = " + ".join(f"{part.weight:g} {part.label}" for part in functions) if has_function else ""
    if not config.reward_model.enable:
        return [PlanRow("score of an answer", terms, "reward.functions")] if terms else []
    parts = [f"{config.reward.function_weight:g} function{f' ({terms})' if terms else ''}"] if has_function else []
    parts.append(f"{config.reward_model.weight:g} model")
    return [PlanRow("score of an answer", " + ".join(parts), "reward.function_weight, reward_model.weight")]


def _length_limit(config: PPOConfig) -> str:
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    return f"at most {prompt} + {response} tokens each"


def _micro_batches(config: PPOConfig, rows: int) -> tuple[str, str]:
    """(how many, why) for `rows` rows on one device; with a token budget a bound, as lengths are not known yet."""
    actor = config.actor
    if not actor.use_dynamic_bsz:
        size = actor.ppo_micro_batch_size_per_gpu or 1
        return f"{math.ceil(rows / size)}", f"actor.ppo_micro_batch_size_per_gpu={size} sequences"
    longest = config.data.max_prompt_length + config.data.max_response_length
    budget = actor.ppo_max_token_len_per_gpu
    most = math.ceil(rows / max(1, budget // longest))
    reason = f"actor.ppo_max_token_len_per_gpu={budget} tokens; {most} if every row is full"
    return ("1", reason) if most == 1 else (f"1 to {most}", reason)


def _passes(config: PPOConfig) -> tuple[str, str]:
    """(how many, which) forward passes over the batch precede the update."""
    passes = ["reward model"] * config.reward_model.enable
    skipped = not needs_old_log_prob(config)
    if not skipped:
        passes.append("old log-probs")
    if config.actor.use_kl_loss or config.algorithm.use_kl_in_reward:
        passes.append("reference log-probs")
    if needs_critic(config):
        passes.append("values")
    listed = ", ".join(passes)
    is_bypassed = config.algorithm.rollout_correction.bypass_mode
    reason = "bypass_mode takes the rollout's" if is_bypassed else "on-policy, the update's own are the same"
    note = f"old log-probs skipped: {reason}" if skipped else ""
    return f"{len(passes)}", "; ".join(part for part in (listed, note) if part)
