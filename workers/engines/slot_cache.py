"""A static KV cache of slots, the record of the slots that hold finished requests, and the attention over the cache.

Cache and attention implement the interfaces of transformers. Each running sequence owns a slot; the first n slots are
the batch of a decode step. Decoding concatenates nothing: a step writes the key and value of each new token at the
token's position and attends to a view of the cache. A prompt is encoded once for all its samples: prefill copies its
keys and values into the slot of each sample.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache

from verl_lite.config import RolloutConfig
from workers.policy.families import family_of
from workers.policy.token_mixing import mixing_layers, state_layers

SLOT_ATTENTION = "verl_lite_slots"


class SlotCache(Cache):
    """Keys and values of all slots: (2, layers, slots, kv_heads, max_length, head_dim).

    Call `begin_prefill` or `begin_decode` before each forward to select the slots and positions that it writes.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        *,
        slots: int,
        max_length: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(layers=[])
        layers, heads, head_dim = kv_shape(config)
        shape = (2, layers, slots, heads, max_length, head_dim)
        self._storage = torch.zeros(shape, device=device, dtype=dtype)
        # one entry per (slot, head, position): a decode step writes with a single flat index
        positions_of_slot = heads * max_length
        self._flat = self._storage.view(2, layers, slots * positions_of_slot, head_dim)
        self._head_offsets = torch.arange(heads, device=device) * max_length
        self._slot_offsets = torch.arange(slots, device=device) * positions_of_slot
        self._arange = torch.arange(max_length, device=device)
        # only the slots and positions below these numbers may have been written since `clear`
        self._dirty_slots = 0
        self._dirty_length = 0
        # slots and sources of a prefill, None in a decode step
        self._prefill: tuple[torch.Tensor, torch.Tensor] | None = None
        # slots, cache length, flat index and positions of a decode step
        self._rows: torch.Tensor | slice = slice(0, 0)
        self._length = 0
        self._index = torch.empty(0, dtype=torch.long)
        self._positions = torch.empty(0, 0, dtype=torch.long)
        # (slots, max_length, layers, k): expert indices of each token
        self.routes: torch.Tensor | None = None

    def begin_prefill(self, slots: torch.Tensor, sources: torch.Tensor) -> None:
        """Makes the next forward encode prompts from position 0 and store batch row `sources[i]` in slot `slots[i]`."""
        self._prefill = (slots, sources)
        end = int(slots.max()) + 1
        self._dirty_slots = max(self._dirty_slots, end)

    def begin_decode(self, positions: torch.Tensor, length: int, slots: torch.Tensor | None = None) -> torch.Tensor:
        """Makes the next forward append T tokens to each of n slots.

        Args:
            positions: (n, T), the positions of the new tokens, all below `length`.
            length: number of cache positions that the attention reads.
            slots: (n,), default the first n slots.

        Returns:
            The additive attention mask (n, 1, T, length): a token attends to its slot up to its own position.
        """
        if slots is None:
            # a slice, so that the attention reads a view of the cache and not a copy
            end = len(positions)
            self._rows = slice(0, end)
        else:
            self._rows = slots
            end = int(slots.max()) + 1
        self._prefill = None
        self._length = length
        self._positions = positions
        self._dirty_slots = max(self._dirty_slots, end)
        self._dirty_length = max(self._dirty_length, length)

        # (n, kv_heads): the flat index of each head's first position
        first_of_head = self._slot_offsets[self._rows, None] + self._head_offsets
        index = first_of_head[:, :, None] + positions[:, None]
        self._index = index.flatten()

        # in the dtype of the queries, which SDPA requires
        is_later = self._arange[:length] > positions[..., None]
        mask = torch.zeros_like(is_later, dtype=self._storage.dtype)
        mask.masked_fill_(is_later, -torch.inf)
        return mask[:, None]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores the keys and values (B, kv_heads, T, head_dim) of a layer and returns those that attention reads."""
        keys = self._storage[0, layer_idx]
        values = self._storage[1, layer_idx]
        if self._prefill is not None:
            slots, sources = self._prefill
            length = key_states.shape[2]
            self._dirty_length = max(self._dirty_length, length)
            keys[slots, :, :length] = key_states[sources]
            values[slots, :, :length] = value_states[sources]
            # a prompt attends only to itself, so nothing is read from the cache
            return key_states, value_states

        head_dim = key_states.shape[3]
        flat_keys = key_states.reshape(-1, head_dim)
        flat_values = value_states.reshape(-1, head_dim)
        self._flat[0, layer_idx].index_copy_(0, self._index, flat_keys)
        self._flat[1, layer_idx].index_copy_(0, self._index, flat_values)

        read_keys = keys[self._rows, :, : self._length]
        read_values = values[self._rows, :, : self._length]
        return read_keys, read_values

    def store_routes(self, experts: torch.Tensor) -> None:
        """Stores the expert indices (B * T, layers, k) of the forward's tokens at the slots and positions it wrote."""
        experts = experts.short()
        layers_and_choices = experts.shape[1:]
        if self.routes is None:
            # only the first forward shows the number of layers with experts
            _, _, num_slots, _, max_length, _ = self._storage.shape
            shape = (num_slots, max_length, *layers_and_choices)
            self.routes = experts.new_full(shape, -1)

        if self._prefill is not None:
            slots, sources = self._prefill
            num_prompts = int(sources.max()) + 1
            of_prompts = experts.view(num_prompts, -1, *layers_and_choices)
            length = of_prompts.shape[1]
            self.routes[slots, :length] = of_prompts[sources]
            return

        all_slots = torch.arange(len(self.routes), device=experts.device)
        rows = all_slots[self._rows]
        of_tokens = experts.view(*self._positions.shape, *layers_and_choices)
        self.routes[rows[:, None], self._positions] = of_tokens

    def move(self, destination: int, source: int, length: int) -> None:
        """Copies the first `length` positions of slot `source` to slot `destination`."""
        destination_states = self._states_of(destination, length)
        destination_states.copy_(self._states_of(source, length))
        if self.routes is not None:
            destination_routes = self.routes[destination, :length]
            destination_routes.copy_(self.routes[source, :length])
        self._dirty_slots = max(self._dirty_slots, destination + 1)

    def swap(self, first: int, second: int, length: int) -> None:
        """Exchanges the first `length` positions of two slots."""
        # clones, because `move` overwrites the first slot
        states_of_first = self._states_of(first, length).clone()
        if self.routes is not None:
            routes_of_first = self.routes[first, :length].clone()

        self.move(first, second, length)

        self._states_of(second, length).copy_(states_of_first)
        if self.routes is not None:
            self.routes[second, :length] = routes_of_first
        self._dirty_slots = max(self._dirty_slots, second + 1)
        self._dirty_length = max(self._dirty_length, length)

    def _states_of(self, slot: int, length: int) -> torch.Tensor:
        """Returns a view of the keys and values at the first `length` positions of a slot."""
        return self._storage[:, :, slot, :, :length]

    def clear(self, first: int = 0) -> None:
        """Sets the written positions of the slots from `first` on to zero. Attention multiplies masked positions by 0,
        so a NaN would spread."""
        written_slots = self._storage[:, :, first : self._dirty_slots]
        written_slots[..., : self._dirty_length, :] = 0
        self._dirty_slots = min(first, self._dirty_slots)
        if first == 0:
            self._dirty_length = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Returns 0. Some models call this to derive positions, but the engine always passes positions."""
        return 0


class Move(NamedTuple):
    """Copies the first `length` positions of a slot to another slot."""

    destination: int
    source: int
    length: int


class Claim(NamedTuple):
    """A kept sequence that a request continues.

    Attributes:
        slot: Its slot.
        length: Its number of tokens.
        displaced: Number of tokens of the sequence that was kept in the request's slot and swaps places with it; 0 if
            there was none.
    """

    slot: int
    length: int
    displaced: int


class _KeptSequence(NamedTuple):
    """A kept sequence.

    Attributes:
        number: Grows with each sequence. As the first field, it decides comparisons: the oldest sequence is the least.
        encoded: Its tokens, whose keys and values its slot holds.
    """

    number: int
    encoded: tuple[int, ...]


class KeptSlots:
    """The slots that hold finished requests, for reuse by requests that continue them.

    The next turn of a conversation, for example, begins with all tokens of the previous turn. Running sequences occupy
    the first slots, kept sequences the slots behind them. When slots run out, the oldest kept sequence is dropped.
    This class only does the bookkeeping: its methods return the moves that the caller has to make in the cache.

    Args:
        slots: total number of slots.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._number = 0
        self._kept: dict[int, _KeptSequence] = {}  # by slot

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, slot: int, encoded: tuple[int, ...]) -> None:
        """Records that `slot`, which no running sequence uses any longer, holds the keys and values of `encoded`."""
        self._number += 1
        # no request continues an empty sequence
        if encoded:
            self._kept[slot] = _KeptSequence(self._number, encoded)

    def claim(self, encoded: Sequence[int], target: int) -> Claim | None:
        """Takes the kept sequence that is the longest prefix of `encoded`, in order to run it in slot `target`.

        Returns None if no kept sequence is a prefix of `encoded`.
        """
        best_slot: int | None = None
        best_length = 0
        for slot, sequence in self._kept.items():
            length = len(sequence.encoded)
            if length <= best_length or length > len(encoded):
                continue
            # most sequences differ in this token, and the comparison of all tokens takes long
            if encoded[length - 1] != sequence.encoded[-1]:
                continue
            if encoded[:length] == sequence.encoded:
                best_slot = slot
                best_length = length
        if best_slot is None:
            return None

        del self._kept[best_slot]
        # the sequence that was kept in the target gets the slot that becomes free
        displaced_length = 0
        if best_slot != target and target in self._kept:
            displaced = self._kept.pop(target)
            self._kept[best_slot] = displaced
            displaced_length = len(displaced.encoded)
        return Claim(best_slot, best_length, displaced_length)

    def vacate(self, start: int, end: int) -> list[Move]:
        """Frees the slots `start` to `end - 1` for new requests.

        Returns the moves of the kept sequences to other slots. If not all of them fit, the newest are kept.
        """
        leaving_slots = [slot for slot in range(start, end) if slot in self._kept]
        leaving = [(self._kept.pop(slot), slot) for slot in leaving_slots]
        if not leaving:
            return []

        moves: list[Move] = []
        free_slots = [slot for slot in range(end, self._slots) if slot not in self._kept]
        # the newest first; sequences compare by their age
        for sequence, source in sorted(leaving, reverse=True):
            if free_slots:
                destination = free_slots.pop()
            else:
                # in place of the oldest kept sequence, if that is older
                later_slots = [slot for slot in self._kept if slot >= end]
                destination = min(later_slots, key=self._kept.__getitem__, default=-1)
                # the leaving sequences that come next are even older: they are dropped, too
                if destination < 0 or self._kept[destination] > sequence:
                    break
            self._kept[destination] = sequence
            moves.append(Move(destination, source, len(sequence.encoded)))
        return moves

    def clear(self) -> None:
        """Forgets all kept sequences."""
        self._kept.clear()


