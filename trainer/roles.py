"""Driver-side interfaces of the worker groups. Each call plans the batch, dispatches it and restores the row order.

The driver plans once for all ranks: the rows of each optimizer step, the rank of each row, the number of micro-batches,
and the global denominators of the loss. Ranks only execute the plan.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch

from trainer.requirements import (
    distilled_tokens,
    estimator_takes,
    is_on_policy,
    micro_batching,
    needs_reference_model,
)
from trainer.rewards.model_inputs import RewardInputs
from trainer.saving import SavedByWorkers
from trainer.step_metrics import compute_seqlen_metrics
from verl_lite.algos.covariance_losses import TOKEN_SELECTIONS
from verl_lite.config import PPOConfig
from verl_lite.core_algos import get_policy_loss, outcome_scores
from verl_lite.errors import UserError
from verl_lite.metrics import Metric, combine
from verl_lite.protocol import DataProto, DataProtoFuture, chunk_bounds
from verl_lite.rewards import RewardResult
from verl_lite.schema import SAMPLING_CANDIDATES
from verl_lite.seqlen_balance import BatchPlan, plan_batch
from verl_lite.single_controller.decorator import PerRank
from verl_lite.single_controller.worker_group import WorkerGroup
from workers.policy.causal_lm import TEACHER_IDS, CausalLMPolicy
from workers.policy.loading import Policy
from workers.rollout.base import SamplingParams
from workers.rollout.group_run import GroupPlan, GroupResults

Metrics = dict[str, Metric]

TRAIN_COLUMNS = ("input_ids", "attention_mask", "position_ids", "responses", "response_mask")


def rows_of_prompts(
    batch: DataProto, prompts: int, n: int, groups: Sequence[Sequence[Any]] | None = None
) -> int | list[int]:
    """Returns the number of rows of `prompts` prompts: prompts * n, or, if the batch has the column answers_per_prompt,
    a list with the row count of each consecutive chunk of `prompts` prompts. The rows of a prompt must be adjacent.
    groups: rows of each prompt, if their number varies for another reason."""
    sizes, row = [len(group) for group in groups or ()], 0
    if groups is None:
        if "answers_per_prompt" not in batch:
            return prompts * n
        counts = batch.batch["answers_per_prompt"].tolist()
        while row < len(counts):
            sizes.append(counts[row])
            row += counts[row]
    return [sum(sizes[start : start + prompts]) for start in range(0, len(sizes), prompts)]


class ModelRole:
    """Base of all roles with a model: holds the worker group and plans batches for its ranks.

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

    def infer(
        self, call: Callable[..., Any], batch: DataProto, stage: str, blocking: bool = True, **meta_info: Any
    ) -> Any:
        """Runs a worker group method over all rows without gradients. The batch carries `meta_info` to the ranks."""
        plan = self.plan(batch, stage)
        return dispatch_planned(call, self.apply_plan(batch, plan, **meta_info), plan.restore, blocking)

    def apply_plan(self, batch: DataProto, plan: BatchPlan, more: Iterable[str] = (), **meta_info: Any) -> DataProto:
        """Returns the columns that the network reads, and `more`, with their rows in the order of the plan, as the
        ranks receive them."""
        columns, objects = [*TRAIN_COLUMNS, *more], list[str]()
        for name in filter(batch.__contains__, self.extra_inputs):
            (objects if name in batch.non_tensor_batch else columns).append(name)
        data = plan.apply(batch.select(batch_keys=columns, non_tensor_batch_keys=objects, meta_info_keys=[]))
        data.meta_info |= meta_info
        return data

    def plan(
        self,
        batch: DataProto,
        stage: str,
        *,
        mini_batch_size: int = -1,
        epochs: int = 1,
        shuffle_seed: int | None = None,
    ) -> BatchPlan:
        """Plans the batch for the ranks. stage: the pass, as named in `micro_batching`. mini_batch_size: prompts per
        optimizer step; -1 = all. shuffle_seed: seed of the row order; None = keep the order."""
        ranks_per_sequence = self.config.sequence_parallel_size(self.section)
        return plan_pass(
            batch,
            self.config,
            stage,
            lengths=batch.batch["attention_mask"].sum(1).numpy(),
            world_size=self.group.world_size // ranks_per_sequence,
            ranks_per_sequence=ranks_per_sequence,
            mini_batch_size=mini_batch_size,
            epochs=epochs,
            shuffle_seed=shuffle_seed,
            balance=self.config.trainer.balance_batch,
        )


