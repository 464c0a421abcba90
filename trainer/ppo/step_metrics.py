"""Metrics of a training step under verl's names: scores, lengths, times and throughput.

All functions ignore padding rows and rows whose response_mask is empty because their reward failed. The prefix
`critic/`, as in verl, stands for the training signal and is used with or without a critic.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from trainer.rewards.groups import extremes_of_groups
from verl_lite.core_algos import group_ids
from verl_lite.protocol import DataProto

WHOLE_SEQUENCE_STAGES = ("ref", "values", "adv", "update_critic", "update_actor")
"""Stages whose time per token counts the tokens of prompts and responses, as in verl."""


def compute_data_metrics(batch: DataProto, use_critic: bool = False) -> dict[str, float]:
    """Returns metrics of scores, rewards, advantages, returns and lengths of a step; METRICS.md defines each of them.

    Reads responses, response_mask, attention_mask, token_level_scores, token_level_rewards, advantages and returns;
    also uid and finish_reason if present, and values with `use_critic`. Metrics without any value are left out. Empty
    responses are left out of all lengths, so verl's response_length_non_aborted equals response_length.
    """
    tensors = batch.batch
    counted, prompt_length, response_length = _lengths(batch)
    mask = (tensors["response_mask"] != 0) & counted[:, None]
    scores = tensors["token_level_scores"].sum(-1)[counted]
    rewards = tensors["token_level_rewards"].sum(-1)[counted]
    returns = tensors["returns"][mask]
    metrics = {
        **summary("critic/score", scores),
        **summary("critic/rewards", rewards),
        **summary("critic/advantages", tensors["advantages"][mask]),
        **summary("critic/returns", returns),
        **summary("response_length", response_length),
        **summary("response_length_non_aborted", response_length),
        **summary("prompt_length", prompt_length),
    }

    metrics |= _shares_of_limits(batch, counted, prompt_length, response_length)
    if "uid" in batch.non_tensor_batch:
        uids = batch.non_tensor_batch["uid"][counted.numpy()]
        metrics |= frac_reward_zero_std(scores, uids)
    if use_critic:
        metrics |= _critic_metrics(tensors["values"][mask], returns)
    return metrics


def _shares_of_limits(
    batch: DataProto, counted: torch.Tensor, prompt_lengths: torch.Tensor, response_lengths: torch.Tensor
) -> dict[str, float]:
    """Returns the shares of empty responses, and of responses and prompts that are as long as their limits.

    counted, prompt_lengths, response_lengths: see `_lengths`.
    """
    attention_mask = batch.batch["attention_mask"]
    width = batch.batch["responses"].shape[-1]
    metrics = {}
    # an empty response has no token to count, so its row is in none of the lengths
    is_real = ~_padding_rows(batch)
    answer_lengths = attention_mask[is_real, -width:].sum(-1)
    if len(answer_lengths):
        metrics["response/aborted_ratio"] = _mean(answer_lengths == 0)

    if not counted.any():
        return metrics
    is_cut_off = response_lengths == width
    if "finish_reason" in batch.non_tensor_batch:
        # a response may also end by itself at the last possible token
        reasons = batch.non_tensor_batch["finish_reason"][counted.numpy()]
        is_cut_off = torch.from_numpy(reasons == "length")
    clip_ratio = _mean(is_cut_off)
    metrics["response_length/clip_ratio"] = clip_ratio
    metrics["response_length_non_aborted/clip_ratio"] = clip_ratio
    prompt_width = attention_mask.shape[-1] - width
    metrics["prompt_length/clip_ratio"] = _mean(prompt_lengths == prompt_width)
    return metrics


def _critic_metrics(values: torch.Tensor, returns: torch.Tensor) -> dict[str, float]:
    """Returns the metrics of the critic's values. values, returns: those of the valid tokens."""
    metrics = summary("critic/values", values)
    # the variance of a single value is undefined
    if len(values) > 1:
        error_variance = (returns - values).var()
        # 1e-5, as in verl: all returns can be equal
        unexplained = error_variance / (returns.var() + 1e-5)
        metrics["critic/vf_explained_var"] = 1.0 - float(unexplained)
    return metrics


def frac_reward_zero_std(scores: torch.Tensor, uid: np.ndarray) -> dict[str, float]:
    """Returns the share of prompts, among those with at least two responses, whose responses all have the same score.

    Args:
        scores: (B,) score of each response.
        uid: (B,) prompt of each response.
    """
    groups, num_groups = group_ids(uid, scores.device)
    has_several = torch.bincount(groups, minlength=num_groups) > 1
    if not has_several.any():
        return {}

    # lowest and highest score instead of the standard deviation, which rounding can make unequal to 0
    lowest, highest = extremes_of_groups(scores.float(), groups, num_groups)
    is_equal = lowest == highest
    return {"frac_reward_zero_std": _mean(is_equal[has_several])}


