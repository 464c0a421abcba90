"""Lower bounds on the time of each stage of a training step, by a roofline model.

The time of a stage is the longer of its operations over the device's peak and its bytes over the bandwidth, each
reduced to the share that is assumed to be reached. It is a lower bound: all answers are assumed to be equally long, so
the engine is always full and no device waits for the slowest. Scheduling, sampling, rewards, the driver, validation and
checkpoints are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from trainer.planner.accelerators import Accelerator
from trainer.planner.memory import distinct_prompts, memory_plan, mini_batch_prompts, rows_per_step
from trainer.planner.model_shape import ModelShape
from trainer.planner.networks import Networks, compute_size, ranks_of_a_copy, recomputed_layers, trained_parameters
from trainer.ppo.requirements import needs_old_log_prob, needs_reference
from verl_lite.config import NetworkConfig, PPOConfig
from verl_lite.config.pools import num_engines

# seconds; shorter bounds say little, because the uncounted work takes longer
LEAST_S = 0.1
# share of generation in the step above which the plan gives advice on shortening it
MOST = 0.7
ARITHMETIC, READING, WIRE = "arithmetic", "reading weights, keys and values", "weights and gradients between devices"


class Stage(NamedTuple):
    """The time of a stage and the resource that bounds it."""

    seconds: float
    bound: str = ARITHMETIC


class Lengths(NamedTuple):
    """Mean number of tokens of a prompt and of an answer."""

    prompt: float
    response: float


def forward_flops(shape: ModelShape, tokens: float, length: float, predicted: float | None = None) -> float:
    """Returns the operations of a forward pass: two per weight and token, plus causal attention (two products of
    queries with half of the keys).

    Args:
        tokens: Number of tokens, in sequences of `length`.
        predicted: Number of tokens whose logits are computed; None: of all.
    """
    weights_per_token = 2.0 * shape.multiplied
    attention_per_token = 2.0 * shape.layers * shape.query * length
    operations = tokens * (weights_per_token + attention_per_token)
    if predicted is None or not shape.has_head:
        return operations
    return operations - 2.0 * (tokens - predicted) * shape.embedding


def generation_stages(
    shape: ModelShape,
    device: Accelerator,
    mean: Lengths,
    sequences: float,
    prompts: float,
    at_once: int,
    size: int,
    devices: int = 1,
) -> tuple[Stage, Stage]:
    """Returns the prefill and decode stages of one rollout engine in a training step.

    A decode step reads the weights once, and the keys and values of all running answers.

    Args:
        shape: Shape of the policy.
        device: Kind of the devices.
        mean: Mean lengths.
        sequences: Number of answers; they run in waves of `at_once`.
        prompts: Number of different prompts.
        at_once: Number of answers that the engine decodes at a time.
        size: Bytes per element.
        devices: Number of devices of the engine.
    """
    prefill_flops = forward_flops(shape, prompts * mean.prompt, mean.prompt, predicted=prompts)
    if shape.tower is not None:
        prefill_flops += shape.tower.flops(prompts, mean.prompt)
    prefill_rate = device.flops * devices * device.prefill
    prefill = Stage(prefill_flops / prefill_rate)

    # a decode step is limited by reading as long as few answers share each read of the weights
    running = min(float(at_once), sequences)
    # the mean over the steps in which an answer grows from nothing to its length
    context = mean.prompt + mean.response / 2
    weights_read = shape.parameters
    if shape.experts and running < shape.experts:
        # few tokens do not reach all experts; the bound counts those of one token
        weights_read = shape.multiplied
    cache_read = running * context * shape.kv_per_token
    bytes_read = size * (weights_read + cache_read) / devices
    # one query for all keys, so twice the operations per token of `forward_flops`, which counts half of the keys
    flops_per_answer = 2.0 * shape.multiplied + 4.0 * shape.layers * shape.query * context
    flops = running * flops_per_answer / devices
    reading = Stage(bytes_read / (device.bandwidth * device.reading), READING)
    arithmetic = Stage(flops / (device.flops * device.prefill))
    # the longer of the two: stages compare by their seconds
    step_seconds, bound = max(reading, arithmetic)
    step_seconds += shape.layers * device.layer_s

    # answers are decoded in waves of `at_once`, with one step for each token
    waves = math.ceil(sequences / at_once)
    steps = waves * mean.response
    return prefill, Stage(steps * step_seconds, bound)


@dataclass(frozen=True)
class Spread:
    """The placement of a network on the devices of a run.

    Attributes:
        ranks: Number of adjacent ranks that share one copy.
        copies: Number of copies.
        per_node: Devices per machine.
    """

    ranks: int
    copies: int = 1
    per_node: int = 8

    def gather_seconds(self, whole: float, device: Accelerator) -> float:
        """Returns the time to gather `whole` bytes from the ranks of a copy, or to reduce-scatter them."""
        # each rank has its own part already
        received = whole * (self.ranks - 1) / self.ranks
        return received / self._bandwidth(device, self.ranks)

    def all_reduce_seconds(self, whole: float, device: Accelerator) -> float:
        """Returns the time to sum a rank's part of `whole` bytes over the copies."""
        # a sum needs a reduce-scatter and a gather
        bytes_both_ways = 2.0 * whole / self.ranks
        received = bytes_both_ways * (self.copies - 1) / self.copies
        all_ranks = self.ranks * self.copies
        return received / self._bandwidth(device, all_ranks)

    def _bandwidth(self, device: Accelerator, ranks: int) -> float:
        """Returns the bandwidth of the slowest connection among this many adjacent ranks."""
        if ranks <= self.per_node:
            return device.link
        return device.network


