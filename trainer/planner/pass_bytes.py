"""The memory of one micro-batch on one device: activations, logits, gradients.

The formulas follow `workers/engine/fsdp.py` (gradients are reduced after the last micro-batch) and
`workers/policy/output_layer.py` (logits in tiles). Parameters called `size` are bytes per element: 4 for fp32, 2 for
bf16.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trainer.planner.memory_table import SHARD, TOWER, WHOLE_GRADIENTS
from trainer.planner.model_shape import ModelShape
from trainer.planner.networks import FP32, HeldNetwork
from verl_lite.config import NetworkConfig
from verl_lite.machine.device import KEPT_FREED_BYTES
from workers.policy.activations import AHEAD
from workers.policy.output_layer import KEPT_LOGITS_BYTES, TILE_BYTES


@dataclass(frozen=True)
class Pass:
    """The size of one micro-batch on one rank.

    Attributes:
        tokens: Length of the packed row.
        predicted: Tokens whose log-probs are computed.
        chunk: Maximum tokens of a tile of logits.
        size: Bytes per element.
        entropy: Whether the entropy is computed.
        repeated: Additional tokens in attention, where each answer has its own copy of a prompt that is shared in all
            other layers.
        ranks: Number of ranks that share each sequence; the numbers of tokens are one rank's part.
        tile: Maximum bytes of a tile of logits.
        images: Tokens of images.
    """

    tokens: int
    predicted: int
    chunk: int
    size: int
    entropy: bool = False
    repeated: int = 0
    ranks: int = 1
    tile: int = TILE_BYTES["cuda"]
    images: int = 0


def tile_bytes(model: NetworkConfig, *, on_cpu: bool) -> int:
    """Returns the maximum bytes of a tile of logits."""
    if on_cpu:
        return TILE_BYTES["cpu"]
    if model.compile:
        return TILE_BYTES["cuda, compiled"]
    return TILE_BYTES["cuda"]


def layer_activations(shape: ModelShape, micro_batch: Pass, *, has_adapter: bool = False) -> float:
    """Returns the bytes that one layer keeps for its backward pass."""
    size = micro_batch.size
    hidden = shape.hidden
    query = shape.query
    # more ranks than heads repeat heads
    kv = shape.kv * max(1, micro_batch.ranks // shape.kv_heads)
    inner = shape.active_inner

    norms = 2 * _norm(hidden, size)
    norms += shape.head_norms * (_norm(query, size) + _norm(kv, size))
    # query, output and its copy; key and value
    attention = size * (3 * query + 2 * kv)
    # gate, activation, up projection and their product
    mlp = size * 4 * inner
    per_token = norms + attention + mlp
    if has_adapter and size != FP32:
        # an fp32 adapter on bf16 weights keeps an fp32 copy of the input of each of the seven linear layers:
        # query, key, value and output; gate, up and down
        attention_inputs = 3 * hidden + query
        mlp_inputs = 2 * hidden + inner
        per_token += FP32 * (attention_inputs + mlp_inputs)

    # attention that cannot share a prompt copies it to each answer, and drops the copies afterwards
    repeated = 0
    if micro_batch.repeated:
        # copies of shared prompts in query, key, value and output, and the output without these copies
        repeated = size * (2 * query + 2 * kv) * micro_batch.repeated
        repeated += size * query * micro_batch.tokens
    return float(micro_batch.tokens * per_token + repeated)


def _norm(width: int, size: int) -> int:
    """Returns the bytes per token that a norm keeps: its fp32 input, the normalized input, and the scaled result."""
    bytes_per_element = FP32 + 2 * size
    return bytes_per_element * width


def layer_work(shape: ModelShape, micro_batch: Pass) -> float:
    """Returns the temporary bytes of a layer's forward: residual, its norm, and the larger of attention and MLP."""
    residual_and_norm = 3 * shape.hidden
    attention = 3 * shape.query + 4 * shape.kv
    mlp = 3 * shape.active_inner
    elements = residual_and_norm + max(attention, mlp)
    return micro_batch.tokens * float(micro_batch.size * elements)


def logits_bytes(shape: ModelShape, micro_batch: Pass) -> float:
    """Returns the bytes of one tile of fp32 logits."""
    if not shape.has_head:
        return 0.0
    all_logits = micro_batch.predicted * shape.vocab * FP32
    # so few logits are kept for the backward pass, and more are computed tile by tile
    if all_logits <= KEPT_LOGITS_BYTES:
        return float(all_logits)
    chunk_bytes = FP32 * shape.vocab * micro_batch.chunk
    return float(min(chunk_bytes, micro_batch.tile, all_logits))


