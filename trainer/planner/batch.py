"""The batch arithmetic of a run: from prompts to optimizer steps to micro-batches on one device.

Computes the launch table, with rows of (quantity, value, options), from the configuration and the number of devices.
The table uses fixed terms for sizes that are easily confused: batch and mini-batch sizes count prompts, a sample is one
answer, and a row is a sample on a device.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from trainer import requirements
from trainer.planner.memory import rows_per_step
from verl_lite.config import ModelConfig, NetworkConfig, PPOConfig, RunConfig
from verl_lite.config.pools import num_engines, rollout_devices
from verl_lite.device import is_on_cpu
from verl_lite.errors import UserError
from workers.policy.loading import count_parameters, count_trained, load_model_config, longest_context
from workers.rollout.base import resolve_engine_name


class PlanRow(NamedTuple):
    """One line of the table: the name of a quantity, its value, and the options that determine it."""

    what: str
    value: str
    options: str


def check_context(config: PPOConfig) -> None:
    """Raises UserError if prompt and response together may exceed the model's number of positions."""
    # an engine would reject this only after its start; a model beyond its positions generates nonsense
    context = longest_context(load_model_config(config.model))
    prompt, answer = config.data.max_prompt_length, config.data.max_response_length
    if context is not None and prompt + answer > context:
        raise UserError(
            f"data.max_prompt_length={prompt} + data.max_response_length={answer} = {prompt + answer} tokens are more "
            f"than the {context} positions of model.path={config.model.path!r}: lower one of them, or take a model "
            "with a longer context"
        )


def launch_table(
    config: PPOConfig, slots: int, total_steps: int | None = None, expected: Sequence[PlanRow] = ()
) -> str:
    """Returns the plan of a run as aligned text; see `launch_rows`. expected: rows appended at the end."""
    return aligned([*launch_rows(config, slots, total_steps), *expected])


def aligned(rows: Sequence[PlanRow]) -> str:
    """Returns rows of a plan as aligned text."""
    what, value = (max(len(row[column]) for row in rows) for column in (0, 1))
    return "\n".join(f"{row.what:<{what}}  {row.value:>{value}}   {row.options}" for row in rows)


def slots_text(trainer: RunConfig, slots: int) -> str:
    """Returns the number of devices of a run as text ("8 devices"), or of processes on a CPU ("2 processes")."""
    one, several = ("process", "processes") if is_on_cpu(trainer.device) else ("device", "devices")
    return f"{slots} {one if slots == 1 else several}"


def launch_rows(config: PPOConfig, slots: int, total_steps: int | None = None) -> list[PlanRow]:
    """Returns the plan of a run.

    Args:
        slots: Number of devices of the whole run.
        total_steps: Number of training steps, or None if the size of the dataset is unknown.
    """
    trainer, rollout = config.trainer, config.rollout
    rows = list(_prompt_rows(config, slots) if config.reads_prompts else _episode_rows(config))
    correction = config.algorithm.rollout_correction
    is_strict, why = "no", "later optimizer steps train on samples from older weights"
    if config.async_training.max_off_policy_threshold:
        corrected = correction.rollout_is is not None or correction.bypass_mode
        how = "corrected" if corrected else "uncorrected; algorithm.rollout_correction.rollout_is=token corrects"
        why = f"samples come from earlier weights, {how}"
    elif requirements.is_on_policy(config):
        is_strict, why = "yes", "one optimizer step per batch"
    rows.append(PlanRow("strictly on-policy", is_strict, why))
    ahead = config.async_training
    if ahead.max_off_policy_threshold:
        most = f"async_training.max_off_policy_threshold={ahead.max_off_policy_threshold}"
        text = f"async_training.batches_ahead; at most {most}"
        rows.append(PlanRow("weight updates from sampling to training", f"{ahead.depth}", text))
    needed = {
        "reward model": config.reward_model.enable,
        "old log-probs": requirements.needs_old_log_prob(config),
        "reference log-probs": requirements.needs_reference(config),
        **{f"log-probs by teacher {one.name}": True for one in config.distillation.named_teachers()},
        "values": requirements.needs_critic(config),
    }
    passes = [name for name, is_needed in needed.items() if is_needed]
    notes = [", ".join(passes)] if passes else []
    if not needed["old log-probs"]:
        bypassed = "bypass_mode uses the rollout's log-probs"
        skipped = bypassed if correction.bypass_mode else "on-policy, so the update computes the same values"
        notes.append(f"old log-probs skipped: {skipped}")
    rows.append(PlanRow("passes before the update", f"{len(passes)}", "; ".join(notes)))
    limit = f"trainer.total_training_steps={trainer.total_training_steps}"
    if trainer.total_training_steps is None:
        limit = f"trainer.total_epochs={trainer.total_epochs}"
    engines = num_engines(config, slots)
    rows.append(PlanRow("training steps", "?" if total_steps is None else f"{total_steps}", limit))
    engine = resolve_engine_name(rollout.name)
    is_slower = engine == "vllm" and is_on_cpu(trainer.device)
    advice = "; on a CPU rollout.name=hf is faster where it runs the model" if is_slower else ""
    place = ""
    if not config.hybrid_engine:
        devices = rollout_devices(config, slots)
        place = f"; hybrid_engine=false: on {devices} device{'s' * (devices != 1)} besides the trainer's {slots}"
    rows.append(PlanRow("rollout engine", f"{engines} x {engine}", f"rollout.name{place}{advice}"))
    if rollout.top_k > 0:
        tokens = rows_per_step(config) * config.data.max_response_length
        options = f"rollout.top_k={rollout.top_k} x 4 bytes per response token, on the driver and in messages"
        rows.append(
            PlanRow("sampling candidates per training step", f"{tokens * rollout.top_k * 4 / 1e6:,.1f} MB", options)
        )
    return [*rows, *adapter_rows(config.model)]


