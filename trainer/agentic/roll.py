"""ROLL's interface: its loop over clusters (`AgenticPipeline`) and its functions of rewards and advantages.

The functions have ROLL's names, take its options and its layout of a batch, and return that layout. They convert both
once and then call `trainer.ppo.advantage` and `trainer.agentic.agentic_advantage`. ROLL's estimators except gae are
REINFORCE on rewards that `reward_postprocess` normalised; a batch without group columns is treated in that way.

ROLL counts steps from 0; `fit` and the log count from 1. `workers.roll_loss` has its loss function and the layout of
its batches. recipes/agentic_frozen_lake/roll_loop.py is an example of a custom loop.
"""

import time
from collections.abc import Callable, MutableMapping
from functools import partial
from operator import attrgetter
from typing import Any, Literal, overload

import numpy as np
import torch

from trainer.agentic import agentic_advantage
from trainer.agentic.agent_trainer import AgentTrainer
from trainer.observe.final_report import FitResult
from trainer.ppo import advantage
from trainer.ppo.advantage import Controllers, ScalarMetrics
from trainer.ppo.roles import ActorRole, CriticRole, Metrics, ReferenceRole
from trainer.ray_trainer import RayPPOTrainer
from trainer.rollout.group_sources import EnvSource
from trainer.validation.answers import val_samplings
from verl_lite.algos.agentic_rewards import agentic_reward_norm, normalization
from verl_lite.config import AgenticConfig, AlgorithmConfig, PPOConfig, RewardNormalizationConfig
from verl_lite.config.spellings import ppo_keys
from verl_lite.core_algos import FixedKLController
from verl_lite.metrics import Metric
from verl_lite.protocol import DataProto, DataProtoFuture
from workers.roll_loss import batch_of_roll

BasePipeline = RayPPOTrainer

_OPTIONS = {
    "norm_mean_type": "norm_mean_type",
    "norm_std_type": "norm_std_type",
    "reward_clip": "reward_clip",
    "add_token_level_kl": "use_kl_in_reward",
    "kl_penalty": "kl_penalty",
}
"""ROLL's name of an option of rewards -> ours."""
_GROUP_LABELS = ("uid", "traj_id", "step", "state_hash")
"""Columns by which an estimator compares rows with each other."""
_NEED_NORMALISED_REWARDS = ("grpo", "gigpo", "step_reinforce")
"""Estimators that compare rows with each other; in ROLL their rewards are already normalised, and REINFORCE remains."""


# --------------------------------------------------------------------------------------------- rewards and advantages


def reward_postprocess(
    data: DataProto, pipeline_config: object, running_ctrl: Controllers | None = None
) -> tuple[DataProto, ScalarMetrics]:
    """Normalises and clips response_level_rewards (B,); see `trainer.ppo.advantage.reward_postprocess`.

    Args:
        pipeline_config: has norm_mean_type, norm_std_type and reward_clip as attributes; a missing option is off. In a
            batch without uid, actor_infer.generating_args.num_return_sequences adjacent rows form a group, and
            adv_estimator=grpo normalises by group.
        running_ctrl: `RunningMoments` by the column domain, or one object for all rows. A single entry serves all rows
            of a batch without that column.

    Returns:
        The batch, and critic/reward_clip_frac over valid rows (ROLL counts all rows).
    """
    algorithm = _algorithm_of(pipeline_config)
    batch = batch_of_roll(data)
    group_size = _num_return_sequences(pipeline_config)
    if group_size and "uid" not in batch:
        if len(batch) % group_size:
            raise ValueError(
                f"reward_postprocess: num_return_sequences={group_size} does not divide the batch of {len(batch)} rows."
            )
        batch.non_tensor_batch["uid"] = np.arange(len(batch)) // group_size
        if getattr(pipeline_config, "adv_estimator", None) == "grpo":
            algorithm.norm_mean_type = "group"
            algorithm.norm_std_type = "group"

    if "domain" in batch:
        # `advantage.reward_postprocess` selects the moments of a row by this column, which ROLL names domain
        batch.non_tensor_batch["data_source"] = batch.non_tensor_batch["domain"]
    elif "data_source" not in batch and isinstance(running_ctrl, MutableMapping) and len(running_ctrl) == 1:
        [running_ctrl] = running_ctrl.values()
    result, metrics = advantage.reward_postprocess(batch, algorithm, running_ctrl)
    return _with_columns(data, result, "response_level_rewards"), metrics


