"""The rollout engine on transformers alone: the default on a CPU, and the numerical reference.

The forward of the transformers model runs over a static KV cache of slots (`slot_cache.py`). A step samples one token
for every running sequence. A finished sequence leaves the batch at once, and the sequence in the last slot moves into
the gap; waiting sequences enter as soon as enough slots are free to justify a prefill. A prompt is encoded up to its
last token, once for all its samples; the last token is the input of the first decode step. Unused slots keep finished
sequences. If a prompt begins with one of them (the next turn of a conversation), only the rest of it is encoded.

In fp32 on a CPU, `lean_decoder.LeanDecoder` computes the decode steps of the common families in less time.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.modeling_outputs import ModelOutput

from verl_lite.config import RolloutConfig
from verl_lite.json_types import JsonObject
from verl_lite.schema import SAMPLING_CANDIDATES
from workers.engine.parameters import WholeWeights
from workers.engines.base import (
    Completion,
    FinishReason,
    Request,
    UnfinishedRequest,
    candidates_of,
    check_names,
    check_request,
    parameter_names,
    register_rollout_engine,
)
from workers.engines.lean_decoder import lean_decoder
from workers.engines.prefill import PrefillPrompt, batches, padded, prefill_inputs
from workers.engines.sampling import Truncation, sample
from workers.engines.slot_cache import (
    SLOT_ATTENTION,
    KeptSlots,
    SlotCache,
    check_full_attention,
    check_layers,
    slots_that_fit,
)
from workers.policy.output_layer import output_logits
from workers.policy.router import ROUTED_EXPERTS, Routers
from workers.policy.vision import attention_of_text, placeholder_ids

# a prefill of any size costs about as much as a decode step; waiting until this share of the slots is free amortises it
_REFILL_SHARE = 1 / 8


@dataclass
class _Sequence(UnfinishedRequest):
    """An unfinished request.

    Attributes:
        limit: Maximum number of tokens of the response.
        stops: Tokens that end the response.
        encoded_by: Version of the weights of its first keys and values.
        candidates: Candidates (rollout.top_k,) of each new token.
    """

    limit: int
    stops: frozenset[int]
    encoded_by: int | None = None
    candidates: list[torch.Tensor] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Number of tokens so far. All but the last are in the cache; the last is the input of the next step."""
        return len(self.request.prompt_ids) + len(self.token_ids)

    def encoded(self) -> tuple[int, ...]:
        """Returns the tokens that the cache must hold before the next step: all but the last."""
        return (*self.request.prompt_ids, *self.token_ids)[:-1]

    @property
    def shift(self) -> int:
        """Difference between the position of a token of the response and its number in the sequence."""
        images = self.request.images
        return 0 if images is None else images.shift


@dataclass(frozen=True)
class _Continued:
    """A sequence that continues a kept one.

    Attributes:
        row: The sequence.
        held: Number of its first tokens whose keys and values its slot already has.
    """

    row: _Sequence
    held: int


