"""The options of the networks beside a device: the policy's loss and update, the reference, the critic, the reward
model."""

from __future__ import annotations

from dataclasses import dataclass

from verl_lite.config.fields import (
    ALL_OR_SOME,
    FINITE,
    POSITIVE,
    POSITIVE_SHARE,
    Problems,
    Range,
    at_least,
    opt,
    section,
)
from verl_lite.config.networks import FSDPConfig, NetworkConfig, OptimConfig
from verl_lite.config.reads import Options

LOSS_AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
_KL = ("k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl")
KL_ESTIMATORS = (*_KL, *(f"{name}+" for name in _KL))
"""Each also with the gradient of k2."""
_ABOVE_ONE = Range("it bounds the ratio where the advantage is negative: a number above 1 is expected", lambda c: c > 1)


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
    clip_ratio_c: float = opt(3.0, "dual clip: bound of the ratio where the advantage is negative, > 1", _ABOVE_ONE)
    ratio_type: str = opt("token", "of vanilla, cispo, tis, topr: token | segment (of tokens)", ("token", "segment"))
    tau_pos: float = opt(1.0, "sapo: steepness of the gate where the advantage is positive", POSITIVE)
    tau_neg: float = opt(1.05, "sapo: and where it is not", POSITIVE)
    loss_agg_mode: str = opt("token-mean", " | ".join(LOSS_AGG_MODES), LOSS_AGG_MODES)
    loss_scale_factor: float | None = opt(None, "of seq-mean-token-sum-norm; null = data.max_response_length", POSITIVE)
    entropy_coeff: float = opt(0.0, "weight of the entropy bonus")
    calculate_entropy: bool = opt(False, "compute the entropy in the update even if its weight is 0")
    use_kl_loss: bool = opt(False, "add a KL term against the reference model to the loss")
    kl_loss_coef: float = opt(0.001, "its weight", at_least(0))
    kl_loss_type: str = opt("low_var_kl", "k1 | abs | k2 | k3 (= low_var_kl); +: gradient of k2", KL_ESTIMATORS)
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
