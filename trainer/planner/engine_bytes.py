"""The memory of a rollout engine and of a weight update on one device."""

from __future__ import annotations

from trainer.planner.model_shape import ModelShape
from trainer.planner.networks import FP32, HeldNetwork
from trainer.planner.pass_bytes import Pass, layer_work
from workers.engines.lean_decoder import PACKED_ELEMENTS


def kv_bytes_per_token(shape: ModelShape, size: int, tensor_parallel: int = 1) -> float:
    """Returns the KV cache bytes per token on one of the devices of an engine."""
    # more devices than heads repeat heads
    divisor = min(tensor_parallel, shape.kv_heads)
    return size * shape.kv_per_token / divisor


def engine_work(
    shape: ModelShape,
    size: int,
    batched_tokens: int,
    sequences: int,
    tensor_parallel: int = 1,
) -> float:
    """Returns the temporary bytes of a step of the rollout engine.

    These are the larger of two: those of a prefill, and the fp32 logits of all running sequences with the tensors that
    sampling derives from them.

    Args:
        shape: Shape of the policy.
        size: Bytes per element.
        batched_tokens: Tokens of the prefill.
        sequences: Number of running sequences.
        tensor_parallel: Number of devices of the engine.
    """
    # no predicted tokens, because the logits of all sequences are counted below
    prefill_pass = Pass(tokens=batched_tokens, predicted=0, chunk=1, size=size)
    prefill = layer_work(shape, prefill_pass) / tensor_parallel
    sampling = 4.0 * FP32 * sequences * shape.vocab
    return max(prefill, sampling)


def copied_matrices(shape: ModelShape) -> float:
    """Returns the bytes of the matrices that the hf engine keeps a second time while it decodes in fp32 on a CPU."""
    if not shape.is_lean:
        return 0.0
    # small matrices are not faster in oneDNN's layout, and are not copied
    copied_elements = 0
    for elements in shape.projections:
        if elements >= PACKED_ELEMENTS:
            copied_elements += elements
    return float(FP32 * copied_elements)


def sync_bytes(network: HeldNetwork, bucket_bytes: int, *, on_cpu: bool = False) -> float:
    """Returns the bytes of weights gathered for the rollout engine.

    A bucket is gathered from this rank's part of it; gloo, on a CPU, fills a copy of the bucket first. Then one tensor
    after the other is copied out of the bucket. A single rank passes its own tensors, and converts them one at a time
    if the dtype differs.
    """
    shape = network.shape
    largest_parameters = max(shape.embedding, shape.layer_parameters)
    largest_tensor = float(network.compute * largest_parameters)
    if network.ranks == 1:
        # an adapter is trained on weights that are in the compute dtype already
        is_converted = network.compute != FP32 and not network.adapter
        return largest_tensor if is_converted else 0.0

    # a bucket is never smaller than the largest tensor, and never larger than the model
    bucket = max(float(bucket_bytes), largest_tensor)
    all_weights = float(network.compute * shape.parameters)
    bucket = min(all_weights, bucket)
    own_part = bucket / network.ranks
    gathering = own_part + bucket
    if on_cpu:
        gathering += bucket
    copying = bucket + largest_tensor
    return max(gathering, copying) + FP32 * network.adapter
