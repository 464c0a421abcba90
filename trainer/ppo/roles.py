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
from trainer.ppo.step_metrics import compute_seqlen_metrics
from trainer.rewards.model_inputs import RewardInputs
from verl_lite.algos.covariance_losses import TOKEN_SELECTIONS
from verl_lite.config import PPOConfig
from verl_lite.core_algos import get_policy_loss, outcome_scores
from verl_lite.errors import UserError
from verl_lite.metrics import Metric, combine
from verl_lite.protocol import DataProto, chunk_bounds
from verl_lite.rewards import RewardResult
from verl_lite.schema import SAMPLING_CANDIDATES
from verl_lite.seqlen_balance import BatchPlan, plan_batch
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
    counts = batch.batch["answers_per_prompt"].tolist()
    rows_of_prompt = []
    row = 0
    while row < len(counts):
        rows_of_prompt.append(counts[row])
        row += counts[row]
    return _chunk_sums(rows_of_prompt, prompts)


def rows_of_tasks(batch: DataProto, tasks: int) -> list[int]:
    """Returns the number of rows of each consecutive chunk of `tasks` tasks of a program, whose episodes vary in their
    number of rows. The rows of a task must be adjacent."""
    rows_of_task = [len(list(rows)) for _, rows in groupby(batch.non_tensor_batch["uid"])]
    return _chunk_sums(rows_of_task, tasks)


def _chunk_sums(counts: Sequence[int], size: int) -> list[int]:
    return [sum(counts[start : start + size]) for start in range(0, len(counts), size)]