@register_rollout_engine("hf")
class HFEngine:
    """Rollout engine on transformers. See `build_rollout_engine` for the arguments, `RolloutEngine` for the methods."""

    def __init__(
        self,
        model_path: str,
        config: RolloutConfig,
        *,
        max_model_len: int,
        device: torch.device,
        dtype: torch.dtype,
        seed: int,
        override_config: JsonObject,
        trust_remote_code: bool,
    ) -> None:
        if config.tensor_model_parallel_size != 1:
            raise ValueError(
                f"rollout.tensor_model_parallel_size={config.tensor_model_parallel_size}: expected 1, because the hf "
                "engine runs on one device; set rollout.name=vllm to distribute an engine over several devices"
            )
        self._config = config
        self._max_model_len = max_model_len
        self._device = device
        self._dtype = dtype
        model_config = AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code, **override_config)
        check_full_attention(model_config, max_model_len)
        with no_init_weights(), device:
            self._model = AutoModelForCausalLM.from_config(
                model_config,
                dtype=dtype,
                attn_implementation=attention_of_text(model_config, SLOT_ATTENTION),
                trust_remote_code=trust_remote_code,
            )
        check_layers(self._model)
        if dtype != torch.float32:
            _compute_logits_in_fp32(self._model)
        # skipped above together with the initialisation
        self._model.tie_weights()
        self._model.requires_grad_(False).eval()
        self._excluded = placeholder_ids(model_config)
        # the lean decoder does not report the chosen experts
        self._lean = None if config.router_replay else lean_decoder(self._model, max_model_len)
        self._names = parameter_names(self._model)
        self._routers = Routers(self._model) if config.router_replay else None
        routed = {} if self._routers is None else self._routers.extra_outputs
        self.extra_outputs = routed | candidates_of(config)
        self._slots = slots_that_fit(model_config, config, max_model_len, device, dtype)
        self._version: int | None = None
        # the parameters to which the tensors of `_mapped` are copied, in the order of these
        self._targets: list[torch.Tensor] = []
        # weak: a reference would keep the tensors of the trainer after it has moved them
        self._mapped: Callable[[], WholeWeights | None] = lambda: None
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._ids: set[str] = set()
        self._asleep: set[str] = set()
        self._allocate()

    def _allocate(self) -> None:
        """Allocates the KV cache, and the tensors with the step inputs and sampling parameters of each slot."""
        slots = self._slots
        device = self._device
        self._cache: SlotCache | None = SlotCache(
            self._model.config,
            slots=slots,
            max_length=self._max_model_len,
            device=device,
            dtype=self._dtype,
        )
        self._kept = KeptSlots(slots)
        # by row: last token, its number in the sequence, its position minus this number, seed, top_k
        self._integers = torch.zeros(5, slots, dtype=torch.long, device=device)
        self._floats = torch.zeros(3, slots, device=device)  # temperature, top_p, min_p

    def submit(self, request: Request) -> None:
        limit = check_request(request, self._max_model_len, self._ids, self._version)
        sampling = request.sampling
        stops = frozenset[int]() if sampling.ignore_eos else frozenset(sampling.stop_token_ids)
        self._ids.add(request.request_id)
        self._waiting.append(_Sequence(request, limit, stops))

    @property
    def unfinished(self) -> int:
        return len(self._ids)

    @property
    def has_weights(self) -> bool:
        return self._version is not None

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        self.wake()
        self._admit()
        if not self._running:
            return []

        rows = len(self._running)
        tokens, positions, shifts, seeds, top_k = self._integers[:, :rows]
        temperature, top_p, min_p = self._floats[:, :rows]
        assert self._cache is not None
        length = int(positions.max()) + 1
        mask = self._cache.begin_decode(positions[:, None], length)
        # the number of a token selects its entry of the cache, the shifted position its rotary embedding
        shifted = positions + shifts
        if self._lean is not None:
            logits = self._lean(tokens, shifted, mask, self._cache)
        else:
            outputs = self._forward(
                self._model, input_ids=tokens[:, None], position_ids=shifted[:, None], attention_mask=mask
            )
            logits = outputs.logits[:, -1]
        # a response cannot contain images
        if self._excluded:
            logits[:, self._excluded] = -torch.inf

        truncation = None
        if self._truncates:
            truncation = Truncation(top_k, top_p, min_p, self._limit)
        num_candidates = max(0, self._config.top_k)
        sampled, log_probs, candidates = sample(
            logits,
            temperature=temperature,
            seeds=seeds,
            positions=positions,
            truncation=truncation,
            num_candidates=num_candidates,
        )
        if candidates is not None:
            for row, values in zip(self._running, candidates.cpu(), strict=True):
                row.candidates.append(values)

        # both are views of `_integers`: the inputs of the next step
        tokens.copy_(sampled)
        positions += 1
        return self._record(sampled.tolist(), log_probs.tolist())

    def _forward(self, network: PreTrainedModel, **inputs: torch.Tensor) -> ModelOutput:
        """Runs `network` over the cache, and stores the chosen experts there with rollout.router_replay."""
        if self._routers is None:
            return network(**inputs, past_key_values=self._cache, use_cache=True)
        assert self._cache is not None
        with self._routers.watched() as routes:
            outputs = network(**inputs, past_key_values=self._cache, use_cache=True)
        experts = [layer.experts for layer in routes]
        self._cache.store_routes(torch.stack(experts, dim=1))
        return outputs

    def _record(self, tokens: list[int], log_probs: list[float]) -> list[Completion]:
        """Appends the new tokens, removes the sequences that ended and returns their completions."""
        assert self._version is not None
        ended_slots: list[int] = []
        completions: list[Completion] = []
        for slot, row in enumerate(self._running):
            token = tokens[slot]
            row.token_ids.append(token)
            row.log_probs.append(log_probs[slot])
            row.versions.append(self._version)
            if token in row.stops or len(row.token_ids) >= row.limit:
                completion = self._completion(slot, row)
                completions.append(completion)
                ended_slots.append(slot)
        # after the loop, because a removal moves other sequences to other slots
        self._remove(ended_slots)
        return completions

    def _completion(self, slot: int, row: _Sequence) -> Completion:
        """Returns the completion of a sequence that has ended in this slot."""
        last_token = row.token_ids[-1]
        reason: FinishReason = "stop" if last_token in row.stops else "length"
        extra: dict[str, torch.Tensor] = {}
        if self._cache is not None and self._cache.routes is not None:
            # a copy, because another sequence gets the slot; no forward has read the last token
            routes = self._cache.routes[slot, : row.length - 1]
            extra[ROUTED_EXPERTS] = routes.to("cpu", copy=True)
        if row.candidates:
            extra[SAMPLING_CANDIDATES] = torch.stack(row.candidates)
        return row.completion(reason, extra)

    def _remove(self, slots: list[int]) -> None:
        """Removes the running sequences in `slots`.

        The last running sequence swaps its slot with the removed one, so running sequences occupy the first slots. The
        removed sequence stays in the cache for requests that continue it.
        """
        if not slots:
            return
        assert self._cache is not None
        # from the last slot on, so that a swap never moves a sequence that is still to be removed
        for slot in sorted(slots, reverse=True):
            removed = self._running[slot]
            self._ids.discard(removed.request.request_id)
            last_slot = len(self._running) - 1
            last_row = self._running.pop()
            if slot != last_slot:
                self._running[slot] = last_row
                # the last token of a sequence is not in the cache
                length = max(last_row.length, removed.length) - 1
                self._cache.swap(slot, last_slot, length)
                self._integers[:, slot] = self._integers[:, last_slot]
                self._floats[:, slot] = self._floats[:, last_slot]
            # later requests must not use keys and values of earlier weights, or of images that their tokens do not show
            if removed.encoded_by == self._version and removed.request.images is None:
                self._kept.keep(last_slot, removed.encoded())

    def _admit(self) -> None:
        """Moves waiting sequences into free slots and encodes them, once enough slots are free to justify a prefill."""
        num_waiting = len(self._waiting)
        if num_waiting == 0:
            return
        num_free = self._slots - len(self._running)
        refill = max(1, int(self._slots * _REFILL_SHARE))
        # with nothing to decode there is nothing to wait for
        if self._running and num_free < min(num_waiting, refill):
            return

        first = len(self._running)
        num_admitted = min(num_free, num_waiting)
        admitted = [self._waiting.popleft() for _ in range(num_admitted)]
        continued, fresh = self._claim_kept(admitted, first)
        rows = [continuation.row for continuation in continued] + fresh
        self._running += rows
        for row in rows:
            row.encoded_by = self._version
        self._set_inputs(rows, slice(first, first + len(rows)))
        self._set_truncation()
        self._extend(continued, first)
        self._prefill(fresh, first + len(continued))

    def _set_inputs(self, rows: list[_Sequence], slots: slice) -> None:
        """Writes the inputs of the next step and the sampling parameters of new sequences."""
        options = [row.request.sampling for row in rows]
        # the last token is one of the response if the request continues another one
        token_ids = [row.token_ids or row.request.prompt_ids for row in rows]
        self._integers[:, slots] = torch.tensor(
            [
                [tokens[-1] for tokens in token_ids],
                [row.length - 1 for row in rows],
                [row.shift for row in rows],
                [option.seed for option in options],
                [option.top_k for option in options],
            ]
        )
        self._floats[:, slots] = torch.tensor(
            [
                [option.temperature for option in options],
                [option.top_p for option in options],
                [option.min_p for option in options],
            ]
        )

    def _set_truncation(self) -> None:
        """Sets `_truncates`, whether a running sequence needs `Truncation`, and `_limit`, see `Truncation.limit`."""
        self._truncates = False
        top_ks = []
        for row in self._running:
            option = row.request.sampling
            # greedy sequences ignore the truncation
            if option.temperature == 0:
                continue
            top_ks.append(option.top_k)
            if option.top_p < 1 or option.top_k > 0 or option.min_p > 0:
                self._truncates = True
        # one sequence without top_k is enough to need all tokens
        self._limit = max(top_ks) if min(top_ks, default=-1) > 0 else None

    def _claim_kept(self, rows: list[_Sequence], first: int) -> tuple[list[_Continued], list[_Sequence]]:
        """Divides `rows` into those that continue a kept sequence, which is moved into their slot, and the others.

        The continued rows get the slots from `first` on. The others get the slots after those, which are empty
        afterwards.
        """
        assert self._cache is not None
        if not len(self._kept):
            return [], rows
        continued: list[_Continued] = []
        fresh: list[_Sequence] = []
        for row in rows:
            target = first + len(continued)
            claim = None
            # kept sequences have no images, and the tokens of a prompt do not tell its images
            if row.request.images is None:
                claim = self._kept.claim(row.encoded(), target)
            if claim is None:
                fresh.append(row)
                continue
            # another kept sequence in this slot stays for later rows
            if claim.displaced:
                length = max(claim.displaced, claim.length)
                self._cache.swap(target, claim.slot, length)
            elif claim.slot != target:
                self._cache.move(target, claim.slot, claim.length)
            continued.append(_Continued(row, claim.length))

        moves = self._kept.vacate(first + len(continued), first + len(rows))
        for move in moves:
            self._cache.move(move.destination, move.source, move.length)
        return continued, fresh

    def _extend(self, rows: list[_Continued], first: int) -> None:
        """Encodes the missing tokens, except the last, of sequences whose slots already hold their first tokens.

        Args:
            rows: the sequences in the slots from `first` on.
            first: the first slot.
        """
        assert self._cache is not None
        missing: dict[int, tuple[int, ...]] = {}  # by slot
        for slot, continued in enumerate(rows, start=first):
            encoded = continued.row.encoded()
            token_ids = encoded[continued.held :]
            if token_ids:
                missing[slot] = token_ids

        token_budget = self._config.max_num_batched_tokens
        for slots in batches(missing, lambda slot: len(missing[slot]), token_budget):
            ids = padded([missing[slot] for slot in slots])
            starts = torch.tensor([rows[slot - first].held for slot in slots])

            # padding may reach beyond the end of the slot; its last position is written again before it is read
            positions = starts[:, None] + torch.arange(ids.shape[1])
            positions.clamp_(max=self._max_model_len - 1)
            length = int(positions.max()) + 1

            ids = ids.to(self._device)
            positions = positions.to(self._device)
            slot_indices = torch.tensor(slots, device=self._device)
            mask = self._cache.begin_decode(positions, length, slot_indices)
            self._forward(self._model.base_model, input_ids=ids, position_ids=positions, attention_mask=mask)

    def _prefill(self, rows: list[_Sequence], first: int) -> None:
        """Encodes all but the last token of `rows`, which own the slots from `first` on; equal prompts only once."""
        prompts: dict[tuple[int, ...], PrefillPrompt] = {}
        for slot, row in enumerate(rows, start=first):
            token_ids = row.encoded()
            # the only token is the input of the first decode step
            if not token_ids:
                continue
            # prompts with equal tokens may have different images: the last entry of a key tells them apart
            images_key = -1 if row.request.images is None else row.request.images.digest
            key = (*token_ids, images_key)
            if key not in prompts:
                prompts[key] = PrefillPrompt(token_ids, row.request.images)
            prompts[key].slots.append(slot)

        # all samples of a prompt share one forward
        token_budget = self._config.max_num_batched_tokens
        for batch in batches(prompts.values(), lambda prompt: len(prompt.token_ids), token_budget):
            self._encode(batch)

    def _encode(self, prompts: Sequence[PrefillPrompt]) -> None:
        """Encodes prompts in one forward and stores their keys and values in all their slots."""
        assert self._cache is not None
        slots: list[int] = []
        sources: list[int] = []  # row of the batch whose keys and values each slot gets
        for row, prompt in enumerate(prompts):
            slots += prompt.slots
            sources += [row] * len(prompt.slots)
        slot_indices = torch.tensor(slots, device=self._device)
        source_indices = torch.tensor(sources, device=self._device)
        self._cache.begin_prefill(slot_indices, source_indices)

        cpu_inputs = prefill_inputs(prompts)
        inputs = {name: tensor.to(self._device) for name, tensor in cpu_inputs.items()}
        # without the head, because the last token of each prompt is left to the first decode step
        self._forward(self._model.base_model, **inputs)

    @torch.inference_mode()
    def abort(self, request_ids: Sequence[str]) -> None:
        aborted = set(request_ids)
        slots = [slot for slot, row in enumerate(self._running) if row.request.request_id in aborted]
        self._remove(slots)
        still_waiting = [row for row in self._waiting if row.request.request_id not in aborted]
        self._waiting = deque(still_waiting)
        self._ids -= aborted

    def snapshot(self, request_ids: Iterable[str]) -> list[Request]:
        rows: dict[str, _Sequence] = {}
        for row in (*self._running, *self._waiting):
            rows[row.request.request_id] = row
        return [rows[request_id].so_far() for request_id in request_ids]

    @torch.inference_mode()
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        self._version = None  # after an interrupted update the weights are a mixture, which must not sample
        # in the trainer's process, which has all weights at once, one call copies them all
        if isinstance(weights, WholeWeights) and self._is_mapped(weights):
            torch._foreach_copy_(self._targets, weights.tensors)
        else:
            for target, tensor in self._with_targets(weights):
                target.copy_(tensor)
        self._version = version
        # the caller resets the cache too, but stale keys and values would go unnoticed, so the engine does it itself
        self.reset_cache()

    def _is_mapped(self, weights: WholeWeights) -> bool:
        """Finds the targets of all tensors of `weights`, once for all calls with this object. Returns False if they
        cannot be copied directly: iterating over `weights` would round the parameters in another way."""
        if weights is self._mapped():
            return True

        named_tensors = weights.buffers | weights.parameters
        self._targets = [target for target, _ in self._with_targets(named_tensors.items())]
        for target, tensor in zip(self._targets, weights.tensors, strict=True):
            # iterating rounds to `weights.dtype` first, and then to the target's dtype
            if weights.dtype not in (target.dtype, tensor.dtype):
                return False
        self._mapped = weakref.ref(weights)
        return True

    def _with_targets(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields each parameter of the model with its new value. Raises ValueError if names or shapes differ."""
        targets = self._model.state_dict(keep_vars=True)
        received: set[str] = set()
        for name, tensor in weights:
            target = targets.get(name)
            if target is None or target.shape != tensor.shape:
                own = "no such parameter" if target is None else f"shape {tuple(target.shape)}"
                raise ValueError(
                    f"weight update: got {name!r} of shape {tuple(tensor.shape)}, but the rollout model "
                    f"({type(self._model).__name__}) has {own}; both engines must load the same model.path"
                )
            received.add(name)
            yield target, tensor
        check_names(received, self._names)

    @torch.inference_mode()
    def reset_cache(self) -> None:
        if self._config.recompute_kv_on_update:
            self._requeue()
        self._kept.clear()
        if self._lean is not None:
            self._lean.discard_copies()
        if self._cache is not None:
            self._cache.clear(len(self._running))

    def _requeue(self) -> None:
        """Returns the running sequences to the head of the queue, where they lose their keys and values."""
        self._waiting.extendleft(reversed(self._running))
        self._running.clear()

    def sleep(self) -> None:
        if self._lean is not None:
            # as large as the weights; the next decode step makes them again, as it does after every weight update
            self._lean.discard_copies()
        if self._device.type == "cpu" or self._asleep:
            return
        self._requeue()
        self.reset_cache()
        self._asleep = {"weights", "kv_cache"}
        self._version = None
        self._cache = None
        # without the buffers, some of which are in no weight update, such as rotary frequencies
        for tensor in self._model.parameters():
            tensor.untyped_storage().resize_(0)

    def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        wanted = self._asleep.intersection(tags)
        self._asleep -= wanted
        if "kv_cache" in wanted:
            self._allocate()
        if "weights" not in wanted:
            return
        # `LeanDecoder` lets parameters share a storage, which must be long enough for the last of them
        for tensor in self._model.parameters():
            storage = tensor.untyped_storage()
            end = tensor.storage_offset() + tensor.numel()
            num_bytes = end * tensor.element_size()
            storage.resize_(max(storage.nbytes(), num_bytes))

    def move_in(self) -> None:
        self.wake(("weights",))

    def move_out(self) -> None:
        if self._config.free_cache_engine:
            self.sleep()

    def close(self) -> None:
        self._waiting.clear()
        self._running.clear()
        self._ids.clear()
        self._cache = None
        del self._model


def _compute_logits_in_fp32(model: PreTrainedModel) -> None:
    """Makes a model with low-precision weights compute its logits in fp32, as the trainer does."""
    head = model.get_output_embeddings()

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden.flatten(0, -2)
        bias = getattr(head, "bias", None)
        logits = output_logits(rows, head.weight, bias)
        return logits.unflatten(0, hidden.shape[:-1])

    head.forward = forward
