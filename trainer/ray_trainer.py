"""The driver process of PPO training. `fit` is the training loop: read it first, then the stages that it calls.

Each stage reads columns of the batch and adds new ones (`verl_lite/schema.py` lists all columns). The workers run the
models; the driver plans, dispatches and computes advantages. A recipe replaces a stage by overriding its method.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from trainer.checkpoint.files import saved_steps
from trainer.data.prompts import PromptDataset
from trainer.loop.saving import Saver
from trainer.loop.training_loop import TrainingLoop
from trainer.observe.final_report import FitResult
from trainer.observe.tracking import Tracking
from trainer.ppo import step_metrics
from trainer.ppo.advantage import ScalarMetrics, compute_token_reward, estimate_advantages, reward_postprocess
from trainer.ppo.pf_ppo import compute_pf_ppo_reweight_data
from trainer.ppo.requirements import needs_old_log_prob
from trainer.ppo.roles import ActorRole, CriticRole, Metrics, ReferenceRole
from trainer.ppo.teacher_server import TeacherStopped
from trainer.ppo.teachers import Teachers
from trainer.rewards.groups import group_shares
from trainer.rewards.scores import RewardStage, mask_failed, punish_overlong, take_greedy_baselines
from trainer.rollout.dynamic_sampling import DynamicSampling, FilterBudgetExceeded
from trainer.rollout.group_sources import ANSWERS, prompt_groups
from trainer.rollout.sample_groups import AnswerRewards, GroupFilter, GroupSource
from trainer.rollout.scheduler import RolloutScheduler
from trainer.rollout.training_steps import TrainingSteps
from trainer.rollout.weight_sync import WeightSync
from trainer.validation.answers import ValSampling, chunk_size, generate_in_chunks, val_samplings
from trainer.validation.metrics import validation_metrics
from trainer.validation.sample import Sample, samples_of
from trainer.validation.sample_files import SampleFiles
from trainer.validation.stored_answers import AnswerStore
from verl_lite.config import PPOConfig
from verl_lite.core_algos import RunningMoments, get_kl_controller
from verl_lite.metrics import Metric, combine, values
from verl_lite.protocol import DataProto
from verl_lite.rollout_correction import correct_rollout, keep_rewards, rollout_probs_diff
from workers.engines.base import SamplingParams


class RayPPOTrainer(TrainingLoop[TrainingSteps, FitResult]):
    """The trainer: holds the components of a run, which `trainer.launch.build` creates from the configuration.

    Args:
        actor: the policy and its rollout engines.
        ref: the reference model; None if no KL term is configured.
        critic: the value model; None if the estimator needs no values.
        teachers: teachers of distillation; None without distillation.
        rewards: scores the samples.
        source: draws the training samples.
        total_steps: last step.
        val_data: prompts of validations; None without validation.
        samples: writes samples to files.
        saver: writes and restores checkpoints.
        run_dir: the run folder.
    """

    trains = True
    """False for subclasses that do not update the policy. They have neither critic nor training prompts."""
    scores = True
    """False for subclasses that compute no rewards."""
    metrics: Metrics

    @classmethod
    def check_folder(cls, config: PPOConfig, data: PromptDataset | None, run_dir: Path) -> None:
        """Checks the run folder before any process starts.

        Subclasses that store answers there raise UserError if it holds the answers of another configuration.

        Args:
            config: the options of the run.
            data: the validation prompts.
            run_dir: the run folder.
        """

    def __init__(
        self,
        config: PPOConfig,
        *,
        actor: ActorRole,
        ref: ReferenceRole | None,
        critic: CriticRole | None,
        teachers: Teachers | None = None,
        rewards: RewardStage,
        source: GroupSource,
        total_steps: int,
        val_data: PromptDataset | None,
        tokenizer: PreTrainedTokenizerBase,
        tracking: Tracking,
        samples: SampleFiles,
        saver: Saver,
        run_dir: Path,
    ) -> None:
        self.config = config
        self.val_only = config.trainer.val_only
        self.actor = actor
        self.ref = ref
        self.critic = critic
        self.teachers = teachers
        self.rewards = rewards

        # the rows of episodes contain their rewards, so the scheduler need not wait for any
        awaited_rewards = rewards if isinstance(rewards, AnswerRewards) else None
        self.scheduler = RolloutScheduler(
            config,
            source,
            actor,
            training_sampling(config),
            self.group_filter(),
            total_steps,
            awaited_rewards,
        )
        steps = TrainingSteps(config, self.scheduler, total_steps)
        super().__init__(config.trainer, steps, tracking, saver, FitResult())
        self.weight_sync = WeightSync(config, self.scheduler, actor, steps)

        self.val_data = val_data
        self.tokenizer = tokenizer
        self.samples = samples
        self.run_dir = run_dir
        if teachers is not None:
            teachers.watch_for_stop(lambda: self.steps.stop_asked)
        self.kl_ctrl = get_kl_controller(config.algorithm.kl_ctrl)
        self.running_moments: dict[str, RunningMoments] = {}  # data_source -> moments of its scores
        # strictly on-policy, every ratio is 1, and `fit` leaves out the pass
        self.needs_old_log_prob = needs_old_log_prob(config)
        self.update_work: step_metrics.UpdateWork | None = None  # None if the model or the devices are unknown

    # ---------------------------------------------------------------------------------------------- the algorithm

    def fit(self) -> FitResult:
        """Runs all remaining training steps. Returns the results for the final report."""
        for _ in self.training_steps():
            with self.timed("step"):
                with self.timed("gen"):
                    batch = self.collect_batch()
                with self.timed("reward"):
                    batch = self.scored_batch = self.score(batch)
                if self.needs_old_log_prob:
                    with self.timed("old_log_prob"):
                        batch = self.compute_old_log_prob(batch)
                if self.ref:
                    with self.timed("ref"):
                        batch |= self.ref.compute_ref_log_prob(batch)
                if self.teachers:
                    with self.timed("teacher"):
                        batch = self.compute_teacher_log_probs(self.teachers, batch)
                if self.critic:
                    with self.timed("values"):
                        batch |= self.critic.compute_values(batch)
                with self.timed("adv"):
                    batch = self.estimate_advantages(batch)
                    train_batch = self.resample(batch)
                if self.critic:
                    with self.timed("update_critic"):
                        self.metrics |= self.critic.update(train_batch, self.steps.global_step)
                if self.steps.past_critic_warmup:
                    with self.timed("update_actor"):
                        self.metrics |= self.actor.update(train_batch, self.steps.global_step)
                    with self.timed("update_weights"):
                        self.metrics |= self.model_update()
            self.end_step(batch)  # validates, logs and saves
        return self.result

    def begin(self) -> None:
        """Restores the checkpoint, gives the weights to the rollout engines, and validates."""
        self.resume()
        self.weight_sync.start()
        self.validate_first()

    # ------------------------------------------------------------------------------------------------- the stages

    def collect_batch(self) -> DataProto:
        """Returns the sampled rows of this step; with dynamic sampling, scored groups that passed the filter.

        With async_training.batches_ahead, also starts the samples of later steps.
        """
        step = self.steps.global_step
        try:
            batch = self.scheduler.get_batch(step)
        except FilterBudgetExceeded:
            # with a checkpoint of the steps before, the run can continue with a larger budget
            self._save_last_step()
            raise
        self.metrics |= batch.meta_info.pop("metrics")

        # if every batch has one version of the weights, they change here, where no sample is running
        with self.timed("update_weights"):
            self.metrics |= self.weight_sync.after_batch()
        if not self.steps.is_last:
            self.scheduler.begin_ahead(step)

        if self.config.algorithm.rollout_correction.bypass_mode:
            # the ratio of the loss is taken against the policy that sampled
            batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
        return batch

    def group_filter(self) -> GroupFilter | None:
        """Returns the filter of the sampled groups; None to train on every group."""
        if not self.config.algorithm.filter_groups.enable:
            return None
        return DynamicSampling(self.config, self.score_groups)

    def score_groups(self, groups: DataProto) -> DataProto:
        """Scores the rows of complete groups for the filter."""
        # the filter scores the groups of a step in several calls, whose metrics must not replace each other
        metrics_before = self.metrics
        self.metrics = {}
        with self.timed("reward", within="gen"):
            groups = self.compute_reward(groups)
        self.metrics = combine([metrics_before, self.metrics])
        return groups

    def _save_last_step(self) -> None:
        """Saves the last completed step, if this process has one, before a step ends the run."""
        self.saver.finish()
        # before step 1, nothing is trained
        if self.steps.global_step <= 1 or self.config.trainer.save_freq == 0:
            return
        self.steps.give_up_step(self.step_data)
        # after a resume, the checkpoint of the last step exists already
        if self.steps.global_step not in saved_steps(self.run_dir):
            self.save_checkpoint(self.callbacks.readable_states())

    def model_update(self) -> Metrics:
        """Gives the trained weights to the rollout engines. `WeightSync` decides whether they receive them now."""
        return self.weight_sync.after_update()

    def score(self, batch: DataProto) -> DataProto:
        """Adds the rewards, most of which were computed during generation. `fit` keeps the result for a crash dump."""
        group_filter = self.scheduler.filter
        if group_filter is not None and group_filter.adds_scores:
            # dynamic sampling needed the scores to choose the groups
            return batch
        return self.compute_reward(batch)

    def compute_reward(self, batch: DataProto) -> DataProto:
        """Waits for the rewards of the batch, masks failed rows and subtracts the length penalty."""
        scores = self.rewards.score(batch)
        self.metrics |= scores.meta_info.pop("metrics")
        batch = mask_failed(batch | scores)
        batch, penalty_metrics = punish_overlong(batch, self.config)
        # after the penalty, so that the greedy answers are scored like those that they are subtracted from
        batch, baseline_metrics = take_greedy_baselines(batch)
        shares = group_shares(batch, self.config.algorithm.filter_groups.metric)
        self.metrics |= penalty_metrics | baseline_metrics | shares
        return batch

    def compute_old_log_prob(self, batch: DataProto) -> DataProto:
        """Adds old_log_probs, the denominator of the policy ratio."""
        batch |= self.actor.compute_log_prob(batch)
        return self.compare_rollout(batch)

    def compare_rollout(self, batch: DataProto) -> DataProto:
        """Logs the difference between rollout_log_probs and old_log_probs. Returns the batch unchanged."""
        if self.config.rollout.calculate_log_probs:
            columns = batch.batch
            self.metrics |= rollout_probs_diff(
                columns["old_log_probs"],
                columns["rollout_log_probs"],
                columns["response_mask"],
            )
        return batch

    def compute_teacher_log_probs(self, teachers: Teachers, batch: DataProto) -> DataProto:
        """Adds the columns of the teachers.

        If the run is to stop while a teacher's server is silent, this step cannot be completed: saves the last
        completed step and raises KeyboardInterrupt.
        """
        try:
            batch |= teachers.compute_log_probs(batch)
        except TeacherStopped as error:
            self._save_last_step()
            # ends the run as a second signal would
            stopped = KeyboardInterrupt()
            stopped.add_note(str(error))
            raise stopped from error
        self.metrics |= batch.meta_info.pop("metrics")
        return batch

    def estimate_advantages(self, batch: DataProto) -> DataProto:
        """Adds token_level_rewards (normalised, clipped scores less the KL penalty), advantages and returns."""
        algorithm = self.config.algorithm
        batch, score_metrics = self.normalize_rewards(batch)
        batch, token_metrics = compute_token_reward(batch, algorithm, self.kl_ctrl)
        # before the estimator, which must not see the tokens that the correction rejects
        batch = self.correct_rollout(batch)
        batch, advantage_metrics = estimate_advantages(batch, algorithm, self.token_estimator)
        self.add_scalars(score_metrics | token_metrics | advantage_metrics)
        return batch

    def add_scalars(self, metrics: ScalarMetrics) -> None:
        """Adds numbers to the metrics of the step."""
        for name, value in metrics.items():
            self.metrics[name] = Metric.last(value)

    def normalize_rewards(self, batch: DataProto) -> tuple[DataProto, ScalarMetrics]:
        """Adds response_level_rewards: the normalised and clipped score of each response."""
        return reward_postprocess(batch, self.config.algorithm, self.running_moments)

    @property
    def token_estimator(self) -> str:
        """Name of the estimator that computes advantages from token-level rewards."""
        return self.config.algorithm.adv_estimator

    def correct_rollout(self, batch: DataProto) -> DataProto:
        """Applies algorithm.rollout_correction.

        Adds rollout_is_weights, removes rejected tokens from response_mask and logs the mismatch of rollout and
        trainer. If old_log_probs are not computed, the workers log the mismatch in the update.
        """
        if not (self.needs_old_log_prob and self.config.rollout.calculate_log_probs):
            return batch
        columns = batch.batch
        mask = columns["response_mask"]
        weights, corrected_mask, metrics = correct_rollout(
            columns["old_log_probs"],
            columns["rollout_log_probs"],
            mask,
            self.config.algorithm.rollout_correction,
        )
        self.metrics |= metrics

        batch = batch.select()
        batch.batch["response_mask"] = corrected_mask
        # the score of a response is on its last token, and would be lost if that token is rejected
        batch.batch["token_level_rewards"] = keep_rewards(columns["token_level_rewards"], mask, corrected_mask)
        if weights is not None:
            batch.batch["rollout_is_weights"] = weights
        return batch

    def resample(self, batch: DataProto) -> DataProto:
        """Returns the rows for the update: all, or with algorithm.use_pf_ppo the same number drawn by score."""
        # the metrics of the step are those of all rows, also of rows that are not drawn
        if not self.config.algorithm.use_pf_ppo:
            return batch
        options = self.config.algorithm.pf_ppo
        # seeded by the step, so that a resumed run draws the same rows
        seed = [self.config.trainer.seed, self.steps.global_step]
        drawn = compute_pf_ppo_reweight_data(batch, options.reweight_method, options.weight_pow, seed)
        # the drawn rows do not form complete groups, by which this column would cut the mini-batches
        drawn.batch.pop(ANSWERS, None)

        distinct_rows = set(drawn.non_tensor_batch["sample_id"])
        self.metrics["pf_ppo/distinct_rows_frac"] = Metric.mean(len(distinct_rows), len(batch))
        return drawn

    # ------------------------------------------------------------------------------------------------- validation

    @property
    def validates(self) -> bool:
        """True if the run has validation prompts."""
        return bool(self.val_data)

    def validate(self, result: FitResult) -> dict[str, float]:
        """Generates and scores the validation set, and stores some samples in `result`. Returns the metrics."""
        self.weight_sync.before_validation()
        samples_by_sampling = self.generate_validation_set()
        metrics: dict[str, float] = {}
        for sampling, samples in samples_by_sampling.items():
            metrics |= validation_metrics(samples, sampling.prefix)
            folder = sampling.prefix.strip("/")
            self.samples.write_validation(samples, self.steps.global_step, folder)

        # the samples of greedy_too follow them, and are only written to files
        first_samples = next(iter(samples_by_sampling.values()))
        result.samples = first_samples[: self.config.trainer.log_val_generations]
        self.tracking.log_samples(result.samples, step=self.steps.global_step)
        return metrics

    def generate_validation_set(self) -> dict[ValSampling, list[Sample]]:
        """Generates and scores the validation prompts. The scores do not depend on data.val_batch_size."""
        assert self.val_data is not None
        store = self.answer_store()
        num_prompts = len(self.val_data)
        num_rows = chunk_size(self.config, num_prompts, self.actor.num_engines, are_stored=store is not None)
        return generate_in_chunks(
            self.val_data,
            val_samplings(self.config),
            num_rows,
            self.generate_for_validation,
            self.score_for_validation,
            store,
            self.tracking.show,
        )

    def answer_store(self) -> AnswerStore | None:
        """The store from which an interrupted validation resumes; None in training, which always validates in full."""
        return None

    def generate_for_validation(self, prompts: DataProto, sampling: ValSampling) -> DataProto:
        """Samples sampling.n responses to each validation prompt."""
        self.samples.write_images(prompts)
        name = f"{sampling.purpose}/{self.steps.global_step}"
        # step 0 in every step: validations use equal random numbers, so that their results can be compared
        groups = prompt_groups(prompts, sampling.n, name, self.config.trainer.seed, step=0)
        answers = self.scheduler.run(groups, sampling.params)
        return answers.select(meta_info_keys=[])

    def score_for_validation(self, answers: DataProto) -> list[Sample]:
        """Waits for the scores of the responses and returns them as samples."""
        scores = self.rewards.score(answers)
        scored = answers | scores.select(meta_info_keys=[])
        return samples_of(scored, self.tokenizer, self.steps.global_step)

    # ---------------------------------------------------------------------------------------------- state, logging

    def state_dict(self) -> dict[str, Any]:
        """Returns the KL coefficient and the running moments."""
        states = {domain: moments.state_dict() for domain, moments in self.running_moments.items()}
        return {
            "kl_coef": self.kl_ctrl.value,
            "running_moments": states,
        }

    def save(self) -> None:
        """Writes a checkpoint of this step."""
        super().save()
        # a resumed run starts with these weights in its engines, so this run continues with them, too
        self.weight_sync.after_checkpoint()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the result of `state_dict`, and removes the sample files of later steps."""
        self.kl_ctrl.value = state["kl_coef"]
        for domain, moments_state in state["running_moments"].items():
            moments = RunningMoments()
            moments.load_state_dict(moments_state)
            self.running_moments[domain] = moments
        self.samples.rewind(self.steps.global_step)

    def log_step(self, batch: DataProto, validation: dict[str, float]) -> None:
        """Sends this step's metrics to the trackers and its samples to files."""
        step = self.steps.global_step
        logged = {
            "training/global_step": float(step),
            **values(self.metrics),
            **self.data_metrics(batch),
            **step_metrics.compute_timing_metrics(batch, self.timing),
            **step_metrics.compute_throughput_metrics(batch, self.timing, n_gpus=self.actor.world_size),
            **self.mfu(batch),
            **self.usage_metrics(),
            **validation,
        }
        self.tracking.log(logged, step=step)
        self.keep_samples(batch)

    def data_metrics(self, batch: DataProto) -> dict[str, float]:
        """Returns the metrics of the training batch. Also updates the data sampler."""
        metrics = {"training/epoch": float(self.steps.epoch)}
        metrics |= step_metrics.compute_data_metrics(batch, use_critic=self.critic is not None)
        metrics |= self.steps.update(batch)
        return metrics

    def mfu(self, batch: DataProto) -> dict[str, float]:
        """Returns perf/mfu/actor if the model's shape and the peak FLOP/s of the devices are known, else nothing."""
        # during trainer.critic_warmup the actor is not updated
        if self.update_work is None or "update_actor" not in self.timing:
            return {}
        work = self.update_work
        lengths = step_metrics.sequence_lengths(batch)
        flops = work.flops(lengths)
        seconds = self.timing["update_actor"]
        return step_metrics.compute_mfu(flops, seconds, self.actor.world_size, work.peak_flops)

    def keep_samples(self, batch: DataProto) -> None:
        """Writes this step's samples to files."""
        if self.samples.keeps_training:
            self.samples.write_images(batch)
            self.samples.write_training(self.training_samples(batch), self.steps.global_step)

    def training_samples(self, batch: DataProto) -> list[Sample]:
        """Returns the answers of a training batch with their scores."""
        return samples_of(batch, self.tokenizer, self.steps.global_step)


def training_sampling(config: PPOConfig) -> SamplingParams:
    """Returns the sampling parameters for training rollouts and agent actions."""
    rollout = config.rollout
    return SamplingParams(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        max_tokens=config.data.max_response_length,
        ignore_eos=rollout.ignore_eos,
    )
