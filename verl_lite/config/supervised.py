"""The options of training without a rollout: supervised fine-tuning and DPO (`python -m trainer.main_sft`) and reward
models (`trainer.main_rm`)."""

from dataclasses import dataclass

from verl_lite.config.data import CHAT_TEMPLATE, template_argument_problems
from verl_lite.config.fields import (
    ALL_OR_SOME,
    NOT_NEGATIVE,
    POSITIVE,
    FreeDict,
    Options,
    Problems,
    Range,
    at_least,
    opt,
    section,
)
from verl_lite.config.learners import FSDPConfig, ModelConfig, NetworkConfig, OptimConfig
from verl_lite.config.run import RunConfig, RunOptions

_BELOW_HALF = Range("at least 0 and less than 0.5 is expected", lambda value: 0 <= value < 0.5)
# value of trainer.test_freq and trainer.save_freq; verl calls it after_each_epoch
EACH_EPOCH = -2
_FREQUENCY = at_least(EACH_EPOCH)
_SCORE_AT = ("end_of_turn", "end_of_text")
LOG_PROB_CHUNK_TOKENS = 1024  # maximum tokens of a tile of logits


@dataclass
class SupervisedDataConfig(Options):
    """The data options common to all training without a rollout."""

    train_files: list[str] = opt([], "parquet, json or jsonl files of training rows")
    val_files: list[str] = opt([], "validation files, in the same formats; may be empty")
    train_batch_size: int = opt(64, "rows per optimizer step, over all ranks", at_least(1))
    train_max_samples: int = opt(-1, "maximum number of training rows; -1 = all", ALL_OR_SOME)
    shuffle: bool = opt(True, "shuffle the rows in each epoch")
    chat_template: str | None = opt(None, CHAT_TEMPLATE)
    apply_chat_template_kwargs: FreeDict = opt({}, "extra arguments of the tokenizer's chat template")
    tools_key: str | None = opt("tools", "column of tool schemas for the chat template; null = ignore the column")
    tools_path: str | None = opt(None, "json list of tool schemas for the chat template, for rows without tools")
    max_length: int = opt(
        1024, "maximum number of tokens of a sequence (prompt and one answer); see `truncation`", at_least(1)
    )
    max_token_len_per_gpu: int = opt(16384, "maximum number of tokens per micro-batch", at_least(1))

    def check(self) -> Problems:
        yield from template_argument_problems("data.apply_chat_template_kwargs", self.apply_chat_template_kwargs)


@dataclass
class SFTDataConfig(SupervisedDataConfig):
    messages_key: str = opt("messages", "column of chat messages; the assistant's messages are trained")
    prompt_key: str = opt("prompt", "without messages_key: the prompt, text or chat messages; COLUMN or COLUMN.ENTRY")
    response_key: str = opt("response", "without messages_key: the answer, text; COLUMN or COLUMN.ENTRY")
    chosen_key: str = opt("chosen", "loss=dpo: the better answer: text, the assistant's message, or the whole chat")
    rejected_key: str = opt("rejected", "loss=dpo: the worse answer, in the same forms")
    assistant_only_loss: bool = opt(True, "only assistant messages are in the loss; false = all tokens (TRL's default)")
    completion_only_loss: bool | None = opt(
        None, "only the completion, or the last assistant message, is in the loss; null = in rows with a prompt (TRL)"
    )
    truncation: str = opt("error", "treatment of longer sequences", ("error", "right", "drop"))


@dataclass
class SFTTrainerConfig(RunConfig):
    """The run."""

    test_freq: int = opt(-1, "steps between validations; -1 = only before and after; -2 = each epoch", _FREQUENCY)
    save_freq: int = opt(-1, "steps between checkpoints; -1 = only at the end; 0 = never; -2 = each epoch", _FREQUENCY)
    log_freq: int = opt(1, "steps between lines of metrics, which average over them", at_least(1))
    n_gpus_per_node: int | None = opt(1, "devices (CPU: worker slots); more than 1 needs backend=ray", at_least(1))
    backend: str = opt("inline", "inline = all in this process; ray = one process per device", ("ray", "inline"))


@dataclass
class SupervisedConfig(RunOptions):
    """The options common to all training without a rollout; see `trainer.supervised.loop`."""

    data: SupervisedDataConfig = section(SupervisedDataConfig, "training data")
    model: NetworkConfig = section(NetworkConfig, "the network")
    optim: OptimConfig = section(OptimConfig, "optimizer")
    fsdp_config: FSDPConfig = section(FSDPConfig, "sharding, precision, offload")
    ulysses_sequence_parallel_size: int = opt(
        1, "ranks that share each sequence (Ulysses sequence parallelism)", at_least(1)
    )
    trainer: SFTTrainerConfig = section(SFTTrainerConfig, "the run")


@dataclass
class DPOConfig(Options):
    """Direct Preference Optimization, with TRL's names; see `verl_lite.algos.preference_losses.dpo_loss`."""

    beta: float = opt(0.1, "loss=dpo: strength of the pull toward the initial model", POSITIVE)
    label_smoothing: float = opt(0.0, "loss=dpo: assumed share of pairs with swapped answers", _BELOW_HALF)


@dataclass
class SFTConfig(SupervisedConfig):
    """Supervised fine-tuning and DPO, `python -m trainer.main_sft`."""

    loss: str = opt("sft", "sft = likelihood of answers; dpo = preference of a chosen answer", ("sft", "dpo"))
    data: SFTDataConfig = section(SFTDataConfig, "training data")
    model: ModelConfig = section(ModelConfig, "the network")
    dpo: DPOConfig = section(DPOConfig, "preference loss")


@dataclass
class PreferenceDataConfig(SupervisedDataConfig):
    prompt_key: str = opt("prompt", "the prompt, text or chat messages; not needed if the answers are whole chats")
    chosen_key: str = opt("chosen", "the better answer: text, the assistant's message, or the whole chat")
    rejected_key: str = opt("rejected", "the worse answer, in the same forms")
    truncation: str = opt("error", "treatment of pairs with a longer answer", ("error", "drop"))
    score_at: str = opt("end_of_turn", "token with the score; end_of_text: for reward_model.retokenize", _SCORE_AT)


@dataclass
class RewardLossConfig(Options):
    center_rewards_coefficient: float = opt(0.0, "weight of (chosen + rejected score)^2; 0.01 is usual", NOT_NEGATIVE)


@dataclass
class RewardTrainingConfig(SupervisedConfig):
    """Training of a reward model, `python -m trainer.main_rm`."""

    data: PreferenceDataConfig = section(PreferenceDataConfig, "pairs of answers")
    loss: RewardLossConfig = section(RewardLossConfig, "Bradley-Terry loss and regularisation")
