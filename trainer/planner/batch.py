"""The batch arithmetic of a run: from prompts to optimizer steps to micro-batches on one device.

Computes the launch table, with rows of (quantity, value, options), from the configuration and the number of devices.
The table uses fixed terms for sizes that are easily confused: batch and mini-batch sizes count prompts, a sample is one
answer, and a row is a sample on a device.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from trainer.planner.memory import rows_per_step
from trainer.ppo import requirements
from verl_lite.config import ModelConfig, NetworkConfig, PPOConfig, RunConfig
from verl_lite.config.pools import num_engines, rollout_devices
from verl_lite.errors import UserError
from verl_lite.machine.device import is_on_cpu
from workers.engines.base import resolve_engine_name
from workers.policy.loading import count_parameters, count_trained, load_model_config, longest_context


class PlanRow(NamedTuple):
    """One line of the table: the name of a quantity, its value, and the options that determine it."""

    what: str
    value: str
    options: str


def check_context(config: PPOConfig) -> None:
    """Raises UserError if prompt and response together may exceed the model's number of positions."""
    # an engine would reject this only after its start; a model beyond its positions generates nonsense
    context = longest_context(load_model_config(config.model))
    prompt = config.data.max_prompt_length
    answer = config.data.max_response_length
    longest = config.longest_sample
    if context is not None and longest > context:
        raise UserError(
            f"data.max_prompt_length={prompt} + data.max_response_length={answer} = {longest} tokens are more "
            f"than the {context} positions of model.path={config.model.path!r}: lower one of them, or take a model "
            "with a longer context"
        )


def launch_table(
    config: PPOConfig,
    slots: int,
    total_steps: int | None = None,
    expected: Sequence[PlanRow] = (),
) -> str:
    """Returns the plan of a run as aligned text.

    Args:
        config, slots, total_steps: See `launch_rows`.
        expected: Rows that are appended at the end.
    """
    rows = launch_rows(config, slots, total_steps)
    return aligned([*rows, *expected])


def aligned(rows: Sequence[PlanRow]) -> str:
    """Returns rows of a plan as aligned text."""
    name_width = max(len(row.what) for row in rows)
    value_width = max(len(row.value) for row in rows)
    lines = []
    for row in rows:
        lines.append(f"{row.what:<{name_width}}  {row.value:>{value_width}}   {row.options}")
    return "\n".join(lines)


def slots_text(trainer: RunConfig, slots: int) -> str:
    """Returns the number of devices of a run as text ("8 devices"), or of processes on a CPU ("2 processes")."""
    if is_on_cpu(trainer.device):
        return "1 process" if slots == 1 else f"{slots} processes"
    return "1 device" if slots == 1 else f"{slots} devices"


def launch_rows(config: PPOConfig, slots: int, total_steps: int | None = None) -> list[PlanRow]:
    """Returns the plan of a run.

    Args:
        config: Options of the run.
        slots: Number of devices of the whole run.
        total_steps: Number of training steps, or None if the size of the dataset is unknown.
    """
    rows: list[PlanRow] = []
    if config.reads_prompts:
        rows += _prompt_rows(config, slots)
    else:
        rows += _episode_rows(config)
    rows += _on_policy_rows(config)
    rows.append(_passes_row(config))
    rows.append(steps_row(config.trainer, total_steps))
    rows.append(_engine_row(config, slots))
    top_k = config.rollout.top_k
    # -1 samples from all tokens, and stores no candidates
    if top_k > 0:
        tokens = rows_per_step(config) * config.data.max_response_length
        megabytes = tokens * top_k * 4 / 1e6
        options = f"rollout.top_k={top_k} x 4 bytes per response token, on the driver and in messages"
        rows.append(PlanRow("sampling candidates per training step", f"{megabytes:,.1f} MB", options))
    return [*rows, *adapter_rows(config.model)]


def steps_row(trainer: RunConfig, total_steps: int | None) -> PlanRow:
    """Returns the number of training steps, and the option that limits it."""
    number = "?" if total_steps is None else f"{total_steps}"
    # as in verl, a number of steps has priority over the epochs
    limit = f"trainer.total_training_steps={trainer.total_training_steps}"
    if trainer.total_training_steps is None:
        limit = f"trainer.total_epochs={trainer.total_epochs}"
    return PlanRow("training steps", number, limit)