def kv_shape(config: PretrainedConfig) -> tuple[int, int, int]:
    """Returns (layers, key-value heads, head dimension) of a model."""
    text = config.get_text_config()
    heads = text.num_attention_heads
    # families without these entries have as many key-value heads as heads, and divide the width among them
    kv_heads = getattr(text, "num_key_value_heads", None)
    if not kv_heads:
        kv_heads = heads
    head_dim = getattr(text, "head_dim", None)
    if not head_dim:
        head_dim = text.hidden_size // heads
    return text.num_hidden_layers, kv_heads, head_dim


def slots_that_fit(
    model: PretrainedConfig,
    config: RolloutConfig,
    max_model_len: int,
    device: torch.device,
    dtype: torch.dtype,
) -> int:
    """Returns the number of sequences that decode together: max_num_seqs, or fewer if the KV cache memory is short."""
    layers, heads, head_dim = kv_shape(model)
    slot_bytes = 2 * layers * heads * head_dim * max_model_len * dtype.itemsize
    if device.type == "cpu":
        setting = f"kv_cache_memory_mb={config.kv_cache_memory_mb}"
        budget = config.kv_cache_memory_mb << 20
    else:
        setting = f"gpu_memory_utilization={config.gpu_memory_utilization}"
        backend = torch.get_device_module(device)
        _, total_bytes = backend.mem_get_info(device)
        share = int(total_bytes * config.gpu_memory_utilization)
        # the share includes this process's tensors, such as the weights
        budget = max(0, share - backend.memory_allocated(device))

    slots = min(config.max_num_seqs, budget // slot_bytes)
    if slots < 1:
        raise ValueError(
            f"rollout.{setting} leaves {budget / 2**20:.1f} MiB for the KV cache, but one sequence of "
            f"{max_model_len} tokens needs {slot_bytes / 2**20:.1f} MiB; raise it or lower rollout.max_model_len"
        )
    return slots


def check_full_attention(config: PretrainedConfig, max_model_len: int) -> None:
    """Raises ValueError if a layer has a sliding window shorter than the context.

    A slot holds the whole context for every layer, so attention would silently ignore such a window.
    """
    text = config.get_text_config()
    window = getattr(text, "sliding_window", None)
    kinds = set(getattr(text, "layer_types", None) or [])
    # a config without `layer_types` has equal layers
    if not kinds:
        kinds = {"sliding_attention"} if window else {"full_attention"}
    # a window over the whole context hides nothing
    if window is not None and window >= max_model_len:
        kinds.discard("sliding_attention")
    if not kinds <= {"full_attention"}:
        raise ValueError(
            f"rollout.name=hf: the model {config.model_type!r} has layers of kind {sorted(kinds)}, expected full "
            f"attention over the context of {max_model_len} tokens (its window is {window}); set rollout.name=vllm"
        )


def check_layers(model: PreTrainedModel) -> None:
    """Raises ValueError for layers that a cache of keys and values or `slot_attention` would compute incorrectly."""
    config = model.config.get_text_config()
    if family_of(model) is None:
        raise ValueError(
            f"rollout.name=hf: a {type(model).__name__} (family {config.model_type}) is not among the networks of "
            "transformers in the table of workers/policy/families.py, whose layers are known to fit the engine's cache "
            "of keys and values; set rollout.name=vllm"
        )
    unfit = mixing_layers(model) or sorted(state_layers(model))
    if getattr(config, "attn_logit_softcapping", None) is not None:
        unfit.append("attention with soft-capping")
    if any(name.endswith(".sinks") for name, _ in model.named_parameters()):
        unfit.append("attention with sinks")
    if _has_other_sizes(config):
        unfit.append("latent attention with keys and values of other sizes than its head_dim")
    if unfit:
        raise ValueError(
            f"rollout.name=hf: a {type(model).__name__} has layers of kind {', '.join(unfit)}, which its cache of keys "
            "and values does not compute; set rollout.name=vllm"
        )


def _has_other_sizes(config: PretrainedConfig) -> bool:
    """Returns True for latent attention whose keys or values have another size than the head dimension."""
    # keys have a part without and a part with rotary embedding
    sizes = []
    for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
        size = getattr(config, name, None)
        if not isinstance(size, int):
            return False
        sizes.append(size)
    key_without_rope, key_with_rope, value_size = sizes
    _, _, head_dim = kv_shape(config)
    return {key_without_rope + key_with_rope, value_size} != {head_dim}


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Computes attention: with the mask of `SlotCache.begin_decode` when decoding, causally without a mask in prefill.

    Prompts are padded on the right, so no real token attends to padding.

    Args:
        query: (B, heads, T, head_dim).
        key: (B, kv_heads, S, head_dim).
        value: (B, kv_heads, S, head_dim).

    Returns:
        The output (B, T, heads, head_dim), and None in place of the attention weights, as transformers expects.
    """
    num_tokens = query.shape[2]
    is_causal = attention_mask is None and num_tokens > 1
    has_shared_heads = query.shape[1] != key.shape[1]
    output = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        is_causal=is_causal,
        scale=scaling,
        enable_gqa=has_shared_heads,
    )
    return output.transpose(1, 2), None


AttentionInterface.register(SLOT_ATTENTION, slot_attention)