def compute_token_reward(
    data: DataProto, pipeline_config: object, kl_ctrl: FixedKLController | None = None
) -> tuple[DataProto, ScalarMetrics]:
    """Assigns rewards to tokens and subtracts the KL penalty; see `trainer.ppo.advantage.compute_token_reward`.

    Args:
        data: response_mask; response_level_rewards or token_level_scores; with the penalty also old_log_probs and
            ref_log_probs.
        pipeline_config: has add_token_level_kl, kl_penalty and reward_clip as attributes; a missing option is off.
        kl_ctrl: controller of the KL coefficient; needed with the penalty, and updated then.

    Returns:
        The batch with token_level_rewards (B, R), and the metrics.
    """
    batch = batch_of_roll(data)
    algorithm = _algorithm_of(pipeline_config)
    result, metrics = advantage.compute_token_reward(batch, algorithm, kl_ctrl)
    if "token_level_rewards" in data and "token_level_scores" not in data:
        # ROLL's reward workers write their scores as token_level_rewards
        data = data.select()
        data.rename("token_level_rewards", "token_level_scores")
    return _with_columns(data, result, "token_level_rewards"), metrics


def compute_advantage(
    data: DataProto,
    gamma: float,
    lambd: float,
    adv_estimator: str,
    advantage_clip: float | None = None,
    whiten_advantages: bool = False,
    whiten_rewards: bool = False,
    response_mask: torch.Tensor | None = None,
) -> DataProto:
    """Adds raw_advantages, advantages and returns (B, R); see `trainer.ppo.advantage.estimate_advantages`.

    gae whitens only with `whiten_advantages`. Without group columns, the estimators that compare rows become REINFORCE
    over the rewards that `reward_postprocess` normalised. The batch keeps its own rewards (ROLL replaces them by the
    whitened ones).

    Args:
        gamma, lambd: discount factor, lambda of GAE.
        adv_estimator: registered name, or pkg.module:function.
        advantage_clip: bound of |advantage|; adds critic/advantage_clip_frac over valid tokens to
            meta_info["metrics"].
        whiten_advantages, whiten_rewards: over all valid tokens.
        response_mask: (B, R) replaces the batch's own.
    """
    batch = batch_of_roll(data)
    if response_mask is not None:
        batch.batch["response_mask"] = response_mask
    has_groups = any(name in batch for name in _GROUP_LABELS)
    if adv_estimator in _NEED_NORMALISED_REWARDS and not has_groups:
        # the rewards are normalised already, and nothing remains to be compared
        adv_estimator = "reinforce"
    algorithm = AlgorithmConfig(
        gamma=gamma,
        lam=lambd,
        advantage_clip=advantage_clip,
        whiten_advantages=whiten_advantages,
        whiten_rewards=whiten_rewards,
    )
    result, metrics = advantage.estimate_advantages(batch, algorithm, adv_estimator, whiten=False)

    result = _with_columns(data, result, "raw_advantages", "advantages", "returns")
    if advantage_clip is not None:
        clipped = metrics["critic/advantage_clip_frac"]
        result.meta_info["metrics"] = data.meta_info.get("metrics", {}) | {"critic/advantage_clip_frac": clipped}
    return result


def compute_response_level_rewards(batch: DataProto, pipeline_config: "RollConfig") -> tuple[DataProto, ScalarMetrics]:
    """Adds response_level_rewards (B,) of episodes; see `trainer.agentic.agentic_advantage`.

    Args:
        batch: the rows of the episodes.
        pipeline_config: has adv_estimator, reward_normalization, step_reward_gamma, episode_reward_weight and
            step_reward_weight as attributes.
    """
    config = AgenticConfig(
        reward_normalization=pipeline_config.reward_normalization,
        step_reward_gamma=pipeline_config.step_reward_gamma,
        episode_reward_weight=pipeline_config.episode_reward_weight,
        step_reward_weight=pipeline_config.step_reward_weight,
    )
    return agentic_advantage.compute_response_level_rewards(batch, config, pipeline_config.adv_estimator)


