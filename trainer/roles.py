"""The driver's faces of the worker groups: each call plans the batch, dispatches it and puts the answer back in order.

Planning happens here, once, for all ranks: which rows share an optimizer step, which rank computes which row, how many
micro-batches there are, and the global denominators of the loss. Ranks obey; none of them counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from trainer.needs import is_on_policy, needs_old_log_prob
from trainer.step_metrics import compute_seqlen_metrics
from verl_lite.config import PPOConfig
from verl_lite.metrics import Metric, combine, join
from verl_lite.protocol import DataProto
from verl_lite.seqlen_balance import BatchPlan, plan_batch
from verl_lite.single_controller.worker_group import WorkerGroup

Metrics = dict[str, Metric]

TRAIN_COLUMNS = ("input_ids", "attention_mask", "position_ids", "responses", "response_mask")


@dataclass(frozen=True)
class MicroBatching:
    """How a rank cuts its rows: by a token budget, or by a number of sequences."""

    max_token_len: int | None
    micro_batch_size: int | None

    @classmethod
    def of_actor(cls, config: PPOConfig) -> MicroBatching:
        """As the actor's update is cut."""
        actor = config.actor
        if actor.use_dynamic_bsz:
            return cls(actor.ppo_max_token_len_per_gpu, None)
        return cls(None, actor.ppo_micro_batch_size_per_gpu)

    @classmethod
    def of_log_prob(
        cls, config: PPOConfig, dynamic: bool | None, max_token_len: int | None, micro_batch_size: int | None
    ) -> MicroBatching:
        """As a log-prob pass is cut; what is null is as in the actor's update."""
        actor = config.actor
        if actor.use_dynamic_bsz if dynamic is None else dynamic:
            return cls(max_token_len or actor.ppo_max_token_len_per_gpu, None)
        return cls(None, micro_batch_size or actor.ppo_micro_batch_size_per_gpu)


def plan_forward(batch: DataProto, world_size: int, cut: MicroBatching, balance: bool) -> BatchPlan:
    """The plan of a pass without gradient: one step over all rows."""
    return plan_batch(
        batch.batch["attention_mask"].sum(1).numpy(),
        world_size=world_size,
        mini_batch_size=None,
        max_token_len=cut.max_token_len,
        micro_batch_size=cut.micro_batch_size,
        balance=balance,
        num_tokens=batch.batch["response_mask"].sum(1).numpy(),
    )


class ActorRole:
    """The policy, as the driver sees it."""

    def __init__(self, group: WorkerGroup, config: PPOConfig) -> None:
        self.group = group
        self.config = config
        rollout = config.rollout
        self._log_prob_cut = MicroBatching.of_log_prob(
            config,
            rollout.log_prob_use_dynamic_bsz,
            rollout.log_prob_max_token_len_per_gpu,
            rollout.log_prob_micro_batch_size_per_gpu,
        )

    @property
    def world_size(self) -> int:
        """Number of devices."""
        return self.group.world_size

    @property
    def needs_old_log_prob(self) -> bool:
        """Whether the step has a pass that computes the log-probs of before the update; see `trainer.needs`."""
        return needs_old_log_prob(self.config)

    def generate(self, prompts: DataProto) -> DataProto:
        """One answer for each row, in the order of the rows; meta_info metrics of all ranks."""
        answers = self.group.generate_sequences(prompts)
        metrics = join(answers.meta_info["metrics"])
        slowest, mean = (metrics[f"rollout/{name}_rank_seconds"].value for name in ("slowest", "mean"))
        answers.meta_info["metrics"] = metrics | {"rollout/idle_frac": Metric.last(1 - mean / slowest)}
        return answers

    def compute_log_prob(self, batch: DataProto) -> DataProto:
        """old_log_probs and entropys of the batch under the weights of now."""
        plan = plan_forward(batch, self.group.world_size, self._log_prob_cut, self.config.trainer.balance_batch)
        data = plan.apply(batch.select(batch_keys=list(TRAIN_COLUMNS), non_tensor_batch_keys=[], meta_info_keys=[]))
        data.meta_info |= {"temperature": self.config.rollout.temperature, "calculate_entropy": True}
        return plan.restore(self.group.compute_log_prob(data))

    def update(self, batch: DataProto, step: int) -> Metrics:
        """Trains on the batch; see `actor.ppo_mini_batch_size` and `actor.ppo_epochs` for how many optimizer steps."""
        config = self.config
        cut = MicroBatching.of_actor(config)
        plan = plan_batch(
            batch.batch["attention_mask"].sum(1).numpy(),
            world_size=self.group.world_size,
            mini_batch_size=config.actor.ppo_mini_batch_size * config.rollout.n,
            max_token_len=cut.max_token_len,
            micro_batch_size=cut.micro_batch_size,
            epochs=config.actor.ppo_epochs,
            shuffle_seed=config.trainer.seed + step if config.actor.shuffle else None,
            balance=config.trainer.balance_batch,
            num_tokens=batch.batch["response_mask"].sum(1).numpy(),
        )
        columns = [*TRAIN_COLUMNS, "advantages"]
        # strictly on-policy there are no old log-probs: the update itself is where trainer and rollout can be compared
        if not is_on_policy(config):
            columns.append("old_log_probs")
        elif config.rollout.calculate_log_probs:
            columns.append("rollout_log_probs")
        columns += ["ref_log_prob"] if config.actor.use_kl_loss else []
        data = plan.apply(batch.select(batch_keys=columns, non_tensor_batch_keys=[], meta_info_keys=[]))
        data.meta_info["temperature"] = config.rollout.temperature
        metrics = combine([result.meta_info["metrics"] for result in self.group.update_actor(data)])
        lengths = batch.batch["attention_mask"].sum(1).numpy()
        return metrics | {name: Metric.last(x) for name, x in compute_seqlen_metrics(plan, lengths).items()}

    def update_weights(self, version: int) -> Metrics:
        """Makes the rollout engines use the trained weights; samples drawn from now on carry `version`."""
        return combine(self.group.update_weights(version))

    def save(self, folder: str) -> None:
        self.group.save_checkpoint(folder)

    def load(self, folder: str) -> None:
        self.group.load_checkpoint(folder)


class Critic(Protocol):
    """The value function, as the driver sees it: trained where the estimator needs values."""

    def compute_values(self, batch: DataProto) -> DataProto:
        """values (B, R) of the batch."""
        ...

    def update(self, batch: DataProto, step: int) -> Metrics:
        """Fits the values to the returns."""
        ...

    def save(self, folder: str) -> None: ...

    def load(self, folder: str) -> None: ...


class ReferenceRole:
    """The frozen reference model, as the driver sees it."""

    def __init__(self, group: WorkerGroup, config: PPOConfig) -> None:
        self.group = group
        self.config = config
        ref = config.ref
        self._cut = MicroBatching.of_log_prob(
            config,
            ref.log_prob_use_dynamic_bsz,
            ref.log_prob_max_token_len_per_gpu,
            ref.log_prob_micro_batch_size_per_gpu,
        )

    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """ref_log_prob of the batch."""
        plan = plan_forward(batch, self.group.world_size, self._cut, self.config.trainer.balance_batch)
        data = plan.apply(batch.select(batch_keys=list(TRAIN_COLUMNS), non_tensor_batch_keys=[], meta_info_keys=[]))
        data.meta_info["temperature"] = self.config.rollout.temperature
        return plan.restore(self.group.compute_ref_log_prob(data))
