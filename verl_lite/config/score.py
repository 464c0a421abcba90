"""The options of `python -m trainer.score`, which scores saved answers anew."""

from __future__ import annotations

from dataclasses import dataclass

from verl_lite.config.fields import opt, section
from verl_lite.config.reads import Options
from verl_lite.config.reward import RewardConfig


@dataclass
class ScoreConfig(Options):
    """Options beside the file or run."""

    reward: RewardConfig = section(RewardConfig, "who scores; of a run without any option, its own reward")
    recipe: str | None = opt(None, "recipe to import for the rewards that it registers; null = that of the run")
    data_source: str | None = opt(None, "data_source of rows that have none")
    out: str | None = opt(None, "parquet file to write; null = beside what was read")