def get_score_normalize_fn(rn_cfg: RewardNormalizationConfig) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns the configured normalization, a function of the scores (B,) of one group."""
    how = normalization(rn_cfg.method or "identity", rn_cfg.norm_mean_type, rn_cfg.norm_std_type)
    return partial(agentic_reward_norm, how=how)


def _algorithm_of(pipeline_config: object) -> AlgorithmConfig:
    """Converts the options of rewards, under ROLL's names or ours. A missing option is off."""
    algorithm = AlgorithmConfig()
    for roll_name, name in _OPTIONS.items():
        value_of_roll = getattr(pipeline_config, roll_name, None)
        value = getattr(pipeline_config, name, value_of_roll)
        if value is not None:
            setattr(algorithm, name, value)
    return algorithm


def _num_return_sequences(pipeline_config: object) -> int | None:
    """Returns the number of adjacent rows that form a group; None if it is not configured."""
    actor_infer = getattr(pipeline_config, "actor_infer", None)
    generating_args = getattr(actor_infer, "generating_args", None)
    size: int | None = getattr(generating_args, "num_return_sequences", None)
    return size


def _with_columns(data: DataProto, result: DataProto, *names: str) -> DataProto:
    """Returns the batch `data`, which stays in ROLL's layout, with these columns of `result`."""
    written = data.select()
    for name in names:
        written.batch[name] = result.batch[name]
    return written


# ---------------------------------------------------------------------------------------------------------- the loop


class RollScheduler:
    """ROLL's interface to the sampling of episodes."""

    def __init__(self, pipeline: "AgenticPipeline", source: EnvSource) -> None:
        self._pipeline = pipeline
        self._source = source
        self.infer_cluster = pipeline.actor_infer

    def get_batch(self, data: DataProto, batch_size: int) -> DataProto:
        """Returns the rows of `batch_size` episodes, with old_log_probs if algorithm.rollout_correction.bypass_mode is
        true.

        Args:
            data: a batch with meta_info global_step, counted from 0, which the result has, too.
            batch_size: number of episodes.
        """
        started = time.perf_counter()
        step = int(data.meta_info["global_step"])
        config = self._pipeline.config
        scheduler = self._pipeline.scheduler
        source = self._source
        source.batch_size = batch_size

        if source.purpose == "train":
            batch = scheduler.get_batch(step + 1)
            # as in `RayPPOTrainer.collect_batch`, which a custom loop does not call
            if config.algorithm.rollout_correction.bypass_mode:
                batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
        else:
            # always the same episodes, so that validations of different steps can be compared
            groups = source.draw_batch(1, 1)
            first_sampling = val_samplings(config)[0]
            batch = scheduler.run(groups, first_sampling.params)

        seconds = Metric.last(time.perf_counter() - started)
        batch.meta_info["metrics"] |= {f"time/get_batch_cost_{source.purpose}": seconds}
        batch.meta_info["global_step"] = step
        return batch

    def begin_ahead(self, data: DataProto, batch_size: int) -> None:
        """Starts the episodes of later steps, unless `get_batch` has already done this (partial rollouts)."""
        self._source.batch_size = batch_size
        # the scheduler counts steps from 1
        step = int(data.meta_info["global_step"]) + 1
        self._pipeline.scheduler.begin_ahead(step)


class RollCluster:
    """A role under the names of ROLL's clusters. Other attributes are those of the role.

    With blocking=False, the calls return a future as in ROLL. Its result is already computed: all roles share the
    devices, which run one call after the other.
    """

    def __init__(self, role: ActorRole | CriticRole | ReferenceRole) -> None:
        self.role: Any = role

    def __getattr__(self, name: str) -> Any:
        return getattr(self.role, name)

    @overload
    def compute_log_probs(self, batch: DataProto) -> DataProto: ...
    @overload
    def compute_log_probs(self, batch: DataProto, blocking: Literal[False]) -> DataProtoFuture: ...
    def compute_log_probs(self, batch: DataProto, blocking: bool = True) -> DataProto | DataProtoFuture:
        """Computes the log-probs of the policy or of the reference."""
        if isinstance(self.role, ActorRole):
            result = self.role.compute_log_prob(batch)
        else:
            result = self.role.compute_ref_log_prob(batch)
        return _result_or_future(result, blocking)

    @overload
    def compute_values(self, batch: DataProto) -> DataProto: ...
    @overload
    def compute_values(self, batch: DataProto, blocking: Literal[False]) -> DataProtoFuture: ...
    def compute_values(self, batch: DataProto, blocking: bool = True) -> DataProto | DataProtoFuture:
        """Computes the values of the critic."""
        return _result_or_future(self.role.compute_values(batch), blocking)

    @overload
    def train_step(self, batch: DataProto) -> DataProto: ...
    @overload
    def train_step(self, batch: DataProto, blocking: Literal[False]) -> DataProtoFuture: ...
    def train_step(self, batch: DataProto, blocking: bool = True) -> DataProto | DataProtoFuture:
        """Trains on a batch, whose meta_info has global_step, counted from 0. Returns the metrics in meta_info."""
        if "global_step" not in batch.meta_info:
            raise ValueError(
                "train_step: the batch has no meta_info['global_step'], counted from 0, as get_batch gives it"
            )
        step = int(batch.meta_info["global_step"]) + 1
        metrics = self.role.update(batch, step)
        result = DataProto(meta_info={"metrics": metrics})
        return _result_or_future(result, blocking)