def reduction_seconds(
    whole: float,
    trained: int,
    spread: Spread,
    device: Accelerator,
    micro_batches: int,
    reductions: int,
) -> float:
    """Returns the time of the communication in an update: gathering weights and summing fp32 gradients.

    The weights are gathered for forward and backward of each micro-batch. The traffic overlaps with arithmetic, so the
    longer of the two is the lower bound.

    Args:
        whole: Bytes of all weights.
        trained: Number of trained parameters.
        spread: Placement of the network.
        device: Kind of the devices.
        micro_batches: Number of micro-batches.
        reductions: Number of times that the gradients are summed.
    """
    gather = spread.gather_seconds(whole, device)
    gradient_bytes = 4.0 * trained
    reduce_scatter = spread.gather_seconds(gradient_bytes, device)
    reduction = reduce_scatter + spread.all_reduce_seconds(gradient_bytes, device)
    return 2.0 * micro_batches * gather + reductions * reduction


def step_stages(
    config: PPOConfig,
    networks: Networks,
    slots: int,
    device: Accelerator,
    mean: Lengths,
) -> dict[str, Stage]:
    """Returns the stages of a training step by name."""
    plan = memory_plan(config, networks, slots, device)
    passes = _Passes.of_run(config, slots, device, mean, plan.micro_batches)
    prefill, decode = _generation(config, networks.policy, slots, device, mean, plan.sequences)
    stages = {"generation: prompts": prefill, "generation: answers": decode}

    if networks.reward_model is not None:
        stages["reward model"] = passes.forward(networks.reward_model)
    if needs_old_log_prob(config):
        stages["old log-probs"] = passes.forward(networks.policy)
    if needs_reference(config):
        stages["reference log-probs"] = passes.forward(networks.policy)
    for teacher in config.distillation.named_teachers():
        # a teacher behind a URL computes on its own server; one without a model is the policy
        if not teacher.url:
            shape = networks.teachers.get(teacher.name, networks.policy)
            stages[f"teacher {teacher.name}: log-probs"] = passes.forward(shape)
    if networks.critic is not None:
        stages["values"] = passes.forward(networks.critic)
        epochs = config.critic.ppo_epochs or config.actor.ppo_epochs
        stages["critic update"] = passes.update(networks.critic, config.critic.model, epochs)

    freezes_tower = config.actor.freeze_vision_tower
    trained, adapter = trained_parameters(config.model, networks.policy, freezes_tower=freezes_tower)
    # communication overlaps with arithmetic, so the longer of the two bounds the update
    arithmetic = passes.update(
        networks.policy,
        config.model,
        config.actor.ppo_epochs,
        trains_tower=trained == networks.policy.parameters,
        has_adapter=adapter > 0,
    )
    wire, sync = _traffic(config, networks.policy, slots, device, trained, plan.micro_batches)
    stages["update"] = max(arithmetic, wire)
    stages["weight sync"] = sync
    return stages


def _generation(
    config: PPOConfig,
    policy: ModelShape,
    slots: int,
    device: Accelerator,
    mean: Lengths,
    sequences: int,
) -> tuple[Stage, Stage]:
    """Returns the prefill and decode stages of a step.

    Args:
        config: Options of the run.
        policy: Shape of the policy.
        slots: Number of devices.
        device: Kind of the devices.
        mean: Mean lengths.
        sequences: Number of answers that an engine can decode at a time.
    """
    rollout = config.rollout
    # the answers of a step are divided equally among the engines
    engines = num_engines(config, slots)
    answers = rows_per_step(config)
    prompts: float = answers
    if config.reads_prompts:
        # answers to one prompt share its prefill
        prompts = answers / rollout.n
    return generation_stages(
        policy,
        device,
        mean,
        sequences=answers / engines,
        prompts=max(1.0, prompts / engines),
        at_once=max(1, sequences),
        size=compute_size(rollout.dtype, device),
        devices=rollout.tensor_model_parallel_size,
    )


