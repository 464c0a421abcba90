"""All options of `python -m trainer.main_ppo`, and what they have to say to each other.

Names are verl's. A key on the command line is the path through these classes (`actor.optim.lr=1e-6`). Each section
stands in a file of its own with its checks; here is what concerns more than one section.
"""

from __future__ import annotations

from dataclasses import dataclass

from verl_lite.config.agentic import AgenticConfig
from verl_lite.config.algorithm import AlgorithmConfig
from verl_lite.config.data import DataConfig
from verl_lite.config.fields import Problems, opt, section
from verl_lite.config.learners import ActorConfig, CriticConfig, RefConfig, RewardModelConfig
from verl_lite.config.networks import ModelConfig
from verl_lite.config.reads import Options
from verl_lite.config.reward import RewardConfig
from verl_lite.config.rollout import RolloutConfig
from verl_lite.config.run import RayKwargs, TrainerConfig

MODEL_METRICS = ("model", "function")
"""Entries of a sample's scores that a run with a reward model has besides those of the reward function."""


@dataclass
class PPOConfig(Options):
    """Reinforcement learning of a language model, of an agent that acts in environments included."""

    recipe: str | None = opt(
        None, "name in recipes/, path or module; null = quickstart if neither model nor data is given", read="load"
    )
    data: DataConfig = section(DataConfig, "what is asked")
    model: ModelConfig = section(ModelConfig, "the policy's network")
    actor: ActorConfig = section(ActorConfig, "how the policy learns")
    ref: RefConfig = section(RefConfig, "the frozen reference model")
    critic: CriticConfig = section(CriticConfig, "how values are learnt, where the estimator needs them")
    rollout: RolloutConfig = section(RolloutConfig, "how the policy generates")
    algorithm: AlgorithmConfig = section(AlgorithmConfig, "how rewards become advantages")
    reward: RewardConfig = section(RewardConfig, "how answers are scored")
    reward_model: RewardModelConfig = section(RewardModelConfig, "a model that scores answers")
    agentic: AgenticConfig = section(AgenticConfig, "agents that act in environments, instead of a dataset of prompts")
    trainer: TrainerConfig = section(TrainerConfig, "the run")
    ray_kwargs: RayKwargs = section(RayKwargs, "Ray")

    @property
    def is_agentic(self) -> bool:
        """True where training samples are episodes of environments."""
        return bool(self.agentic.train_env_manager.tags)

    @property
    def validates(self) -> bool:
        """True where there is something to validate on: prompts, or environments of their own."""
        return bool(self.agentic.val_env_manager.tags if self.is_agentic else self.data.val_files)

    @property
    def longest_sample(self) -> int:
        """Tokens of the longest prompt and answer together."""
        return self.data.max_prompt_length + self.data.max_response_length

    def check(self) -> Problems:
        """What concerns more than one section."""
        if self.model.path is None:
            yield "model.path is null: give a Hugging Face folder or a cached hub name, or recipe=quickstart for both"
        yield from self._check_lengths()
        yield from self._check_rewards()
        yield from self._check_validation()
        if self.is_agentic:
            yield from self.agentic.check_run()
            yield from self._check_agent()
        else:
            yield from self.data.check_prompts(trains=not self.trainer.val_only)
            yield from self._check_batch()

    def _check_lengths(self) -> Problems:
        """Micro-batches and the engine's context against the longest sample."""
        actor, critic = self.actor, self.critic
        for start, options, size_key, budget_key in (
            ("actor.", actor, "ppo_micro_batch_size_per_gpu", "ppo_max_token_len_per_gpu"),
            ("critic.", critic, "ppo_micro_batch_size_per_gpu", "ppo_max_token_len_per_gpu"),
            ("critic.", critic, "forward_micro_batch_size_per_gpu", "forward_max_token_len_per_gpu"),
            ("reward_model.", self.reward_model, "micro_batch_size_per_gpu", "forward_max_token_len_per_gpu"),
            ("ref.", self.ref, "log_prob_micro_batch_size_per_gpu", "log_prob_max_token_len_per_gpu"),
            ("rollout.", self.rollout, "log_prob_micro_batch_size_per_gpu", "log_prob_max_token_len_per_gpu"),
        ):
            switch = "log_prob_use_dynamic_bsz" if size_key.startswith("log_prob") else "use_dynamic_bsz"
            own, size, budget = (getattr(options, key) for key in (switch, size_key, budget_key))
            dynamic = actor.use_dynamic_bsz if own is None else own
            inherited = actor.ppo_micro_batch_size_per_gpu or (
                critic.ppo_micro_batch_size_per_gpu if options is critic else None
            )
            if not dynamic and not size and not inherited:
                yield (
                    f"{start}{switch}=false needs {start}{size_key}, which is null: give a number of sequences, or set "
                    f"{start}{switch}=true"
                )
            if dynamic and budget is not None and budget < self.longest_sample:
                yield (
                    f"{start}{budget_key}={budget} cannot hold one sample of data.max_prompt_length + "
                    f"data.max_response_length = {self.longest_sample} tokens: set at least {self.longest_sample}"
                )
        rollout = self.rollout
        context = rollout.max_model_len or self.longest_sample
        if context < self.longest_sample:
            yield (
                f"rollout.max_model_len={context} is shorter than data.max_prompt_length + data.max_response_length = "
                f"{self.longest_sample}: set at least {self.longest_sample}, or null"
            )
        if not rollout.enable_chunked_prefill and rollout.max_num_batched_tokens < context:
            yield (
                f"rollout.max_num_batched_tokens={rollout.max_num_batched_tokens} is shorter than the context of "
                f"{context} tokens, and rollout.enable_chunked_prefill=false forbids to split a prompt: set at least "
                f"{context}"
            )

    def _check_rewards(self) -> Problems:
        """Who scores, and the log-probs that the correction reads."""
        if not self.reward_model.enable and self.reward.function_weight == 0:
            yield (
                "reward.function_weight=0 without a reward model leaves nothing that scores: set "
                "reward_model.enable=true and reward_model.model.path, or give the reward function a weight"
            )
        buffer, longest = self.reward.overlong_buffer, self.data.max_response_length
        if buffer.enable and not 1 <= buffer.len <= longest:
            yield (
                f"reward.overlong_buffer.len={buffer.len}: the penalty grows over the last so many tokens of "
                f"data.max_response_length={longest}, so 1 to {longest} are expected; DAPO takes a fifth"
            )
        correction = self.algorithm.rollout_correction
        for name in ("rollout_is", "rollout_rs", "bypass_mode"):
            if getattr(correction, name) and not self.rollout.calculate_log_probs:
                yield (
                    f"rollout.calculate_log_probs=false with algorithm.rollout_correction.{name}="
                    f"{getattr(correction, name)}: it reads the rollout engine's log-probs, so set true"
                )

    def _check_validation(self) -> Problems:
        trainer, files = self.trainer, "agentic.val_env_manager.tags" if self.is_agentic else "data.val_files"
        if not self.validates and (trainer.val_only or trainer.test_freq > 0):
            asked = "val_only=true" if trainer.val_only else f"test_freq={trainer.test_freq}"
            yield f"trainer.{asked} needs {files}, which is empty"

    def _check_batch(self) -> Problems:
        """Of a run on prompts: a mini-batch is a part of the batch."""
        prompts = self.data.train_batch_size
        for name, mini in (("actor", self.actor.ppo_mini_batch_size), ("critic", self.critic.ppo_mini_batch_size)):
            if mini is not None and mini > prompts:
                yield (
                    f"{name}.ppo_mini_batch_size={mini} is larger than data.train_batch_size={prompts}; both count "
                    f"prompts, and a mini-batch is a part of the batch: set at most {prompts}"
                )

    def _check_agent(self) -> Problems:
        """Of a run of agents: what the run as a whole needs."""
        trainer, frequency = self.trainer, self.agentic.model_update_frequency
        if trainer.total_training_steps is None and not trainer.val_only:
            yield (
                "trainer.total_training_steps=null: environments have no end, so the number of steps has to be given, "
                "such as trainer.total_training_steps=200"
            )
        if self.rollout.n != 1:
            yield (
                f"rollout.n={self.rollout.n}: an environment takes one action at a time, so 1 is expected; how many "
                "episodes of a task are compared is agentic.train_env_manager.group_size"
            )
        if self.rollout.tensor_model_parallel_size > 1:
            yield (
                f"rollout.tensor_model_parallel_size={self.rollout.tensor_model_parallel_size}: each device has an "
                "engine and environments of its own where agents act, so 1 is expected"
            )
        for name, every in (("test_freq", trainer.test_freq), ("save_freq", trainer.save_freq)):
            if frequency > 1 and every > 0 and every % frequency:
                yield (
                    f"trainer.{name}={every} with agentic.model_update_frequency={frequency}: a validation, and a "
                    "resumed run, give the engine the newest weights, which would change the training between two "
                    f"updates: set trainer.{name} to a multiple of {frequency}, or to -1 (at the end)"
                )
