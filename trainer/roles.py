"""The driver's faces of the worker groups: each call plans the batch, dispatches it and puts the answer back in order.

Planning happens here, once, for all ranks: which rows share an optimizer step, which rank computes which row, how many
micro-batches there are, and the global denominators of the loss. Ranks obey; none of them counts.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from trainer.requirements import estimator_takes, is_on_policy, loss_takes, micro_batching
from trainer.rewards.model_inputs import RewardInputs
from trainer.saving import SavedByWorkers
from trainer.step_metrics import compute_seqlen_metrics
from verl_lite.algos.covariance_losses import TOKEN_SELECTIONS
from verl_lite.config import PPOConfig
from verl_lite.core_algos import outcome_scores
from verl_lite.errors import UserError
from verl_lite.group_filters import make_group_filter
from verl_lite.metrics import Metric, combine, join
from verl_lite.protocol import DataProto, DataProtoFuture
from verl_lite.rewards import RewardResult
from verl_lite.seqlen_balance import BatchPlan, plan_batch
from verl_lite.single_controller.decorator import PerRank
from verl_lite.single_controller.worker_group import WorkerGroup
from workers.rollout.base import SamplingParams
from workers.rollout.group_run import GroupPlan, GroupResults

Metrics = dict[str, Metric]

TRAIN_COLUMNS = ("input_ids", "attention_mask", "position_ids", "responses", "response_mask")


def rows_of_prompts(batch: DataProto, prompts: int, n: int) -> int | list[int]:
    """How many rows so many prompts have: `n` each, or, where the column answers_per_prompt says otherwise, one number
    for each so many prompts of the batch, in order; rows of one prompt stand together there."""
    if "answers_per_prompt" not in batch:
        return prompts * n
    counts, sizes, row = batch.batch["answers_per_prompt"].tolist(), [], 0
    while row < len(counts):
        sizes.append(counts[row])
        row += counts[row]
    return [sum(sizes[start : start + prompts]) for start in range(0, len(sizes), prompts)]


class ModelRole:
    """What roles with a model share: a worker group, and batches planned for its ranks."""

    def __init__(self, group: WorkerGroup, config: PPOConfig) -> None:
        self.group, self.config = group, config

    @property
    def world_size(self) -> int:
        """Number of devices."""
        return self.group.world_size

    def infer(
        self, call: Callable[..., Any], batch: DataProto, stage: str, blocking: bool = True, **meta_info: Any
    ) -> Any:
        """A pass without gradient over all rows, by a method of the worker group; meta_info goes with the batch."""
        plan = self.plan(batch, stage)
        columns = [*TRAIN_COLUMNS, *self.replayed] if stage == "log_prob" else TRAIN_COLUMNS
        return dispatch_planned(call, apply_plan(batch, plan, columns, **meta_info), plan.restore, blocking)

    @property
    def replayed(self) -> list[str]:
        """The column with the experts of the rollout, where the policy is to take them again."""
        return ["routed_experts"] if self.config.rollout.router_replay else []

    def plan(
        self,
        batch: DataProto,
        stage: str,
        *,
        mini_batch_size: int = -1,
        epochs: int = 1,
        shuffle_seed: int | None = None,
    ) -> BatchPlan:
        """stage: a pass of `micro_batching`. mini_batch_size: prompts of an optimizer step; -1 = all. shuffle_seed:
        None = rows in order."""
        cut = micro_batching(self.config, stage)
        rows = None if mini_batch_size == -1 else rows_of_prompts(batch, mini_batch_size, self.config.rollout.n)
        return plan_batch(
            batch.batch["attention_mask"].sum(1).numpy(),
            world_size=self.group.world_size,
            mini_batch_size=rows,
            max_token_len=cut.max_token_len,
            micro_batch_size=cut.micro_batch_size,
            epochs=epochs,
            shuffle_seed=shuffle_seed,
            balance=self.config.trainer.balance_batch,
            num_tokens=batch.batch["response_mask"].sum(1).numpy(),
        )


def apply_plan(batch: DataProto, plan: BatchPlan, columns: Iterable[str], **meta_info: Any) -> DataProto:
    """Those columns as the ranks get them."""
    data = plan.apply(batch.select(batch_keys=list(columns), non_tensor_batch_keys=[], meta_info_keys=[]))
    data.meta_info |= meta_info
    return data


def dispatch_planned(
    call: Callable[..., Any], data: DataProto, then: Callable[[Any], DataProto], blocking: bool
) -> Any:
    """`then` of what a method of a worker group answers; with blocking=False a future of it, as the ranks begin."""
    if blocking:
        return then(call(data))
    answer = call(data, blocking=False)
    return DataProtoFuture(lambda: then(answer.get()))


def joined_metrics(results: Iterable[DataProto], more: Metrics) -> DataProto:
    """The metrics of all ranks, and more, as meta_info of a batch."""
    return DataProto(meta_info={"metrics": combine([result.meta_info["metrics"] for result in results]) | more})


def step_of(batch: DataProto) -> int:
    """The training step of a batch that says it as ROLL does, counted from 0; ours count from 1."""
    if "global_step" not in batch.meta_info:
        raise ValueError("train_step: the batch has no meta_info['global_step'], counted from 0, as get_batch gives it")
    return int(batch.meta_info["global_step"]) + 1


class ActorRole(ModelRole, SavedByWorkers):
    """The policy, as the driver sees it."""

    def generate(self, prompts: DataProto) -> DataProto:
        """One answer for each row, in the order of the rows; meta_info metrics of all ranks."""
        answers = self.group.generate_sequences(prompts)
        metrics = join(answers.meta_info["metrics"])
        slowest, mean = (metrics[f"rollout/{name}_rank_seconds"].value for name in ("slowest", "mean"))
        answers.meta_info["metrics"] = metrics | {"rollout/idle_frac": Metric.last(1 - mean / slowest)}
        return answers

    def compute_log_prob(self, batch: DataProto, blocking: bool = True) -> Any:
        """old_log_probs and entropys of the batch under the weights of now, and sum_pi_squared for estimators that
        read it; blocking=False gives a future of it."""
        return self.infer(
            self.group.compute_log_prob,
            batch,
            "log_prob",
            blocking,
            temperature=self.config.rollout.temperature,
            calculate_entropy=True,
            calculate_sum_pi_squared=estimator_takes(self.config, "sum_pi_squared"),
        )

    compute_log_probs = compute_log_prob  # ROLL's name

    def update(self, batch: DataProto, step: int) -> Metrics:
        """Trains on the batch; see `actor.ppo_mini_batch_size` and `actor.ppo_epochs` for how many optimizer steps."""
        return self.train_step(batch, step=step).meta_info["metrics"]

    def train_step(self, batch: DataProto, blocking: bool = True, step: int | None = None) -> Any:
        """`update` under ROLL's name: a batch with the metrics in meta_info, with blocking=False a future of it. step:
        None = as the batch says."""
        step = step_of(batch) if step is None else step
        config, correction = self.config, self.config.algorithm.rollout_correction
        plan = self.plan(
            batch,
            "update_actor",
            mini_batch_size=config.actor.ppo_mini_batch_size,
            epochs=config.actor.ppo_epochs,
            shuffle_seed=config.trainer.seed + step if config.actor.shuffle else None,
        )
        columns = [*TRAIN_COLUMNS, "advantages", *self.replayed]
        # strictly on-policy there are no old log-probs: the update itself is where trainer and rollout can be compared
        if not is_on_policy(config) or correction.bypass_mode:
            columns.append("old_log_probs")
        elif config.rollout.calculate_log_probs:
            columns.append("rollout_log_probs")
        chosen = loss_columns(batch, config, step)
        columns += ["ref_log_prob"] if config.actor.use_kl_loss else []
        columns += ["rollout_is_weights"] if correction.rollout_is and not correction.bypass_mode else []
        batch = batch | DataProto.from_dict(chosen)
        data = apply_plan(batch, plan, [*columns, *chosen], temperature=config.rollout.temperature)
        lengths = batch.batch["attention_mask"].sum(1).numpy()
        shape = {name: Metric.last(x) for name, x in compute_seqlen_metrics(plan, lengths).items()}
        return dispatch_planned(self.group.update_actor, data, lambda results: joined_metrics(results, shape), blocking)

    def update_weights(self, version: int) -> Metrics:
        """Makes the rollout engines use the trained weights; samples drawn from now on carry `version`."""
        return combine(self.group.update_weights(version))


def loss_columns(batch: DataProto, config: PPOConfig, step: int) -> dict[str, torch.Tensor]:
    """selected (B, R) bool and scores (B,), where the policy loss names them.

    selected: tokens chosen over the whole batch, by the policy of before the update; the same ones in each epoch. A
    random choice follows from trainer.seed and the step.
    """
    tensors, loss_mode = {}, config.actor.policy_loss.loss_mode
    if loss_takes(config, "selected"):
        if loss_mode not in TOKEN_SELECTIONS:
            raise UserError(
                f"actor.policy_loss.loss_mode={loss_mode} takes `selected`, and nothing says how tokens are chosen: "
                "add a function to verl_lite.algos.covariance_losses.TOKEN_SELECTIONS under its name"
            )
        seed = int(np.random.SeedSequence([config.trainer.seed, step]).generate_state(1)[0])
        columns = (batch.batch[name] for name in ("old_log_probs", "advantages", "response_mask"))
        generator = torch.Generator().manual_seed(seed)
        tensors["selected"] = TOKEN_SELECTIONS[loss_mode](*columns, config.actor, generator=generator)
    if loss_takes(config, "scores"):
        tensors["scores"] = outcome_scores(batch.batch["token_level_scores"], batch.batch["response_mask"])
    return tensors


class AgentRole(ActorRole):
    """The policy that acts in environments, as the driver sees it; a `trainer.rollout_scheduler.GroupRunner`.

    Groups are dealt whole to the engines in turn, so that which members of a group are kept is decided where they run.
    """

    def __init__(self, group: WorkerGroup, config: PPOConfig) -> None:
        super().__init__(group, config)
        self.group_filter = make_group_filter(config.agentic, config.agentic.train_env_manager, "train")

    def begin_groups(self, key: str, plans: Sequence[GroupPlan], sampling: SamplingParams) -> None:
        """Starts these groups and returns."""
        mesh = self.group.mesh("rollout")
        dealt = PerRank(plans[part :: mesh.dp_size] for part in mesh.dp_rank)
        is_train = any(plan.attempts[0][0].purpose == "train" for plan in plans)
        self.group.begin_episodes(key, dealt, sampling, self.group_filter if is_train else None)

    def finish_groups(self, key: str) -> list[GroupResults]:
        """Waits for the groups begun under this key. One entry for each engine."""
        results = self.group.run_episodes(key)
        return [results[rank] for rank in self.group.mesh("rollout").collecting]


class CriticRole(ModelRole, SavedByWorkers):
    """The critic on its worker group. What `critic` leaves open is as in the actor's update."""

    def compute_values(self, batch: DataProto, blocking: bool = True) -> Any:
        """values of the batch under the critic's weights of now; blocking=False gives a future of it."""
        return self.infer(self.group.compute_values, batch, "values", blocking)

    def update(self, batch: DataProto, step: int) -> Metrics:
        """Fits the values to the returns, with mini-batches and epochs of its own where `critic` sets them."""
        return self.train_step(batch, step=step).meta_info["metrics"]

    def train_step(self, batch: DataProto, blocking: bool = True, step: int | None = None) -> Any:
        """`update` under ROLL's name; see `ActorRole.train_step`."""
        step = step_of(batch) if step is None else step
        critic, actor = self.config.critic, self.config.actor
        shuffle = actor.shuffle if critic.shuffle is None else critic.shuffle
        plan = self.plan(
            batch,
            "update_critic",
            mini_batch_size=critic.ppo_mini_batch_size or actor.ppo_mini_batch_size,
            epochs=critic.ppo_epochs or actor.ppo_epochs,
            shuffle_seed=self.config.trainer.seed + step if shuffle else None,
        )
        data = apply_plan(batch, plan, [*TRAIN_COLUMNS, "values", "returns"])
        return dispatch_planned(self.group.update_critic, data, lambda results: joined_metrics(results, {}), blocking)