def _on_policy_rows(config: PPOConfig) -> Iterator[PlanRow]:
    """Yields whether the samples come from the weights that they train, and else how far ahead they are sampled."""
    correction = config.algorithm.rollout_correction
    asynchronous = config.async_training
    threshold = asynchronous.max_off_policy_threshold
    if threshold:
        if correction.rollout_is is not None or correction.bypass_mode:
            reason = "samples come from earlier weights, corrected"
        else:
            reason = "samples come from earlier weights, uncorrected; "
            reason += "algorithm.rollout_correction.rollout_is=token corrects"
        yield PlanRow("strictly on-policy", "no", reason)
        options = f"async_training.batches_ahead; at most async_training.max_off_policy_threshold={threshold}"
        yield PlanRow("weight updates from sampling to training", f"{asynchronous.depth}", options)
    elif requirements.is_on_policy(config):
        yield PlanRow("strictly on-policy", "yes", "one optimizer step per batch")
    else:
        yield PlanRow("strictly on-policy", "no", "later optimizer steps train on samples from older weights")


def _passes_row(config: PPOConfig) -> PlanRow:
    """Returns the passes through networks between sampling and the update."""
    needs_old_log_prob = requirements.needs_old_log_prob(config)
    passes = []
    if config.reward_model.enable:
        passes.append("reward model")
    if needs_old_log_prob:
        passes.append("old log-probs")
    if requirements.needs_reference(config):
        passes.append("reference log-probs")
    passes += [f"log-probs by teacher {teacher.name}" for teacher in config.distillation.named_teachers()]
    if requirements.needs_critic(config):
        passes.append("values")

    notes = [", ".join(passes)] if passes else []
    if not needs_old_log_prob:
        reason = "on-policy, so the update computes the same values"
        if config.algorithm.rollout_correction.bypass_mode:
            reason = "bypass_mode uses the rollout's log-probs"
        notes.append(f"old log-probs skipped: {reason}")
    return PlanRow("passes before the update", f"{len(passes)}", "; ".join(notes))


def _engine_row(config: PPOConfig, slots: int) -> PlanRow:
    """Returns the number and the kind of the rollout engines, and their devices if these are not the trainer's."""
    engine = resolve_engine_name(config.rollout.name)
    options = "rollout.name"
    if not config.hybrid_engine:
        # in addition to `slots`, which are those of the training alone
        devices = rollout_devices(config, slots)
        devices_text = "1 device" if devices == 1 else f"{devices} devices"
        options += f"; hybrid_engine=false: on {devices_text} besides the trainer's {slots}"
    if engine == "vllm" and is_on_cpu(config.trainer.device):
        options += "; on a CPU rollout.name=hf is faster where it runs the model"
    return PlanRow("rollout engine", f"{num_engines(config, slots)} x {engine}", options)


def adapter_rows(model: NetworkConfig) -> Iterator[PlanRow]:
    """Yields the number of trainable parameters if only an adapter is trained.

    Raises:
        UserError: the adapter in model.lora_adapter_path does not fit the model.
    """
    if isinstance(model, ModelConfig) and model.lora_rank:
        options = f"model.lora_rank={model.lora_rank} on {', '.join(model.target_modules)}"
        whole = count_parameters(model)
        trained = count_trained(model)
        yield PlanRow("trainable parameters", f"{trained:,}", f"of {whole:,}: {options}")


def _prompt_rows(config: PPOConfig, slots: int) -> Iterator[PlanRow]:
    """Yields the rows of a run with a dataset of prompts, from the prompts of a step to its micro-batches."""
    data = config.data
    actor = config.actor
    batch = data.train_batch_size
    n = config.rollout.n

    # data.sources can set another number of samples for the prompts of a source
    n_by_source = []
    for name, options_of_source in data.sources.items():
        if options_of_source.get("n"):
            n_by_source.append(f"{name} {options_of_source['n']}")
    samples_options = "rollout.n"
    samples = f"{batch * n}"
    if n_by_source:
        samples_options += f" for most prompts; data.sources: {', '.join(n_by_source)}"
        samples = f"about {samples}"
    if requirements.needs_greedy_baseline(config):
        samples_options += "; plus one greedy answer, whose score is the baseline"
    lengths = f"at most {data.max_prompt_length} + {data.max_response_length} tokens each"
    yield PlanRow("prompts per training step", f"{batch}", "data.train_batch_size")
    yield PlanRow("x samples per prompt", f"{n}", samples_options)
    yield PlanRow("= samples per training step", samples, lengths)

    filters = config.algorithm.filter_groups
    if filters.enable:
        metric = filters.metric or "acc, else score"
        options = f"algorithm.filter_groups: until enough groups have answers that differ in {metric}"
        yield PlanRow("generation batches per training step", f"1 to {filters.max_num_gen_batches}", options)

    mini_batch = actor.ppo_mini_batch_size
    mini_batches = _mini_batches(mini_batch, batch)
    options = f"{mini_batches} of actor.ppo_mini_batch_size={mini_batch} prompts, actor.ppo_epochs={actor.ppo_epochs}"
    yield PlanRow("optimizer steps per training step", f"{mini_batches * actor.ppo_epochs}", options)
    if requirements.needs_critic(config):
        yield _critic_row(config)

    prompts_of_mini_batch = mini_batch
    # a mini-batch of -1, or larger than the batch, is the whole batch
    if mini_batches == 1:
        prompts_of_mini_batch = batch
    yield from _device_rows(config, slots, prompts_of_mini_batch * n)


