"""How long the stages of a training step take at least, by roofline: arithmetic over the device's peak, or bytes over
its bandwidth, whichever is longer, divided by an assumed efficiency. Pure functions of shapes.

Peaks are the vendors' (dense, without sparsity). A real run is slower where lengths are skewed, where a device waits
for the slowest, and by what is not counted: rewards, driver, validation, checkpoints.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainer.planner.model_shape import ModelShape
from verl_lite.config import did_you_mean
from verl_lite.errors import UserError


@dataclass(frozen=True)
class Accelerator:
    """A device. memory_gib: None = the machine's. flops: per second in bf16 (of a CPU core in fp32). bandwidth: of its
    memory, bytes/s. link, network: to other devices of the machine, and of other machines, bytes/s each way. size:
    bytes of a number that it computes in by default."""

    name: str
    memory_gib: float | None
    flops: float
    bandwidth: float
    link: float
    network: float
    size: int = 2


# NVIDIA's data sheets: H100 SXM, H200 SXM, A100 80GB SXM, L40S; memory: what torch reports of one. network: one adapter
# each of 400 Gb/s (A100 200, L40S 100), assumed. cpu: one core of the Zen 4 machine on which this project is measured.
ACCELERATORS = {
    device.name: device
    for device in (
        Accelerator("h100", 79.1, 989e12, 3.35e12, 450e9, 50e9),
        Accelerator("h200", 139.8, 989e12, 4.8e12, 450e9, 50e9),
        Accelerator("a100", 79.2, 312e12, 2.039e12, 300e9, 25e9),
        Accelerator("l40s", 44.4, 362e12, 0.864e12, 32e9, 12.5e9),
        Accelerator("cpu", None, 92e9, 20e9, 10e9, 1e9, size=4),
    )
}


@dataclass(frozen=True)
class Efficiency:
    """Shares of the peak that are assumed to be reached: matrix products in training, in prefill, and bandwidth."""

    training: float = 0.4
    prefill: float = 0.5
    bandwidth: float = 0.5


def accelerator(name: str) -> Accelerator:
    """The device of that name. UserError, with the nearest, if it is not known."""
    found = ACCELERATORS.get(name.lower())
    if found is None:
        near = did_you_mean(name.lower(), ACCELERATORS)
        raise UserError(
            f"--device {name}: expected one of {', '.join(ACCELERATORS)}{near}; for another, take the nearest and its "
            "memory with --memory_gb"
        )
    return found


def forward_flops(shape: ModelShape, tokens: float, length: float) -> float:
    """Of a forward pass over `tokens` in sequences of `length`: two for each number of the weights, and causal
    attention (two products of queries with half of the keys)."""
    return tokens * (2.0 * shape.multiplied + 2.0 * shape.layers * shape.query * length)


def pass_seconds(shape: ModelShape, tokens: float, length: float, device: Accelerator, assumed: Efficiency) -> float:
    """A pass without gradient over a device's tokens."""
    return forward_flops(shape, tokens, length) / (device.flops * assumed.training)


def update_seconds(
    shape: ModelShape,
    tokens: float,
    length: float,
    device: Accelerator,
    assumed: Efficiency,
    *,
    checkpointing: bool,
    has_adapter: bool,
) -> float:
    """Forward, backward (twice a forward; once with an adapter, whose base gets no gradient), and with gradient
    checkpointing the forward again."""
    passes = 1 + (1 if has_adapter else 2) + checkpointing
    return passes * pass_seconds(shape, tokens, length, device, assumed)


@dataclass(frozen=True)
class Generation:
    """What one rollout engine does in a step. sequences, prompts: answers, and different prompts. at_once: answers that
    decode together. size: bytes of a number. devices: that share the engine."""

    sequences: float
    prompts: float
    prompt_length: float
    response_length: float
    at_once: int
    size: int
    devices: int = 1


def generation_seconds(
    shape: ModelShape, run: Generation, device: Accelerator, assumed: Efficiency
) -> tuple[float, float]:
    """(prefill, decode). A decode step reads the weights once and the keys and values of all running answers; they run
    in waves of `at_once`."""
    prefill = forward_flops(shape, run.prompts * run.prompt_length, run.prompt_length)
    prefill /= device.flops * run.devices * assumed.prefill
    steps = math.ceil(run.sequences / run.at_once) * run.response_length
    together = min(float(run.at_once), run.sequences)
    context = run.prompt_length + run.response_length / 2
    touched = shape.parameters if not shape.experts or together >= shape.experts else shape.multiplied
    read = run.size * (touched + together * context * shape.kv_per_token) / run.devices
    computed = together * (2.0 * shape.multiplied + 4.0 * shape.layers * shape.query * context) / run.devices
    one = max(read / (device.bandwidth * assumed.bandwidth), computed / (device.flops * assumed.prefill))
    return prefill, steps * one


@dataclass(frozen=True)
class Spread:
    """How a network lies on the devices of a run. ranks: that share one copy of it, neighbours. copies: of the whole.
    per_node: devices of a machine."""

    ranks: int
    copies: int = 1
    per_node: int = 8

    def gather_seconds(self, whole: float, device: Accelerator) -> float:
        """`whole` bytes gathered from the ranks that share them, or summed and left to them in parts."""
        return whole * (self.ranks - 1) / self.ranks / self._bandwidth(device, self.ranks)

    def all_reduce_seconds(self, whole: float, device: Accelerator) -> float:
        """A rank's part of `whole` bytes summed over the copies."""
        part = 2.0 * whole / self.ranks
        return part * (self.copies - 1) / self.copies / self._bandwidth(device, self.ranks * self.copies)

    def _bandwidth(self, device: Accelerator, ranks: int) -> float:
        return device.link if ranks <= self.per_node else device.network


def sync_seconds(shape: ModelShape, spread: Spread, size: int, device: Accelerator) -> float:
    """Weights gathered from the ranks that share them, and copied into the rollout engine."""
    whole = float(size * shape.parameters)
    return spread.gather_seconds(whole, device) + 2 * whole / device.bandwidth


def reduction_seconds(
    shape: ModelShape, trained: int, spread: Spread, size: int, device: Accelerator, micro_batches: int, reductions: int
) -> float:
    """Weights gathered for forward and backward of each micro-batch, and fp32 gradients summed `reductions` times. It
    overlaps with arithmetic: a floor where that is shorter."""
    gathered = 2.0 * micro_batches * spread.gather_seconds(float(size * shape.parameters), device)
    gradients = 4.0 * trained
    summed = spread.gather_seconds(gradients, device) + spread.all_reduce_seconds(gradients, device)
    return gathered + reductions * summed
