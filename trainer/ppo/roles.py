"""Driver-side interfaces of the worker groups. Each call plans the batch, dispatches it and restores the row order.

The driver plans once for all ranks: the rows of each optimizer step, the rank of each row, the number of micro-batches,
and the global denominators of the loss. Ranks only execute the plan.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby

import numpy as np
import torch

from trainer.loop.saving import SavedByWorkers
from trainer.ppo.requirements import (
    distilled_tokens,
    estimator_takes,
    is_on_policy,
    micro_batching,
    needs_reference_model,
)
from trainer.rewards.model_inputs import RewardInputs
from verl_lite.algos.covariance_losses import TOKEN_SELECTIONS
from verl_lite.config import PPOConfig
from verl_lite.core_algos import get_policy_loss, outcome_scores
from verl_lite.errors import UserError
from verl_lite.metrics import Metric, combine
from verl_lite.protocol import DataProto, chunk_bounds
from verl_lite.rewards import RewardResult
from verl_lite.schema import SAMPLING_CANDIDATES
from verl_lite.seqlen_balance import BatchPlan, compute_seqlen_metrics, plan_batch
from verl_lite.single_controller.decorator import PerRank
from verl_lite.single_controller.worker_group import WorkerGroup
from workers.engines.base import SamplingParams
from workers.policy.causal_lm import TEACHER_IDS, CausalLMPolicy
from workers.policy.loading import Policy
from workers.rollout.specs import GroupPlan, GroupResults

Metrics = dict[str, Metric]

TRAIN_COLUMNS = ("input_ids", "attention_mask", "position_ids", "responses", "response_mask")


def rows_of_prompts(batch: DataProto, prompts: int, n: int) -> int | list[int]:
    """Returns the number of rows of `prompts` prompts with `n` answers each.

    If the batch has the column answers_per_prompt, returns a list with the number of rows of each consecutive chunk of
    `prompts` prompts. The rows of a prompt must be adjacent.
    """
    if "answers_per_prompt" not in batch:
        return prompts * n
    answers_of_row = batch.batch["answers_per_prompt"].tolist()
    answers_of_prompt = []
    row = 0
    while row < len(answers_of_row):
        num_answers = answers_of_row[row]
        answers_of_prompt.append(num_answers)
        # the next row is the first one of the next prompt
        row += num_answers
    return _chunk_sums(answers_of_prompt, prompts)


def rows_of_tasks(batch: DataProto, tasks: int) -> list[int]:
    """Returns the number of rows of each consecutive chunk of `tasks` tasks of a program.

    The episodes of programs vary in their number of rows. The rows of a task must be adjacent.
    """
    uids = batch.non_tensor_batch["uid"]
    rows_of_task = [len(list(rows)) for _, rows in groupby(uids)]
    return _chunk_sums(rows_of_task, tasks)


def _chunk_sums(counts: Sequence[int], size: int) -> list[int]:
    sums = []
    for start in range(0, len(counts), size):
        chunk = counts[start : start + size]
        sums.append(sum(chunk))
    return sums


class ModelRole:
    """Base of all roles with a model: holds the worker group and plans batches for its ranks.

    Every pass over a batch is written out: `plan` assigns the rows to the ranks, `planned_rows` orders what the network
    reads, a method of the worker group runs the pass, and `BatchPlan.restore` puts its results in the order of the
    batch.
    """

    section: str
    """Section of the configuration with the options of the training engine."""
    extra_inputs = Policy.extra_inputs
    """Columns that the network reads besides the token columns, if the batch has them."""

    def __init__(self, group: WorkerGroup, config: PPOConfig) -> None:
        self.group = group
        self.config = config

    @property
    def world_size(self) -> int:
        """Number of devices."""
        return self.group.world_size

    def plan(
        self,
        batch: DataProto,
        stage: str,
        *,
        mini_batch_size: int = -1,
        epochs: int = 1,
        shuffle_seed: int | None = None,
    ) -> BatchPlan:
        """Plans a pass over the batch.

        Args:
            batch: the batch.
            stage: the pass, as named in `trainer.ppo.requirements.micro_batching`.
            mini_batch_size: prompts per optimizer step; -1 = all in one step.
            epochs: number of passes.
            shuffle_seed: seed of the row order; None keeps the order.
        """
        config = self.config
        columns = batch.batch
        rows_per_step: int | list[int] | None = None
        samples: list[str] | None = None
        if config.agentic.has_program:
            # the loss counts an episode of a program once, also if it has several rows
            samples = batch.non_tensor_batch["traj_id"].tolist()
            if mini_batch_size != -1:
                rows_per_step = rows_of_tasks(batch, mini_batch_size)
        elif mini_batch_size != -1:
            rows_per_step = rows_of_prompts(batch, mini_batch_size, config.rollout.n)

        # the ranks that share a sequence hold the tokens of a micro-batch together
        ranks_per_sequence = config.sequence_parallel_size(self.section)
        limits = micro_batching(config, stage)
        max_token_len = limits.max_token_len
        if max_token_len is not None:
            max_token_len *= ranks_per_sequence

        # the denominators of the losses: the tokens of policy and values, and those of distillation
        num_tokens = columns["response_mask"].sum(1)
        num_distilled = None
        if "has_teacher" in batch:
            num_distilled = (num_tokens * columns["has_teacher"]).numpy()

        return plan_batch(
            columns["attention_mask"].sum(1).numpy(),
            world_size=self.world_size // ranks_per_sequence,
            mini_batch_size=rows_per_step,
            max_token_len=max_token_len,
            micro_batch_size=limits.micro_batch_size,
            epochs=epochs,
            shuffle_seed=shuffle_seed,
            balance=config.trainer.balance_batch,
            num_tokens=num_tokens.numpy(),
            num_distilled=num_distilled,
            samples=samples,
        )

    def planned_rows(
        self, batch: DataProto, plan: BatchPlan, columns: Iterable[str] = (), **options: float
    ) -> DataProto:
        """Returns the rows in the order of the plan, as the ranks receive them.

        Args:
            batch: the batch.
            plan: the plan of the pass.
            columns: columns besides those that the network reads.
            options: entries of meta_info, which the worker's method reads.
        """
        # only these columns travel to the ranks
        tensors = [*TRAIN_COLUMNS, *columns]
        objects = []
        for name in self.extra_inputs:
            if name in batch.non_tensor_batch:
                objects.append(name)
            elif name in batch:
                tensors.append(name)
        selected = batch.select(batch_keys=tensors, non_tensor_batch_keys=objects, meta_info_keys=[])

        rows = plan.apply(selected)
        # the ranks get the options of this pass, and nothing else of the batch's meta_info
        rows.meta_info |= options
        return rows


def combined_metrics(results: Iterable[DataProto]) -> Metrics:
    """Combines the metrics in meta_info of all ranks."""
    return combine([result.meta_info["metrics"] for result in results])


class ActorRole(ModelRole, SavedByWorkers):
    """The driver's interface to the policy workers."""

    section = "actor"

    extra_inputs = CausalLMPolicy.extra_inputs

    def __init__(self, group: WorkerGroup, config: PPOConfig) -> None:
        super().__init__(group, config)
        self._engine_of: dict[str, int] = {}  # engines of the running groups

    @property
    def num_engines(self) -> int:
        """Number of rollout engines."""
        return self.group.mesh("rollout").dp_size

    def begin_groups(self, plans: Sequence[GroupPlan], sampling: SamplingParams) -> None:
        """Starts groups of samples without waiting for them."""
        plans_of_engine = self._plans_of_engines(plans)
        for engine, engine_plans in enumerate(plans_of_engine):
            for plan in engine_plans:
                self._engine_of[plan.key] = engine

        # all ranks of a tensor-parallel engine receive the same plans
        engine_of_rank = self.group.mesh("rollout").dp_rank
        plans_of_ranks = PerRank(plans_of_engine[engine] for engine in engine_of_rank)
        self.group.begin_groups(plans_of_ranks, sampling)

    def _plans_of_engines(self, plans: Sequence[GroupPlan]) -> list[list[GroupPlan]]:
        """Returns the plans that each engine starts."""
        num_engines = self.num_engines
        if len(plans) >= num_engines:
            # contiguous blocks, as in the dispatch of batches
            bounds = chunk_bounds(len(plans), num_engines)
            return [list(plans[start:stop]) for start, stop in bounds]

        # a few groups, such as replacements of dropped ones, go to the engines that run the fewest
        num_running = Counter(self._engine_of.values())
        engines = sorted(range(num_engines), key=lambda engine: num_running[engine])
        plans_of_engine: list[list[GroupPlan]] = [[] for _ in range(num_engines)]
        for engine, plan in zip(engines, plans, strict=False):
            plans_of_engine[engine].append(plan)
        return plans_of_engine

    def run_groups(self, keys: Sequence[str], seconds: float | None = None) -> list[GroupResults]:
        """Runs the engines until the groups with these keys are complete, or for a time.

        Args:
            keys: the keys of the groups.
            seconds: time after which the call returns in any case; None = no limit.

        Returns:
            One entry per engine with all groups that it completed, also those with other keys.
        """
        results = self.group.run_groups(list(keys), seconds)
        # one rank of each tensor-parallel engine has its results
        collecting_ranks = self.group.mesh("rollout").collecting
        collected = [results[rank] for rank in collecting_ranks]
        for result in collected:
            for report in result.reports:
                del self._engine_of[report.key]
        return collected

    def snapshot_groups(self) -> list[GroupPlan]:
        """Returns plans that continue the running groups whose samples can be continued."""
        plans: list[GroupPlan] = []
        for plans_of_engine in self.group.snapshot_groups():
            plans += plans_of_engine
        return plans

    def abort_groups(self, keys: Sequence[str]) -> int:
        """Ends groups without rows. Returns the number of tokens that they had sampled."""
        for key in keys:
            del self._engine_of[key]
        return sum(self.group.abort_groups(list(keys)))

    def compute_log_prob(self, batch: DataProto) -> DataProto:
        """Computes old_log_probs and entropys under the current weights; sum_pi_squared if the estimator takes it; and
        with distillation over the policy's top tokens also these tokens."""
        config = self.config
        topk = 0
        if config.distillation.takes_student_topk:
            # the teachers read the tokens that this pass chooses
            topk = distilled_tokens(config)
        plan = self.plan(batch, "log_prob")
        rows = self.planned_rows(
            batch,
            plan,
            temperature=config.rollout.temperature,
            calculate_entropy=True,
            calculate_sum_pi_squared=estimator_takes(config, "sum_pi_squared"),
            calculate_topk=topk,
        )
        return plan.restore(self.group.compute_log_prob(rows))

    def update(self, batch: DataProto, step: int) -> Metrics:
        """Trains on the batch. actor.ppo_mini_batch_size and actor.ppo_epochs set the number of optimizer steps."""
        config = self.config
        actor = config.actor
        plan = self.plan(
            batch,
            "update_actor",
            mini_batch_size=actor.ppo_mini_batch_size,
            epochs=actor.ppo_epochs,
            shuffle_seed=config.trainer.seed + step if actor.shuffle else None,
        )
        computed = loss_columns(batch, config, step)
        columns = [*self._columns_of_loss(batch), *computed]
        # a new batch, so that the trainer's batch does not get these columns
        batch = batch | DataProto.from_dict(computed)
        rows = self.planned_rows(batch, plan, columns, temperature=config.rollout.temperature)
        results = self.group.update_actor(rows)
        metrics = combined_metrics(results)

        lengths = batch.batch["attention_mask"].sum(1).numpy()
        for name, value in compute_seqlen_metrics(plan, lengths).items():
            metrics[name] = Metric.last(value)
        return metrics

    def _columns_of_loss(self, batch: DataProto) -> list[str]:
        """Returns the columns of the batch that the loss reads, besides those of the network."""
        config = self.config
        correction = config.algorithm.rollout_correction
        columns = ["advantages"]
        # strictly on-policy, old_log_probs are not computed: the update compares the trainer with the rollout instead
        if not is_on_policy(config) or correction.bypass_mode:
            columns.append("old_log_probs")
        elif config.rollout.calculate_log_probs:
            columns.append("rollout_log_probs")
        if config.actor.use_kl_loss:
            columns.append("ref_log_prob")
        if config.distillation.is_active:
            # either sampled tokens or the top tokens of a distribution are compared
            teacher_columns = ("teacher_log_probs", "teacher_topk_log_probs", "has_teacher")
            columns += [name for name in teacher_columns if name in batch]
        if correction.rollout_is and not correction.bypass_mode:
            columns.append("rollout_is_weights")
        return columns

    def update_weights(self, version: int) -> Metrics:
        """Copies the trained weights to the rollout engines. New samples carry `version`."""
        return combine(self.group.update_weights(version))

    def close(self) -> None:
        """Closes the rollout engines."""
        self.group.close()