class ModelRole:
    """Base of all roles with a model: holds the worker group and plans batches for its ranks.

    Every pass over a batch is written out: `plan` assigns the rows to the ranks, `planned_rows` orders what the network
    reads, a method of the worker group runs the pass, and `BatchPlan.restore` puts its results in the order of the
    batch.

    section: section of the configuration with the options of the training engine.
    """

    section: str
    extra_inputs = Policy.extra_inputs

    def __init__(self, group: WorkerGroup, config: PPOConfig) -> None:
        self.group, self.config = group, config

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
            stage: The pass, as named in `trainer.ppo.requirements.micro_batching`.
            mini_batch_size: Prompts per optimizer step; -1 = all in one step.
            epochs: Number of passes.
            shuffle_seed: Seed of the row order; None keeps the order.
        """
        config, has_program = self.config, self.config.agentic.has_program
        rows_per_step: int | list[int] | None = None
        if mini_batch_size != -1 and has_program:
            rows_per_step = rows_of_tasks(batch, mini_batch_size)
        elif mini_batch_size != -1:
            rows_per_step = rows_of_prompts(batch, mini_batch_size, config.rollout.n)

        # the ranks that share a sequence hold the tokens of a micro-batch together
        ranks_per_sequence = config.sequence_parallel_size(self.section)
        limits = micro_batching(config, stage)
        max_token_len = None if limits.max_token_len is None else limits.max_token_len * ranks_per_sequence

        num_tokens = batch.batch["response_mask"].sum(1)
        num_distilled = (num_tokens * batch.batch["has_teacher"]).numpy() if "has_teacher" in batch else None
        return plan_batch(
            batch.batch["attention_mask"].sum(1).numpy(),
            world_size=self.world_size // ranks_per_sequence,
            mini_batch_size=rows_per_step,
            max_token_len=max_token_len,
            micro_batch_size=limits.micro_batch_size,
            epochs=epochs,
            shuffle_seed=shuffle_seed,
            balance=config.trainer.balance_batch,
            num_tokens=num_tokens.numpy(),
            num_distilled=num_distilled,
            # the loss counts an episode of a program once, also if it has several rows
            samples=batch.non_tensor_batch["traj_id"].tolist() if has_program else None,
        )

    def planned_rows(
        self, batch: DataProto, plan: BatchPlan, columns: Iterable[str] = (), **options: float
    ) -> DataProto:
        """Returns the rows in the order of the plan, as the ranks receive them.

        Args:
            columns: Columns besides those that the network reads.
            options: Entries of meta_info, which the worker's method reads.
        """
        inputs = [name for name in self.extra_inputs if name in batch]
        objects = [name for name in inputs if name in batch.non_tensor_batch]
        tensors = [*TRAIN_COLUMNS, *columns, *(name for name in inputs if name not in objects)]
        rows = plan.apply(batch.select(batch_keys=tensors, non_tensor_batch_keys=objects, meta_info_keys=[]))
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
        """Starts groups of samples without waiting for them. Each engine receives a contiguous block of whole groups;
        fewer groups than engines go to those that run the fewest."""
        mesh = self.group.mesh("rollout")
        if len(plans) >= mesh.dp_size:
            parts = [list(plans[start:stop]) for start, stop in chunk_bounds(len(plans), mesh.dp_size)]
        else:
            running = Counter(self._engine_of.values())
            engines = sorted(range(mesh.dp_size), key=running.__getitem__)
            parts = [list(plans[place : place + 1]) for place in map(engines.index, range(mesh.dp_size))]
        self._engine_of |= {plan.key: engine for engine, part in enumerate(parts) for plan in part}
        self.group.begin_groups(PerRank(parts[engine] for engine in mesh.dp_rank), sampling)

    def run_groups(self, keys: Sequence[str], seconds: float | None = None) -> list[GroupResults]:
        """Runs until the groups with these keys are complete, or for this time. Returns the completed groups, also
        others, in one entry per engine."""
        results = self.group.run_groups(list(keys), seconds)
        collected = [results[rank] for rank in self.group.mesh("rollout").collecting]
        for result in collected:
            for report in result.reports:
                del self._engine_of[report.key]
        return collected

    def snapshot_groups(self) -> list[GroupPlan]:
        """Returns plans that continue the running groups whose samples can be continued."""
        return [plan for plans in self.group.snapshot_groups() for plan in plans]

    def abort_groups(self, keys: Sequence[str]) -> int:
        """Ends groups without rows. Returns the number of tokens that they had sampled."""
        for key in keys:
            del self._engine_of[key]
        return sum(self.group.abort_groups(list(keys)))

    def compute_log_prob(self, batch: DataProto) -> DataProto:
        """Computes old_log_probs and entropys under the current weights, and sum_pi_squared if the estimator takes
        it."""
        config = self.config
        plan = self.plan(batch, "log_prob")
        rows = self.planned_rows(
            batch,
            plan,
            temperature=config.rollout.temperature,
            calculate_entropy=True,
            calculate_sum_pi_squared=estimator_takes(config, "sum_pi_squared"),
            calculate_topk=distilled_tokens(config) if config.distillation.takes_student_topk else 0,
        )
        return plan.restore(self.group.compute_log_prob(rows))

    def update(self, batch: DataProto, step: int) -> Metrics:
        """Trains on the batch. actor.ppo_mini_batch_size and actor.ppo_epochs set the number of optimizer steps."""
        config, actor = self.config, self.config.actor
        plan = self.plan(
            batch,
            "update_actor",
            mini_batch_size=actor.ppo_mini_batch_size,
            epochs=actor.ppo_epochs,
            shuffle_seed=config.trainer.seed + step if actor.shuffle else None,
        )
        computed = loss_columns(batch, config, step)
        columns = [*self._columns_of_loss(batch), *computed]
        batch = batch | DataProto.from_dict(computed)
        rows = self.planned_rows(batch, plan, columns, temperature=config.rollout.temperature)
        metrics = combined_metrics(self.group.update_actor(rows))
        shape = compute_seqlen_metrics(plan, batch.batch["attention_mask"].sum(1).numpy())
        return metrics | {name: Metric.last(value) for name, value in shape.items()}

    def _columns_of_loss(self, batch: DataProto) -> list[str]:
        """Returns the columns of the batch that the loss reads, besides those of the network."""
        config, correction = self.config, self.config.algorithm.rollout_correction
        columns = ["advantages"]
        # strictly on-policy, old_log_probs are not computed: the update compares the trainer with the rollout instead
        if not is_on_policy(config) or correction.bypass_mode:
            columns.append("old_log_probs")
        elif config.rollout.calculate_log_probs:
            columns.append("rollout_log_probs")
        if config.actor.use_kl_loss:
            columns.append("ref_log_prob")
        if config.distillation.is_active:
            taught = ("teacher_log_probs", "teacher_topk_log_probs", "has_teacher")
            columns += [name for name in taught if name in batch]
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
    """Returns the columns that the registration of the policy loss declares: selected (B, R) bool, scores (B,),
    staleness (B, R).

    selected: tokens chosen over the whole batch under the policy before the update, the same in every epoch. Random
    choices are seeded with trainer.seed and the step. staleness: weight updates between the version that sampled the
    token and the version that this step updates; steps of trainer.critic_warmup do not update the weights.
    """
    tensors = {}
    loss_mode = config.actor.policy_loss.loss_mode
    declared_columns = get_policy_loss(loss_mode).columns
    if "selected" in declared_columns:
        if loss_mode not in TOKEN_SELECTIONS:
            raise UserError(
                f"actor.policy_loss.loss_mode={loss_mode} reads `selected`, and nothing says how tokens are chosen: "
                "add a function to verl_lite.algos.covariance_losses.TOKEN_SELECTIONS under its name"
            )
        seed = int(np.random.SeedSequence([config.trainer.seed, step]).generate_state(1)[0])
        columns = (batch.batch[name] for name in ("old_log_probs", "advantages", "response_mask"))
        generator = torch.Generator().manual_seed(seed)
        tensors["selected"] = TOKEN_SELECTIONS[loss_mode](*columns, config.actor, generator=generator)
    if "scores" in declared_columns:
        tensors["scores"] = outcome_scores(batch.batch["token_level_scores"], batch.batch["response_mask"])
    if "staleness" in declared_columns:
        warmup = config.trainer.critic_warmup  # the weights after these steps are those of version 0
        updated_version = max(step - 1, warmup)
        sampled_versions = batch.batch["rollout_versions"].clamp(min=warmup)
        is_valid = batch.batch["response_mask"] != 0
        tensors["staleness"] = (updated_version - sampled_versions).where(is_valid, 0)
    return tensors


class CriticRole(ModelRole, SavedByWorkers):
    """The driver's interface to the critic workers. Update options that `critic` leaves unset come from `actor`."""

    section = "critic"

    def compute_values(self, batch: DataProto) -> DataProto:
        """Computes values under the critic's current weights."""
        plan = self.plan(batch, "values")
        return plan.restore(self.group.compute_values(self.planned_rows(batch, plan)))

    def update(self, batch: DataProto, step: int) -> Metrics:
        """Fits the values to the returns. Mini-batch size and epochs come from `critic`, else from `actor`."""
        critic, actor = self.config.critic, self.config.actor
        shuffle = actor.shuffle if critic.shuffle is None else critic.shuffle
        plan = self.plan(
            batch,
            "update_critic",
            mini_batch_size=critic.ppo_mini_batch_size or actor.ppo_mini_batch_size,
            epochs=critic.ppo_epochs or actor.ppo_epochs,
            shuffle_seed=self.config.trainer.seed + step if shuffle else None,
        )
        rows = self.planned_rows(batch, plan, ["values", "returns"])
        return combined_metrics(self.group.update_critic(rows))


