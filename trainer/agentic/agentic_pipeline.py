"""ROLL's names for `AgentTrainer`, for custom loops such as recipes/agentic_frozen_lake/roll_loop.py.

ROLL counts steps from 0; `fit` and the log count from 1.
"""

import time
from operator import attrgetter
from typing import Any, Literal, overload

from trainer.agentic.agent_trainer import AgentTrainer
from trainer.final_report import FitResult
from trainer.group_sources import EnvSource
from trainer.ray_trainer import RayPPOTrainer
from trainer.roles import ActorRole, CriticRole, Metrics, ReferenceRole
from trainer.validation.answers import val_samplings
from verl_lite.config import PPOConfig
from verl_lite.config.spellings import ppo_keys
from verl_lite.metrics import Metric
from verl_lite.protocol import DataProto, DataProtoFuture

BasePipeline = RayPPOTrainer


class RollScheduler:
    """ROLL's interface to the sampling of episodes."""

    def __init__(self, pipeline: "AgenticPipeline", source: EnvSource) -> None:
        self._pipeline, self._source, self.infer_cluster = pipeline, source, pipeline.actor_infer

    def get_batch(self, data: DataProto, batch_size: int) -> DataProto:
        """Returns the rows of `batch_size` episodes, with old_log_probs if algorithm.rollout_correction.bypass_mode is
        true. data: a batch with meta_info global_step, which the result has, too."""
        step, started, scheduler = int(data.meta_info["global_step"]), time.perf_counter(), self._pipeline.scheduler
        source = self._source
        source.batch_size = batch_size
        if source.purpose == "train":
            batch = scheduler.get_batch(step + 1)
            if self._pipeline.config.algorithm.rollout_correction.bypass_mode:
                batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
        else:
            batch = scheduler.run(source.draw_batch(1, 1), val_samplings(self._pipeline.config)[0].params)
        seconds = Metric.last(time.perf_counter() - started)
        batch.meta_info["metrics"] |= {f"time/get_batch_cost_{source.purpose}": seconds}
        batch.meta_info["global_step"] = step
        return batch

    def begin_ahead(self, data: DataProto, batch_size: int) -> None:
        """Starts the episodes of later steps, unless `get_batch` has already done this (partial rollouts)."""
        self._source.batch_size = batch_size
        self._pipeline.scheduler.begin_ahead(int(data.meta_info["global_step"]) + 1)


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
        is_policy = isinstance(self.role, ActorRole)
        compute = self.role.compute_log_prob if is_policy else self.role.compute_ref_log_prob
        return _answer(compute(batch), blocking)

    @overload
    def compute_values(self, batch: DataProto) -> DataProto: ...
    @overload
    def compute_values(self, batch: DataProto, blocking: Literal[False]) -> DataProtoFuture: ...
    def compute_values(self, batch: DataProto, blocking: bool = True) -> DataProto | DataProtoFuture:
        """Computes the values of the critic."""
        return _answer(self.role.compute_values(batch), blocking)

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
        metrics = self.role.update(batch, int(batch.meta_info["global_step"]) + 1)
        return _answer(DataProto(meta_info={"metrics": metrics}), blocking)


def _answer(result: DataProto, blocking: bool) -> DataProto | DataProtoFuture:
    return result if blocking else DataProtoFuture(lambda: result)


class AgenticPipeline(AgentTrainer):
    """An `AgentTrainer` with ROLL's names: train_rollout_scheduler and val_rollout_scheduler (None without validation);
    pipeline_config; actor_train and actor_infer, one worker with two engines; reference and critic, None if not
    configured; running; tracker."""

    def __init__(self, config: PPOConfig, **parts: Any) -> None:
        super().__init__(config, **parts)
        val = self.val_source
        self.pipeline_config: Any = RollConfig(config)
        self.actor_train = self.actor_infer = RollCluster(self.actor)
        self.critic: Any = self.critic and RollCluster(self.critic)
        self.reference = RollCluster(self.ref) if self.ref else None
        self.running, self.tracker = self.running_moments, self.tracking
        self.train_rollout_scheduler = RollScheduler(self, parts["source"])
        self.val_rollout_scheduler = RollScheduler(self, val) if isinstance(val, EnvSource) else None

    def set_model_update_pair(self, src_cluster: RollCluster, tgt_cluster: RollCluster, frequency: int = 1) -> None:
        """Sets the number of steps between weight updates from actor_train to actor_infer."""
        if src_cluster is not self.actor_train or tgt_cluster is not self.actor_infer or frequency < 1:
            raise ValueError(
                f"set_model_update_pair: found {src_cluster=}, {tgt_cluster=}, {frequency=}; expected actor_train, "
                "actor_infer (two engines of one worker) and at least 1"
            )
        self.config.agentic.model_update_frequency = frequency

    def model_update(self, global_step: int | None = None) -> Metrics:
        """Copies the trained weights to the rollout engines. global_step: number of trained steps, for loops that start
        each step with this call; running episodes are finished first."""
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
        self._config, self._section = config, section

    def __getattr__(self, name: str) -> Any:
        key = f"{self._section}{name}"
        renamed = {known: of.renamed for known, of in ppo_keys().entries.items() if of.renamed and not of.values}
        if any(known.startswith(f"{key}.") for known in renamed):
            return RollConfig(self._config, f"{key}.")
        return attrgetter(renamed.get(key, key))(self._config)