def _critic_row(config: PPOConfig) -> PlanRow:
    """Returns the optimizer steps of the critic in a training step."""
    critic = config.critic
    # null options of the critic are those of the actor
    mini_batch = critic.ppo_mini_batch_size or config.actor.ppo_mini_batch_size
    epochs = critic.ppo_epochs or config.actor.ppo_epochs
    optimizer_steps = _mini_batches(mini_batch, config.data.train_batch_size) * epochs
    options = f"critic.ppo_mini_batch_size={mini_batch}, critic.ppo_epochs={epochs}"
    warmup = config.trainer.critic_warmup
    if warmup:
        options += f"; the policy is trained from step {warmup + 1} (trainer.critic_warmup={warmup})"
    return PlanRow("critic optimizer steps per training step", f"{optimizer_steps}", options)


def _device_rows(config: PPOConfig, slots: int, mini_batch_rows: int) -> Iterator[PlanRow]:
    """Yields the rows and the micro-batches of a mini-batch on each device, or on each group of devices that share
    their sequences.

    Args:
        config: Options of the run.
        slots: Number of devices of the whole run.
        mini_batch_rows: Samples of a mini-batch.
    """
    sharing = config.sequence_parallel_size("actor")
    groups = slots // sharing
    rows = math.ceil(mini_batch_rows / groups)
    owner = "device"
    options = slots_text(config.trainer, slots)
    if sharing > 1:
        owner = "group"
        options += f", in groups of actor.ulysses_sequence_parallel_size={sharing}"
    yield PlanRow(f"rows per {owner} and mini-batch", f"{rows}", options)

    name = f"micro-batches per {owner} and mini-batch"
    limits = requirements.micro_batching(config, "update_actor")
    if limits.max_token_len is None:
        rows_together = limits.micro_batch_size or 1
        micro_batches = math.ceil(rows / rows_together)
        options = f"actor.ppo_micro_batch_size_per_gpu={rows_together} sequences"
        yield PlanRow(name, f"{micro_batches}", options)
        return

    # an upper bound of full rows, because the lengths are not known yet
    full_rows_together = max(1, limits.max_token_len * sharing // config.longest_sample)
    most = math.ceil(rows / full_rows_together)
    ranks = f" on each of {sharing} ranks" if sharing > 1 else ""
    options = f"actor.ppo_max_token_len_per_gpu={limits.max_token_len} tokens{ranks}; {most} if every row is full"
    yield PlanRow(name, "1" if most == 1 else f"1 to {most}", options)


def _mini_batches(size: int, prompts: int) -> int:
    """Returns the number of mini-batches of this size in a batch of prompts; -1 means the whole batch."""
    if size == -1:
        return 1
    return math.ceil(prompts / size)


def _episode_rows(config: PPOConfig) -> Iterator[PlanRow]:
    """Yields the rows of an agentic run. An episode becomes one training row, or one row per step of the episode."""
    agentic = config.agentic
    envs = agentic.train_env_manager
    groups_of_tag = envs.num_groups_partition
    # an empty option means equal shares
    if not groups_of_tag:
        equal_share = envs.num_env_groups // len(envs.tags)
        groups_of_tag = [equal_share] * len(envs.tags)
    shares = []
    for tag, count in zip(envs.tags, groups_of_tag, strict=False):
        shares.append(f"{count} of {tag}")
    size_options = "agentic.train_env_manager.group_size"
    redundancy = envs.group_size_redundancy
    if redundancy > 0:
        size_options += f" ({redundancy} more are started, and the last {redundancy} to end are dropped)"

    yield PlanRow("episodes per training step", f"{agentic.rollout_batch_size}", "agentic.rollout_batch_size")
    yield PlanRow("in groups of", f"{envs.group_size}", size_options)
    yield PlanRow("groups at one time", f"{envs.num_env_groups}", " + ".join(shares))
    yield PlanRow("a row has at most", f"{config.longest_sample}", "tokens")

    epochs = config.actor.ppo_epochs
    mini_batch = config.actor.ppo_mini_batch_size
    steps = f"{epochs}" if mini_batch == -1 else f"{epochs} x rows / {mini_batch}"
    yield PlanRow("optimizer steps per training step", steps, f"actor.ppo_mini_batch_size={mini_batch} rows")
