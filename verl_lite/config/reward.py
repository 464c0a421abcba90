"""The options of the reward function: its source, processes and limits."""

import os
from dataclasses import dataclass

from verl_lite.config.fields import FINITE, POSITIVE, SHARE, FreeDict, Options, Problems, at_least, opt, section


@dataclass
class CustomRewardConfig(Options):
    """A custom reward function."""

    path: str | None = opt(None, "Python file, or pkg://module, of the reward function")
    name: str = opt("compute_score", "f(data_source, solution_str, ground_truth, extra_info) -> number or dict")
    style: str = opt(
        "sample",
        "signature: sample = as in `name` | batch = f(data_sources, solution_strs, ground_truths, extra_infos) of "
        "lists -> list | trl = f(prompts, completions, **columns) -> list",
        ("sample", "batch", "trl"),
    )


@dataclass
class RemoteRewardConfig(Options):
    """A reward server."""

    url: str | None = opt(None, 'receives each sample as a JSON POST; replies a number or {"score": ..., ...}')
    max_retries: int = opt(3, "retries of a request after a lost connection or status 429 or 5xx", at_least(0))
    api_key_env: str | None = opt(None, "environment variable of a key, sent as `Authorization: Bearer KEY`")

    def check(self) -> Problems:
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            yield f"reward.remote.url={self.url}: expected a URL that starts with http:// or https://"
        if self.api_key_env is not None and not os.environ.get(self.api_key_env):
            yield f"reward.remote.api_key_env={self.api_key_env}: this environment variable is not set"


@dataclass
class OverlongBufferConfig(Options):
    """Soft overlong penalty of DAPO."""

    enable: bool = opt(False, "penalise answers that approach data.max_response_length")
    len: int = opt(0, "last tokens of data.max_response_length, over which the penalty grows", at_least(0))
    penalty_factor: float = opt(1.0, "penalty of an answer of full length", POSITIVE)
    log: bool = opt(False, "log the penalty and the share of penalised answers")


@dataclass
class RewardConfig(Options):
    """The scores of answers."""

    custom_reward_function: CustomRewardConfig = section(CustomRewardConfig, "custom reward function")
    remote: RemoteRewardConfig = section(RemoteRewardConfig, "reward server")
    functions: FreeDict = opt(
        {},
        "weighted sum of rewards: PART: {reward: NAME, or path: FILE.py and name: f; weight: 1, kwargs: {}, style: "
        "sample, outcome: false}; without reward and path, data_source selects the function",
    )
    overlong_buffer: OverlongBufferConfig = section(OverlongBufferConfig, "penalty for long answers")
    function_weight: float = opt(1.0, "weight of the function's score; 0 = only reward_model", FINITE)
    reward_kwargs: FreeDict = opt({}, "extra keyword arguments of the reward function")
    num_workers: int = opt(1, "reward processes; 0 = run in the driver, without timeout_s", at_least(0))
    batch_size: int = opt(64, "maximum number of samples per call of styles batch and trl", at_least(1))
    max_concurrent: int = opt(64, "maximum number of concurrent calls of an async function or server", at_least(1))
    max_rpm: float | None = opt(None, "maximum number of calls per minute in all processes; null = any", POSITIVE)
    timeout_s: float = opt(30.0, "time limit of a call, whose process is killed if necessary", POSITIVE)
    max_error_rate: float = opt(0.1, "the run stops if a larger share of a step's rewards failed", SHARE)


@dataclass
class ScoreConfig(Options):
    """Options of `python -m trainer.score`, which scores saved answers again."""

    reward: RewardConfig = section(RewardConfig, "reward; default for a run: the run's own")
    recipe: str | None = opt(None, "recipe that registers rewards; null = the run's")
    data_source: str | None = opt(None, "data_source of rows without this column")
    out: str | None = opt(None, "parquet file to write; null = next to the input")