class ReferenceRole(ModelRole):
    """The driver's interface to the frozen reference model."""

    extra_inputs = (*ModelRole.extra_inputs, SAMPLING_CANDIDATES)

    @property
    def section(self) -> str:  # type: ignore[override]
        return "ref" if needs_reference_model(self.config) else "actor"

    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """Computes ref_log_prob of the batch."""
        plan = self.plan(batch, "ref")
        rows = self.planned_rows(batch, plan, temperature=self.config.rollout.temperature)
        return plan.restore(self.group.compute_ref_log_prob(rows))


class TeacherRole(ModelRole):
    """The driver's interface to a teacher of distillation, or to the policy as its own teacher."""

    extra_inputs = (*ReferenceRole.extra_inputs, TEACHER_IDS)  # not the experts, which belong to the policy's prompt

    def __init__(self, group: WorkerGroup, config: PPOConfig, is_policy: bool) -> None:
        super().__init__(group, config)
        self.section = "actor" if is_policy else "ref"

    def compute_teacher_log_prob(self, batch: DataProto) -> DataProto:
        """Computes the columns of `workers.roles.frozen_models.teacher_log_probs`."""
        config = self.config
        plan = self.plan(batch, "log_prob" if self.section == "actor" else "ref")
        rows = self.planned_rows(batch, plan, temperature=config.rollout.temperature, topk=distilled_tokens(config))
        return plan.restore(self.group.compute_teacher_log_prob(rows))


class RewardModelRole(ModelRole):
    """The driver's interface to the reward model.

    inputs: converts a batch into the model's input rows. weight: factor of its score in the sum with the function's.
    """

    section = "reward_model"

    def __init__(self, group: WorkerGroup, config: PPOConfig, inputs: RewardInputs) -> None:
        super().__init__(group, config)
        self.inputs, self.weight = inputs, config.reward_model.weight

    def score(self, batch: DataProto) -> list[RewardResult]:
        """Returns one result per row; an empty response scores 0. A row fails if the model cannot read it or returns a
        number that is not finite."""
        inputs, errors = self.inputs(batch)
        plan = self.plan(inputs, "reward_model")
        scored = plan.restore(self.group.compute_rm_score(self.planned_rows(inputs, plan)))
        scores = scored.batch["rm_scores"].tolist()
        return [
            RewardResult.scored("The reward model", score) if error is None else RewardResult.failure(error)
            for score, error in zip(scores, errors, strict=True)
        ]
