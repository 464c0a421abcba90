"""The options of rewards and advantages."""

from dataclasses import dataclass

from verl_lite.config.fields import NOT_NEGATIVE, POSITIVE, SHARE, Options, at_least, opt, section
from verl_lite.config.learners import KL_ESTIMATORS
from verl_lite.config.rollout_correction import RolloutCorrectionConfig

_SCALES = ("batch", "group", "running")


@dataclass
class KLControlConfig(Options):
    type: str = opt("fixed", "fixed, or adaptive: adjusted towards target_kl", ("fixed", "adaptive"))
    kl_coef: float = opt(0.001, "coefficient (initial, if adaptive)", NOT_NEGATIVE)
    horizon: int = opt(10000, "adaptive: number of sequences over which the coefficient adjusts", at_least(1))
    target_kl: float = opt(0.1, "adaptive: target KL per token", POSITIVE)


@dataclass
class PFPPOConfig(Options):
    reweight_method: str = opt("pow", "weight of a row as a function of its score", ("pow", "max_min", "max_random"))
    weight_pow: float = opt(2.0, "pow: the weight is |score| to this power", POSITIVE)


@dataclass
class FilterGroupsConfig(Options):
    """Dynamic sampling (DAPO): replaces prompts whose answers all have the same outcome."""

    enable: bool = opt(False, "drop groups of equal outcomes and sample other prompts instead")
    metric: str | None = opt(None, "outcome: acc, score or an entry of the reward's dict; null = acc, else score")
    max_num_gen_batches: int = opt(10, "maximum number of generation batches per step; then the run stops", at_least(2))


@dataclass
class AlgorithmConfig(Options):
    """The computation of advantages from rewards."""

    adv_estimator: str = opt("grpo", "registered advantage estimator, or pkg.module:function")
    gamma: float = opt(1.0, "discount factor per token", SHARE)
    lam: float = opt(1.0, "lambda of GAE", SHARE)
    norm_adv_by_std_in_grpo: bool = opt(True, "divide by the group's standard deviation; false = Dr.GRPO")
    gdpo_reward_keys: list[str] = opt([], "gdpo: entries of the reward function's dict, each normalised separately")
    gdpo_reward_weights: list[float] = opt([], "gdpo: weight of each gdpo_reward_keys entry; empty = 1 each")
    norm_mean_type: str | None = opt(None, "subtract this mean from scores: null | batch | group | running", _SCALES)
    norm_std_type: str | None = opt(None, "divide scores by this std: null | batch | group | running", _SCALES)
    reward_clip: float | None = opt(None, "bound of |score|, and of |token reward| after the KL penalty", POSITIVE)
    whiten_rewards: bool = opt(False, "whiten token rewards over the batch, before the estimator")
    whiten_advantages: bool = opt(False, "whiten token advantages over the batch, after the estimator")
    advantage_clip: float | None = opt(None, "bound of |advantage|, applied last", POSITIVE)
    filter_groups: FilterGroupsConfig = section(FilterGroupsConfig, "dynamic sampling")
    use_pf_ppo: bool = opt(False, "gae: resample the rows of the batch, weighted by score (PF-PPO)")
    pf_ppo: PFPPOConfig = section(PFPPOConfig, "weights of PF-PPO")
    rollout_correction: RolloutCorrectionConfig = section(RolloutCorrectionConfig, "rollout-trainer mismatch")
    use_kl_in_reward: bool = opt(False, "subtract the KL to the reference model from the rewards")
    kl_penalty: str = opt("kl", "use_kl_in_reward: estimator k1 (= kl) | abs | k2 | k3", KL_ESTIMATORS)
    kl_ctrl: KLControlConfig = section(KLControlConfig, "use_kl_in_reward: coefficient")
