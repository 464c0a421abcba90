"""Predicts the batches and the memory of supervised training, from the parts of `trainer.planner.memory`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.planner.accelerators import Accelerator
from trainer.planner.batch import PlanRow, adapter_rows, slots_text, steps_row
from trainer.planner.memory import place_networks, update_parts
from trainer.planner.memory_table import KEPT_FREED, WORKER_BYTES, MemoryPlan
from trainer.planner.model_shape import read_shape
from trainer.planner.networks import HeldNetwork, held_network, trained_parameters
from trainer.planner.pass_bytes import Pass, forward_only, kept_after_update, tile_bytes
from verl_lite.config import SFTConfig, SupervisedConfig
from verl_lite.config.supervised import LOG_PROB_CHUNK_TOKENS

if TYPE_CHECKING:
    from trainer.data.sft_dataset import TrainingRow


@dataclass(frozen=True)
class Batch:
    """The size of an optimizer step or of a validation.

    Attributes:
        rows: Number of sequences, or of pairs.
        longest: Tokens of the longest row.
        tokens: Tokens of all rows.
        predicted: Tokens in the loss.
        shared: Prompt tokens of second answers, which share them with the first.
    """

    rows: int
    longest: int
    tokens: int
    predicted: int
    shared: int = 0


def is_of_pairs(config: SupervisedConfig) -> bool:
    """Returns True if a row is a pair of answers."""
    return not isinstance(config, SFTConfig) or config.loss == "dpo"


def longest_step(config: SupervisedConfig) -> Batch:
    """Returns a step of rows of the maximum length, all of whose tokens are in the loss: an upper bound."""
    rows = config.data.train_batch_size
    longest = config.data.max_length
    if is_of_pairs(config):
        # the limit counts for each sequence of a pair
        longest *= 2
    tokens = rows * longest
    return Batch(rows, longest, tokens, predicted=tokens)


def batches_of(rows: Sequence[TrainingRow], batches: Iterable[Sequence[int]]) -> list[Batch]:
    """Returns the sizes of batches.

    Args:
        rows: Examples or pairs.
        batches: Row numbers of each batch.
    """
    result = []
    for batch in batches:
        longest = 0
        tokens = 0
        predicted = 0
        shared = 0
        for row_number in batch:
            row = rows[row_number]
            longest = max(longest, len(row))
            tokens += len(row)
            for text in row.texts:
                predicted += sum(text.mask)
            # the answers of a pair have the same prompt
            shared += (len(row.texts) - 1) * len(row.texts[0].prompt)
        result.append(Batch(len(batch), longest, tokens, predicted, shared))
    return result


def read_network(config: SupervisedConfig, slots: int, device: Accelerator) -> HeldNetwork:
    """Returns the trained network, from its config.json. Raises UserError if that file is missing."""
    shape = read_shape(config.model)
    # `trainer.main_rm` trains a reward model, which has one output number
    if not isinstance(config, SFTConfig):
        shape = shape.as_scorer()
    trained, adapter = trained_parameters(config.model, shape, freezes_tower=True)
    optimizer = config.optim.optimizer
    return held_network(slots, device, shape, config.fsdp_config, trained, adapter, optimizer)


def micro_batches(config: SupervisedConfig, slots: int, batch: Batch) -> tuple[int, int]:
    """Returns the number of micro-batches of a batch on each device, and the tokens of the largest one, which the
    devices of a sequence group share."""
    ranks = config.ulysses_sequence_parallel_size
    budget = config.data.max_token_len_per_gpu * ranks
    tokens_of_group = math.ceil(batch.tokens * ranks / slots)
    # a row is never divided among micro-batches
    largest = max(tokens_of_group, batch.longest)
    number = math.ceil(tokens_of_group / budget)
    return number, min(budget, largest)


def supervised_plan(
    config: SupervisedConfig,
    network: HeldNetwork,
    slots: int,
    device: Accelerator,
    step: Batch,
    validation: Batch | None = None,
) -> MemoryPlan:
    """Predicts the memory of an optimizer step and of a validation on one of `slots` devices."""
    on_cpu = device.name == "cpu"
    plan = MemoryPlan({}, {}, WORKER_BYTES if on_cpu else None)
    held = {"model": network}
    is_dpo = isinstance(config, SFTConfig) and config.loss == "dpo"
    # with an adapter, the reference is the trained network with its adapter disabled
    if is_dpo and not network.adapter:
        held["reference"] = held_network(slots, device, network.shape, config.fsdp_config)
    weights, moments = place_networks(plan, held, on_cpu)
    micro_batch = _largest_micro_batch(config, network, slots, step, on_cpu)

    if is_dpo:
        role = "reference" if "reference" in held else "model"
        plan.phases["reference log-probs"] = weights[role] | forward_only(held[role], micro_batch)
    if validation is not None:
        micro_batch_of_validation = _largest_micro_batch(config, network, slots, validation, on_cpu)
        plan.phases["validation"] = weights["model"] | forward_only(network, micro_batch_of_validation)

    plan.micro_batches, _ = micro_batches(config, slots, step)
    parts = update_parts(plan, "model", network, micro_batch, config.model)
    if on_cpu:
        parts[KEPT_FREED] = kept_after_update(parts, network.shape, micro_batch, plan.micro_batches)
    plan.phases["update"] = weights["model"] | moments["model"] | parts
    return plan


def _largest_micro_batch(
    config: SupervisedConfig,
    network: HeldNetwork,
    slots: int,
    batch: Batch,
    on_cpu: bool,
) -> Pass:
    """Returns the part of the largest micro-batch that one of the ranks of a sequence group has."""
    ranks = config.ulysses_sequence_parallel_size
    _, tokens = micro_batches(config, slots, batch)
    # the largest micro-batch is assumed to have the mean share of tokens in the loss and of shared prompts
    share = tokens / batch.tokens / ranks
    shared = 0
    if config.model.use_remove_padding and network.shape.is_packed:
        shared = math.ceil(batch.shared * share)
    return Pass(
        tokens=math.ceil(tokens / ranks) - shared,
        predicted=math.ceil(batch.predicted * share),
        chunk=LOG_PROB_CHUNK_TOKENS,
        size=network.compute,
        repeated=shared,
        ranks=ranks,
        tile=tile_bytes(config.model, on_cpu=on_cpu),
    )


def supervised_rows(
    config: SupervisedConfig,
    slots: int,
    total_steps: int | None,
    steps: Sequence[Batch],
) -> list[PlanRow]:
    """Returns the plan of the batches of a run.

    Args:
        config: Options of the run.
        slots: Number of devices.
        total_steps: Number of training steps, if it is known.
        steps: Sizes of some of the run's steps.
    """
    largest = max(steps, key=lambda step: step.tokens)
    most, _ = micro_batches(config, slots, largest)

    # sums, because the shares of tokens are those of all steps, not means of the steps' shares
    total_tokens = 0
    total_predicted = 0
    total_micro_batches = 0
    for step in steps:
        total_tokens += step.tokens
        total_predicted += step.predicted
        number, _ = micro_batches(config, slots, step)
        total_micro_batches += number
    mean_tokens = total_tokens / len(steps)
    loss_share = total_predicted / total_tokens
    budget = config.data.max_token_len_per_gpu
    full_share = total_tokens / (total_micro_batches * slots * budget)

    unit = "pairs" if is_of_pairs(config) else "rows"
    devices = slots_text(config.trainer, slots)
    options = f"at most, on {devices}; data.max_token_len_per_gpu={budget} tokens, on average {full_share:.0%} full"
    loss_text = f"on average, {loss_share:.1%} of them in the loss"
    longest_row = f"the longest of the {unit} has {largest.longest}"
    return [
        PlanRow(f"{unit} per training step", f"{largest.rows}", "data.train_batch_size"),
        PlanRow("tokens per training step", f"{mean_tokens:,.0f}", loss_text),
        PlanRow("tokens of the largest step", f"{largest.tokens:,}", longest_row),
        PlanRow("micro-batches per device and step", f"{most}", options),
        steps_row(config.trainer, total_steps),
        *adapter_rows(config.model),
    ]
