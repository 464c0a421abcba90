"""The memory of a rollout engine and of a weight update on one device."""

from __future__ import annotations

from trainer.planner.model_shape import ModelShape
from trainer.planner.networks import FP32, HeldNetwork
from trainer.planner.pass_bytes import Pass, layer_work
from workers.engines.lean_decoder import PACKED_ELEMENTS


def kv_bytes_per_token(shape: ModelShape, size: int, tensor_parallel: int = 1) -> float:
    """Returns the KV cache bytes per token on one of the devices of an engine."""
    # more devices than heads repeat heads
    return size * shape.kv_per_token / min(tensor_parallel, shape.kv_heads)


def engine_work(shape: ModelShape, size: int, batched_tokens: int, sequences: int, tensor_parallel: int = 1) -> float:
    """Returns the temporary bytes of a step of the rollout engine: of a prefill with batched_tokens tokens, or of the
    fp32 logits of all running sequences with the tensors that sampling derives from them."""
    # no predicted tokens, because the logits of all sequences are counted below
    run = Pass(batched_tokens, 0, 1, size)
    prefill = layer_work(shape, run) / tensor_parallel
    return max(prefill, 4.0 * FP32 * sequences * shape.vocab)


def copied_matrices(shape: ModelShape) -> float:
    """Returns the bytes of the matrices that the hf engine keeps a second time while it decodes in fp32 on a CPU."""
    if not shape.is_lean:
        return 0.0
    # small matrices are not faster in oneDNN's layout, and are not copied
    large = [elements for elements in shape.projections if elements >= PACKED_ELEMENTS]
    return float(FP32 * sum(large))


def sync_bytes(network: HeldNetwork, bucket_bytes: int, *, on_cpu: bool = False) -> float:
    """Returns the bytes of weights gathered for the rollout engine.

    A bucket is gathered from this rank's part of it; gloo, on a CPU, fills a copy of the bucket first. Then one tensor
    after the other is copied out of the bucket. A single rank passes its own tensors, and converts them one at a time
    if the dtype differs.
    """
    shape = network.shape
    # a bucket is never smaller than the largest tensor
    largest = float(network.compute * max(shape.embedding, shape.layer_parameters))
    if network.ranks == 1:
        is_converted = network.compute != FP32 and not network.adapter
        return largest if is_converted else 0.0
    whole = min(float(network.compute * shape.parameters), max(float(bucket_bytes), largest))
    gathering = whole * (1 + on_cpu + 1 / network.ranks)
    copying = whole + largest
    return max(gathering, copying) + FP32 * network.adapter
