"""The options of generation, in training and in validation."""

import math
from dataclasses import dataclass

from verl_lite.config.fields import (
    ALL_OR_SOME,
    NOT_NEGATIVE,
    POSITIVE_SHARE,
    FreeDict,
    Options,
    Range,
    at_least,
    opt,
    section,
)
from verl_lite.config.learners import DTYPES

_SAMPLES = Range(
    "training has to sample: a number above 0 is expected, usually 1.0", lambda value: 0 < value < math.inf
)
_BELOW_ONE = Range("a share of at least 0 and below 1 is expected", lambda value: 0 <= value < 1)
_OVERSAMPLE = Range("a number from 1 to 8 is expected, such as 1.25", lambda value: 1 <= value <= 8)

SAMPLED = "rollout.val_kwargs.n={} rollout.val_kwargs.do_sample=true rollout.val_kwargs.temperature=1.0"
"""Command line options for several sampled answers to each validation prompt."""


@dataclass
class ValKwargs(Options):
    """Sampling in validation."""

    n: int = opt(1, "samples per validation prompt", at_least(1))
    do_sample: bool = opt(False, "sample; false = greedy at any temperature")
    temperature: float = opt(0.0, "sampling temperature; 0 = greedy", NOT_NEGATIVE)
    top_p: float = opt(1.0, "nucleus sampling; 1 = all tokens", POSITIVE_SHARE)
    top_k: int = opt(-1, "sample from the most probable tokens; -1 = all", ALL_OR_SOME)
    greedy_too: bool = opt(False, "add a greedy sample, logged as val-aux/{source}/greedy/*")


@dataclass
class RolloutConfig(Options):
    """Generation by the policy."""

    name: str = opt("auto", "rollout engine: auto (CUDA: vllm, CPU: hf, if it runs) | vllm | hf | a registered one")
    n: int = opt(1, "samples per prompt", at_least(1))
    nnodes: int = opt(0, "machines with rollout engines, for hybrid_engine=false", at_least(0))
    n_gpus_per_node: int | None = opt(None, "devices of engines per machine; null = the trainer's", at_least(1))
    temperature: float = opt(1.0, "sampling temperature; the trainer's log-probs use the same", _SAMPLES)
    top_p: float = opt(1.0, "nucleus sampling, needs top_k; training uses the same tokens; 1 = all", POSITIVE_SHARE)
    top_k: int = opt(-1, "sample from the most probable tokens, and train on them; -1 = all", ALL_OR_SOME)
    min_p: float = opt(0.0, "least probability relative to the largest, needs top_k; 0 = all tokens", _BELOW_ONE)
    ignore_eos: bool = opt(False, "continue after the end of text, for benchmarks of fixed length")
    dtype: str = opt("auto", "dtype of generation: auto (bf16 on CUDA, fp32 on CPU) | fp32 | bf16", DTYPES)
    tensor_model_parallel_size: int = opt(1, "devices that share one engine", at_least(1))
    gpu_memory_utilization: float = opt(0.5, "CUDA: share of the device memory for the engine", POSITIVE_SHARE)
    kv_cache_memory_mb: int = opt(256, "CPU: memory of the KV cache in MiB", at_least(1))
    max_num_seqs: int = opt(256, "maximum number of sequences decoded together on one engine", at_least(1))
    max_num_batched_tokens: int = opt(8192, "maximum number of tokens per engine step", at_least(1))
    max_model_len: int | None = opt(None, "context length; null = max_prompt_length + max_response_length")
    enforce_eager: bool = opt(False, "CUDA: run without CUDA graphs")
    enable_chunked_prefill: bool = opt(True, "vLLM: split long prompts over several engine steps")
    enable_prefix_caching: bool = opt(True, "vLLM: share the KV cache of equal prompts; reset at each weight update")
    recompute_kv_on_update: bool = opt(True, "encode running samples again after a weight update")
    oversample: float = opt(1.0, "groups to start per group of a batch; the first complete ones are used", _OVERSAMPLE)
    free_cache_engine: bool = opt(True, "CUDA: free the engine's memory during training")
    lora_sync: str | None = opt(
        # with engines in the trainer's processes, adapter takes 0 to 30% less CPU time (1M and 12M parameters), but it
        # keeps a copy of the base model in each process, which a GPU would read from the host in every update
        None,
        "LoRA: send the adapter alone (adapter) or merged weights (merged); null = adapter with hybrid_engine=false",
        ("adapter", "merged"),
    )
    update_weights_bucket_megabytes: int | None = opt(
        None, "size of one bucket of a weight update in MiB; null = 512, on a CPU 64", at_least(1)
    )
    calculate_log_probs: bool = opt(True, "keep the engine's log-probs and log their distance to the trainer's")
    router_replay: bool = opt(False, "mixture of experts: train with the rollout's expert choices (vLLM: GPU)")
    log_prob_use_dynamic_bsz: bool | None = opt(None, "size micro-batches by tokens; null = actor.use_dynamic_bsz")
    log_prob_max_token_len_per_gpu: int | None = opt(None, "tokens per micro-batch; null = the actor's", at_least(1))
    log_prob_micro_batch_size_per_gpu: int | None = opt(None, "rows per micro-batch; null = the actor's", at_least(1))
    engine_kwargs: FreeDict = opt({}, "extra engine arguments by engine name: engine_kwargs.vllm.KEY")
    val_kwargs: ValKwargs = section(ValKwargs, "sampling in validation")

    def bucket_megabytes(self, on_cpu: bool) -> int:
        """Returns the size of one bucket of a weight update in MiB."""
        if self.update_weights_bucket_megabytes is not None:
            return self.update_weights_bucket_megabytes
        if on_cpu:
            # gloo needs 2.5 times the bucket, and larger messages do not make it faster
            return 64
        return 512


@dataclass
class AsyncTrainingConfig(Options):
    """Sampling ahead of training; see trainer/ASYNC.md."""

    max_off_policy_threshold: int = opt(
        0, "largest staleness of a sample in weight updates; 0 = on-policy", at_least(0)
    )
    batches_ahead: int | None = opt(None, "batches started before they are needed; null = 1 if allowed", at_least(0))
    partial_rollout: bool | None = opt(
        None, "continue running samples under new weights; null = true if max_off_policy_threshold is above 1"
    )

    @property
    def depth(self) -> int:
        """Number of batches that are started before they are needed."""
        if self.batches_ahead is not None:
            return self.batches_ahead
        return min(1, self.max_off_policy_threshold)
