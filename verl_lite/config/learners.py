"""The options of every network that is loaded and trained: where it lies, its adapter, its optimizer, its sharding; and
of the policy's loss and update, the reference, the critic, the reward model."""

from dataclasses import dataclass
from typing import Any

from verl_lite.config.fields import (
    ALL_OR_SOME,
    FINITE,
    POSITIVE,
    POSITIVE_SHARE,
    SHARE,
    Options,
    Problems,
    Range,
    at_least,
    opt,
    section,
)

DTYPES = ("auto", "fp32", "bf16")
LOSS_AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
_KL = ("k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl")
KL_ESTIMATORS = (*_KL, *(f"{name}+" for name in _KL))
"""Each also with the gradient of k2."""
_MOMENTS = Range(
    "two numbers from 0 up to but not 1 are expected, such as [0.9,0.999]",
    lambda values: len(values) == 2 and all(0 <= value < 1 for value in values),
)
_ABOVE_ONE = Range("it bounds the ratio where the advantage is negative: a number above 1 is expected", lambda c: c > 1)


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
    betas: list[float] = opt([0.9, 0.999], "AdamW moments", _MOMENTS)
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
    reduce_every_micro_batch: bool | None = opt(
        None, "sum gradients over ranks in each micro-batch: less memory, slower; null = where GPUs need it"
    )
    fsdp_size: int | None = opt(
        None,
        "ranks that share one copy; -1 = all, 1 = replicate; null = a machine's where its GPUs hold one",
        ALL_OR_SOME,
    )
    mixed_precision: MixedPrecisionConfig = section(MixedPrecisionConfig, "dtypes of computation")
    wrap_policy: WrapPolicyConfig = section(WrapPolicyConfig, "what becomes an FSDP group of its own")


@dataclass
class PolicyLossConfig(Options):
    """Which policy loss, and what single ones read."""

    loss_mode: str = opt("vanilla", "registered policy loss, or pkg.module:function")
    clip_cov_ratio: float = opt(0.0002, "clip_cov: share of the tokens whose loss is dropped", POSITIVE_SHARE)
    clip_cov_lb: float = opt(1.0, "clip_cov: they are drawn from covariances above this")
    clip_cov_ub: float = opt(5.0, "clip_cov: and below this")
    kl_cov_ratio: float = opt(0.0002, "kl_cov: share of tokens, of largest covariance, penalised", POSITIVE_SHARE)
    ppo_kl_coef: float = opt(0.1, "kl_cov: weight of their penalty", at_least(0))
    dro_beta: float | None = opt(None, "dro: weight of the squared log-ratio; must be given", POSITIVE)
    tis_lower_bound: float = opt(0.0, "tis: the ratio is truncated to at least this", at_least(0))
    tis_upper_bound: float = opt(1.0, "tis: and at most this", POSITIVE)
    topr_positive_weight: float = opt(1.0, "topr: weight of good answers", at_least(0))
    topr_negative_weight: float = opt(1.0, "topr: weight of bad answers", at_least(0))
    kimi15_tau: float = opt(0.1, "kimi15: weight of the squared log-ratio", at_least(0))
    cispo_unified_mask: bool = opt(False, "cispo: no loss where PPO's clip would drop it (ROLL)")

    def check(self) -> Problems:
        for low, high in (("clip_cov_lb", "clip_cov_ub"), ("tis_lower_bound", "tis_upper_bound")):
            if not getattr(self, low) < getattr(self, high):
                shown = f"actor.policy_loss.{low}={getattr(self, low)}"
                yield f"{shown} is not below {high}={getattr(self, high)}: a bound below the other is expected"


