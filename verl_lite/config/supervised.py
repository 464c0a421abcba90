"""The options of training without a rollout: `python -m trainer.main_sft`, and `trainer.main_rm`, which trains a reward
model from pairs of answers."""

from dataclasses import dataclass

from verl_lite.config.data import CHAT_TEMPLATE
from verl_lite.config.fields import ALL_OR_SOME, Options, at_least, opt, section
from verl_lite.config.learners import FSDPConfig, ModelConfig, NetworkConfig, OptimConfig
from verl_lite.config.run import RunConfig, RunOptions

_SCORE_AT = ("end_of_turn", "end_of_text")


@dataclass
class SupervisedDataConfig(Options):
    """What the data of all training without a rollout has."""

    train_files: list[str] = opt([], "parquet, json or jsonl files to learn from")
    val_files: list[str] = opt([], "the same, to measure on; may be empty")
    train_batch_size: int = opt(64, "rows per optimizer step, over all ranks", at_least(1))
    train_max_samples: int = opt(-1, "use at most this many training rows; -1 = all", ALL_OR_SOME)
    shuffle: bool = opt(True, "shuffle the rows each epoch")
    chat_template: str | None = opt(None, CHAT_TEMPLATE)
    max_token_len_per_gpu: int = opt(16384, "token budget of a micro-batch on one device")


@dataclass
class SFTDataConfig(SupervisedDataConfig):
    messages_key: str = opt("messages", "column of chat messages; what the assistant says in them is learnt")
    prompt_key: str = opt("prompt", "without a messages column: the question, text or chat messages; COLUMN.ENTRY too")
    response_key: str = opt("response", "without a messages column: the answer to it, text; COLUMN.ENTRY too")
    max_length: int = opt(1024, "tokens of a whole sequence; see `truncation` for longer ones")
    truncation: str = opt("error", "what to do with a longer sequence", ("error", "right", "drop"))


@dataclass
class SFTTrainerConfig(RunConfig):
    """The run."""

    log_freq: int = opt(1, "steps between lines of metrics, which are means over these steps", at_least(1))
    n_gpus_per_node: int | None = opt(1, "devices (CPU: worker slots); several: trainer.backend=ray", at_least(1))
    backend: str = opt("inline", "inline = all in this process; ray = one process per device", ("ray", "inline"))


@dataclass
class SupervisedConfig(RunOptions):
    """What all training without a rollout has: see `trainer.supervised.loop`."""

    data: SupervisedDataConfig = section(SupervisedDataConfig, "what is learnt from")
    model: NetworkConfig = section(NetworkConfig, "the network")
    optim: OptimConfig = section(OptimConfig, "optimizer")
    fsdp_config: FSDPConfig = section(FSDPConfig, "sharding, precision, offload")
    trainer: SFTTrainerConfig = section(SFTTrainerConfig, "the run")


@dataclass
class SFTConfig(SupervisedConfig):
    """Supervised fine-tuning, `python -m trainer.main_sft`."""

    data: SFTDataConfig = section(SFTDataConfig, "what is learnt from")
    model: ModelConfig = section(ModelConfig, "the network")


@dataclass
class PreferenceDataConfig(SupervisedDataConfig):
    prompt_key: str = opt("prompt", "the question, text or chat messages; not needed where the answers are whole chats")
    chosen_key: str = opt("chosen", "the better answer: text, the assistant's message, or the whole chat")
    rejected_key: str = opt("rejected", "the worse answer, likewise")
    max_length: int = opt(1024, "tokens of question and one answer; see `truncation` for longer ones")
    truncation: str = opt("error", "what to do with a pair that has a longer one", ("error", "drop"))
    score_at: str = opt("end_of_turn", "token of the score; end_of_text is for reward_model.retokenize=true", _SCORE_AT)


@dataclass
class RewardLossConfig(Options):
    center_rewards_coefficient: float = opt(0.0, "weight of (chosen + rejected score)^2; 0.01 is usual", at_least(0))


@dataclass
class RewardTrainingConfig(SupervisedConfig):
    """Training of a reward model, `python -m trainer.main_rm`."""

    data: PreferenceDataConfig = section(PreferenceDataConfig, "pairs of answers")
    loss: RewardLossConfig = section(RewardLossConfig, "Bradley-Terry, and what is added")
