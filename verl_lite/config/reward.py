"""The options of the reward function: who scores an answer, in how many processes, within which limits.

Part of `verl_lite.config`, which documents how fields are written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl_lite.config.fields import POSITIVE, SHARE, at_least, opt, section


@dataclass
class CustomRewardConfig:
    path: str | None = opt(None, "Python file, or pkg://module, that defines the reward function")
    name: str = opt(
        "compute_score", "its name: f(data_source, solution_str, ground_truth, extra_info) -> number or dict"
    )
    style: str = opt(
        "sample",
        "sample = called as above (async def: many calls at once) | batch = with lists: f(data_sources, "
        "solution_strs, ground_truths, extra_infos) -> list | trl = TRL's f(prompts, completions, **columns) -> list",
        ("sample", "batch", "trl"),
    )


@dataclass
class RemoteRewardConfig:
    """A server that scores."""

    url: str | None = opt(None, 'each sample is posted there as JSON; it answers a number or {"score": ..., ...}')
    max_retries: int = opt(
        3, "times that a request is repeated after a lost connection or the status 429 or 5xx", at_least(0)
    )
    api_key_env: str | None = opt(None, "environment variable with a key, sent as `Authorization: Bearer KEY`")


@dataclass
class OverlongBufferConfig:
    """DAPO's soft punishment of long answers."""

    enable: bool = opt(False, "punish answers by length, before they are cut off")
    len: int = opt(
        0, "tokens before data.max_response_length in which the penalty grows from 0 to penalty_factor", at_least(0)
    )
    penalty_factor: float = opt(1.0, "what an answer of full length loses", POSITIVE)
    log: bool = opt(False, "log the penalty and the share of answers that have one")


@dataclass
class RewardConfig:
    custom_reward_function: CustomRewardConfig = section(CustomRewardConfig, "your own reward")
    remote: RemoteRewardConfig = section(RemoteRewardConfig, "a reward over HTTP")
    functions: dict[str, Any] = opt(
        {},
        "several rewards, PART: {reward: a registered one, or path: FILE.py and name:; weight: 1, kwargs: {}, "
        "style: sample, outcome: false}; neither reward nor path = by data_source",
    )
    overlong_buffer: OverlongBufferConfig = section(OverlongBufferConfig, "penalty of long answers")
    function_weight: float = opt(1.0, "weight of the function's score; 0 = reward_model alone, no function is called")
    reward_kwargs: dict[str, Any] = opt({}, "extra keyword arguments of the reward function")
    num_workers: int = opt(
        1, "reward processes; 0 = in the driver (a debugger can stop there, no deadline holds)", at_least(0)
    )
    batch_size: int = opt(64, "samples in one call at most, for styles batch and trl", at_least(1))
    max_concurrent: int = opt(
        64, "calls of an async function or a server that are under way at one time, in all", at_least(1)
    )
    max_rpm: float | None = opt(
        None, "calls begun per minute at most, in all processes together; null = no limit", POSITIVE
    )
    timeout_s: float = opt(
        30.0,
        "a call that takes longer has failed; where it does not let itself be cancelled, its process is killed",
        POSITIVE,
    )
    max_memory_mb: int | None = opt(
        None, "a reward process that holds more memory is replaced between two samples, MiB; null = never", at_least(1)
    )
    max_error_rate: float = opt(
        0.1, "the run stops when more than this share of a step's rewards failed (of 20, in smaller steps)", SHARE
    )