def plan_pass(
    batch: DataProto,
    config: PPOConfig,
    stage: str,
    *,
    lengths: np.ndarray,
    mini_batch_size: int = -1,
    ranks_per_sequence: int = 1,
    **options: Any,
) -> BatchPlan:
    """Plans a pass; see `ModelRole.plan`. lengths: (B,) tokens of each row. ranks_per_sequence: number of ranks that
    share a micro-batch, which then holds the tokens of all of them. options: arguments of `plan_batch`."""
    cut = micro_batching(config, stage)
    has_program = "requests" in batch  # the rows of a prompt vary in number
    groups = [list(rows) for _, rows in groupby(batch.non_tensor_batch["uid"])] if has_program else None
    steps = None if mini_batch_size == -1 else rows_of_prompts(batch, mini_batch_size, config.rollout.n, groups)
    return plan_batch(
        lengths,
        mini_batch_size=steps,
        samples=batch.non_tensor_batch["traj_id"].tolist() if has_program else None,
        max_token_len=None if cut.max_token_len is None else cut.max_token_len * ranks_per_sequence,
        micro_batch_size=cut.micro_batch_size,
        num_tokens=(tokens := batch.batch["response_mask"].sum(1)).numpy(),
        num_distilled=(tokens * batch.batch["has_teacher"]).numpy() if "has_teacher" in batch else None,
        **options,
    )


def dispatch_planned(
    call: Callable[..., Any], data: DataProto, then: Callable[[Any], DataProto], blocking: bool
) -> Any:
    """Calls a worker group's method and applies `then` to its result. blocking=False returns a future at once."""
    if blocking:
        return then(call(data))
    answer = call(data, blocking=False)
    return DataProtoFuture(lambda: then(answer.get()))


