"""The driver of flow_grpo: GRPO as for language models, with denoising paths as responses.

A step draws prompts, samples `rollout.n` paths for each, scores the images, estimates advantages with a registered
estimator and updates the policy with a registered loss. Only sampling and scoring are specific to images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

import numpy as np
import torch

from trainer.diffusion.loop import DiffusionRole, DiffusionTrainer
from trainer.loop.saving import Saver
from trainer.loop.steps import EpochSteps
from trainer.observe.tracking import Tracking
from trainer.ppo.advantage import compute_token_reward, estimate_advantages, reward_postprocess
from trainer.ppo.requirements import micro_batching
from trainer.ppo.roles import loss_columns
from trainer.ppo.step_metrics import frac_reward_zero_std, summary
from trainer.validation.metrics import name_metrics, process_validation_metrics
from verl_lite.config.flow_grpo import FlowGRPOConfig
from verl_lite.core_algos import RunningMoments
from verl_lite.metrics import Metric, combine, values
from verl_lite.protocol import DataProto
from verl_lite.rewards.results import is_score
from verl_lite.seqlen_balance import BatchPlan, plan_batch
from verl_lite.single_controller.worker_group import WorkerGroup

SOURCE = "prompts"
"""Name of the data source in the validation metrics."""

FIRST, PATH, EVALUATION = 0, 1, 2
"""Numbers in the key of a seed. The first number of a key says for which noise the seed is: the first noise of a path
(FIRST), or that of its steps (PATH). The second says for which samples: those of training (PATH) or EVALUATION."""


class Reward(Protocol):
    """A reward function, which need not be differentiable: it may count, threshold or call a detector."""

    def __call__(self, frames: torch.Tensor, prompts: Sequence[str], **kwargs: Any) -> Sequence[float | None]:
        """Returns a score per sample, None or NaN if it cannot be scored.

        Args:
            frames: (B, F, 3, H, W) in [0, 1].
            prompts: the prompt of each sample.
            kwargs: `reward.kwargs` of the options.
        """


class FlowGRPOTrainer(DiffusionTrainer):
    """The trainer of flow_grpo.

    Args:
        config: options of the run.
        actor: the policy on the workers.
        prompts: prompts of the training, by row.
        val_prompts: prompts of the validations.
        reward: scores the images of both.
    """

    def __init__(
        self,
        config: FlowGRPOConfig,
        *,
        actor: FlowActor,
        prompts: Sequence[str],
        val_prompts: Sequence[str],
        reward: Reward,
        steps: EpochSteps,
        tracking: Tracking,
        saver: Saver,
    ) -> None:
        super().__init__(config.trainer, steps=steps, tracking=tracking, saver=saver)
        self.config = config
        self.actor = actor
        self.reward = reward
        self.prompts = prompts
        self.val_prompts = val_prompts
        self.running_moments = RunningMoments()

    def train_step(self, data: int) -> DataProto:
        """Samples, scores, estimates advantages within the samples of a prompt, and updates the policy."""
        prompts = [(row, self.prompts[row]) for row in self.steps.rows_of(data)]
        with self.timed("gen"):
            batch = self.sample(prompts)
        with self.timed("reward"):
            batch = self.score(batch)
        with self.timed("adv"):
            batch = self.estimate_advantages(batch)
        with self.timed("update_actor"):
            self.metrics |= values(self.actor.update(batch, data))
        self.metrics |= data_metrics(batch)
        return batch

    def sample(self, prompts: Sequence[tuple[int, str]]) -> DataProto:
        """Samples rollout.n paths for each prompt with the noisy sampler and sampler.num_train_steps steps.

        Args:
            prompts: pairs of the prompt's row and its text.
        """
        sampler = self.config.sampler
        rows = self.rows_of(prompts, self.config.rollout.n, PATH)
        paths = self.actor.generate(rows, sampler.num_train_steps, sampler.noise_level)
        batch = rows | paths

        # every step of a path counts; `score` masks the paths that cannot be scored
        log_probs = batch.batch["old_log_probs"]
        batch.batch["response_mask"] = torch.ones_like(log_probs, dtype=torch.long)
        return batch

    def rows_of(self, prompts: Sequence[tuple[int, str]], n: int, purpose: int) -> DataProto:
        """Returns n rows per prompt, with prompt, uid and seeds.

        Args:
            prompts: pairs of the prompt's row and its text.
            n: samples of a prompt.
            purpose: PATH (training) or EVALUATION, whose seeds do not depend on the step.
        """
        step = 0 if purpose == EVALUATION else self.steps.global_step
        shares_first_noise = self.config.sampler.share_first_noise and purpose == PATH

        first_seeds = []
        path_seeds = []
        texts = []
        uids = []
        for row, text in prompts:
            for sample in range(n):
                # paths of a prompt can start at the same noise and differ only by that of their steps
                first_sample = 0 if shares_first_noise else sample
                first_seeds.append(self._seed(FIRST, purpose, step, row, first_sample))
                path_seeds.append(self._seed(PATH, purpose, step, row, sample))
                texts.append(text)
                uids.append(str(row))

        tensors = {
            "first_seed": torch.tensor(first_seeds),
            "path_seed": torch.tensor(path_seeds),
        }
        non_tensors = {
            "prompt": np.array(texts, dtype=object),
            "uid": np.array(uids, dtype=object),
        }
        return DataProto.from_dict(tensors=tensors, non_tensors=non_tensors)

    def _seed(self, *key: int) -> int:
        """Returns a seed in [0, 2^63) that depends on trainer.seed and the key."""
        sequence = np.random.SeedSequence([self.config.trainer.seed, *key])
        [state] = sequence.generate_state(1, np.uint64)
        # the shift makes it fit into int64
        return int(state >> 1)

    def score(self, batch: DataProto) -> DataProto:
        """Adds token_level_scores (B, T) with each reward at the last step; masks samples that cannot be scored."""
        scores = _with_nan(self._scores(batch))
        has_failed = scores.isnan()
        self.metrics["reward/error_rate"] = float(has_failed.float().mean())

        # a new object, so that the caller's batch keeps its mask
        batch = batch.select()
        # estimators and losses ignore a row without a mask, as for a language model's failed reward
        mask = batch.batch["response_mask"].masked_fill(has_failed[:, None], 0)
        token_scores = torch.zeros(mask.shape)
        token_scores[:, -1] = scores.nan_to_num(0.0)
        batch.batch["response_mask"] = mask
        batch.batch["token_level_scores"] = token_scores
        return batch

    def _scores(self, batch: DataProto) -> list[float | None]:
        """Returns the reward of each sample; None for one that cannot be scored."""
        reward = self.config.reward
        prompts = [str(prompt) for prompt in batch.non_tensor_batch["prompt"]]
        scores: list[float | None] = []
        for score in self.reward(batch.batch["frames"], prompts, **reward.kwargs):
            if score is None or not is_score(float(score)):
                scores.append(None)
            else:
                scores.append(float(score))
        if len(scores) != len(batch):
            raise ValueError(f"{reward.name} returned {len(scores)} scores for {len(batch)} samples")
        return scores

    def estimate_advantages(self, batch: DataProto) -> DataProto:
        """Adds token_level_rewards, advantages and returns, as for responses of T tokens."""
        algorithm = self.config.algorithm
        batch, score_metrics = reward_postprocess(batch, algorithm, self.running_moments)
        batch, token_metrics = compute_token_reward(batch, algorithm)
        batch, advantage_metrics = estimate_advantages(batch, algorithm, algorithm.adv_estimator)
        self.metrics |= score_metrics | token_metrics | advantage_metrics
        return batch

    def evaluate(self) -> tuple[dict[str, float], DataProto]:
        """Samples with the ODE from the same noise in each call. face_score is NaN if a sample cannot be scored."""
        prompts = list(enumerate(self.val_prompts))
        samples = self.config.rollout.val_kwargs.n
        rows = self.rows_of(prompts, samples, EVALUATION)
        # without noise in the steps, the sampler is the ODE
        steps = self.config.sampler.num_inference_steps
        images = self.actor.generate(rows, steps, noise_level=0.0)
        batch = rows | images
        scores = self._scores(batch)
        # `draw_before_and_after` reads the scores under the name that reward flow gives them
        batch.batch["face_score"] = _with_nan(scores)

        sources = [SOURCE] * len(batch)
        uids = list(batch.non_tensor_batch["uid"])
        metrics = process_validation_metrics(sources, uids, {"reward": scores})
        return name_metrics(metrics), batch

    def state_dict(self) -> dict[str, dict[str, float]]:
        """Returns the running moments of the scores."""
        return {"running_moments": self.running_moments.state_dict()}

    def load_state_dict(self, state: Mapping[str, dict[str, float]]) -> None:
        """Restores the result of `state_dict`."""
        self.running_moments.load_state_dict(state["running_moments"])


def _with_nan(scores: list[float | None]) -> torch.Tensor:
    """Returns the scores as a tensor (B,) with NaN in place of None."""
    return torch.from_numpy(np.array(scores, dtype=np.float32))


class FlowActor(DiffusionRole):
    """The driver's handle of the policy on its worker group."""

    def __init__(self, group: WorkerGroup, config: FlowGRPOConfig) -> None:
        super().__init__(group, config.rollout.max_num_seqs)
        self.config = config

    def generate(self, rows: DataProto, steps: int, noise_level: float) -> DataProto:
        """Samples one path for each row; see `FlowActorWorker.generate`."""
        plan = self.plan_of(rows)
        planned_rows = plan.apply(rows)
        planned_rows.meta_info |= {"steps": steps, "noise_level": noise_level}
        planned_results = self.group.generate(planned_rows)

        results = plan.restore(planned_results)
        return results.select(meta_info_keys=[])

    def update(self, batch: DataProto, step: int) -> dict[str, Metric]:
        """Trains on the batch; `actor.ppo_mini_batch_size` and `actor.ppo_epochs` set the number of optimizer steps."""
        # these options have the sections that `loss_columns` reads of a PPOConfig
        computed = loss_columns(batch, cast("Any", self.config), step)
        columns = ["first_seed", "path_seed", "latents", "response_mask", "advantages", *computed]
        # not needed for a single optimizer step, where every ratio is 1
        if not self._is_single_step():
            columns.append("old_log_probs")

        # most losses declare no columns of their own
        if computed:
            batch = batch | DataProto.from_dict(computed)
        rows = batch.select(batch_keys=columns, non_tensor_batch_keys=["prompt"], meta_info_keys=[])
        plan = self._plan_of_update(batch, step)
        results = self.group.update_actor(plan.apply(rows))
        return combine([result.meta_info["metrics"] for result in results])

    def _is_single_step(self) -> bool:
        """Returns True if a batch is used for one optimizer step."""
        actor = self.config.actor
        if actor.ppo_epochs > 1:
            return False
        if actor.ppo_mini_batch_size == -1:
            return True
        return actor.ppo_mini_batch_size >= self.config.data.train_batch_size

    def _plan_of_update(self, batch: DataProto, step: int) -> BatchPlan:
        """Divides the rows into mini-batches and micro-batches."""
        actor = self.config.actor
        paths_per_step = None
        if actor.ppo_mini_batch_size != -1:
            paths_per_step = actor.ppo_mini_batch_size * self.config.rollout.n
        shuffle_seed = None
        if actor.shuffle:
            shuffle_seed = self.config.trainer.seed + step

        # a path is planned like a response of T tokens, all paths with the same length
        mask = batch.batch["response_mask"]
        lengths = np.full(len(batch), mask.shape[1])
        limits = micro_batching(cast("Any", self.config), "update_actor")
        return plan_batch(
            lengths,
            world_size=self.group.world_size,
            mini_batch_size=paths_per_step,
            max_token_len=limits.max_token_len,
            micro_batch_size=limits.micro_batch_size,
            epochs=actor.ppo_epochs,
            shuffle_seed=shuffle_seed,
            num_tokens=mask.sum(1).numpy(),
        )


def data_metrics(batch: DataProto) -> dict[str, float]:
    """Returns mean, max and min of critic/score, rewards, advantages and returns over unmasked entries, and
    frac_reward_zero_std."""
    columns = batch.batch
    mask = columns["response_mask"] != 0
    # samples that cannot be scored have no mask, and do not count
    is_counted = mask.any(1)
    all_scores = columns["token_level_scores"].sum(1)
    all_rewards = columns["token_level_rewards"].sum(1)
    scores = all_scores[is_counted]
    rewards = all_rewards[is_counted]
    uids = batch.non_tensor_batch["uid"][is_counted.numpy()]
    return {
        **summary("critic/score", scores),
        **summary("critic/rewards", rewards),
        **summary("critic/advantages", columns["advantages"][mask]),
        **summary("critic/returns", columns["returns"][mask]),
        **frac_reward_zero_std(scores, uids),
    }