@dataclass
class ActorConfig(Options):
    """How the policy learns."""

    ppo_mini_batch_size: int = opt(256, "prompts per optimizer step (agentic: rows); -1 = the whole batch", ALL_OR_SOME)
    ppo_epochs: int = opt(1, "passes over each batch", at_least(1))
    shuffle: bool = opt(False, "draw mini-batches at random, anew each epoch")
    use_dynamic_bsz: bool = opt(True, "micro-batches by token budget; false = by ppo_micro_batch_size_per_gpu")
    ppo_max_token_len_per_gpu: int = opt(16384, "token budget of a micro-batch on one device", at_least(1))
    ppo_micro_batch_size_per_gpu: int | None = opt(None, "sequences per micro-batch, not by token budget", at_least(1))
    clip_ratio: float = opt(0.2, "PPO clip range, both sides", POSITIVE)
    clip_ratio_low: float | None = opt(None, "lower clip range; null = clip_ratio", POSITIVE)
    clip_ratio_high: float | None = opt(None, "upper clip range; null = clip_ratio", POSITIVE)
    clip_ratio_c: float | None = opt(3.0, "dual clip: bound of the ratio where A < 0, > 1; null = none", _ABOVE_ONE)
    ratio_type: str = opt("token", "of vanilla, cispo, tis, topr: token | segment (of tokens)", ("token", "segment"))
    tau_pos: float = opt(1.0, "sapo: steepness of the gate where the advantage is positive", POSITIVE)
    tau_neg: float = opt(1.05, "sapo: and where it is not", POSITIVE)
    loss_agg_mode: str = opt("token-mean", "how the losses of tokens become one", LOSS_AGG_MODES)
    loss_scale_factor: float | None = opt(None, "of seq-mean-token-sum-norm; null = data.max_response_length", POSITIVE)
    entropy_coeff: float = opt(0.0, "weight of the entropy bonus")
    calculate_entropy: bool = opt(False, "compute the entropy in the update even if its weight is 0")
    use_kl_loss: bool = opt(False, "add a KL term against the reference model to the loss")
    kl_loss_coef: float = opt(0.001, "its weight", at_least(0))
    kl_loss_type: str = opt("low_var_kl", "k1 | abs | k2 | k3 (= low_var_kl); +: gradient of k2", KL_ESTIMATORS)
    router_aux_loss_coef: float = opt(0.0, "mixtures of experts: weight of the loss that balances them", at_least(0))
    log_prob_chunk_tokens: int = opt(1024, "tokens whose logits exist at one time, for log-probs", at_least(1))
    policy_loss: PolicyLossConfig = section(PolicyLossConfig, "which policy loss")
    optim: OptimConfig = section(OptimConfig, "optimizer")
    fsdp_config: FSDPConfig = section(FSDPConfig, "sharding, precision, offload")


@dataclass
class RefConfig(Options):
    """The frozen reference model."""

    log_prob_use_dynamic_bsz: bool | None = opt(None, "null = actor.use_dynamic_bsz")
    log_prob_max_token_len_per_gpu: int | None = opt(None, "null = actor.ppo_max_token_len_per_gpu", at_least(1))
    log_prob_micro_batch_size_per_gpu: int | None = opt(None, "null = actor.ppo_micro_batch_size_per_gpu", at_least(1))
    fsdp_config: FSDPConfig = section(FSDPConfig, "sharding, precision, offload of the reference model")


@dataclass
class CriticOptimConfig(OptimConfig):
    """The critic's optimizer: as the actor's, with a higher learning rate."""

    lr: float = opt(1e-5, "peak learning rate", at_least(0))


@dataclass
class CriticConfig(Options):
    """The value function, which exists where `algorithm.adv_estimator` needs values (gae)."""

    ppo_mini_batch_size: int | None = opt(None, "prompts per optimizer step, -1 = all; null = the actor's", ALL_OR_SOME)
    ppo_epochs: int | None = opt(None, "passes over each batch; null = actor.ppo_epochs", at_least(1))
    shuffle: bool | None = opt(None, "draw mini-batches at random; null = actor.shuffle")
    use_dynamic_bsz: bool | None = opt(None, "micro-batches by token budget; null = actor.use_dynamic_bsz")
    ppo_max_token_len_per_gpu: int | None = opt(None, "token budget; null = the actor's", at_least(1))
    ppo_micro_batch_size_per_gpu: int | None = opt(None, "null = actor.ppo_micro_batch_size_per_gpu", at_least(1))
    forward_max_token_len_per_gpu: int | None = opt(None, "for values; null = ppo_max_token_len_per_gpu", at_least(1))
    forward_micro_batch_size_per_gpu: int | None = opt(None, "null = ppo_micro_batch_size_per_gpu", at_least(1))
    cliprange_value: float = opt(0.5, "a value moves at most this far from the one before the update", POSITIVE)
    loss_agg_mode: str | None = opt(None, "null = actor.loss_agg_mode", LOSS_AGG_MODES)
    model: NetworkConfig = section(NetworkConfig, "its network; path null = the policy's, with its override_config")
    optim: CriticOptimConfig = section(CriticOptimConfig, "optimizer")
    fsdp_config: FSDPConfig = section(FSDPConfig, "sharding, precision, offload")


@dataclass
class RewardModelConfig(Options):
    """A sequence-classification model in Hugging Face format that scores prompt and answer."""

    enable: bool = opt(False, "score with a reward model, beside or instead of a reward function")
    weight: float = opt(1.0, "its score is multiplied by this and added to the reward function's", FINITE)
    retokenize: bool = opt(False, "decode the answer and apply the reward model's own tokenizer and chat template")
    use_dynamic_bsz: bool | None = opt(None, "null = actor.use_dynamic_bsz")
    forward_max_token_len_per_gpu: int | None = opt(None, "token budget; null = the actor's", at_least(1))
    micro_batch_size_per_gpu: int | None = opt(None, "null = actor.ppo_micro_batch_size_per_gpu", at_least(1))
    model: NetworkConfig = section(NetworkConfig, "its network, with one label")
    fsdp_config: FSDPConfig = section(FSDPConfig, "sharding, precision, offload")

    def check(self) -> Problems:
        if self.enable and self.model.path is None:
            yield "reward_model.enable=true needs reward_model.model.path, a folder of a sequence-classification model"
