"""All options of `python -m trainer.main_ppo`.

Names are those of verl. A key on the command line is the path through these classes (`actor.optim.lr=1e-6`). Each
section has its own file. `verl_lite/config/conflicts` has the conflicts between options.
"""

import math
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
    def runs_program(self) -> bool:
        """True if the training samples are episodes of a program."""
        return self.reads_prompts and self.agentic.has_program

    @property
    def spans_updates(self) -> bool:
        """True if running samples continue under new weights."""
        options = self.async_training
        continues = options.partial_rollout
        if continues is None:
            continues = options.max_off_policy_threshold > 1
        # otherwise no sample is running when the weights change
        has_running_samples = options.depth > 0 or self.rollout.oversample > 1
        return continues and has_running_samples

    @property
    def staleness(self) -> int:
        """Largest number of weight updates between the sampling of a token and its training."""
        num_updates = self.async_training.depth
        if self.spans_updates:
            # surplus groups of a batch continue into the next batches
            num_updates += math.ceil(self.rollout.oversample - 1)
        # the engine may have weights from `model_update_frequency` - 1 steps before
        return num_updates + self.agentic.model_update_frequency - 1

    @property
    def validates(self) -> bool:
        """True if the run has validation prompts or environments."""
        if self.reads_prompts:
            return bool(self.data.val_files)
        return bool(self.agentic.val_env_manager.tags)

    @property
    def longest_sample(self) -> int:
        """Maximum number of tokens of a prompt with its answer."""
        return self.data.max_prompt_length + self.data.max_response_length

    def sequence_parallel_size(self, role: str) -> int:
        """Number of ranks that share each sequence in a role: actor, ref, critic or reward_model."""
        own_size = getattr(self, role).ulysses_sequence_parallel_size
        if own_size is None:
            return self.actor.ulysses_sequence_parallel_size
        return own_size

    def check(self) -> Problems:
        if self.model.path is None:
            yield "model.path is null: set it to a Hugging Face folder or a cached hub name, or set recipe=quickstart"
        if self.reads_prompts:
            yield from self.data.check_prompts(trains=not self.trainer.val_only)
