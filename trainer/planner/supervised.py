"""Predicts the batches and the memory of supervised training, from the parts of `trainer.planner.memory`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from trainer.planner import memory
from trainer.planner.accelerators import Accelerator
from trainer.planner.batch import PlanRow, adapter_rows, slots_text
from trainer.planner.memory import HeldNetwork, MemoryPlan, Pass
from trainer.planner.model_shape import read_shape
from trainer.resources import WORKER_BYTES
from verl_lite.config import SFTConfig, SupervisedConfig
from verl_lite.config.supervised import LOG_PROB_CHUNK_TOKENS


@dataclass(frozen=True)
class Batch:
    """The size of an optimizer step or of a validation. rows: sequences, or pairs. longest: tokens of the longest row.
    tokens: of all rows. predicted: tokens in the loss. shared: prompt tokens of second answers, which share them."""

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
    rows, longest = config.data.train_batch_size, (1 + is_of_pairs(config)) * config.data.max_length
    return Batch(rows, longest, rows * longest, rows * longest)


def batches_of(rows: Sequence[Any], batches: Iterable[Sequence[int]]) -> list[Batch]:
    """Returns the sizes of batches. rows: examples or pairs. batches: row numbers of each batch."""
    table = np.array(
        [
            (len(row), sum(sum(text.mask) for text in row.texts), (len(row.texts) - 1) * len(row.texts[0].prompt))
            for row in rows
        ]
    )
    return [Batch(len(batch), int(table[batch, 0].max()), *table[batch].sum(0).tolist()) for batch in batches]


def read_network(config: SupervisedConfig, slots: int, device: Accelerator) -> HeldNetwork:
    """Returns the trained network, from its config.json. Raises UserError if that file is missing."""
    shape = read_shape(config.model)
    shape = shape if isinstance(config, SFTConfig) else shape.as_scorer()
    trained = memory.trained_parameters(config.model, shape, freezes_tower=True)
    return memory.held_network(slots, device, shape, config.fsdp_config, *trained, config.optim.optimizer)


def micro_batches(config: SupervisedConfig, slots: int, batch: Batch) -> tuple[int, int]:
    """Returns the number of micro-batches of a batch on each device, and the tokens of the largest one, which the
    devices of a sequence group share."""
    ranks = config.ulysses_sequence_parallel_size
    budget, tokens = config.data.max_token_len_per_gpu * ranks, math.ceil(batch.tokens * ranks / slots)
    return math.ceil(tokens / budget), min(budget, max(tokens, batch.longest))


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
    held, is_dpo = {"model": network}, isinstance(config, SFTConfig) and config.loss == "dpo"
    if is_dpo and not network.adapter:
        held["reference"] = memory.held_network(slots, device, network.shape, config.fsdp_config)
    weights, moments = memory.place_networks(plan, held, on_cpu)
    shares = config.model.use_remove_padding and network.shape.is_packed

    def micro_batch(batch: Batch) -> Pass:
        ranks, (_, tokens) = config.ulysses_sequence_parallel_size, micro_batches(config, slots, batch)
        part = tokens / batch.tokens / ranks
        shared, predicted = math.ceil(shares * batch.shared * part), math.ceil(batch.predicted * part)
        tile = memory.TILE_BYTES["cpu" if on_cpu else "cuda, compiled" if config.model.compile else "cuda"]
        run = Pass(math.ceil(tokens / ranks) - shared, predicted, LOG_PROB_CHUNK_TOKENS, network.compute, tile=tile)
        return replace(run, repeated=shared, ranks=ranks)

    if is_dpo:
        role = "reference" if "reference" in held else "model"
        plan.phases["reference log-probs"] = weights[role] | memory.forward_only(held[role], micro_batch(step))
    if validation is not None:
        plan.phases["validation"] = weights["model"] | memory.forward_only(network, micro_batch(validation))
    run, (plan.micro_batches, _) = micro_batch(step), micro_batches(config, slots, step)
    recomputed = memory.recomputed_layers(config.model, network.shape)
    if offload := config.model.enable_activation_offload and not on_cpu:
        plan.host["model: activations"] = memory.kept_activations(network, run, recomputed)
    parts = memory.training_pass(network, run, plan.micro_batches, recomputed=recomputed, offload=offload)
    if on_cpu:
        parts[memory.KEPT_FREED] = memory.kept_when_freed(parts)
    plan.phases["update"] = weights["model"] | moments["model"] | parts
    return plan


def supervised_rows(
    config: SupervisedConfig, slots: int, total_steps: int | None, steps: Sequence[Batch]
) -> list[PlanRow]:
    """Returns the plan of batches of a run. steps: sizes of some of its steps."""
    largest = max(steps, key=lambda step: step.tokens)
    tokens, predicted, number = (sum(values) / len(steps) for values in zip(*(
        (step.tokens, step.predicted, micro_batches(config, slots, step)[0]) for step in steps
    ), strict=True))  # fmt: skip
    most, budget = micro_batches(config, slots, largest)[0], config.data.max_token_len_per_gpu
    limit = f"trainer.total_training_steps={config.trainer.total_training_steps}"
    if config.trainer.total_training_steps is None:
        limit = f"trainer.total_epochs={config.trainer.total_epochs}"
    unit = "pairs" if is_of_pairs(config) else "rows"
    full = f"on average {tokens / (number * slots * budget):.0%} full"
    return [
        PlanRow(f"{unit} per training step", f"{largest.rows}", "data.train_batch_size"),
        PlanRow(
            "tokens per training step", f"{tokens:,.0f}", f"on average, {predicted / tokens:.1%} of them in the loss"
        ),
        PlanRow(
            "tokens of the largest step", f"{largest.tokens:,}", f"the longest of the {unit} has {largest.longest}"
        ),
        PlanRow(
            "micro-batches per device and step",
            f"{most}",
            f"at most, on {slots_text(config.trainer, slots)}; data.max_token_len_per_gpu={budget} tokens, {full}",
        ),
        PlanRow("training steps", "?" if total_steps is None else f"{total_steps}", limit),
        *adapter_rows(config.model),
    ]
