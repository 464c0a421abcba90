"""All options of `python -m trainer.main_ppo`, and the checks that involve several sections.

Names are those of verl. A key on the command line is the path through these classes (`actor.optim.lr=1e-6`). Each
section has its own file, with the checks that involve only this section.
"""

from dataclasses import dataclass

from verl_lite.config.agentic import AgenticConfig
from verl_lite.config.algorithm import AlgorithmConfig
from verl_lite.config.data import DataConfig
from verl_lite.config.distillation import DistillationConfig
from verl_lite.config.fields import Problems, opt, section
from verl_lite.config.learners import ActorConfig, CriticConfig, ModelConfig, RefConfig, RewardModelConfig
from verl_lite.config.reward import RewardConfig
from verl_lite.config.rollout import AsyncTrainingConfig, RolloutConfig
from verl_lite.config.run import RunOptions, TrainerConfig


@dataclass
class PPOConfig(RunOptions):
    """Options for reinforcement learning of a language model, on prompts or as an agent in environments."""

    data: DataConfig = section(DataConfig, "prompts and files")
    model: ModelConfig = section(ModelConfig, "network of the policy")
    actor: ActorConfig = section(ActorConfig, "training of the policy")
    ref: RefConfig = section(RefConfig, "frozen reference model")
    critic: CriticConfig = section(CriticConfig, "value function, for estimators that need one")
    rollout: RolloutConfig = section(RolloutConfig, "generation by the policy")
    hybrid_engine: bool = opt(
        True, "training and generation share their devices; false = engines on rollout.nnodes x n_gpus_per_node others"
    )
    async_training: AsyncTrainingConfig = section(AsyncTrainingConfig, "sampling ahead of training")
    algorithm: AlgorithmConfig = section(AlgorithmConfig, "rewards and advantages")
    reward: RewardConfig = section(RewardConfig, "reward function")
    reward_model: RewardModelConfig = section(RewardModelConfig, "model that scores answers")
    distillation: DistillationConfig = section(DistillationConfig, "teachers whose probabilities the policy learns")
    agentic: AgenticConfig = section(AgenticConfig, "agents that act in environments, instead of a dataset of prompts")
    trainer: TrainerConfig = section(TrainerConfig, "the run")

    @property
    def is_agentic(self) -> bool:
        """True if the training samples are episodes, of environments or of a program."""
        return not self.reads_prompts or self.agentic.has_program

    @property
    def reads_prompts(self) -> bool:
        """True if the training samples belong to rows of data.train_files; False if environments provide the tasks."""
        return not self.agentic.train_env_manager.tags

    @property
    def spans_updates(self) -> bool:
        """True if running samples continue under new weights."""
        options = self.async_training
        continues = options.max_off_policy_threshold > 1 if options.partial_rollout is None else options.partial_rollout
        return continues and (options.depth > 0 or self.rollout.oversample > 1)

    @property
    def validates(self) -> bool:
        """True if the run has validation prompts or environments."""
        return bool(self.data.val_files if self.reads_prompts else self.agentic.val_env_manager.tags)

    @property
    def longest_sample(self) -> int:
        """Maximum number of tokens of a prompt with its answer."""
        return self.data.max_prompt_length + self.data.max_response_length

    def sequence_parallel_size(self, role: str) -> int:
        """Number of ranks that share each sequence in a role: actor, ref, critic or reward_model."""
        own = getattr(self, role).ulysses_sequence_parallel_size
        return self.actor.ulysses_sequence_parallel_size if own is None else own

    def check(self) -> Problems:
        """Yields the problems that involve several sections."""
        trainer, buffer, filters = self.trainer, self.reward.overlong_buffer, self.algorithm.filter_groups
        if self.model.path is None:
            yield "model.path is null: set it to a Hugging Face folder or a cached hub name, or set recipe=quickstart"
        unscored = not self.reward_model.enable and self.reward.function_weight == 0
        if unscored and not self.distillation.replaces_rewards:
            yield "reward.function_weight=0 without reward_model.enable=true makes every score 0: set one of them"
        if not self.reward_model.enable and filters.enable and filters.metric in ("model", "function"):
            yield f"algorithm.filter_groups.metric={filters.metric} needs reward_model.enable=true: set another metric"
        if buffer.enable and not 1 <= buffer.len <= (longest := self.data.max_response_length):
            yield f"reward.overlong_buffer.len={buffer.len}: expected 1 to {longest} (data.max_response_length)"
        correction = self.algorithm.rollout_correction
        for name in ("rollout_is", "rollout_rs", "bypass_mode"):
            if (value := getattr(correction, name)) and not self.rollout.calculate_log_probs:
                shown = f"algorithm.rollout_correction.{name}={value}"
                yield f"rollout.calculate_log_probs=false with {shown}, which needs these log-probs: set true"
        files = "data.val_files" if self.reads_prompts else "agentic.val_env_manager.tags"
        for name in ("val_only", "test_freq"):
            if (value := getattr(trainer, name)) > 0 and not self.validates:
                yield f"trainer.{name}={str(value).lower()} needs {files}, which is empty"
        yield from self._check_lengths()
        yield from self._check_distillation()
        if not self.reads_prompts:
            yield from self.agentic.check_run()
            yield from self._check_agent()
            return
        if self.is_agentic:
            yield from self._check_program()
        yield from self.data.check_prompts(trains=not trainer.val_only)
        prompts = self.data.train_batch_size
        for name, mini in (("actor", self.actor.ppo_mini_batch_size), ("critic", self.critic.ppo_mini_batch_size)):
            if mini is not None and mini > prompts:
                batch = f"data.train_batch_size={prompts}"
                yield f"{name}.ppo_mini_batch_size={mini} is larger than {batch}: set at most {prompts} prompts"

    def _check_lengths(self) -> Problems:
        """Checks that micro-batches and the engine's context can hold the longest sample."""
        actor, critic, rollout, longest = self.actor, self.critic, self.rollout, self.longest_sample
        need = f"data.max_prompt_length + data.max_response_length = {longest}: set at least {longest}"
        for start, options, size_key, budget_key in (
            ("actor.", actor, "ppo_micro_batch_size_per_gpu", "ppo_max_token_len_per_gpu"),
            ("critic.", critic, "ppo_micro_batch_size_per_gpu", "ppo_max_token_len_per_gpu"),
            ("critic.", critic, "forward_micro_batch_size_per_gpu", "forward_max_token_len_per_gpu"),
            ("reward_model.", self.reward_model, "micro_batch_size_per_gpu", "forward_max_token_len_per_gpu"),
            ("ref.", self.ref, "log_prob_micro_batch_size_per_gpu", "log_prob_max_token_len_per_gpu"),
            ("rollout.", rollout, "log_prob_micro_batch_size_per_gpu", "log_prob_max_token_len_per_gpu"),
        ):
            switch = "log_prob_use_dynamic_bsz" if size_key.startswith("log_prob") else "use_dynamic_bsz"
            own, size, budget = (getattr(options, key) for key in (switch, size_key, budget_key))
            dynamic = actor.use_dynamic_bsz if own is None else own
            size = size or actor.ppo_micro_batch_size_per_gpu
            size = size or (critic.ppo_micro_batch_size_per_gpu if options is critic else None)
            if not dynamic and not size:
                yield f"{start}{switch}=false needs {start}{size_key}, a number of sequences, which is null"
            shared = self.sequence_parallel_size({"rollout.": "actor"}.get(start, start[:-1]))
            if dynamic and budget is not None and budget * max(1, shared) < longest:
                ranks = f" of {shared} ranks" * (shared > 1)
                yield f"{start}{budget_key}={budget}{ranks} cannot hold one sample, {need}{' in total' * (shared > 1)}"
        context = rollout.max_model_len or longest
        if context < longest:
            yield f"rollout.max_model_len={context} is shorter than {need}, or null"
        if not rollout.enable_chunked_prefill and rollout.max_num_batched_tokens < context:
            shown = f"rollout.max_num_batched_tokens={rollout.max_num_batched_tokens}"
            yield f"{shown} is shorter than the context: set {context}, or rollout.enable_chunked_prefill=true"

    def _check_distillation(self) -> Problems:
        """Checks the options that have no meaning for some teachers or samples."""
        if any(self.distillation.check()):
            return
        temperature = self.rollout.temperature
        for teacher in self.distillation.named_teachers():
            if teacher.url and temperature != 1:
                at = f"distillation.teachers.{teacher.name}.url={teacher.url}"
                yield f"rollout.temperature={temperature} with {at}, whose log-probs have the temperature 1: set 1"
            if teacher.prompt_template and self.is_agentic:
                yield f"distillation.teachers.{teacher.name}.prompt_template: episodes have no single prompt; set null"
        if self.distillation.takes_student_topk and self.algorithm.rollout_correction.bypass_mode:
            yield (
                "distillation.distillation_loss.topk_source=student needs the pass over the samples that algorithm."
                "rollout_correction.bypass_mode=true omits: set it to false, or topk_source=teacher"
            )

    def _check_program(self) -> Problems:
        """Checks the options that cannot give each episode the same weight, whatever its number of rows."""
        algorithm, actor = self.algorithm, self.actor
        for key, value, expected in (
            ("algorithm.use_kl_in_reward", algorithm.use_kl_in_reward, "actor.use_kl_loss=true instead"),
            ("algorithm.whiten_advantages", algorithm.whiten_advantages, "false"),
            ("algorithm.whiten_rewards", algorithm.whiten_rewards, "false"),
            ("algorithm.use_pf_ppo", algorithm.use_pf_ppo, "false"),
            ("actor.shuffle", actor.shuffle, "false"),
            ("reward_model.enable", self.reward_model.enable, "false, and score with reward.* or in the program"),
            ("reward.overlong_buffer.enable", self.reward.overlong_buffer.enable, "false"),
        ):
            if value:
                yield f"{key}=true with agentic.program, whose episodes have several rows: set {expected}"
        if actor.loss_agg_mode == "seq-mean-token-mean":
            yield (
                "actor.loss_agg_mode=seq-mean-token-mean with agentic.program would give the tokens of short rows more "
                "weight: set token-mean, seq-mean-token-sum or seq-mean-token-sum-norm"
            )
        if self.agentic.train_env_manager.group_filter_cls is not None:
            yield "agentic.train_env_manager.group_filter_cls with agentic.program: use algorithm.filter_groups"
        if algorithm.filter_groups.enable and (metric := algorithm.filter_groups.metric) not in (None, "score"):
            yield f"algorithm.filter_groups.metric={metric} with agentic.program: expected score, the episode's score"

    def _check_agent(self) -> Problems:
        """Checks for agentic runs that involve several sections."""
        trainer, frequency = self.trainer, self.agentic.model_update_frequency
        if trainer.total_training_steps is None and not trainer.val_only:
            yield "trainer.total_training_steps=null: environments have no epochs: set a number of steps, such as 200"
        if self.rollout.n != 1:
            yield (
                f"rollout.n={self.rollout.n}: expected 1 in agentic runs, in which "
                "agentic.train_env_manager.group_size is the number of episodes per task"
            )
        for name in ("test_freq", "save_freq"):
            every = getattr(trainer, name)
            if frequency > 1 and every > 0 and every % frequency:
                yield (
                    f"trainer.{name}={every} would update the engine's weights between two updates of "
                    f"agentic.model_update_frequency={frequency}: set a multiple of {frequency}, or -1"
                )
