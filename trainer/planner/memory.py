"""Bytes on one device, calculated: of a network held by the training engine, of a pass through it, of a rollout engine
and of a weight update. Pure functions of shapes.

They follow the code that does it: `workers/engine/fsdp.py` (FSDP2; masters and moments in fp32, frozen weights in the
compute dtype, gradients local until the last micro-batch), `workers/policy/causal_lm.py` (logits in chunks),
`workers/engine/parameters.py` (buckets) and `workers/rollout`. Sizes are bytes of a number: 4 for fp32, 2 for bf16.
`python -m tests.bench plan_memory` compares them with a run.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainer.planner.model_shape import ModelShape
from verl_lite.device import KEPT_FREED_BYTES

FP32 = 4
MOMENTS = 2 * FP32  # AdamW's two, of each number that learns
KEPT_LOGITS_BYTES = 32 << 20  # workers.policy.causal_lm: up to this size they are kept for the backward pass
SHARD = "gradients, this rank's shard"
GATHERED_LAYERS = 2  # the layer that computes, and the next one on its way


@dataclass(frozen=True)
class HeldNetwork:
    """A network as an FSDP engine holds it.

    ranks: over which one copy is spread. compute, reduce: bytes of a number in forward and backward, and in the
    reduction of gradients. trained: numbers that learn: all, an adapter's, or 0 of a frozen one. adapter: those of an
    adapter. reshard: gathered weights are freed after the forward. reduces_each: gradients are reduced after each
    micro-batch.
    """

    shape: ModelShape
    ranks: int
    compute: int
    reduce: int = FP32
    trained: int = 0
    adapter: int = 0
    reshard: bool = True
    reduces_each: bool = False

    @property
    def weights(self) -> float:
        """This rank's shard: masters in fp32 where all learns, else the compute dtype and an adapter in fp32."""
        size = FP32 if self.trained and not self.adapter else self.compute
        return (size * self.shape.parameters + FP32 * self.adapter) / self.ranks

    @property
    def moments(self) -> float:
        """This rank's shard of AdamW's state."""
        return MOMENTS * self.trained / self.ranks

    def gradient_shard(self, micro_batches: int) -> float:
        """This rank's shard of the reduced gradients, in fp32 as the masters. Where whole ones have added up, it takes
        their place layer by layer; counted is what it needs beyond them."""
        shard = FP32 * self.trained / self.ranks
        return max(0.0, shard - self.whole_gradients(micro_batches)) if self._adds_up(micro_batches) else shard

    def _adds_up(self, micro_batches: int) -> bool:
        return micro_batches > 1 and not self.reduces_each

    @property
    def gathered(self) -> float:
        """Whole weights in a pass: of the root (embedding, output layer) and two layers, or of all layers."""
        shape, layers = self.shape, GATHERED_LAYERS if self.reshard else self.shape.layers
        per_layer = self.compute * shape.layer_parameters + FP32 * self.adapter / shape.layers
        return self.compute * shape.root_parameters + min(layers, shape.layers) * per_layer

    def whole_gradients(self, micro_batches: int) -> float:
        """Gradients before they are reduced. With several micro-batches they add up whole on every rank, in the dtype
        of the reduction; with one, or where each reduces its own, only those of the root and of two layers exist
        together, on their way."""
        if not self.trained:
            return 0.0
        shape = self.shape
        if self._adds_up(micro_batches):
            return float(self.reduce * self.trained)
        if self.adapter:
            return 2.0 * FP32 * self.adapter * GATHERED_LAYERS / shape.layers
        parts = shape.root_parameters + min(GATHERED_LAYERS, shape.layers) * shape.layer_parameters
        return float((self.compute + self.reduce) * parts)


# -- a pass ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pass:
    """Tokens of one micro-batch. tokens: in the packed row. predicted: of which log-probs are asked. chunk: whose
    logits exist at one time. size: bytes of a number. repeated: tokens that attention sees besides, because answers to
    one prompt share its tokens in all other layers."""

    tokens: int
    predicted: int
    chunk: int
    size: int
    entropy: bool = False
    repeated: int = 0


def layer_activations(shape: ModelShape, run: Pass, *, has_adapter: bool = False) -> float:
    """What the backward pass of one layer needs: the inputs of both norms (in fp32), normed and scaled; query, key,
    value and output of the attention; gate, its activation, up and their product. An adapter in fp32 beside bf16
    weights keeps the input of each linear layer as an fp32 copy of its own."""
    size, hidden, query, kv, inner = run.size, shape.hidden, shape.query, shape.kv, shape.active_inner
    norms = 2 * _norm(hidden, size) + shape.head_norms * (_norm(query, size) + _norm(kv, size))
    attention = size * (3 * query + 2 * kv)
    repeated = size * (2 * query + 2 * kv) * run.repeated + (size * query * run.tokens if run.repeated else 0)
    copies = FP32 * (3 * hidden + query + 2 * hidden + inner) if has_adapter and size != FP32 else 0
    return run.tokens * float(norms + attention + size * 4 * inner + copies) + repeated