def output_layer_bytes(shape: ModelShape, micro_batch: Pass, *, trains: bool) -> float:
    """Returns the peak bytes of tiles of logits: the tile, its exponentials or the previous tile, and in training the
    larger of the entropy's terms and a copy in the compute dtype if that is not fp32."""
    tiles = 2.0
    if trains:
        if micro_batch.entropy:
            tiles += 1.0
        elif micro_batch.size != FP32:
            tiles += 0.5
    return tiles * logits_bytes(shape, micro_batch)


def forward_only(network: HeldNetwork, micro_batch: Pass) -> dict[str, float]:
    """Returns the peak bytes of a pass without gradients by name, in addition to the engine's shards."""
    shape = network.shape
    hidden_states = micro_batch.size * micro_batch.tokens * shape.hidden
    return {
        "gathered weights": network.gathered,
        "activations": layer_work(shape, micro_batch) + hidden_states,
        "logits": output_layer_bytes(shape, micro_batch, trains=False),
    }


def kept_activations(network: HeldNetwork, micro_batch: Pass, recomputed: int) -> float:
    """Returns the bytes that the layers keep for the backward pass: the inputs of the `recomputed` layers, and all
    activations of the others."""
    shape = network.shape
    input_bytes = float(micro_batch.size * micro_batch.tokens * shape.hidden)
    layer_bytes = layer_activations(shape, micro_batch, has_adapter=bool(network.adapter))
    not_recomputed = shape.layers - recomputed
    return recomputed * input_bytes + not_recomputed * layer_bytes


def training_pass(
    network: HeldNetwork,
    micro_batch: Pass,
    micro_batches: int,
    *,
    recomputed: int,
    offload: bool = False,
) -> dict[str, float]:
    """Returns the peak bytes of forward and backward of one micro-batch by name, in addition to the engine's shards.

    The peak occurs either where the backward pass begins, at the output layer (all activations, the logits and the
    layer's gradient), or where it ends, at the embedding (the gradients of embedding and output layer, one layer, and
    this rank's shard of all gradients). Between the two, each layer frees its activations and adds its shard, so that
    no other moment needs more.

    Args:
        network: The network.
        micro_batch: The micro-batch.
        micro_batches: Number of micro-batches of the optimizer step.
        recomputed: Number of layers with gradient checkpointing.
        offload: Whether kept activations are on the host, except for the tensors that `workers.policy.activations`
            leaves or brings back ahead of their use.
    """
    shape = network.shape
    all_recomputed = recomputed == shape.layers
    layer_bytes = layer_activations(shape, micro_batch, has_adapter=bool(network.adapter))
    activations = kept_activations(network, micro_batch, recomputed)
    if offload:
        on_device = _kept_despite_offload(shape, micro_batch, all_recomputed=all_recomputed)
        activations = min(activations, on_device)
    temporary = _temporary_bytes(shape, micro_batch)
    whole_gradients, shard = network.gradients(micro_batches)

    # where the backward pass begins: of the output layer and the last layer, the one that needs more
    output_layer = _output_layer_backward(network, micro_batch)
    last_layer = temporary
    # otherwise a recomputed layer takes the place of a later one that kept its activations and is done
    if recomputed and (offload or all_recomputed):
        last_layer = layer_bytes + temporary
    last_part = "one layer"
    if output_layer > last_layer:
        last_part = "logits and output layer"
    last_norm = float(micro_batch.tokens * _norm(shape.hidden, micro_batch.size))
    at_start = {
        "gathered weights": network.gathered,
        WHOLE_GRADIENTS: 0.0,
        "kept activations": activations + last_norm,
        last_part: max(output_layer, last_layer),
        SHARD: 0.0,
    }
    # the gradients of earlier micro-batches exist from the start
    if micro_batches > 1:
        at_start |= {WHOLE_GRADIENTS: whole_gradients, SHARD: shard}

    # where it ends: all gradients, and the activations of the first layer
    first_layer = layer_bytes
    # offload brings back a part of the layer at a time
    if offload and not recomputed:
        first_layer = activations
    at_end = {
        "gathered weights": network.gathered,
        WHOLE_GRADIENTS: whole_gradients,
        "kept activations": float(micro_batch.size * micro_batch.tokens * shape.hidden),
        "one layer": first_layer + temporary,
        SHARD: shard,
    }
    if sum(at_end.values()) > sum(at_start.values()):
        return at_end
    return at_start


