"""The options that make advantages of rewards."""

from dataclasses import dataclass

from verl_lite.config.fields import POSITIVE, SHARE, Options, Problems, at_least, opt, section
from verl_lite.config.learners import KL_ESTIMATORS
from verl_lite.config.rollout_correction import RolloutCorrectionConfig

_SCALES = ("batch", "group", "running")


@dataclass
class KLControlConfig(Options):
    type: str = opt("fixed", "whether the coefficient follows the KL", ("fixed", "adaptive"))
    kl_coef: float = opt(0.001, "coefficient (initial, if adaptive)", at_least(0))
    horizon: int = opt(10000, "adaptive: sequences over which the coefficient reacts", at_least(1))
    target_kl: float = opt(0.1, "adaptive: KL per token aimed at", POSITIVE)


@dataclass
class PFPPOConfig(Options):
    reweight_method: str = opt("pow", "how the weight follows from the score", ("pow", "max_min", "max_random"))
    weight_pow: float = opt(2.0, "pow: exponent of the absolute score", POSITIVE)


@dataclass
class FilterGroupsConfig(Options):
    """Dynamic sampling (DAPO): prompts whose answers are all as good as each other are replaced by other prompts."""

    enable: bool = opt(False, "drop groups of equal outcome and sample more prompts in their place")
    metric: str | None = opt(None, "what has to differ: acc, score, or an entry of the reward's dict; null = the first")
    max_num_gen_batches: int = opt(10, "generation batches of one step at most; then the run stops", at_least(2))


@dataclass
class AlgorithmConfig(Options):
    """How rewards become advantages."""

    adv_estimator: str = opt("grpo", "registered advantage estimator, or pkg.module:function")
    gamma: float = opt(1.0, "discount", SHARE)
    lam: float = opt(1.0, "GAE lambda", SHARE)
    norm_adv_by_std_in_grpo: bool = opt(True, "divide by the group's standard deviation; false = Dr.GRPO")
    gdpo_reward_keys: list[str] = opt([], "gdpo: values of the reward function's dict, each normalised by itself")
    gdpo_reward_weights: list[float] = opt([], "gdpo: a weight for each of these; empty = 1 each")
    norm_mean_type: str | None = opt(None, "mean subtracted from scores: null | batch | group | running", _SCALES)
    norm_std_type: str | None = opt(None, "scores are divided by the deviation of: batch | group | running", _SCALES)
    reward_clip: float | None = opt(None, "scores, and tokens' rewards after the KL, are clipped to +- this", POSITIVE)
    whiten_rewards: bool = opt(False, "whiten rewards over the batch's tokens before the estimator")
    whiten_advantages: bool = opt(False, "whiten advantages over the batch's tokens after the estimator")
    advantage_clip: float | None = opt(None, "advantages are clipped to +- this, last", POSITIVE)
    filter_groups: FilterGroupsConfig = section(FilterGroupsConfig, "dynamic sampling")
    use_pf_ppo: bool = opt(False, "gae: draw the batch anew with weights by score (PF-PPO)")
    pf_ppo: PFPPOConfig = section(PFPPOConfig, "these weights")
    rollout_correction: RolloutCorrectionConfig = section(RolloutCorrectionConfig, "mismatch of rollout and trainer")
    use_kl_in_reward: bool = opt(False, "subtract the KL to the reference model from the rewards")
    kl_penalty: str = opt("kl", "its estimator: k1 (= kl) | abs | k2 | k3", KL_ESTIMATORS)
    kl_ctrl: KLControlConfig = section(KLControlConfig, "its coefficient")

    def check(self) -> Problems:
        keys, weights, chosen = self.gdpo_reward_keys, self.gdpo_reward_weights, self.adv_estimator
        if chosen == "gdpo" and not keys:
            yield "algorithm.adv_estimator=gdpo needs algorithm.gdpo_reward_keys, such as [correct,format]"
        if weights and len(weights) != len(keys):
            yield f"algorithm.gdpo_reward_weights={weights}: one weight for each of gdpo_reward_keys={keys} is expected"
        if self.use_pf_ppo and chosen != "gae" and ":" not in chosen:
            yield f"algorithm.use_pf_ppo=true with {chosen}: PF-PPO has a critic: set algorithm.adv_estimator=gae"
