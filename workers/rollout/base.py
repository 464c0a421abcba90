"""What a rollout engine is: requests of token ids in, completions of token ids and their log-probs out, continuously.

`submit` queues a request at any time, `step` advances every running request by about one token and hands out those that
finished; new weights come in by `load_weights`. Nothing here or in an engine knows of tokenizers, batches or rewards.
An engine registers itself under the name that `rollout.name` selects; its module is imported when it is asked for.

Promises that every engine keeps (tests/workers/rollout/test_engines.py runs over all of them):

- Same weights, prompt, sampling parameters and seed give the same tokens, whatever else is running, in any order, on
  any replica (up to rounding of the model's forward, which a batch size may change in the last bit).
- log_probs are those of the distribution that the trainer differentiates: log-softmax(logits / temperature) over the
  full vocabulary, fp32; at temperature 0 (greedy) with temperature 1. With top_p < 1 or top_k >= 1 tokens come from a
  truncated distribution and log_probs must not be used (engines differ in what they give).
- After `reset_cache` nothing computed with earlier weights is used: running requests go on, re-encoded.
"""

import hashlib
import importlib
import importlib.util
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from verl_lite.config import NetworkConfig, RolloutConfig
from verl_lite.registry import Registry

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled.

    temperature: 0 = greedy. top_p in (0, 1]; top_k: -1 = all tokens. max_tokens: at least 1; the engine's context may
    end a response earlier. seed: of this request alone, see `derive_seed`. stop_token_ids: any of them ends the
    response, and is its last token. ignore_eos: sample on to max_tokens over any stop token.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 16
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True)
class Request:
    """One prompt to continue. request_id is unique among the unfinished requests of an engine."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams


@dataclass
class Completion:
    """What a request became.

    token_ids, log_probs: of the response, equally long, the stop token included. finish_reason: "stop" (a stop token),
    "length" (max_tokens or the context). policy_version: of the weights that were loaded when the request was
    submitted, i.e. the oldest that any of its tokens came from. routed_experts: with rollout.router_replay (n, layers,
    k) int16, of prompt and response but for their last token, which no forward read.
    """

    request_id: str
    token_ids: list[int]
    log_probs: list[float]
    finish_reason: FinishReason
    policy_version: int
    routed_experts: torch.Tensor | None = None


class RolloutEngine(Protocol):
    """A continuous token generator. Constructor arguments are those of `build_rollout_engine` after the name.

    It starts with arbitrary weights: `load_weights` comes before the first request.
    """

    def submit(self, request: Request) -> None:
        """Queues a request; raises ValueError if its prompt does not fit the context or its id is in use."""

    def step(self) -> list[Completion]:
        """Advances the running requests by about one token; gives those that finished since the last step."""

    @property
    def unfinished(self) -> int:
        """Requests submitted and not handed out yet."""

    @property
    def has_weights(self) -> bool:
        """False before the first `load_weights` and after a `sleep`, which loses them; `submit` then raises."""

    def abort(self, request_ids: Sequence[str]) -> None:
        """Ends these requests now, without a completion; ids that are unknown or finished are skipped."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Takes all parameters under their Hugging Face names, on any device. The iterator is consumed lazily.

        Call `reset_cache` afterwards. Requests submitted from now on are stamped with `version`.
        """

    def reset_cache(self) -> None:
        """Forgets everything computed with earlier weights."""

    def sleep(self) -> None:
        """Frees the device memory of weights and KV cache; the weights are lost. Does nothing on a CPU."""

    def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Takes the memory back; weights must be loaded anew. Does nothing if awake."""

    def move_in(self) -> None:
        """Tenant of `workers.phase`: wakes the weights. The KV cache follows with the first request, after the sync."""

    def move_out(self) -> None:
        """Tenant of `workers.phase`: sleeps, if `rollout.free_cache_engine`."""

    def close(self) -> None:
        """Ends the engine; nothing of it (memory, files, processes) stays."""


ROLLOUT_ENGINES: Registry[Any] = Registry("rollout engine")
VLLM_CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # of vLLM 0.32
HF_ONLY_ON_CPU = ("diffllama", "minimax_m2")
"""Families (model_type) that the hf engine runs and vLLM on a CPU does not."""
_BUILT_IN = {"hf": "workers.rollout.hf_engine", "vllm": "workers.rollout.vllm_engine"}

register_rollout_engine = ROLLOUT_ENGINES.register


def engine_names() -> list[str]:
    """The names that `rollout.name` may have: auto, the built-in engines and the registered ones."""
    return ["auto", *dict.fromkeys([*_BUILT_IN, *ROLLOUT_ENGINES])]


