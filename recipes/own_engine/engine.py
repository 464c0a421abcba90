"""The smallest rollout engine that keeps the promises of `workers.engines.base`: each token is a whole forward pass.

It has no KV cache, so a token costs as much as the whole sequence. Read it before you connect a serving system of your
own: the methods and their order are the same, and `tests/workers/engines/test_engines.py` checks both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM

from verl_lite.config import RolloutConfig
from verl_lite.json_types import JsonObject
from workers.engines.base import (
    Completion,
    FinishReason,
    Request,
    Sampled,
    check_names,
    check_request,
    parameter_names,
    register_rollout_engine,
)
from workers.engines.sampling import Truncation, sample


@dataclass
class Running:
    """An unfinished request with the tokens, log-probs and weight versions of its response so far.

    Attributes:
        limit: Largest number of tokens of the response.
    """

    request: Request
    limit: int
    token_ids: list[int]
    log_probs: list[float]
    versions: list[int]


@register_rollout_engine("plain")
class PlainEngine:
    """A rollout engine without a cache. `build_rollout_engine` describes the arguments."""

    # it fills no columns besides the token columns
    extra_outputs: dict[str, tuple[int, ...]] = {}

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
        self.max_num_seqs = config.max_num_seqs
        self.max_model_len = max_model_len
        self.device = device

        # the shape only: the trainer sends the weights before the first request
        shape = AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code, **override_config)
        model = AutoModelForCausalLM.from_config(shape, dtype=dtype, trust_remote_code=trust_remote_code)
        model.eval()
        model.requires_grad_(False)
        self.model = model.to(device)
        self.names = parameter_names(self.model)
        self.version: int | None = None
        self.queue: dict[str, Running] = {}

    # ------------------------------------------------------------------------------------------------- requests

    @property
    def unfinished(self) -> int:
        return len(self.queue)

    @property
    def has_weights(self) -> bool:
        return self.version is not None

    def submit(self, request: Request) -> None:
        """Adds a request to the end of the queue."""
        limit = check_request(request, self.max_model_len, self.queue, self.version)
        # an interrupted request continues from the tokens that it has
        token_ids, log_probs, versions = request.sampled.lists()
        running = Running(request, limit, token_ids, log_probs, versions)
        self.queue[request.request_id] = running

    def abort(self, request_ids: Sequence[str]) -> None:
        """Removes requests from the queue without a completion."""
        # a request that is not in the queue has ended before
        for request_id in request_ids:
            self.queue.pop(request_id, None)

    def snapshot(self, request_ids: Iterable[str]) -> list[Request]:
        """Returns requests with the tokens that they have so far, so that they can be continued later."""
        requests = []
        for request_id in request_ids:
            running = self.queue[request_id]
            sampled = Sampled(tuple(running.token_ids), tuple(running.log_probs), tuple(running.versions))
            requests.append(replace(running.request, sampled=sampled))
        return requests

    @torch.no_grad()
    def step(self) -> list[Completion]:
        """Samples one token for each of the oldest `max_num_seqs` requests. Returns those that end with it."""
        # a dict keeps the order of its entries, so that the oldest requests run first
        queued = list(self.queue.values())
        running_requests = queued[: self.max_num_seqs]
        if not running_requests:
            return []
        self._sample_tokens(running_requests)

        completions = []
        for running in running_requests:
            reason = self._finish_reason(running)
            if reason is None:
                continue
            request_id = running.request.request_id
            del self.queue[request_id]
            completions.append(Completion(request_id, running.token_ids, running.log_probs, reason, running.versions))
        return completions

    def _sample_tokens(self, running_requests: list[Running]) -> None:
        """Appends one token to each response."""
        # `submit` has refused requests without weights
        assert self.version is not None
        logits, last_positions = self._next_logits(running_requests)

        options = [running.request.sampling for running in running_requests]
        truncation = Truncation(
            top_k=self._tensor([option.top_k for option in options]),
            top_p=self._tensor([option.top_p for option in options]),
            min_p=self._tensor([option.min_p for option in options]),
        )
        # A draw depends only on the seed and the position in the sequence, so that batches and interruptions do not
        # change it. The position counts the prompt, too: the turns of an episode have one seed, and must not repeat
        # their random numbers.
        tokens, log_probs, _ = sample(
            logits,
            temperature=self._tensor([option.temperature for option in options]),
            seeds=self._tensor([option.seed for option in options]),
            positions=last_positions,
            truncation=truncation,
        )
        # one copy from the device for all rows
        next_tokens = tokens.tolist()
        next_log_probs = log_probs.tolist()
        for row, running in enumerate(running_requests):
            running.token_ids.append(next_tokens[row])
            running.log_probs.append(next_log_probs[row])
            running.versions.append(self.version)

    def _next_logits(self, running_requests: list[Running]) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the logits of the next token of each request (B, V), and the position of its last token (B,)."""
        sequences = []
        lengths = []
        for running in running_requests:
            token_ids = [*running.request.prompt_ids, *running.token_ids]
            sequences.append(torch.tensor(token_ids))
            lengths.append(len(token_ids))
        last_positions = self._tensor(lengths) - 1

        # attention is causal, so that no token sees the padding behind it
        input_ids = pad_sequence(sequences, batch_first=True).to(self.device)  # (B, L), padded on the right
        logits = self.model(input_ids, use_cache=False).logits  # (B, L, V)
        rows = torch.arange(len(sequences), device=self.device)
        return logits[rows, last_positions], last_positions

    def _tensor(self, numbers: Sequence[float]) -> torch.Tensor:
        return torch.tensor(numbers, device=self.device)

    def _finish_reason(self, running: Running) -> FinishReason | None:
        """Returns why a response ends with its last token; None if it continues."""
        sampling = running.request.sampling
        if running.token_ids[-1] in sampling.stop_token_ids and not sampling.ignore_eos:
            return "stop"
        if len(running.token_ids) >= running.limit:
            return "length"
        return None

    # -------------------------------------------------------------------------------------------------- weights

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Copies new weights into the model. An incomplete update leaves the engine without weights."""
        targets = self.model.state_dict(keep_vars=True)
        received = set()
        # an interrupted update leaves a mixture of weights, which must not answer
        self.version = None
        for name, weight in weights:
            if name in targets:
                targets[name].data.copy_(weight)
                received.add(name)
        # a parameter that is left out would keep its old value
        check_names(received, self.names)
        self.version = version

    def reset_cache(self) -> None:
        """Does nothing, because the engine caches nothing."""

    # ------------------------------------------------------------------------------------------- memory, lifetime

    def sleep(self) -> None:
        """Does nothing: the memory stays allocated. On a GPU, set rollout.free_cache_engine=false."""

    def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Does nothing, see `sleep`."""

    def move_in(self) -> None:
        """Called before generation. Does nothing."""

    def move_out(self) -> None:
        """Called after generation, before training. Does nothing."""

    def close(self) -> None:
        self.queue.clear()