def compute_timing_metrics(batch: DataProto, timing_raw: Mapping[str, float]) -> dict[str, float]:
    """Returns timing_s/<stage> and timing_per_token_ms/<stage>, per response token for gen and per token of whole
    sequences for the other stages."""
    _, prompt_lengths, response_lengths = _lengths(batch)
    num_generated = int(response_lengths.sum())
    num_tokens = int(prompt_lengths.sum()) + num_generated
    tokens_of_stage = {"gen": num_generated}
    for name in WHOLE_SEQUENCE_STAGES:
        tokens_of_stage[name] = num_tokens

    metrics = {f"timing_s/{name}": seconds for name, seconds in timing_raw.items()}
    for name, tokens in tokens_of_stage.items():
        if name in timing_raw and tokens:
            metrics[f"timing_per_token_ms/{name}"] = timing_raw[name] * 1000 / tokens
    return metrics


def compute_throughput_metrics(batch: DataProto, timing_raw: Mapping[str, float], n_gpus: int) -> dict[str, float]:
    """Returns perf/total_num_tokens (prompts and responses), perf/time_per_step (s) and perf/throughput (tokens/s per
    device)."""
    num_tokens = float(sum(sequence_lengths(batch)))
    seconds = timing_raw["step"]
    metrics = {"perf/total_num_tokens": num_tokens, "perf/time_per_step": seconds}
    if seconds > 0:
        metrics["perf/throughput"] = num_tokens / (seconds * n_gpus)
    return metrics


@dataclass(frozen=True)
class UpdateWork:
    """The work of updating the policy, as far as the planner knows the model and the devices.

    Attributes:
        flops: returns the operations of an update on sequences with these numbers of tokens.
        peak_flops: FLOP/s of one device.
    """

    flops: Callable[[Sequence[int]], float]
    peak_flops: float


def compute_mfu(flops: float, seconds: float, n_gpus: int, peak_flops: float) -> dict[str, float]:
    """Returns perf/mfu/actor: the operations of the update divided by the peak operations of the devices in the same
    time (model FLOPs utilization as defined by PaLM, which excludes recomputation by gradient checkpointing).

    Args:
        flops: operations of the update.
        seconds: duration of update_actor.
        n_gpus: number of devices.
        peak_flops: FLOP/s of one device.
    """
    if seconds <= 0:
        return {}
    most_flops = seconds * n_gpus * peak_flops
    return {"perf/mfu/actor": flops / most_flops}


def sequence_lengths(batch: DataProto) -> list[int]:
    """Returns the number of tokens of each row, without padding rows and rows whose reward failed."""
    _, prompt_lengths, response_lengths = _lengths(batch)
    return (prompt_lengths + response_lengths).tolist()


def _padding_rows(batch: DataProto) -> torch.Tensor:
    """Returns the padding rows, which only make the batch divisible, as (B,) bool."""
    tensors = batch.batch
    if "is_padding" in tensors.keys():
        return tensors["is_padding"].bool()
    return torch.zeros(len(batch), dtype=torch.bool)


def _lengths(batch: DataProto) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the counted rows (B,) bool, and their numbers of prompt tokens and response tokens.

    A row is counted if it has a response whose reward did not fail, even if the rollout correction rejects it. Response
    tokens include those of tools and environments.
    """
    tensors = batch.batch
    width = tensors["responses"].shape[-1]
    prompt_mask = tensors["attention_mask"][:, :-width]
    answer_mask = tensors["attention_mask"][:, -width:]
    counted = (tensors["response_mask"] != 0).any(-1)
    if "reward_failed" in batch.non_tensor_batch:
        # not by response_mask, which the rollout correction may have emptied: rejected rows would improve the scores
        is_answered = (answer_mask != 0).any(-1)
        failed = torch.from_numpy(batch.non_tensor_batch["reward_failed"].astype(bool))
        counted = is_answered & ~failed
    counted = counted & ~_padding_rows(batch)

    prompt_lengths = prompt_mask[counted].sum(-1)
    response_lengths = answer_mask[counted].sum(-1)
    return counted, prompt_lengths, response_lengths


def _mean(values: torch.Tensor) -> float:
    # torch has no mean of integers
    return float(values.float().mean())


def summary(name: str, values: torch.Tensor | np.ndarray) -> dict[str, float]:
    """Returns {name}/mean, {name}/max and {name}/min; an empty dictionary without values."""
    if not len(values):
        return {}
    if isinstance(values, torch.Tensor):
        mean = _mean(values)
    else:
        mean = float(values.mean())
    return {
        f"{name}/mean": mean,
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }
