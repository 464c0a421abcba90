"""The options of `python -m trainer.main_rm`, which trains a reward model from pairs of answers.

Fields are written as in `verl_lite.config`.
"""

from __future__ import annotations

from dataclasses import dataclass

from verl_lite.config.fields import at_least, opt, section
from verl_lite.config.ppo import SupervisedConfig, SupervisedDataConfig


@dataclass
class PreferenceDataConfig(SupervisedDataConfig):
    prompt_key: str = opt("prompt", "the question, text or chat messages; not needed where the answers are whole chats")
    chosen_key: str = opt("chosen", "the better answer: text, the assistant's message, or the whole chat")
    rejected_key: str = opt("rejected", "the worse answer, likewise")
    max_length: int = opt(1024, "tokens of question and one answer; see `truncation` for longer ones")
    truncation: str = opt("error", "what to do with a pair that has a longer one", ("error", "drop"))
    score_at: str = opt(
        "end_of_turn",
        "the token whose number is the score: end_of_turn = of the answer, where a sampled one ends | end_of_text = "
        "the last of the chat template, for reward_model.retokenize=true",
        ("end_of_turn", "end_of_text"),
    )


@dataclass
class RewardLossConfig:
    center_rewards_coefficient: float = opt(
        0.0,
        "adds this times (chosen score + rejected score)^2, which holds scores around 0; TRL's name, 0.01 is usual",
        at_least(0),
    )


@dataclass
class RewardTrainingConfig(SupervisedConfig):
    """Training of a reward model, `python -m trainer.main_rm`."""

    data: PreferenceDataConfig = section(PreferenceDataConfig, "pairs of answers")
    loss: RewardLossConfig = section(RewardLossConfig, "Bradley-Terry, and what is added")