def loss_columns(batch: DataProto, config: PPOConfig, step: int) -> dict[str, torch.Tensor]:
    """Returns the columns that the registration of the policy loss declares.

    Args:
        batch: the batch with advantages.
        config: the options of the run.
        step: the training step, from 1.

    Returns:
        Those of these columns that the loss reads:
        selected (B, R) bool: tokens chosen over the whole batch under the policy before the update, the same in every
            epoch. Random choices are seeded with trainer.seed and the step.
        scores (B,): score of each response.
        staleness (B, R): weight updates between the version that sampled the token and the version that this step
            updates; steps of trainer.critic_warmup do not update the weights.
    """
    columns = batch.batch
    computed = {}
    loss_mode = config.actor.policy_loss.loss_mode
    declared_columns = get_policy_loss(loss_mode).columns
    if "selected" in declared_columns:
        if loss_mode not in TOKEN_SELECTIONS:
            raise UserError(
                f"actor.policy_loss.loss_mode={loss_mode} reads `selected`, and nothing says how tokens are chosen: "
                "add a function to verl_lite.algos.covariance_losses.TOKEN_SELECTIONS under its name"
            )
        # here and not in the workers: a rank sees only its part of the batch
        select = TOKEN_SELECTIONS[loss_mode]
        seeds = np.random.SeedSequence([config.trainer.seed, step])
        [seed] = seeds.generate_state(1)
        computed["selected"] = select(
            columns["old_log_probs"],
            columns["advantages"],
            columns["response_mask"],
            config.actor,
            generator=torch.Generator().manual_seed(int(seed)),
        )
    if "scores" in declared_columns:
        computed["scores"] = outcome_scores(columns["token_level_scores"], columns["response_mask"])
    if "staleness" in declared_columns:
        # the weights after the steps of the warm-up are those of version 0
        warmup = config.trainer.critic_warmup
        updated_version = max(step - 1, warmup)
        sampled_versions = columns["rollout_versions"].clamp(min=warmup)
        staleness = updated_version - sampled_versions
        is_valid = columns["response_mask"] != 0
        computed["staleness"] = staleness.where(is_valid, 0)
    return computed