def _kept_despite_offload(shape: ModelShape, micro_batch: Pass, *, all_recomputed: bool) -> float:
    """Returns the bytes of saved tensors that offload leaves on the device at one time."""
    # tensors that stay after they were saved, and as many that return before they are read
    width = 2 * AHEAD * max(shape.hidden, shape.active_inner)
    # only the inputs of recomputed layers are saved
    if all_recomputed:
        width = (AHEAD + 1) * shape.hidden
    return float(micro_batch.size * micro_batch.tokens * width)


def _output_layer_backward(network: HeldNetwork, micro_batch: Pass) -> float:
    """Returns the bytes of the output layer's backward pass: logits, gradient of its weights, and of its inputs."""
    shape = network.shape
    weight_gradient = 0.0
    if network.trained and not network.adapter and shape.has_head:
        weight_gradient = float(micro_batch.size * shape.embedding)
    input_gradient = (FP32 + micro_batch.size) * micro_batch.predicted * shape.hidden
    return output_layer_bytes(shape, micro_batch, trains=True) + weight_gradient + input_gradient


def tower_parts(
    network: HeldNetwork,
    micro_batch: Pass,
    parts: Mapping[str, float],
    *,
    is_recomputed: bool = False,
) -> dict[str, float]:
    """Returns the bytes by name that a vision tower adds to a pass; none without a vision tower.

    The tower runs first: at that time none of the later activations and logits exist, and in a backward pass they are
    freed. Its temporary tensors need additional memory only where they exceed those.

    Args:
        network: The network.
        micro_batch: The micro-batch.
        parts: The bytes of the pass without the tower.
        is_recomputed: Whether the blocks of a trained tower are recomputed.
    """
    tower = network.shape.tower
    if tower is None:
        return {}
    kept_bytes = tower.feature_bytes(micro_batch.images, micro_batch.size)
    work = tower.work_bytes(micro_batch.images, micro_batch.size)
    if network.trains_tower:
        kept_bytes += tower.kept_bytes(micro_batch.images, micro_batch.size, is_recomputed=is_recomputed)
        if is_recomputed:
            work = max(work, tower.block_bytes(micro_batch.images, micro_batch.size))

    held_meanwhile = ("gathered weights", WHOLE_GRADIENTS, SHARD)
    later_bytes = sum(size for name, size in parts.items() if name not in held_meanwhile)
    exceeding_work = max(0.0, work - later_bytes)
    return {
        "pixels": tower.pixel_bytes(micro_batch.images, micro_batch.size),
        TOWER: kept_bytes + exceeding_work,
    }


def _temporary_bytes(shape: ModelShape, micro_batch: Pass) -> float:
    """Returns the bytes that a layer frees before the next one begins: three tensors of the MLP, two of the width."""
    elements = 3 * shape.active_inner + 2 * shape.hidden
    return micro_batch.tokens * float(micro_batch.size * elements)


def kept_when_freed(parts: Mapping[str, float]) -> float:
    """Returns the freed bytes that the C library keeps on a CPU (`verl_lite.machine.device.release_freed_memory`).

    Tensors of the next layer or micro-batch often do not fit into the gaps that others have left. Measured: the heap
    takes about the temporary bytes of a backward pass a second time, unless they are given back.
    """
    temporary = sum(size for name, size in parts.items() if name != SHARD)
    return min(float(KEPT_FREED_BYTES), temporary)


def kept_after_update(parts: Mapping[str, float], shape: ModelShape, micro_batch: Pass, micro_batches: int) -> float:
    """Returns the freed bytes that the C library keeps on a CPU in an update.

    A single micro-batch leaves gaps once: half of the temporary bytes of each layer, as measured for networks of 12,
    81 and 135 million parameters. With several micro-batches the gaps reach the limit of `kept_when_freed`.
    """
    limit = kept_when_freed(parts)
    if micro_batches > 1:
        return limit
    gaps = 0.5 * shape.layers * _temporary_bytes(shape, micro_batch)
    return min(limit, gaps)