def resolve_engine_name(name: str) -> str:
    """`auto` becomes vllm where it is installed, else hf; other names stay."""
    if name != "auto":
        return name
    return "vllm" if importlib.util.find_spec("vllm") is not None else "hf"


def vllm_problem(model: NetworkConfig, rollout: RolloutConfig, device_type: str) -> str | None:
    """Returns the reason why vLLM cannot generate with this model on this machine, or None if none is known before vLLM
    starts. `rollout.name=auto` then chooses the hf engine."""
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed"
    if device_type != "cpu":
        return None
    if rollout.router_replay:
        return "rollout.router_replay=true needs the experts of each token, which vLLM records on a GPU only"
    from workers.policy.loading import load_model_config  # imports transformers, which takes seconds

    config = load_model_config(model).get_text_config()
    heads = getattr(config, "num_attention_heads", None) or 1
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    if size not in VLLM_CPU_HEAD_SIZES:
        known = ", ".join(map(str, VLLM_CPU_HEAD_SIZES))
        return f"model.path={model.path!r} has heads of {size}, and vLLM on a CPU has kernels for heads of {known}"
    if config.model_type in HF_ONLY_ON_CPU:
        return f"model.path={model.path!r} is a {config.model_type} model, a family that vLLM does not run on a CPU"
    return None


def build_rollout_engine(
    name: str,
    model_path: str,
    config: RolloutConfig,
    *,
    max_model_len: int,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
    override_config: dict[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> RolloutEngine:
    """Makes the engine that `rollout.name` asks for: auto, hf, vllm, a registered name or "pkg.module:Class".

    model_path: Hugging Face folder; only its config is read. max_model_len: tokens of prompt and response together.
    dtype: of weights and KV cache. seed: of whatever is not seeded by a request. override_config: entries that replace
    those of the model's config.
    Raises ValueError for an unknown name, ImportError if the engine's package is missing.
    """
    name = resolve_engine_name(name)
    if name in _BUILT_IN:
        importlib.import_module(_BUILT_IN[name])
    engine_class = ROLLOUT_ENGINES.get_fn(name)
    return engine_class(
        model_path,
        config,
        max_model_len=max_model_len,
        device=device,
        dtype=dtype,
        seed=seed,
        override_config=override_config or {},
        trust_remote_code=trust_remote_code,
    )


def derive_seed(root: int, step: int, uid: str | int, sample: int) -> int:
    """The seed of one sample of one prompt in one step: 63 bits, equal on every machine and in every process.

    root: of the run. uid: names the prompt within the step. sample: 0 .. n-1.
    """
    text = f"{root}\x1f{step}\x1f{uid}\x1f{sample}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def check_request(request: Request, max_model_len: int, in_use: Iterable[str], version: int | None) -> tuple[int, int]:
    """Tokens that the request may sample at most (max_tokens, cut to the context), and its policy version.

    Raises ValueError for an empty or too long prompt or an id in use, RuntimeError without weights.
    """
    length = len(request.prompt_ids)
    if not 1 <= length < max_model_len:
        raise ValueError(
            f"request {request.request_id!r}: its prompt has {length} tokens, expected 1 to {max_model_len - 1} "
            f"(rollout.max_model_len={max_model_len}, less one token of response); raise rollout.max_model_len or "
            "shorten the prompt (data.max_prompt_length)"
        )
    if request.request_id in in_use:
        raise ValueError(f"request {request.request_id!r} is running already; each unfinished request needs its own id")
    if version is None:
        raise RuntimeError("the rollout engine has no weights; call load_weights before the first request")
    return min(request.sampling.max_tokens, max_model_len - length), version


def parameter_names(model: torch.nn.Module) -> list[frozenset[str]]:
    """The parameters and saved buffers of a model, each with all its names (tied ones have several)."""
    names: dict[int, set[str]] = {}
    for name, parameter in model.state_dict(keep_vars=True).items():
        names.setdefault(id(parameter), set()).add(name)
    return [frozenset(group) for group in names.values()]


def check_names(given: set[str], expected: list[frozenset[str]]) -> None:
    """Raises ValueError unless a weight update gave every parameter: one left out would keep its old value."""
    missing = [min(group) for group in expected if not group & given]
    if missing:
        raise ValueError(
            f"weight update: {len(missing)} of {len(expected)} parameters were not given, among them {missing[0]!r}; "
            "the training engine must hand over every parameter of model.path under its Hugging Face name"
        )