class ReferenceRole(ModelRole):
    """The frozen reference model, as the driver sees it."""

    def compute_ref_log_prob(self, batch: DataProto, blocking: bool = True) -> Any:
        """ref_log_prob of the batch; blocking=False gives a future of it."""
        temperature = self.config.rollout.temperature
        return self.infer(self.group.compute_ref_log_prob, batch, "ref", blocking, temperature=temperature)

    compute_log_probs = compute_ref_log_prob  # ROLL's name


class RewardModelRole(ModelRole):
    """The reward model, as the driver sees it.

    inputs: what it reads of a batch. weight: the factor of its score, beside that of the reward function.
    """

    def __init__(self, group: WorkerGroup, config: PPOConfig, inputs: RewardInputs) -> None:
        super().__init__(group, config)
        self.inputs, self.weight = inputs, config.reward_model.weight

    def score(self, batch: DataProto) -> list[RewardResult]:
        """A score for each row, 0 for an empty answer; failed where the model cannot read the row, or gives no finite
        number."""
        rows, errors = self.inputs(batch)
        scored = self.infer(self.group.compute_rm_score, rows, "reward_model")
        scores = scored.batch["rm_scores"].tolist()
        return [
            RewardResult.scored("The reward model", score) if error is None else RewardResult.failure(error)
            for score, error in zip(scores, errors, strict=True)
        ]