class CriticRole(ModelRole, SavedByWorkers):
    """The driver's interface to the critic workers. Update options that `critic` leaves unset come from `actor`."""

    section = "critic"

    def compute_values(self, batch: DataProto) -> DataProto:
        """Computes values under the critic's current weights."""
        plan = self.plan(batch, "values")
        rows = self.planned_rows(batch, plan)
        return plan.restore(self.group.compute_values(rows))

    def update(self, batch: DataProto, step: int) -> Metrics:
        """Fits the values to the returns. Mini-batch size and epochs come from `critic`, else from `actor`."""
        critic = self.config.critic
        actor = self.config.actor
        shuffle = actor.shuffle if critic.shuffle is None else critic.shuffle
        plan = self.plan(
            batch,
            "update_critic",
            mini_batch_size=critic.ppo_mini_batch_size or actor.ppo_mini_batch_size,
            epochs=critic.ppo_epochs or actor.ppo_epochs,
            shuffle_seed=self.config.trainer.seed + step if shuffle else None,
        )
        rows = self.planned_rows(batch, plan, ["values", "returns"])
        results = self.group.update_critic(rows)
        return combined_metrics(results)


class ReferenceRole(ModelRole):
    """The driver's interface to the frozen reference model."""

    extra_inputs = (*ModelRole.extra_inputs, SAMPLING_CANDIDATES)

    @property
    def section(self) -> str:  # type: ignore[override]
        if needs_reference_model(self.config):
            return "ref"
        # the policy's workers compute it without their adapter
        return "actor"

    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """Computes ref_log_prob of the batch."""
        plan = self.plan(batch, "ref")
        rows = self.planned_rows(batch, plan, temperature=self.config.rollout.temperature)
        return plan.restore(self.group.compute_ref_log_prob(rows))