def adapter_rows(model: NetworkConfig) -> Iterator[PlanRow]:
    """Yields the number of trainable parameters if only an adapter is trained. Raises UserError if the adapter in
    model.lora_adapter_path does not fit the model."""
    if isinstance(model, ModelConfig) and model.lora_rank:
        options = f"model.lora_rank={model.lora_rank} on {', '.join(model.target_modules)}"
        whole, trained = count_parameters(model), count_trained(model)
        yield PlanRow("trainable parameters", f"{trained:,}", f"of {whole:,}: {options}")


def _prompt_rows(config: PPOConfig, slots: int) -> Iterator[PlanRow]:
    data, actor, critic, filters = config.data, config.actor, config.critic, config.algorithm.filter_groups
    batch, n, size = data.train_batch_size, config.rollout.n, actor.ppo_mini_batch_size
    n_by_source = [f"{name} {options['n']}" for name, options in data.sources.items() if options.get("n")]
    named = f" for most prompts; data.sources: {', '.join(n_by_source)}" if n_by_source else ""
    has_baseline = requirements.needs_greedy_baseline(config)
    greedy = "; plus one greedy answer, whose score is the baseline" if has_baseline else ""
    lengths = f"at most {data.max_prompt_length} + {data.max_response_length} tokens each"
    yield PlanRow("prompts per training step", f"{batch}", "data.train_batch_size")
    yield PlanRow("x samples per prompt", f"{n}", f"rollout.n{named}{greedy}")
    yield PlanRow("= samples per training step", f"{'about ' * bool(n_by_source)}{batch * n}", lengths)
    if filters.enable:
        text = "algorithm.filter_groups: until enough groups have answers that differ in "
        text += filters.metric or "acc, else score"
        yield PlanRow("generation batches per training step", f"1 to {filters.max_num_gen_batches}", text)
    count = _mini_batches(size, batch)
    text = f"{count} of actor.ppo_mini_batch_size={size} prompts, actor.ppo_epochs={actor.ppo_epochs}"
    yield PlanRow("optimizer steps per training step", f"{count * actor.ppo_epochs}", text)
    if requirements.needs_critic(config):
        of_critic = critic.ppo_mini_batch_size or size
        epochs = critic.ppo_epochs or actor.ppo_epochs
        warmup = config.trainer.critic_warmup
        text = f"critic.ppo_mini_batch_size={of_critic}, critic.ppo_epochs={epochs}"
        if warmup:
            text += f"; the policy is trained from step {warmup + 1} (trainer.critic_warmup={warmup})"
        yield PlanRow("critic optimizer steps per training step", f"{_mini_batches(of_critic, batch) * epochs}", text)
    sharing = config.sequence_parallel_size("actor")
    rows, owner = math.ceil((batch if count == 1 else size) * n / (slots // sharing)), "device"
    where = slots_text(config.trainer, slots)
    if sharing > 1:
        owner, where = "group", f"{where}, in groups of actor.ulysses_sequence_parallel_size={sharing}"
    yield PlanRow(f"rows per {owner} and mini-batch", f"{rows}", where)
    cut, what = requirements.micro_batching(config, "update_actor"), f"micro-batches per {owner} and mini-batch"
    if cut.max_token_len is None:
        together = cut.micro_batch_size or 1
        text = f"actor.ppo_micro_batch_size_per_gpu={together} sequences"
        yield PlanRow(what, f"{math.ceil(rows / together)}", text)
        return
    together = max(1, cut.max_token_len * sharing // (data.max_prompt_length + data.max_response_length))
    most = math.ceil(rows / together)  # an upper bound, because the lengths are not known yet
    ranks = f" on each of {sharing} ranks" * (sharing > 1)
    text = f"actor.ppo_max_token_len_per_gpu={cut.max_token_len} tokens{ranks}; {most} if every row is full"
    yield PlanRow(what, "1" if most == 1 else f"1 to {most}", text)


def _mini_batches(size: int, prompts: int) -> int:
    return 1 if size == -1 else math.ceil(prompts / size)


def _episode_rows(config: PPOConfig) -> Iterator[PlanRow]:
    """Yields the rows of an agentic run. An episode becomes one training row, or one row per step of the episode."""
    agentic, actor, data = config.agentic, config.actor, config.data
    envs, mini = agentic.train_env_manager, actor.ppo_mini_batch_size
    partition = envs.num_groups_partition or [envs.num_env_groups // len(envs.tags)] * len(envs.tags)
    shares = " + ".join(f"{count} of {tag}" for tag, count in zip(envs.tags, partition, strict=False))
    spare = envs.group_size_redundancy
    redundancy = f" ({spare} more are started, and the last {spare} to end are dropped)" * (spare > 0)
    steps = f"{actor.ppo_epochs}" if mini == -1 else f"{actor.ppo_epochs} x rows / {mini}"
    yield PlanRow("episodes per training step", f"{agentic.rollout_batch_size}", "agentic.rollout_batch_size")
    yield PlanRow("in groups of", f"{envs.group_size}", f"agentic.train_env_manager.group_size{redundancy}")
    yield PlanRow("groups at one time", f"{envs.num_env_groups}", shares)
    yield PlanRow("a row has at most", f"{data.max_prompt_length + data.max_response_length}", "tokens")
    yield PlanRow("optimizer steps per training step", steps, f"actor.ppo_mini_batch_size={mini} rows")