def joined_metrics(results: Iterable[DataProto], more: Metrics) -> DataProto:
    """Returns a batch whose meta_info holds the combined metrics of all ranks, plus `more`."""
    return DataProto(meta_info={"metrics": combine([result.meta_info["metrics"] for result in results]) | more})


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

    def compute_log_prob(self, batch: DataProto, blocking: bool = True) -> Any:
        """Computes old_log_probs and entropys under the current weights, and sum_pi_squared if the estimator takes it.
        blocking=False returns a future."""
        return self.infer(
            self.group.compute_log_prob,
            batch,
            "log_prob",
            blocking,
            temperature=self.config.rollout.temperature,
            calculate_entropy=True,
            calculate_sum_pi_squared=estimator_takes(self.config, "sum_pi_squared"),
            calculate_topk=distilled_tokens(self.config) if self.config.distillation.takes_student_topk else 0,
        )

    def update(self, batch: DataProto, step: int) -> Metrics:
        """Trains on the batch. actor.ppo_mini_batch_size and actor.ppo_epochs set the number of optimizer steps."""
        return self.train_step(batch, step).meta_info["metrics"]

    def train_step(self, batch: DataProto, step: int, blocking: bool = True) -> Any:
        """Trains as `update`. Returns a batch with the metrics in meta_info; blocking=False returns a future."""
        config, correction = self.config, self.config.algorithm.rollout_correction
        plan = self.plan(
            batch,
            "update_actor",
            mini_batch_size=config.actor.ppo_mini_batch_size,
            epochs=config.actor.ppo_epochs,
            shuffle_seed=config.trainer.seed + step if config.actor.shuffle else None,
        )
        columns = ["advantages"]
        # strictly on-policy, old_log_probs are not computed: the update compares the trainer with the rollout instead
        if not is_on_policy(config) or correction.bypass_mode:
            columns.append("old_log_probs")
        elif config.rollout.calculate_log_probs:
            columns.append("rollout_log_probs")
        chosen = loss_columns(batch, config, step)
        columns += ["ref_log_prob"] if config.actor.use_kl_loss else []
        taught = ("teacher_log_probs", "teacher_topk_log_probs", "has_teacher")
        columns += filter(batch.__contains__, taught) if config.distillation.is_active else []
        columns += ["rollout_is_weights"] if correction.rollout_is and not correction.bypass_mode else []
        batch = batch | DataProto.from_dict(chosen)
        data = self.apply_plan(batch, plan, [*columns, *chosen], temperature=config.rollout.temperature)
        lengths = batch.batch["attention_mask"].sum(1).numpy()
        shape = {name: Metric.last(x) for name, x in compute_seqlen_metrics(plan, lengths).items()}
        return dispatch_planned(self.group.update_actor, data, lambda results: joined_metrics(results, shape), blocking)

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

    def compute_values(self, batch: DataProto, blocking: bool = True) -> Any:
        """Computes values under the critic's current weights; blocking=False returns a future."""
        return self.infer(self.group.compute_values, batch, "values", blocking)

    def update(self, batch: DataProto, step: int) -> Metrics:
        """Fits the values to the returns. Mini-batch size and epochs come from `critic`, else from `actor`."""
        return self.train_step(batch, step).meta_info["metrics"]

    def train_step(self, batch: DataProto, step: int, blocking: bool = True) -> Any:
        """Trains as `update`; see `ActorRole.train_step`."""
        critic, actor = self.config.critic, self.config.actor
        shuffle = actor.shuffle if critic.shuffle is None else critic.shuffle
        plan = self.plan(
            batch,
            "update_critic",
            mini_batch_size=critic.ppo_mini_batch_size or actor.ppo_mini_batch_size,
            epochs=critic.ppo_epochs or actor.ppo_epochs,
            shuffle_seed=self.config.trainer.seed + step if shuffle else None,
        )
        data = self.apply_plan(batch, plan, ["values", "returns"])
        return dispatch_planned(self.group.update_critic, data, lambda results: joined_metrics(results, {}), blocking)


class ReferenceRole(ModelRole):
    """The driver's interface to the frozen reference model."""

    extra_inputs = (*ModelRole.extra_inputs, SAMPLING_CANDIDATES)

    @property
    def section(self) -> str:  # type: ignore[override]
        return "ref" if needs_reference_model(self.config) else "actor"

    def compute_ref_log_prob(self, batch: DataProto, blocking: bool = True) -> Any:
        """Computes ref_log_prob of the batch; blocking=False returns a future."""
        temperature = self.config.rollout.temperature
        return self.infer(self.group.compute_ref_log_prob, batch, "ref", blocking, temperature=temperature)


class TeacherRole(ModelRole):
    """The driver's interface to a teacher of distillation, or to the policy as its own teacher."""

    extra_inputs = (*ReferenceRole.extra_inputs, TEACHER_IDS)  # not the experts, which belong to the policy's prompt

    def __init__(self, group: WorkerGroup, config: PPOConfig, is_policy: bool) -> None:
        super().__init__(group, config)
        self.section = "actor" if is_policy else "ref"

    def compute_teacher_log_prob(self, batch: DataProto) -> DataProto:
        """Computes the columns of `workers.frozen_models.teacher_log_probs`."""
        temperature, topk = self.config.rollout.temperature, distilled_tokens(self.config)
        call, stage = self.group.compute_teacher_log_prob, "log_prob" if self.section == "actor" else "ref"
        return self.infer(call, batch, stage, temperature=temperature, topk=topk)


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
        rows, errors = self.inputs(batch)
        scored = self.infer(self.group.compute_rm_score, rows, "reward_model")
        scores = scored.batch["rm_scores"].tolist()
        return [
            RewardResult.scored("The reward model", score) if error is None else RewardResult.failure(error)
            for score, error in zip(scores, errors, strict=True)
        ]
