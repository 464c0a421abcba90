"""The options of the reward function: who scores an answer, in how many processes, within which limits."""

import os
from dataclasses import dataclass
from typing import Any

from verl_lite.config.fields import FINITE, POSITIVE, SHARE, Options, Problems, at_least, opt, section


@dataclass
class CustomRewardConfig(Options):
    """Your own reward."""

    path: str | None = opt(None, "Python file, or pkg://module, that defines the reward function")
    name: str = opt("compute_score", "f(data_source, solution_str, ground_truth, extra_info) -> number or dict")
    style: str = opt(
        "sample",
        "sample = as above | batch = f(data_sources, solution_strs, ground_truths, extra_infos) of lists -> list | "
        "trl = f(prompts, completions, **columns) -> list",
        ("sample", "batch", "trl"),
    )


@dataclass
class RemoteRewardConfig(Options):
    """A server that scores."""

    url: str | None = opt(None, 'each sample is posted there as JSON; it answers a number or {"score": ..., ...}')
    max_retries: int = opt(3, "repeats of a request after a lost connection or the status 429 or 5xx", at_least(0))
    api_key_env: str | None = opt(None, "environment variable with a key, sent as `Authorization: Bearer KEY`")

    def check(self) -> Problems:
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            yield f"reward.remote.url={self.url}: a URL that starts with http:// or https:// is expected"
        if self.api_key_env is not None and not os.environ.get(self.api_key_env):
            yield f"reward.remote.api_key_env={self.api_key_env}: this environment variable is not set"


@dataclass
class OverlongBufferConfig(Options):
    """DAPO's soft punishment of long answers."""

    enable: bool = opt(False, "punish answers by length, before they are cut off")
    len: int = opt(0, "last tokens before data.max_response_length, in which the penalty grows from 0", at_least(0))
    penalty_factor: float = opt(1.0, "what an answer of full length loses", POSITIVE)
    log: bool = opt(False, "log the penalty and the share of answers that have one")


@dataclass
class RewardConfig(Options):
    """How answers are scored."""

    custom_reward_function: CustomRewardConfig = section(CustomRewardConfig, "your own reward")
    remote: RemoteRewardConfig = section(RemoteRewardConfig, "a reward over HTTP")
    functions: dict[str, Any] = opt(
        {},
        "several rewards, PART: {reward: NAME, or path: FILE.py, name: f; weight: 1, kwargs: {}, style: sample, "
        "outcome: false}; neither reward nor path = by data_source",
    )
    overlong_buffer: OverlongBufferConfig = section(OverlongBufferConfig, "penalty of long answers")
    function_weight: float = opt(1.0, "weight of the function's score; 0 = reward_model alone", FINITE)
    reward_kwargs: dict[str, Any] = opt({}, "extra keyword arguments of the reward function")
    num_workers: int = opt(1, "reward processes; 0 = in the driver, where no deadline holds", at_least(0))
    batch_size: int = opt(64, "samples in one call at most, for styles batch and trl", at_least(1))
    max_concurrent: int = opt(64, "calls of an async function or a server at one time, in all", at_least(1))
    max_rpm: float | None = opt(None, "calls begun per minute at most, in all processes; null = no limit", POSITIVE)
    timeout_s: float = opt(30.0, "a call that takes longer has failed; if need be its process is killed", POSITIVE)
    max_error_rate: float = opt(0.1, "the run stops when a larger share of a step's rewards failed", SHARE)

    def check(self) -> Problems:
        own, url = self.custom_reward_function.path, self.remote.url
        ways = {"reward.custom_reward_function.path": own, "reward.remote.url": url, "reward.functions": self.functions}
        given = [f"{name}={value}" for name, value in ways.items() if value]
        if len(given) > 1:
            yield f"{' and '.join(given)}: one of them can be the reward; leave the others out"
        if url is not None and self.num_workers == 0:
            yield f"reward.remote.url={url} needs a reward process: set reward.num_workers=1, at least"


@dataclass
class ScoreConfig(Options):
    """Options of `python -m trainer.score`, which scores saved answers anew, beside the file or run."""

    reward: RewardConfig = section(RewardConfig, "who scores; of a run without any option, its own reward")
    recipe: str | None = opt(None, "recipe to import for the rewards that it registers; null = that of the run")
    data_source: str | None = opt(None, "data_source of rows that have none")
    out: str | None = opt(None, "parquet file to write; null = beside what was read")
