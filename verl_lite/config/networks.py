"""The options of every network that is loaded and trained: where it lies, its adapter, its optimizer, its sharding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl_lite.config.fields import ALL_OR_SOME, MOMENTS, POSITIVE, SHARE, Problems, at_least, opt, section
from verl_lite.config.reads import Options

DTYPES = ("auto", "fp32", "bf16")


@dataclass
class NetworkConfig(Options):
    """A network that the training engine holds."""

    path: str | None = opt(None, "Hugging Face folder or cached hub name")
    trust_remote_code: bool = opt(False, "run code that comes with the model")
    override_config: dict[str, Any] = opt({}, "entries that replace those of the model's own config")
    enable_gradient_checkpointing: bool = opt(True, "recompute activations in the backward pass to save memory")
    use_remove_padding: bool = opt(True, "packed forward without padding; false = padded, the plain reference")


@dataclass
class ModelConfig(NetworkConfig):
    """The policy's network."""

    tokenizer_path: str | None = opt(None, "tokenizer from elsewhere; null = model.path")
    lora_rank: int = opt(0, "rank of a LoRA adapter, which alone learns; 0 = all parameters learn", at_least(0))
    lora_alpha: int = opt(16, "the adapter counts lora_alpha / lora_rank", at_least(1))
    target_modules: list[str] = opt(["all-linear"], "linear layers with an adapter: all-linear, or [q_proj,v_proj,...]")
    exclude_modules: list[str] = opt([], "of these, layers without one")

    def check(self) -> Problems:
        targets = self.target_modules
        if self.lora_rank > 0 and (not targets or ("all-linear" in targets and len(targets) > 1)):
            yield f"model.target_modules={self.target_modules}: all-linear alone, or names of layers, are expected"


@dataclass
class OptimConfig(Options):
    """AdamW and its schedule."""

    lr: float = opt(1e-6, "peak learning rate", at_least(0))
    weight_decay: float = opt(0.01, "AdamW decoupled weight decay", at_least(0))
    betas: list[float] = opt([0.9, 0.999], "AdamW moments", MOMENTS)
    eps: float = opt(1e-8, "AdamW denominator term", POSITIVE)
    clip_grad: float = opt(1.0, "global gradient norm is clipped to this; a non-finite norm skips the step", POSITIVE)
    lr_scheduler_type: str = opt("constant", "after warm-up: constant | cosine", ("constant", "cosine"))
    lr_warmup_steps: int = opt(-1, "training steps of linear warm-up; -1 = use lr_warmup_steps_ratio", at_least(-1))
    lr_warmup_steps_ratio: float = opt(0.0, "warm-up as a share of all training steps", SHARE)
    min_lr_ratio: float = opt(0.0, "cosine ends at lr times this", SHARE)
    num_cycles: float = opt(0.5, "cosine periods; 0.5 = from peak to minimum once", POSITIVE)


@dataclass
class MixedPrecisionConfig(Options):
    param_dtype: str = opt("auto", "of forward and backward: auto (bf16 on CUDA, fp32 on CPU) | fp32 | bf16", DTYPES)
    reduce_dtype: str = opt("fp32", "dtype of the gradient reduction: fp32 | bf16", ("fp32", "bf16"))


@dataclass
class WrapPolicyConfig(Options):
    min_num_params: int = opt(0, "layers with fewer parameters share the root's FSDP group", at_least(0))


@dataclass
class FSDPConfig(Options):
    """Sharding, precision and offload of one network."""

    param_offload: bool = opt(False, "keep parameters in host memory outside their phase")
    optimizer_offload: bool = opt(False, "keep optimizer state in host memory outside the update")
    reshard_after_forward: bool = opt(True, "free gathered parameters after the forward (ZeRO-3); false = ZeRO-2")
    reduce_every_micro_batch: bool = opt(False, "sum gradients over ranks in each micro-batch: less memory, slower")
    fsdp_size: int = opt(-1, "ranks that share one copy of the weights; -1 = all, 1 = replicate", ALL_OR_SOME)
    mixed_precision: MixedPrecisionConfig = section(MixedPrecisionConfig, "dtypes of computation")
    wrap_policy: WrapPolicyConfig = section(WrapPolicyConfig, "what becomes an FSDP group of its own")
