"""The options of networks (path, adapter, optimizer, sharding), of the policy's loss and update, and of the reference
model, critic and reward model."""

from dataclasses import dataclass

from verl_lite.config.fields import (
    ALL_OR_SOME,
    FINITE,
    NOT_NEGATIVE,
    POSITIVE,
    POSITIVE_SHARE,
    SHARE,
    FreeDict,
    Options,
    Range,
    at_least,
    opt,
    section,
)

DTYPES = ("auto", "fp32", "bf16")
LOSS_AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
# kl, mse and low_var_kl are verl's other names of k1, k2 and k3
_KL = ("k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl")
KL_ESTIMATORS = (*_KL, *(f"{name}+" for name in _KL))
"""KL estimators by name. NAME+ has the value of NAME and the gradient of k2."""
_MOMENTS = Range(
    "two numbers of at least 0 and less than 1 are expected, such as [0.9,0.999]",
    lambda values: len(values) == 2 and all(0 <= value < 1 for value in values),
)
_BELOW_ONE = Range("a number of at least 0 and less than 1 is expected", lambda value: 0 <= value < 1)
_ABOVE_ONE = Range("a bound above 1 of the ratio for negative advantages is expected", lambda c: c > 1)


@dataclass
class NetworkConfig(Options):
    """A network of the training engine."""

    path: str | None = opt(None, "Hugging Face folder or cached hub name")
    trust_remote_code: bool = opt(False, "run the Python code in the model's folder")
    override_config: FreeDict = opt({}, "entries that replace those of the model's config.json")
    enable_gradient_checkpointing: bool = opt(True, "recompute activations in the backward pass to save memory")
    compile: bool = opt(False, "compile the layers with torch.compile; a layer that cannot be compiled runs eagerly")
    use_remove_padding: bool = opt(True, "pack sequences without padding; false = padded rows (reference)")
    gradient_checkpointing_layers: int | None = opt(
        None, "checkpoint only the first layers; null = as few as needed to fit the memory", at_least(0)
    )
    enable_activation_offload: bool = opt(False, "keep saved activations in host memory until the backward pass")


@dataclass
class ModelConfig(NetworkConfig):
    """The policy's network."""

    tokenizer_path: str | None = opt(None, "folder or hub name of the tokenizer; null = model.path")
    lora_rank: int = opt(0, "rank of a LoRA adapter, the only trained weights; 0 = train all", at_least(0))
    lora_alpha: int = opt(16, "the adapter's output is scaled by lora_alpha / lora_rank", at_least(1))
    target_modules: list[str] = opt(["all-linear"], "linear layers with an adapter: all-linear, or [q_proj,v_proj,...]")
    exclude_modules: list[str] = opt([], "layers without an adapter, although target_modules names them")
    lora_adapter_path: str | None = opt(None, "start from this folder of a saved adapter in peft's format; null = zero")


@dataclass
class OptimConfig(Options):
    """The optimizer and its learning rate schedule."""

    optimizer: str = opt("adamw", "adamw | muon (linear layers of the blocks; the rest: AdamW)", ("adamw", "muon"))
    lr: float = opt(1e-6, "peak learning rate", NOT_NEGATIVE)
    weight_decay: float = opt(0.01, "decoupled weight decay", NOT_NEGATIVE)
    betas: list[float] = opt([0.9, 0.999], "decay rates of the two moments of AdamW", _MOMENTS)
    eps: float = opt(1e-8, "term added to the denominator of AdamW", POSITIVE)
    muon_momentum: float = opt(0.95, "muon: decay rate of its momentum", _BELOW_ONE)
    clip_grad: float = opt(1.0, "bound of the global gradient norm; a non-finite norm skips the step", POSITIVE)
    lr_scheduler_type: str = opt("constant", "schedule after warm-up: constant | cosine", ("constant", "cosine"))
    lr_warmup_steps: int = opt(-1, "steps of linear warm-up; -1 = use lr_warmup_steps_ratio", at_least(-1))
    lr_warmup_steps_ratio: float = opt(0.0, "linear warm-up as a share of all training steps", SHARE)
    min_lr_ratio: float = opt(0.0, "cosine: minimum learning rate / lr", SHARE)
    num_cycles: float = opt(0.5, "cosine: number of periods; 0.5 = once from peak to minimum", POSITIVE)


@dataclass
class MixedPrecisionConfig(Options):
    param_dtype: str = opt("auto", "dtype of computation: auto (bf16 on CUDA, fp32 on CPU) | fp32 | bf16", DTYPES)
    reduce_dtype: str = opt("fp32", "dtype of the gradient reduction: fp32 | bf16", ("fp32", "bf16"))


@dataclass
class WrapPolicyConfig(Options):
    min_num_params: int = opt(0, "layers with fewer parameters join the root's FSDP group", at_least(0))


