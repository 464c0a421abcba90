"""The options of generation, in training and in validation."""

from dataclasses import dataclass
from typing import Any

from verl_lite.config.fields import ALL_OR_SOME, POSITIVE_SHARE, Options, Problems, Range, at_least, opt, section
from verl_lite.config.learners import DTYPES

_TRUNCATED = "samples of a truncated distribution have other log-probs than the trainer's: {} is expected in training"
_WHOLE_P = Range(_TRUNCATED.format("1"), lambda value: value == 1)
_WHOLE_K = Range(_TRUNCATED.format("-1"), lambda value: value == -1)
_SAMPLES = Range("training has to sample: a number above 0 is expected, 1.0 as a rule", lambda value: value > 0)


SAMPLED = "rollout.val_kwargs.n={} rollout.val_kwargs.do_sample=true rollout.val_kwargs.temperature=1.0"
"""Several answers to each validation prompt, as a user writes it."""


@dataclass
class ValKwargs(Options):
    """Sampling in validation."""

    n: int = opt(1, "samples per validation prompt", at_least(1))
    do_sample: bool = opt(False, "false = greedy, whatever the temperature")
    temperature: float = opt(0.0, "0 = greedy", at_least(0))
    top_p: float = opt(1.0, "nucleus", POSITIVE_SHARE)
    top_k: int = opt(-1, "-1 = all tokens", ALL_OR_SOME)
    greedy_too: bool = opt(False, "also a greedy one, logged as val-aux/{source}/greedy/*")

    def check(self) -> Problems:
        asked = f"rollout.val_kwargs.n={self.n}, greedy_too={self.greedy_too}, temperature={self.temperature}"
        if self.do_sample and not self.temperature > 0:
            yield f"{asked} with do_sample=true: a temperature above 0 is expected, such as 1.0; or do_sample=false"
        if not self.do_sample and (self.n > 1 or self.greedy_too):
            yield f"{asked} with do_sample=false would answer greedily more than once: set {SAMPLED.format(self.n)}"


@dataclass
class RolloutConfig(Options):
    """How the policy generates."""

    name: str = opt("auto", "rollout engine: auto (vllm where it runs, else hf) | vllm | hf | a registered one")
    n: int = opt(1, "samples per prompt", at_least(1))
    temperature: float = opt(1.0, "sampling temperature; the trainer's log-probs use the same", _SAMPLES)
    top_p: float = opt(1.0, "must be 1 in training; val_kwargs.top_p is free", _WHOLE_P)
    top_k: int = opt(-1, "must be -1 in training; val_kwargs.top_k is free", _WHOLE_K)
    ignore_eos: bool = opt(False, "sample on after the end of text, for benchmarks of fixed length")
    dtype: str = opt("auto", "dtype of generation: auto (bf16 on CUDA, fp32 on CPU) | fp32 | bf16", DTYPES)
    tensor_model_parallel_size: int = opt(1, "devices that share one engine", at_least(1))
    gpu_memory_utilization: float = opt(0.5, "share of the device's memory for the engine (CUDA)", POSITIVE_SHARE)
    kv_cache_memory_mb: int = opt(256, "memory of the KV cache (CPU), MiB", at_least(1))
    max_num_seqs: int = opt(256, "sequences decoded together at most on one engine", at_least(1))
    max_num_batched_tokens: int = opt(8192, "tokens per engine step at most", at_least(1))
    max_model_len: int | None = opt(None, "context; null = max_prompt_length + max_response_length")
    enforce_eager: bool = opt(False, "no CUDA graphs (on a CPU there are none)")
    enable_chunked_prefill: bool = opt(True, "vLLM: split long prompts over steps")
    enable_prefix_caching: bool = opt(True, "vLLM: share the KV cache of equal prompts; reset at each weight update")
    free_cache_engine: bool = opt(True, "put the engine to sleep while training (CUDA)")
    update_weights_bucket_megabytes: int = opt(512, "tensors gathered at once in a weight update, MiB", at_least(1))
    calculate_log_probs: bool = opt(True, "log how far the engine's log-probs are from the trainer's")
    router_replay: bool = opt(False, "mixtures of experts: train tokens by the experts that sampled them (vLLM: GPU)")
    log_prob_use_dynamic_bsz: bool | None = opt(None, "null = actor.use_dynamic_bsz")
    log_prob_max_token_len_per_gpu: int | None = opt(None, "null = actor.ppo_max_token_len_per_gpu", at_least(1))
    log_prob_micro_batch_size_per_gpu: int | None = opt(None, "null = actor.ppo_micro_batch_size_per_gpu", at_least(1))
    engine_kwargs: dict[str, Any] = opt({}, "extra arguments of the engine, by engine name: engine_kwargs.vllm.KEY")
    val_kwargs: ValKwargs = section(ValKwargs, "sampling in validation")
