"""The conflicts of sections that several commands have, and of the commands other than `trainer.main_ppo`."""

from collections.abc import Mapping

from verl_lite.config.conflicts.table import Condition, Conflict
from verl_lite.config.diffusion import RewardFlowConfig
from verl_lite.config.fields import FreeDict
from verl_lite.config.flow_grpo import FlowGRPOConfig
from verl_lite.config.option_table import value_of
from verl_lite.config.ppo import PPOConfig
from verl_lite.config.reward import ScoreConfig
from verl_lite.config.run import EarlyStoppingConfig, RunOptions
from verl_lite.config.supervised import DPOConfig, SFTConfig, SFTDataConfig
from verl_lite.core_algos import POLICY_LOSS_REGISTRY

RUN_ROWS: tuple[Conflict[RunOptions], ...] = (
    Conflict(
        ("trainer.resume_from_path",),
        lambda config, folder: (config.trainer.resume_mode == "resume_path") != (folder is not None),
        "resume_mode=resume_path and resume_from_path, a global_step_N folder, need each other",
        "set both, or leave both out",
        beside=("trainer.resume_mode",),
    ),
    Conflict(
        ("trainer.early_stopping.metric",),
        lambda config, metric: metric is None and config.trainer.early_stopping != EarlyStoppingConfig(),
        "trainer.early_stopping has options but no metric",
        "set trainer.early_stopping.metric",
    ),
    Conflict(
        ("trainer.early_stopping.metric",),
        lambda config, metric: (metric or "").startswith(("val-", "val/")) and config.trainer.test_freq in (-1, 0),
        "the metric is logged only before and after the training",
        "set trainer.test_freq to a number of steps",
        beside=("trainer.test_freq",),
    ),
)
"""Rows of all commands that train."""

# ---------------------------------------------------------------------------------------------------- networks


def _are_no_layers(config: PPOConfig | SFTConfig, layers: list[str]) -> bool:
    """True if an adapter would have no layers, or if all-linear is listed together with other names."""
    if config.model.lora_rank == 0:
        return False
    has_further_names = "all-linear" in layers and len(layers) > 1
    return not layers or has_further_names


ADAPTER_ROWS: tuple[Conflict[PPOConfig | SFTConfig], ...] = (
    Conflict(
        ("model.target_modules",),
        _are_no_layers,
        "all-linear alone, or names of layers are expected",
        "set model.target_modules=all-linear, or such as [q_proj,v_proj]",
        beside=("model.lora_rank",),
    ),
    Conflict(
        ("model.lora_adapter_path",),
        lambda config, folder: folder is not None and not config.model.lora_rank,
        "the adapter's rank is not given",
        "set model.lora_rank to the rank of that adapter",
        beside=("model.lora_rank",),
    ),
)
"""Rows of the policy's adapter."""

# ------------------------------------------------------------------------------------------- losses and advantages


def loss_facts(config: PPOConfig | FlowGRPOConfig) -> FreeDict:
    """Returns what the policy loss declared at its registration; see `core_algos.register_policy_loss`."""
    return POLICY_LOSS_REGISTRY.facts.get(config.actor.policy_loss.loss_mode, {})


def required_loss_agg_mode(config: PPOConfig | FlowGRPOConfig) -> str:
    """Returns the only aggregation that the policy loss is defined for, or the chosen one if it has none."""
    return str(loss_facts(config).get("loss_agg_mode") or config.actor.loss_agg_mode)


POLICY_ROWS: tuple[Conflict[PPOConfig | FlowGRPOConfig], ...] = (
    Conflict(
        ("actor.policy_loss.dro_beta",),
        lambda config, beta: beta is None and "dro_beta" in loss_facts(config).get("needs", ()),
        "the loss needs it",
        "set actor.policy_loss.dro_beta to a number",
        beside=("actor.policy_loss.loss_mode",),
    ),
    Conflict(
        ("actor.loss_agg_mode",),
        lambda config, mode: mode != required_loss_agg_mode(config),
        "the loss is defined for another aggregation",
        lambda config: f"set actor.loss_agg_mode={required_loss_agg_mode(config)}",
        beside=("actor.policy_loss.loss_mode",),
    ),
    Conflict(
        ("actor.policy_loss.clip_cov_lb",),
        lambda config, bound: bound >= config.actor.policy_loss.clip_cov_ub,
        "the lower bound is not less than the upper bound",
        "set a smaller number",
        beside=("actor.policy_loss.clip_cov_ub",),
    ),
    Conflict(
        ("actor.policy_loss.tis_lower_bound",),
        lambda config, bound: bound >= config.actor.policy_loss.tis_upper_bound,
        "the lower bound is not less than the upper bound",
        "set a smaller number",
        beside=("actor.policy_loss.tis_upper_bound",),
    ),
    Conflict(
        ("algorithm.adv_estimator",),
        lambda config, estimator: estimator == "gdpo" and not config.algorithm.gdpo_reward_keys,
        "gdpo needs the entries of the reward function's dict that it normalises",
        "set algorithm.gdpo_reward_keys, such as [correct,format]",
        beside=("algorithm.gdpo_reward_keys",),
    ),
    Conflict(
        ("algorithm.gdpo_reward_weights",),
        lambda config, weights: weights and len(weights) != len(config.algorithm.gdpo_reward_keys),
        "one weight for each key is expected",
        "set as many weights as keys, or none",
        beside=("algorithm.gdpo_reward_keys",),
    ),
    Conflict(
        ("algorithm.use_pf_ppo",),
        # an estimator of the user, which is named by its path, may have a critic
        lambda config, resamples: (
            resamples and config.algorithm.adv_estimator != "gae" and ":" not in config.algorithm.adv_estimator
        ),
        "PF-PPO needs a critic",
        "set algorithm.adv_estimator=gae",
        beside=("algorithm.adv_estimator",),
    ),
    Conflict(
        ("algorithm.rollout_correction.rollout_is_batch_normalize",),
        lambda config, normalizes: (
            normalizes
            and config.algorithm.rollout_correction.bypass_mode
            and config.algorithm.rollout_correction.rollout_is is not None
        ),
        "weights change with each optimizer step, so their mean over the batch does not exist",
        "remove one of them",
        beside=("algorithm.rollout_correction.bypass_mode",),
    ),
    Conflict(
        ("algorithm.rollout_correction.rollout_rs",),
        # the criteria of the level batch: batch_k2 and batch_k3
        lambda config, criteria: "batch_" in (criteria or "") and config.algorithm.rollout_correction.bypass_mode,
        "the workers reject tokens without knowing the other tokens of the batch",
        "set algorithm.rollout_correction.bypass_mode=false",
        beside=("algorithm.rollout_correction.bypass_mode",),
    ),
)
"""Rows of the policy loss and of the advantages, for language models and for flow matching."""