def _result_or_future(result: DataProto, blocking: bool) -> DataProto | DataProtoFuture:
    """Returns the result itself, or with blocking=False a future that has it already."""
    if blocking:
        return result
    return DataProtoFuture(lambda: result)


class AgenticPipeline(AgentTrainer):
    """An `AgentTrainer` with ROLL's names: train_rollout_scheduler and val_rollout_scheduler (None without validation);
    pipeline_config; actor_train and actor_infer, one worker with two engines; reference and critic, None if not
    configured; running; tracker."""

    def __init__(self, config: PPOConfig, **parts: Any) -> None:
        super().__init__(config, **parts)
        self.pipeline_config = RollConfig(config)
        # training and sampling are two engines of one worker
        self.actor_train = RollCluster(self.actor)
        self.actor_infer = self.actor_train
        self.critic: Any = self.critic and RollCluster(self.critic)
        self.reference = self.ref and RollCluster(self.ref)
        self.running = self.running_moments
        self.tracker = self.tracking
        self.train_rollout_scheduler = RollScheduler(self, parts["source"])
        self.val_rollout_scheduler: RollScheduler | None = None
        if isinstance(self.val_source, EnvSource):
            self.val_rollout_scheduler = RollScheduler(self, self.val_source)

    def set_model_update_pair(self, src_cluster: RollCluster, tgt_cluster: RollCluster, frequency: int = 1) -> None:
        """Sets the number of steps between weight updates from actor_train to actor_infer."""
        if src_cluster is not self.actor_train or tgt_cluster is not self.actor_infer or frequency < 1:
            raise ValueError(
                f"set_model_update_pair: found {src_cluster=}, {tgt_cluster=}, {frequency=}; expected actor_train, "
                "actor_infer (two engines of one worker) and at least 1"
            )
        self.config.agentic.model_update_frequency = frequency

    def model_update(self, global_step: int | None = None) -> Metrics:
        """Copies the trained weights to the rollout engines. Running episodes are finished first.

        Args:
            global_step: number of trained steps, for loops that start each step with this call; None = the current
                step, as in `fit`.
        """
        if global_step is None:
            return super().model_update()
        return self.weight_sync.give_if_due(global_step)

    def do_checkpoint(self, global_step: int) -> None:
        """Ends a step of a custom loop, counted from 0: writes a checkpoint if one is due."""
        self.steps.global_step = global_step + 1
        if self.saver.is_due(self.steps):
            self.save()

    def run(self) -> FitResult:
        """`fit` under ROLL's name."""
        return self.fit()


class RollConfig:
    """The options under ROLL's names, such as `pipeline_config.actor_train.model_update_frequency`, and under our own.
    Options whose values differ in ROLL are not included."""

    def __init__(self, config: PPOConfig, section: str = "") -> None:
        self._config = config
        self._section = section

    def __getattr__(self, name: str) -> Any:
        key = f"{self._section}{name}"
        # ROLL's name of an option -> its path in our options, such as actor.ppo_epochs
        paths = {}
        for roll_key, entry in ppo_keys().entries.items():
            # without the options whose values differ, which would have to be converted back
            if entry.renamed and not entry.values:
                paths[roll_key] = entry.renamed
        is_section = any(roll_key.startswith(f"{key}.") for roll_key in paths)
        if is_section:
            return RollConfig(self._config, f"{key}.")
        path = paths.get(key, key)
        return attrgetter(path)(self._config)