@dataclass(frozen=True)
class _Passes:
    """The arithmetic of passes through a network on one device.

    Attributes:
        rows: Answers of a step on this device.
        rows_together: Answers in a micro-batch. Answers to the same prompt in a micro-batch share its tokens.
        prompts_of_mini_batch: Prompts of an optimizer step, on all devices.
    """

    config: PPOConfig
    device: Accelerator
    mean: Lengths
    rows: float
    rows_together: int
    prompts_of_mini_batch: int

    @classmethod
    def of_run(cls, config: PPOConfig, slots: int, device: Accelerator, mean: Lengths, micro_batches: int) -> _Passes:
        """Returns the passes of a run.

        Args:
            config: Options of the run.
            slots: Number of devices.
            device: Kind of the devices.
            mean: Mean lengths.
            micro_batches: Number of micro-batches of a mini-batch on each device.
        """
        actor = config.actor
        answers = rows_per_step(config)
        prompts = mini_batch_prompts(config, -1)
        prompts_of_mini_batch = mini_batch_prompts(config, actor.ppo_mini_batch_size)
        # devices that share their sequences have one micro-batch together
        groups = slots / actor.ulysses_sequence_parallel_size
        rows_of_group = answers / groups
        rows_of_mini_batch = rows_of_group * prompts_of_mini_batch / prompts
        rows_together = max(1, round(rows_of_mini_batch / micro_batches))
        return cls(config, device, mean, answers / slots, rows_together, prompts_of_mini_batch)

    def forward(self, shape: ModelShape) -> Stage:
        """Returns the time of a forward pass over the device's rows."""
        whole, _ = self._flops(shape)
        flops = whole + self._tower_flops(shape)
        return self._stage(flops)

    def update(
        self,
        shape: ModelShape,
        model: NetworkConfig,
        epochs: int,
        *,
        trains_tower: bool = False,
        has_adapter: bool = False,
    ) -> Stage:
        """Returns the time of forward and backward passes over the device's rows.

        A backward pass counts as two forward passes, with an adapter as one, because the weights get no gradient.
        Gradient checkpointing adds a forward pass of the recomputed layers. The backward pass of the output layer
        always computes the logits again.

        Args:
            trains_tower: The vision tower is trained; otherwise its backward pass is left out.
        """
        # the backward pass computes the logits again, tile by tile
        whole, layers = self._flops(shape)
        output_layer = whole - layers
        recomputed = recomputed_layers(model, shape) / shape.layers
        passes = 2 if has_adapter else 3
        tower_passes = 1
        if trains_tower:
            # with gradient checkpointing, all blocks of a tower are recomputed
            tower_passes = 4 if model.enable_gradient_checkpointing else 3
        flops_of_epoch = passes * whole + recomputed * layers + output_layer
        flops_of_epoch += tower_passes * self._tower_flops(shape)
        return self._stage(epochs * flops_of_epoch)

    def _stage(self, flops: float) -> Stage:
        """Returns the time of this many operations in training."""
        rate = self.device.flops * self.device.training
        return Stage(flops / rate)

    def _num_prompts(self, shape: ModelShape) -> float:
        """Returns the number of prompts whose tokens this device computes, in all micro-batches of a step.

        A prompt that several rows of a micro-batch share is computed once, if the network supports it.
        """
        distinct = distinct_prompts(self.config, shape, self.rows_together, self.prompts_of_mini_batch)
        return self.rows * distinct / self.rows_together

    def _flops(self, shape: ModelShape) -> tuple[float, float]:
        """Returns the operations of a forward pass over this device's rows of a step: of the whole network, and of its
        layers alone."""
        predicted = self.rows * self.mean.response
        prompt_tokens = self._num_prompts(shape) * self.mean.prompt
        tokens = predicted + prompt_tokens
        row_length = sum(self.mean)
        whole = forward_flops(shape, tokens, row_length, predicted)
        layers = forward_flops(shape, tokens, row_length, predicted=0)
        return whole, layers

    def _tower_flops(self, shape: ModelShape) -> float:
        """Returns the operations of a forward pass of the images through the vision tower."""
        if shape.tower is None:
            return 0.0
        return shape.tower.flops(self._num_prompts(shape), self.mean.prompt)


