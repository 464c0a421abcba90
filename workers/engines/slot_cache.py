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

from workers.policy.families import family_of
from workers.policy.token_mixing import mixing_layers, state_layers

SLOT_ATTENTION = "verl_lite_slots"


class SlotCache(Cache):
    """Keys and values of all slots: (2, layers, slots, kv_heads, max_length, head_dim).

    Call `begin_prefill` or `begin_decode` before each forward to select the slots and positions that it writes.
    """

    def __init__(
        self, config: PretrainedConfig, *, slots: int, max_length: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(layers=[])
        layers, heads, head_dim = kv_shape(config)
        self._storage = torch.zeros(2, layers, slots, heads, max_length, head_dim, device=device, dtype=dtype)
        # one entry per (slot, head, position): a decode step writes with a single flat index
        self._flat = self._storage.view(2, layers, slots * heads * max_length, head_dim)
        self._head_offsets = torch.arange(heads, device=device) * max_length
        self._slot_offsets = torch.arange(slots, device=device) * (heads * max_length)
        self._arange = torch.arange(max_length, device=device)
        self._dirty_slots = self._dirty_length = 0
        self._prefill: tuple[torch.Tensor, torch.Tensor] | None = None
        self._rows: torch.Tensor | slice = slice(0, 0)
        self._length = 0
        self._index = torch.empty(0, dtype=torch.long)
        self._positions = torch.empty(0, 0, dtype=torch.long)
        self.routes: torch.Tensor | None = None  # (slots, max_length, layers, k): expert indices of each token

    def begin_prefill(self, slots: torch.Tensor, sources: torch.Tensor) -> None:
        """Makes the next forward encode prompts from position 0 and store batch row `sources[i]` in slot `slots[i]`."""
        self._prefill = (slots, sources)
        self._dirty_slots = max(self._dirty_slots, int(slots.max()) + 1)

    def begin_decode(self, positions: torch.Tensor, length: int, slots: torch.Tensor | None = None) -> torch.Tensor:
        """Makes the next forward append T tokens to each of n slots.

        Args:
            positions: (n, T), the positions of the new tokens, all below `length`.
            length: number of cache positions that the attention reads.
            slots: (n,), default the first n slots.

        Returns:
            The additive attention mask (n, 1, T, length): a token attends to its slot up to its own position.
        """
        rows: torch.Tensor | slice = slice(0, len(positions)) if slots is None else slots
        last = rows.stop if isinstance(rows, slice) else int(rows.max()) + 1
        self._prefill = None
        self._rows = rows
        self._length = length
        self._positions = positions
        self._dirty_slots = max(self._dirty_slots, last)
        self._dirty_length = max(self._dirty_length, length)

        heads = self._slot_offsets[rows, None] + self._head_offsets
        self._index = (heads[:, :, None] + positions[:, None]).flatten()
        mask = torch.zeros(*positions.shape, length, device=positions.device, dtype=self._storage.dtype)
        is_later = self._arange[:length] > positions[..., None]
        return mask.masked_fill_(is_later, -torch.inf)[:, None]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores the keys and values (B, kv_heads, T, head_dim) of a layer and returns those that attention reads."""
        keys, values = self._storage[0, layer_idx], self._storage[1, layer_idx]
        if self._prefill is not None:
            slots, sources = self._prefill
            length = key_states.shape[2]
            self._dirty_length = max(self._dirty_length, length)
            keys[slots, :, :length] = key_states[sources]
            values[slots, :, :length] = value_states[sources]
            return key_states, value_states
        head_dim = key_states.shape[3]
        self._flat[0, layer_idx].index_copy_(0, self._index, key_states.reshape(-1, head_dim))
        self._flat[1, layer_idx].index_copy_(0, self._index, value_states.reshape(-1, head_dim))
        return keys[self._rows, :, : self._length], values[self._rows, :, : self._length]

    def store_routes(self, experts: torch.Tensor) -> None:
        """Stores the expert indices (B * T, layers, k) of the forward's tokens at the slots and positions it wrote."""
        experts = experts.short()
        if self.routes is None:
            _, _, num_slots, _, max_length, _ = self._storage.shape
            self.routes = experts.new_full((num_slots, max_length, *experts.shape[1:]), -1)
        if self._prefill is not None:
            slots, sources = self._prefill
            of_prompts = experts.view(int(sources.max()) + 1, -1, *experts.shape[1:])
            self.routes[slots, : of_prompts.shape[1]] = of_prompts[sources]
        else:
            rows = torch.arange(len(self.routes), device=experts.device)[self._rows]
            self.routes[rows[:, None], self._positions] = experts.view(*self._positions.shape, *experts.shape[1:])

    def move(self, destination: int, source: int, length: int) -> None:
        """Copies the first `length` positions of slot `source` to slot `destination`."""
        self._storage[:, :, destination, :, :length] = self._storage[:, :, source, :, :length]
        if self.routes is not None:
            self.routes[destination, :length] = self.routes[source, :length]
        self._dirty_slots = max(self._dirty_slots, destination + 1)

    def swap(self, first: int, second: int, length: int) -> None:
        """Exchanges the first `length` positions of two slots."""
        kept = self._storage[:, :, first, :, :length].clone()
        kept_routes = None if self.routes is None else self.routes[first, :length].clone()
        self.move(first, second, length)
        self._storage[:, :, second, :, :length] = kept
        if self.routes is not None and kept_routes is not None:
            self.routes[second, :length] = kept_routes
        self._dirty_slots = max(self._dirty_slots, first + 1, second + 1)
        self._dirty_length = max(self._dirty_length, length)

    def clear(self, first: int = 0) -> None:
        """Sets the written positions of the slots from `first` on to zero. Attention multiplies masked positions by 0,
        so a NaN would spread."""
        self._storage[:, :, first : self._dirty_slots, :, : self._dirty_length] = 0
        self._dirty_slots = min(first, self._dirty_slots)
        self._dirty_length = self._dirty_length if first else 0

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

    slot, length: its slot and its number of tokens. displaced: number of tokens of the sequence that was kept in the
    request's slot and swaps places with it; 0 if there was none.
    """

    slot: int
    length: int
    displaced: int


class _Kept(NamedTuple):
    """A kept sequence. number: grows with each sequence, so that the order is that of age."""

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
        self._kept: dict[int, _Kept] = {}  # by slot

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, slot: int, encoded: tuple[int, ...]) -> None:
        """Records that `slot`, which no running sequence uses any longer, holds the keys and values of `encoded`."""
        self._number += 1
        if encoded:
            self._kept[slot] = _Kept(self._number, encoded)

    def claim(self, encoded: Sequence[int], target: int) -> Claim | None:
        """Takes the kept sequence that is the longest prefix of `encoded`, in order to run it in slot `target`.

        Returns None if no kept sequence is a prefix of `encoded`.
        """
        best: int | None = None
        length = 0
        for slot, kept in self._kept.items():
            size = len(kept.encoded)
            if not length < size <= len(encoded):
                continue
            # most sequences differ in this token, and the comparison of all tokens takes long
            if encoded[size - 1] == kept.encoded[-1] and encoded[:size] == kept.encoded:
                best = slot
                length = size
        if best is None:
            return None

        del self._kept[best]
        displaced = 0
        if best != target and target in self._kept:
            self._kept[best] = self._kept.pop(target)
            displaced = len(self._kept[best].encoded)
        return Claim(best, length, displaced)

    def vacate(self, start: int, end: int) -> list[Move]:
        """Frees the slots `start` to `end - 1` for new requests.

        Returns the moves of the kept sequences to other slots. If not all of them fit, the newest are kept.
        """
        moves: list[Move] = []
        leaving = sorted((self._kept.pop(slot), slot) for slot in range(start, end) if slot in self._kept)
        free = [slot for slot in range(end, self._slots) if slot not in self._kept] if leaving else []
        for entry, slot in reversed(leaving):
            if free:
                room = free.pop()
            else:
                room = min((other for other in self._kept if other >= end), key=self._kept.__getitem__, default=-1)
                if room < 0 or self._kept[room] > entry:
                    break  # the remaining sequences are older than all kept ones
            self._kept[room] = entry
            moves.append(Move(room, slot, len(entry.encoded)))
        return moves

    def clear(self) -> None:
        """Forgets all kept sequences."""
        self._kept.clear()


def kv_shape(config: PretrainedConfig) -> tuple[int, int, int]:
    """Returns (layers, key-value heads, head dimension) of a model."""
    text = config.get_text_config()
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    return text.num_hidden_layers, getattr(text, "num_key_value_heads", None) or heads, head_dim


def check_full_attention(config: PretrainedConfig, max_model_len: int) -> None:
    """Raises ValueError if a layer has a sliding window shorter than the context.

    A slot holds the whole context for every layer, so attention would silently ignore such a window.
    """
    text = config.get_text_config()
    window = getattr(text, "sliding_window", None)
    kinds = set(getattr(text, "layer_types", None) or ["sliding_attention" if window else "full_attention"])
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
    latent = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    if all(isinstance(getattr(config, name, None), int) for name in latent):
        nope, rope, values = (getattr(config, name) for name in latent)
        if {nope + rope, values} != {kv_shape(config)[2]}:
            unfit.append("latent attention with keys and values of other sizes than its head_dim")
    if unfit:
        raise ValueError(
            f"rollout.name=hf: a {type(model).__name__} has layers of kind {', '.join(unfit)}, which its cache of keys "
            "and values does not compute; set rollout.name=vllm"
        )


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

    query is (B, heads, T, head_dim), key and value are (B, kv_heads, S, head_dim). Returns (B, T, heads, head_dim) and
    None. Prompts are padded on the right, so no real token attends to padding.
    """
    output = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        is_causal=attention_mask is None and query.shape[2] > 1,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.transpose(1, 2), None


AttentionInterface.register(SLOT_ATTENTION, slot_attention)
