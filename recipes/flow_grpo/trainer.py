"""The driver: `fit` is the algorithm, and it is that of language models with other samples.

A step draws prompts, samples `rollout.n` paths for each, scores the images, estimates advantages by a registered
estimator and updates by a registered loss. Only sampling and scoring are particular to images.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from recipes.flow_grpo.rewards import Reward
from trainer.advantage import compute_advantage, compute_token_reward, reward_postprocess
from trainer.checkpoint import find_checkpoint, read_state
from trainer.evaluate.metrics import name_metrics, process_validation_metrics
from trainer.evaluate.sample import Sample
from trainer.loss_columns import loss_columns
from trainer.resume import flat_config
from trainer.saving import SavedByWorkers, Saver
from trainer.step_metrics import frac_reward_zero_std
from trainer.steps import StepCounter
from trainer.timing import timed
from trainer.tracking import Tracking
from verl_lite.config.flow_grpo import FlowGRPOConfig
from verl_lite.core_algos import RunningMoments
from verl_lite.metrics import Metric, combine, values
from verl_lite.protocol import DataProto
from verl_lite.random_state import get_random_state, set_random_state
from verl_lite.seqlen_balance import BatchPlan, plan_batch
from verl_lite.single_controller.worker_group import WorkerGroup

SOURCE = "prompts"
"""The data source under which the evaluation is reported."""

FIRST, PATH, EVALUATION = 0, 1, 2
"""What a seed is for; it follows from trainer.seed, this, the step, the prompt's row and the sample's number."""


Summary = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class FitResult:
    """Evaluation before and after, the frames that it scored (prompts x n, F, 3, H, W), the last checkpoint."""

    before: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)
    frames_before: torch.Tensor | None = None
    frames_after: torch.Tensor | None = None
    scores_before: list[float | None] = field(default_factory=list)
    scores_after: list[float | None] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    checkpoint: Path | None = None
    stopped: bool = False


class PromptSteps(StepCounter):
    """The prompts of each step as (row, text); the order of an epoch follows from the seed and its number alone."""

    def __init__(self, config: FlowGRPOConfig, prompts: Sequence[str]) -> None:
        self.config, self.prompts = config, prompts
        self.per_epoch = -(-len(prompts) // config.data.train_batch_size)
        limit = config.trainer.total_training_steps
        self.total = config.trainer.total_epochs * self.per_epoch if limit is None else limit

    def __iter__(self) -> Iterator[list[tuple[int, str]]]:
        size = self.config.data.train_batch_size
        while self.global_step < self.total and not self.stopping:
            self.epoch, place = divmod(self.global_step, self.per_epoch)
            self.global_step += 1
            order = np.arange(len(self.prompts))
            if self.config.data.shuffle:
                order = np.random.default_rng([self.config.trainer.seed, self.epoch]).permutation(len(order))
            yield [(int(row), self.prompts[row]) for row in order[place * size : (place + 1) * size]]


class FlowActor(SavedByWorkers):
    """The policy, as the driver sees it: each call plans the batch, dispatches it and puts the answer back in order."""

    def __init__(self, group: WorkerGroup, config: FlowGRPOConfig) -> None:
        self.group, self.config = group, config

    @property
    def is_on_policy(self) -> bool:
        """Whether each batch gives one optimizer step: then every ratio is 1, without old log-probs."""
        actor = self.config.actor
        whole = actor.ppo_mini_batch_size == -1 or actor.ppo_mini_batch_size >= self.config.data.train_batch_size
        return actor.ppo_epochs == 1 and whole

    def generate(self, rows: DataProto, steps: int, noise_level: float) -> DataProto:
        """One sample for each row; see `FlowActorWorker.generate`."""
        ones = np.ones(len(rows), dtype=np.int64)
        plan = plan_batch(
            ones,
            world_size=self.group.world_size,
            mini_batch_size=None,
            micro_batch_size=self.config.rollout.max_num_seqs,
            num_tokens=ones,
        )
        data = plan.apply(rows)
        data.meta_info |= {"steps": steps, "noise_level": noise_level}
        return plan.restore(self.group.generate(data)).select(meta_info_keys=[])

    def update(self, batch: DataProto, step: int) -> dict[str, Metric]:
        """Trains on the batch; see `actor.ppo_mini_batch_size` and `actor.ppo_epochs` for how many optimizer steps."""
        chosen = loss_columns(batch, cast("Any", self.config), step)  # of which it reads actor and trainer.seed
        columns = ["first_seed", "path_seed", "latents", "response_mask", "advantages", *chosen]
        if not self.is_on_policy:
            columns.append("old_log_probs")
        data = (batch | DataProto.from_dict(chosen)) if chosen else batch
        plan = self._plan(batch, step)
        data = plan.apply(data.select(batch_keys=columns, non_tensor_batch_keys=["prompt"], meta_info_keys=[]))
        return combine([result.meta_info["metrics"] for result in self.group.update_actor(data)])

    def _plan(self, batch: DataProto, step: int) -> BatchPlan:
        actor, mask = self.config.actor, batch.batch["response_mask"]
        is_whole = actor.ppo_mini_batch_size == -1
        return plan_batch(
            np.full(len(batch), mask.shape[1]),
            world_size=self.group.world_size,
            mini_batch_size=None if is_whole else actor.ppo_mini_batch_size * self.config.rollout.n,
            max_token_len=actor.ppo_max_token_len_per_gpu if actor.use_dynamic_bsz else None,
            micro_batch_size=None if actor.use_dynamic_bsz else actor.ppo_micro_batch_size_per_gpu,
            epochs=actor.ppo_epochs,
            shuffle_seed=self.config.trainer.seed + step if actor.shuffle else None,
            num_tokens=mask.sum(1).numpy(),
        )

    def export(self, folder: str) -> None:
        """Writes the network of now as its own from_pretrained reads it."""
        self.group.export(folder)


class FlowGRPOTrainer:
    """Holds the parts of a run."""

    def __init__(
        self,
        config: FlowGRPOConfig,
        *,
        actor: FlowActor,
        steps: PromptSteps,
        val_prompts: Sequence[str],
        reward: Reward,
        tracking: Tracking,
        saver: Saver,
        run_dir: Path,
    ) -> None:
        self.config, self.actor, self.steps, self.val_prompts = config, actor, steps, val_prompts
        self.reward, self.tracking, self.saver, self.run_dir = reward, tracking, saver, run_dir
        self.running_moments = RunningMoments()
        self.metrics: dict[str, float] = {}
        self.timing: dict[str, float] = {}

    # ---------------------------------------------------------------------------------------------- the algorithm

    def fit(self) -> FitResult:
        """Trains to the end of the configured steps. Returns what to show."""
        result = FitResult()
        self.resume()
        if self.config.trainer.val_before_train:
            result.before = result.after = self.validate(result)
            result.frames_before, result.scores_before = result.frames_after, result.scores_after
            self.tracking.log(result.before, step=self.steps.global_step)
        for prompts in self.steps:
            self.metrics, self.timing, validation = {}, {}, {}
            with self.timed("step"):
                with self.timed("gen"):
                    batch = self.sample(prompts)
                with self.timed("reward"):
                    batch = self.score(batch)
                with self.timed("adv"):
                    batch = self.estimate_advantages(batch)
                with self.timed("update_actor"):
                    self.metrics |= values(self.actor.update(batch, self.steps.global_step))
            if self.steps.due(self.config.trainer.test_freq):
                with self.timed("testing"):
                    result.after = validation = self.validate(result)
            self.log_step(batch, validation)
            if self.saver.is_due(self.steps):
                self.save()
        result.checkpoint, result.stopped = self.saver.newest, self.steps.stopping
        return result

    # ------------------------------------------------------------------------------------------------- the stages

    def sample(self, prompts: Sequence[tuple[int, str]]) -> DataProto:
        """rollout.n paths for each prompt, by the sampler with noise and its few steps."""
        sampler, rows = self.config.sampler, self.rows_of(prompts, self.config.rollout.n, PATH)
        batch = rows | self.actor.generate(rows, sampler.num_train_steps, sampler.noise_level)
        batch.batch["response_mask"] = torch.ones_like(batch.batch["old_log_probs"], dtype=torch.long)
        return batch

    def rows_of(self, prompts: Sequence[tuple[int, str]], n: int, purpose: int) -> DataProto:
        """n rows for each prompt, with its name and their seeds; those of the evaluation are the same in each step."""
        step = 0 if purpose == EVALUATION else self.steps.global_step
        shares = self.config.sampler.share_first_noise and purpose == PATH
        rows = [(row, text, sample) for row, text in prompts for sample in range(n)]
        first = [self._seed(FIRST, purpose, step, row, 0 if shares else sample) for row, _, sample in rows]
        path = [self._seed(PATH, purpose, step, row, sample) for row, _, sample in rows]
        return DataProto.from_dict(
            tensors={"first_seed": torch.tensor(first), "path_seed": torch.tensor(path)},
            non_tensors={
                "prompt": np.array([text for _, text, _ in rows], dtype=object),
                "uid": np.array([str(row) for row, _, _ in rows], dtype=object),
            },
        )

    def _seed(self, *key: int) -> int:
        return int(np.random.SeedSequence([self.config.trainer.seed, *key]).generate_state(1, np.uint64)[0] >> 1)

    def score(self, batch: DataProto) -> DataProto:
        """token_level_scores (B, T): the reward of a sample on its last step. What cannot be scored does not count."""
        scores = self._scores(batch)
        failed = torch.tensor([score is None for score in scores])
        batch = batch.select()
        mask = batch.batch["response_mask"].masked_fill(failed[:, None], 0)
        placed = torch.zeros(mask.shape)
        placed[:, -1] = torch.tensor([score or 0.0 for score in scores])
        batch.batch["response_mask"], batch.batch["token_level_scores"] = mask, placed
        self.metrics["reward/error_rate"] = float(failed.float().mean())
        return batch

    def _scores(self, batch: DataProto) -> list[float | None]:
        prompts = [str(prompt) for prompt in batch.non_tensor_batch["prompt"]]
        found = self.reward(batch.batch["frames"], prompts, **self.config.reward.kwargs)
        scores = [None if score is None or not np.isfinite(float(score)) else float(score) for score in found]
        if len(scores) != len(batch):
            raise ValueError(f"{self.config.reward.name} gave {len(scores)} scores for {len(batch)} samples")
        return scores

    def estimate_advantages(self, batch: DataProto) -> DataProto:
        """Adds token_level_rewards, advantages and returns, as for answers of T tokens."""
        algorithm = self.config.algorithm
        batch, score_metrics = reward_postprocess(batch, algorithm, self.running_moments)
        batch, reward_metrics = compute_token_reward(batch, algorithm)
        batch = compute_advantage(
            batch,
            algorithm.gamma,
            algorithm.lam,
            algorithm.adv_estimator,
            advantage_clip=algorithm.advantage_clip,
            whiten_advantages=algorithm.whiten_advantages,
            whiten_rewards=algorithm.whiten_rewards,
            pipeline_config=algorithm,
        )
        self.metrics |= score_metrics | reward_metrics | batch.meta_info.pop("metrics", {})
        return batch

    def validate(self, result: FitResult) -> dict[str, float]:
        """Samples by the ODE, from the same noise each time, and scores; keeps the frames in `result`."""
        n = self.config.rollout.val_kwargs.n
        rows = self.rows_of(list(enumerate(self.val_prompts)), n, EVALUATION)
        batch = rows | self.actor.generate(rows, self.config.sampler.num_inference_steps, 0.0)
        scores = self._scores(batch)
        result.frames_after, result.scores_after = batch.batch["frames"], scores
        uids = list(batch.non_tensor_batch["uid"])
        return name_metrics(process_validation_metrics([SOURCE] * len(batch), uids, {"reward": scores}))

    # ------------------------------------------------------------------------------------- saving, resuming, logging

    def save(self) -> None:
        """Writes a checkpoint of this step."""
        state = {
            "config": flat_config(self.config),
            "steps": {"global_step": self.steps.global_step},
            "running_moments": self.running_moments.state_dict(),
            "random": get_random_state(),
        }
        with self.timed("save_checkpoint"):
            self.saver.save(self.steps.global_step, state, is_last=self.steps.is_last or self.steps.stopping)
        self.tracking.log({"timing_s/save_checkpoint": self.timing["save_checkpoint"]}, step=self.steps.global_step)

    def resume(self) -> None:
        """Continues from the checkpoint that `trainer.resume_mode` names, if any."""
        trainer = self.config.trainer
        folder = find_checkpoint(self.run_dir, trainer.resume_mode, trainer.resume_from_path)
        if folder is not None:
            state = read_state(folder)
            self.actor.load(str(folder / "actor"))
            self.steps.global_step = state["steps"]["global_step"]
            self.running_moments.load_state_dict(state["running_moments"])
            set_random_state(state["random"])

    def timed(self, name: str) -> AbstractContextManager[None]:
        """Adds the block's seconds to timing_s/<name>."""
        return timed(self.timing, name, self.steps.global_step)

    def log_step(self, batch: DataProto, validation: Mapping[str, float]) -> None:
        """Sends this step's metrics to the trackers, under the names of language models."""
        logged = {
            "training/global_step": float(self.steps.global_step),
            "training/epoch": float(self.steps.epoch),
            **self.metrics,
            **data_metrics(batch),
            **{f"timing_s/{name}": seconds for name, seconds in self.timing.items()},
            "perf/time_per_step": self.timing["step"],
            **validation,
        }
        self.tracking.log(logged, step=self.steps.global_step)


def data_metrics(batch: DataProto) -> dict[str, float]:
    """critic/score, rewards, advantages, returns (mean, max, min), over what counts; frac_reward_zero_std."""
    columns, mask = batch.batch, batch.batch["response_mask"] != 0
    counted = mask.any(1)
    per_sample = {name: columns[f"token_level_{name}s"].sum(1)[counted] for name in ("score", "reward")}
    found = {
        "score": per_sample["score"],
        "rewards": per_sample["reward"],
        "advantages": columns["advantages"][mask],
        "returns": columns["returns"][mask],
    }
    summaries: dict[str, Summary] = {"mean": torch.mean, "max": torch.max, "min": torch.min}
    metrics = {
        f"critic/{name}/{kind}": float(summary(x.float()))
        for name, x in found.items()
        for kind, summary in summaries.items()
        if x.numel()
    }
    return metrics | frac_reward_zero_std(per_sample["score"], batch.non_tensor_batch["uid"][counted.numpy()])