class TeacherRole(ModelRole):
    """The driver's interface to a teacher of distillation, or to the policy as its own teacher."""

    # not the experts of the rollout, which belong to the policy's prompt
    extra_inputs = (*ReferenceRole.extra_inputs, TEACHER_IDS)

    def __init__(self, group: WorkerGroup, config: PPOConfig, is_policy: bool) -> None:
        super().__init__(group, config)
        self.section = "ref"
        self.stage = "ref"
        if is_policy:
            self.section = "actor"
            self.stage = "log_prob"

    def compute_teacher_log_prob(self, batch: DataProto) -> DataProto:
        """Computes the columns of `workers.roles.frozen_models.teacher_log_probs`."""
        config = self.config
        topk = distilled_tokens(config)
        plan = self.plan(batch, self.stage)
        rows = self.planned_rows(batch, plan, temperature=config.rollout.temperature, topk=topk)
        return plan.restore(self.group.compute_teacher_log_prob(rows))


class RewardModelRole(ModelRole):
    """The driver's interface to the reward model.

    Attributes:
        inputs: converts a batch into the model's input rows.
        weight: factor of the model's score in the sum with the score of the reward function.
    """

    section = "reward_model"

    def __init__(self, group: WorkerGroup, config: PPOConfig, inputs: RewardInputs) -> None:
        super().__init__(group, config)
        self.inputs = inputs
        self.weight = config.reward_model.weight

    def score(self, batch: DataProto) -> list[RewardResult]:
        """Returns one result per row; an empty response scores 0. A row fails if the model cannot read it or returns a
        number that is not finite."""
        inputs, errors = self.inputs(batch)
        plan = self.plan(inputs, "reward_model")
        rows = self.planned_rows(inputs, plan)
        scored = plan.restore(self.group.compute_rm_score(rows))

        results = []
        for score, error in zip(scored.batch["rm_scores"].tolist(), errors, strict=True):
            if error is None:
                results.append(RewardResult.scored("The reward model", score))
            else:
                results.append(RewardResult.failure(error))
        return results