def _traffic(
    config: PPOConfig,
    policy: ModelShape,
    slots: int,
    device: Accelerator,
    trained: int,
    micro_batches: int,
) -> tuple[Stage, Stage]:
    """Returns the time of an update's communication, and of the weight update.

    Args:
        config: Options of the run.
        policy: Shape of the policy.
        slots: Number of devices.
        device: Kind of the devices.
        trained: Number of trained parameters.
        micro_batches: Number of micro-batches of a mini-batch on each device.
    """
    actor = config.actor
    fsdp = config.actor.fsdp_config
    ranks = ranks_of_a_copy(fsdp, slots)
    spread = Spread(ranks, copies=slots // ranks, per_node=slots // config.trainer.nnodes)
    size = compute_size(fsdp.mixed_precision.param_dtype, device)
    weight_bytes = float(size * policy.parameters)

    # gradients are reduced once for each optimizer step, or for each micro-batch
    prompts = mini_batch_prompts(config, -1)
    prompts_of_mini_batch = mini_batch_prompts(config, actor.ppo_mini_batch_size)
    mini_batches = math.ceil(prompts / prompts_of_mini_batch)
    optimizer_steps = actor.ppo_epochs * mini_batches
    passes = optimizer_steps * micro_batches
    reductions = passes if fsdp.reduce_every_micro_batch else optimizer_steps
    update = reduction_seconds(weight_bytes, trained, spread, device, passes, reductions)

    # the weights are gathered, and then copied into the engine, which reads and writes each byte
    copying = 2 * weight_bytes / device.bandwidth
    sync = spread.gather_seconds(weight_bytes, device) + copying
    return Stage(update, WIRE), Stage(sync, WIRE)


def time_lines(config: PPOConfig, networks: Networks, slots: int, device: Accelerator, mean: Lengths) -> Iterator[str]:
    """Yields lines with the seconds of each stage, the assumptions, and advice if generation dominates the step."""
    plan = memory_plan(config, networks, slots, device)
    if plan.sequences < 1:
        yield "no time of a step: the engine has no room for one sequence (see above)"
        return
    stages = step_stages(config, networks, slots, device, mean)
    step_seconds = sum(stage.seconds for stage in stages.values())
    yield f"{'lower bound on the time of a step':<44}{'s':>8}          bounded by"
    for name, (seconds, bound) in stages.items():
        yield f"  {name:<42}{_shown(seconds):>8}   {seconds / step_seconds:4.0%}   {bound}"
    tokens = rows_per_step(config) * sum(mean)
    tokens_per_second = tokens / step_seconds / slots
    speed = f"{tokens_per_second:,.0f} tokens/s and device"
    if step_seconds < LEAST_S:
        speed = "for a model this small, uncounted work (kernel launches, scheduling, the driver) takes longer"
    yield f"{'a step':<44}{_shown(step_seconds):>8}   {speed}"
    yield (
        f"  peaks of {device.name}: {device.flops / 1e12:.3g} TFLOP/s, {device.bandwidth / 1e12:g} TB/s; assumed: "
        f"{device.training:.0%} of the first in training, {device.prefill:.0%} in prefill, {device.reading:.0%} of the "
        f"second; prompts of {mean.prompt:g} tokens (--mean_prompt), answers of {mean.response:g} (--mean_response), "
        "all equally long"
    )
    generation_seconds = stages["generation: prompts"].seconds + stages["generation: answers"].seconds
    share = generation_seconds / step_seconds
    if share > MOST and step_seconds >= LEAST_S:
        yield f"generation takes {share:.0%} of the step. To shorten it:"
        for advice in _generation_advice(config, plan.sequences, slots, device, mean):
            yield f"  {advice}"


def _shown(seconds: float) -> str:
    """Returns seconds as text; of a time below LEAST_S only that it is less."""
    if seconds < LEAST_S:
        return f"<{LEAST_S}"
    return f"{seconds:.1f}"


def _generation_advice(
    config: PPOConfig,
    sequences: int,
    slots: int,
    device: Accelerator,
    mean: Lengths,
) -> Iterator[str]:
    """Yields advice for shorter generation: memory for more concurrent answers, shorter answers, more devices.

    Args:
        config: Options of the run.
        sequences: Number of answers that an engine can decode at a time.
        slots: Number of devices.
        device: Kind of the devices.
        mean: Mean lengths.
    """
    rollout = config.rollout
    answers = math.ceil(rows_per_step(config) * rollout.tensor_model_parallel_size / slots)
    if sequences < answers:
        if sequences == rollout.max_num_seqs:
            option = "rollout.max_num_seqs"
        elif device.name == "cpu":
            option = "rollout.kv_cache_memory_mb"
        else:
            option = "rollout.gpu_memory_utilization or rollout.tensor_model_parallel_size (devices of an engine)"
        yield f"an engine decodes {sequences:,} of its {answers:,} answers at a time: raise {option}"
    if mean.response == config.data.max_response_length:
        yield "all answers are assumed to have the maximal length: set the expected length with --mean_response"
    yield "use a smaller data.max_response_length, a smaller rollout.n, or more devices"