@dataclass
class FSDPConfig(Options):
    """Sharding, precision and offload of one network."""

    param_offload: bool = opt(False, "keep parameters in host memory while not in use")
    optimizer_offload: bool = opt(False, "keep the optimizer state in host memory except in the update")
    reshard_after_forward: bool = opt(True, "free gathered parameters after the forward pass (ZeRO-3); false = ZeRO-2")
    reduce_every_micro_batch: bool | None = opt(
        None, "reduce gradients in each micro-batch: less memory, slower; null = if they do not fit on a GPU otherwise"
    )
    fsdp_size: int | None = opt(
        None,
        "ranks that shard one copy; -1 = all, 1 = replicate; null = those of a machine if a copy fits there, else all",
        ALL_OR_SOME,
    )
    mixed_precision: MixedPrecisionConfig = section(MixedPrecisionConfig, "dtypes of computation")
    wrap_policy: WrapPolicyConfig = section(WrapPolicyConfig, "layers with their own FSDP group")


@dataclass
class PolicyLossConfig(Options):
    """The policy loss and its parameters."""

    loss_mode: str = opt("vanilla", "registered policy loss, or pkg.module:function")
    clip_cov_ratio: float = opt(0.0002, "clip_cov: share of tokens whose loss is dropped", POSITIVE_SHARE)
    clip_cov_lb: float = opt(1.0, "clip_cov: minimum covariance of dropped tokens")
    clip_cov_ub: float = opt(5.0, "clip_cov: maximum covariance of dropped tokens")
    kl_cov_ratio: float = opt(0.0002, "kl_cov: share of tokens (largest covariance) with a KL penalty", POSITIVE_SHARE)
    ppo_kl_coef: float = opt(0.1, "kl_cov: weight of the KL penalty", NOT_NEGATIVE)
    dro_beta: float | None = opt(None, "dro: weight of the squared log-ratio; required", POSITIVE)
    tis_lower_bound: float = opt(0.0, "tis: lower bound of the ratio", NOT_NEGATIVE)
    tis_upper_bound: float = opt(1.0, "tis: upper bound of the ratio", POSITIVE)
    topr_positive_weight: float = opt(1.0, "topr: weight of answers with a score above 0", NOT_NEGATIVE)
    topr_negative_weight: float = opt(1.0, "topr: weight of the other answers", NOT_NEGATIVE)
    kimi15_tau: float = opt(0.1, "kimi15: weight of the squared log-ratio", NOT_NEGATIVE)
    cispo_unified_mask: bool = opt(False, "cispo: drop the loss of tokens that PPO would clip (ROLL)")


@dataclass
class ActorConfig(Options):
    """Training of the policy."""

    ppo_mini_batch_size: int = opt(256, "prompts per optimizer step (agentic: rows); -1 = the whole batch", ALL_OR_SOME)
    ppo_epochs: int = opt(1, "passes over each batch", at_least(1))
    shuffle: bool = opt(False, "draw random mini-batches in each of the ppo_epochs")
    use_dynamic_bsz: bool = opt(True, "size micro-batches by tokens; false = by ppo_micro_batch_size_per_gpu")
    ppo_max_token_len_per_gpu: int = opt(16384, "maximum number of tokens per micro-batch", at_least(1))
    ppo_micro_batch_size_per_gpu: int | None = opt(None, "sequences per micro-batch; null = by tokens", at_least(1))
    clip_ratio: float = opt(0.2, "PPO clip range on both sides", POSITIVE)
    clip_ratio_low: float | None = opt(None, "lower clip range; null = clip_ratio", POSITIVE)
    clip_ratio_high: float | None = opt(None, "upper clip range; null = clip_ratio", POSITIVE)
    clip_ratio_c: float | None = opt(3.0, "dual clip: bound (> 1) of the ratio where A < 0; null = none", _ABOVE_ONE)
    ratio_type: str = opt("token", "vanilla, cispo, tis, topr: ratio per token | segment", ("token", "segment"))
    tau_pos: float = opt(1.0, "sapo: temperature of the gate where the advantage is positive", POSITIVE)
    tau_neg: float = opt(1.05, "sapo: temperature of the gate elsewhere", POSITIVE)
    loss_agg_mode: str = opt("token-mean", "aggregation of token losses", LOSS_AGG_MODES)
    loss_scale_factor: float | None = opt(None, "seq-mean-token-sum-norm divisor; null = max_response_length", POSITIVE)
    entropy_coeff: float = opt(0.0, "weight of the entropy bonus", FINITE)
    calculate_entropy: bool = opt(False, "compute the entropy in the update even if entropy_coeff is 0")
    use_kl_loss: bool = opt(False, "add a KL term against the reference model to the loss")
    kl_loss_coef: float = opt(0.001, "use_kl_loss: weight of the KL term", NOT_NEGATIVE)
    kl_loss_type: str = opt("low_var_kl", "KL: k1 | abs | k2 | k3 (= low_var_kl); NAME+: gradient of k2", KL_ESTIMATORS)
    freeze_vision_tower: bool = opt(True, "vision-language models: train only the language model")
    router_aux_loss_coef: float = opt(0.0, "mixture of experts: weight of the load balancing loss", NOT_NEGATIVE)
    ulysses_sequence_parallel_size: int = opt(
        1, "ranks that share each sequence (Ulysses sequence parallelism)", at_least(1)
    )
    log_prob_chunk_tokens: int = opt(8192, "maximum tokens of a tile of logits; memory is bounded", at_least(1))
    policy_loss: PolicyLossConfig = section(PolicyLossConfig, "policy loss")
    optim: OptimConfig = section(OptimConfig, "optimizer")
    fsdp_config: FSDPConfig = section(FSDPConfig, "sharding, precision, offload")