# ---------------------------------------------------------------------------------------------------- rewards


def _have_no_weight(config: PPOConfig | ScoreConfig, functions: FreeDict) -> bool:
    """True if every part of the reward has weight 0, and no reward model scores in addition."""
    if not functions or value_of(config, "reward_model.enable"):
        return False
    for entry in functions.values():
        # a part of another form is reported by `part_problems`
        if not isinstance(entry, Mapping) or entry.get("weight", 1):
            return False
    return True


REWARD_ROWS: tuple[Conflict[PPOConfig | ScoreConfig], ...] = (
    Conflict(
        ("reward.custom_reward_function.path",),
        lambda config, path: bool(path and config.reward.remote.url),
        "only one of them can be the reward",
        "remove the other",
        beside=("reward.remote.url",),
    ),
    Conflict(
        ("reward.custom_reward_function.path", "reward.remote.url"),
        lambda config, source: bool(source and config.reward.functions),
        "only one of them can be the reward",
        "remove the other",
        beside=("reward.functions",),
    ),
    Conflict(
        ("reward.remote.url",),
        lambda config, url: url is not None and config.reward.num_workers == 0,
        "a reward server needs a reward process",
        "set reward.num_workers=1 or more",
        beside=("reward.num_workers",),
    ),
    Conflict(
        ("reward.functions",),
        _have_no_weight,
        "every weight is 0, so every score would be 0",
        "set a weight above 0",
    ),
)
"""Rows of the reward functions, for training and for `trainer.score`."""

# ------------------------------------------------------------------------------------------ supervised training


def _is_set_without_dpo(default: object) -> Condition[SFTConfig]:
    """Returns a condition that holds for a value other than the default if the loss is not dpo."""
    return lambda config, value: config.loss != "dpo" and value != default


def _is_set_with_dpo(default: object) -> Condition[SFTConfig]:
    """Returns a condition that holds for a value other than the default if the loss is dpo."""
    return lambda config, value: config.loss == "dpo" and value != default


SFT_ROWS: tuple[Conflict[SFTConfig], ...] = (
    Conflict(
        ("data.truncation",),
        lambda config, truncation: config.loss == "dpo" and truncation == "right",
        "part of an answer is another answer",
        "set data.truncation=error or drop",
        beside=("loss",),
    ),
    *(
        Conflict(
            (f"data.{name}",),
            _is_set_with_dpo(getattr(SFTDataConfig(), name)),
            "it has no effect, because dpo trains on whole answers",
            "leave it out",
            beside=("loss",),
        )
        for name in ("assistant_only_loss", "completion_only_loss")
    ),
    *(
        Conflict(
            (f"dpo.{name}",),
            _is_set_without_dpo(default),
            "it has no effect",
            f"set loss=dpo, or leave dpo.{name} out",
            beside=("loss",),
        )
        for name, default in vars(DPOConfig()).items()
    ),
)
"""Rows of `trainer.main_sft`."""

# ---------------------------------------------------------------------------------------------------- reward flow

REWARD_FLOW_ROWS: tuple[Conflict[RewardFlowConfig], ...] = (
    Conflict(
        ("sampler.mid_timestep",),
        lambda config, middle: not 0 <= middle <= config.sampler.final_timestep < config.sampler.num_inference_steps,
        "expected 0 <= mid_timestep <= final_timestep < num_inference_steps",
        "set them in this order",
        beside=("sampler.final_timestep", "sampler.num_inference_steps"),
    ),
)
"""Rows of `trainer.main_reward_flow`."""