def _norm(width: int, size: int) -> int:
    """Of one token: the input in fp32, the normed one, and that times the weight."""
    return (FP32 + 2 * size) * width


def layer_work(shape: ModelShape, run: Pass) -> float:
    """What comes and goes inside a layer's forward: residual and its norm, and the larger of attention and MLP."""
    attention = 3 * shape.query + 4 * shape.kv
    return run.tokens * float(run.size * (3 * shape.hidden + max(attention, 3 * shape.active_inner)))


def logits_bytes(shape: ModelShape, run: Pass) -> float:
    """One chunk of logits, in fp32."""
    if not shape.has_head:
        return 0.0
    keeps = run.predicted * shape.vocab * FP32 <= KEPT_LOGITS_BYTES
    return float(FP32 * shape.vocab * (run.predicted if keeps else min(run.chunk, run.predicted)))


def forward_only(network: HeldNetwork, run: Pass) -> dict[str, float]:
    """A pass without gradient: what is there at the same time, beside the engine's own shards."""
    shape = network.shape
    copies = 2 + (run.size != FP32) / 2 + run.entropy  # the old chunk or an exponential beside the new one
    return {
        "gathered weights": network.gathered,
        "activations": layer_work(shape, run) + run.size * run.tokens * shape.hidden,
        "logits": copies * logits_bytes(shape, run),
    }


def training_pass(network: HeldNetwork, run: Pass, micro_batches: int, *, checkpointing: bool) -> dict[str, float]:
    """Forward and backward of one micro-batch: the most that is there at the same time, beside the engine's own shards.

    Either the output layer's part (all activations, logits, its own gradient) or that of the first layers (all
    gradients, one layer's work) is the peak; both are bounded by activations and gradients together.
    """
    shape = network.shape
    has_adapter = bool(network.adapter)
    layer = layer_activations(shape, run, has_adapter=has_adapter)
    hidden = float(run.size * run.tokens * shape.hidden)
    kept = shape.layers * hidden if checkpointing else shape.layers * layer
    work = (layer if checkpointing else 0.0) + run.tokens * float(run.size * 3 * shape.active_inner) + 2 * hidden
    logits, ends = logits_bytes(shape, run), run.tokens * _norm(shape.hidden, run.size)
    learns_head = network.trained and not has_adapter and shape.has_head
    head_gradient = 2.0 * FP32 * shape.embedding if learns_head else 0.0
    at_head = (
        (3 + (run.size != FP32) / 2 + run.entropy) * logits
        + head_gradient
        + 2 * run.size * run.predicted * shape.hidden
    )
    parts = {
        "gathered weights": network.gathered,
        "gradients before their reduction": network.whole_gradients(micro_batches),
        "kept activations": kept + ends,
    }
    if at_head > work:
        parts["logits and output layer"] = at_head
    else:
        parts["one layer"] = work
    return parts | {SHARD: network.gradient_shard(micro_batches)}


def kept_when_freed(parts: dict[str, float], micro_batches: int) -> float:
    """On a CPU, of a training pass: what the C library keeps (`verl_lite.device.keep_freed_memory`) in pieces that the
    next micro-batch, of other lengths, cannot use. Measured: about as much as comes and goes in a mini-batch."""
    comes_and_goes = sum(size for name, size in parts.items() if name != SHARD)
    return min(float(KEPT_FREED_BYTES), comes_and_goes) if micro_batches > 1 else 0.0


# -- rollout and sync --------------------------------------------------------------------------------------------------


def kv_bytes_per_token(shape: ModelShape, size: int, tensor_parallel: int = 1) -> float:
    """Of the KV cache of one sequence's token, on one of the devices that share an engine."""
    return size * shape.kv_per_token / min(tensor_parallel, shape.kv_heads)  # beyond, the heads are repeated


def engine_weights(shape: ModelShape, size: int, tensor_parallel: int = 1) -> float:
    """The rollout engine's own weights, on one device."""
    return size * shape.parameters / tensor_parallel


def engine_work(shape: ModelShape, size: int, batched_tokens: int, sequences: int, tensor_parallel: int = 1) -> float:
    """What comes and goes in a step of the rollout engine: a prefill of batched_tokens, or the logits of all running
    sequences with what sampling makes of them (fp32)."""
    run = Pass(batched_tokens, 0, 1, size)
    prefill = layer_work(shape, run) / tensor_parallel
    return max(prefill, 4.0 * FP32 * sequences * shape.vocab)


def sync_bytes(network: HeldNetwork, bucket_bytes: int) -> float:
    """Whole weights on their way to the rollout engine: a bucket gathered, the same as tensors of its own, and this
    rank's part. One rank hands its own tensors over; where they have another dtype, one at a time."""
    shape = network.shape
    largest = float(network.compute * max(shape.embedding, shape.layer_parameters))
    if network.ranks == 1:
        return 0.0 if network.compute == FP32 or network.adapter else largest
    whole = min(float(network.compute * shape.parameters), max(float(bucket_bytes), largest))
    return whole * (2 + 1 / network.ranks) + FP32 * network.adapter