@dataclass
class RefConfig(Options):
    """The frozen reference model."""

    log_prob_use_dynamic_bsz: bool | None = opt(None, "size micro-batches by tokens; null = actor.use_dynamic_bsz")
    log_prob_max_token_len_per_gpu: int | None = opt(None, "tokens per micro-batch; null = the actor's", at_least(1))
    log_prob_micro_batch_size_per_gpu: int | None = opt(None, "rows per micro-batch; null = the actor's", at_least(1))
    ulysses_sequence_parallel_size: int | None = opt(
        None, "ranks that share each sequence; null = the actor's", at_least(1)
    )
    fsdp_config: FSDPConfig = section(FSDPConfig, "sharding, precision, offload of the reference model")


@dataclass
class CriticOptimConfig(OptimConfig):
    """The optimizer of the critic, which has a higher default learning rate than the actor's."""

    lr: float = opt(1e-5, "peak learning rate", NOT_NEGATIVE)


@dataclass
class CriticConfig(Options):
    """The value function, which exists where `algorithm.adv_estimator` needs values (gae)."""

    ppo_mini_batch_size: int | None = opt(None, "prompts per optimizer step; -1 = all; null = the actor's", ALL_OR_SOME)
    ppo_epochs: int | None = opt(None, "passes over each batch; null = actor.ppo_epochs", at_least(1))
    shuffle: bool | None = opt(None, "draw random mini-batches; null = actor.shuffle")
    use_dynamic_bsz: bool | None = opt(None, "size micro-batches by tokens; null = actor.use_dynamic_bsz")
    ppo_max_token_len_per_gpu: int | None = opt(None, "tokens per micro-batch; null = the actor's", at_least(1))
    ppo_micro_batch_size_per_gpu: int | None = opt(None, "sequences per micro-batch; null = the actor's", at_least(1))
    forward_max_token_len_per_gpu: int | None = opt(None, "tokens per forward pass; null = as in updates", at_least(1))
    forward_micro_batch_size_per_gpu: int | None = opt(None, "rows per forward pass; null = as in updates", at_least(1))
    ulysses_sequence_parallel_size: int | None = opt(
        None, "ranks that share each sequence; null = the actor's", at_least(1)
    )
    cliprange_value: float = opt(0.5, "clip range of values around those before the update", POSITIVE)
    loss_agg_mode: str | None = opt(None, "aggregation of token losses; null = actor.loss_agg_mode", LOSS_AGG_MODES)
    model: NetworkConfig = section(NetworkConfig, "network; path=null = the policy's path and override_config")
    optim: CriticOptimConfig = section(CriticOptimConfig, "optimizer")
    fsdp_config: FSDPConfig = section(FSDPConfig, "sharding, precision, offload")


@dataclass
class RewardModelConfig(Options):
    """A Hugging Face sequence-classification model that scores a prompt with its answer."""

    enable: bool = opt(False, "score with a reward model, in addition to or instead of a function")
    weight: float = opt(1.0, "weight of the model's score in the sum with the function's", FINITE)
    retokenize: bool = opt(False, "decode the answer and apply the reward model's own tokenizer and chat template")
    use_dynamic_bsz: bool | None = opt(None, "size micro-batches by tokens; null = actor.use_dynamic_bsz")
    forward_max_token_len_per_gpu: int | None = opt(None, "tokens per micro-batch; null = the actor's", at_least(1))
    micro_batch_size_per_gpu: int | None = opt(None, "sequences per micro-batch; null = the actor's", at_least(1))
    ulysses_sequence_parallel_size: int | None = opt(
        None, "ranks that share each sequence; null = the actor's", at_least(1)
    )
    model: NetworkConfig = section(NetworkConfig, "network with one label")
    fsdp_config: FSDPConfig = section(FSDPConfig, "sharding, precision, offload")
