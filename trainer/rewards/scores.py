"""The scores of a batch: of the reward function, of a reward model, or the weighted sum of both, laid out as columns;
and what the driver does to them: failed samples are masked, long answers punished, greedy ones become baselines.

Workers send finished samples to the pool of reward functions while others still generate; here the driver lets the
reward model score, and then waits for the rest of the pool. A sample whose reward failed has no weight anywhere.
"""

from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from trainer.evaluate.sample import is_prediction
from trainer.rewards.failures import FailureLog
from trainer.roles import RewardModelRole
from verl_lite.algos.advantages import outcome_scores
from verl_lite.config import PPOConfig, RewardConfig
from verl_lite.errors import UserError
from verl_lite.metrics import Metric
from verl_lite.protocol import DataProto, as_column
from verl_lite.rewards import RewardResult
from verl_lite.single_controller.resource_pool import ServiceHandle

OVERLONG = ("overlong_reward", "overlong")
"""Columns `reward/<name>` of the penalty of a long answer and of whether there is one, under verl's names."""

OVERLONG_TAKEN = (
    "a column of reward.overlong_buffer.log: call it something else, or set reward.overlong_buffer.log=false"
)


class Scorer(Protocol):
    """What scores a batch, as the trainer sees it."""

    def score(self, batch: DataProto) -> DataProto:
        """Columns to be added to the batch, token_level_scores and reward_failed among them, and meta_info metrics."""
        ...


class Rewards:
    """Collects scores.

    pool: the service that runs `workers.rewards.reward_pool.RewardPool`; None = no reward function is called. model:
    None = no reward model. There is at least one of them. failures: gets every result; null = one that writes into
    `run_dir`.
    """

    def __init__(
        self,
        pool: ServiceHandle | None,
        config: RewardConfig,
        run_dir: Path,
        model: RewardModelRole | None = None,
        failures: FailureLog | None = None,
    ) -> None:
        self.pool = pool
        self.config = config
        self.model = model
        self.failures = failures or FailureLog(config.max_error_rate, run_dir)

    def score(self, batch: DataProto) -> DataProto:
        """Waits for the batch's rewards.

        Reads sample_id, response_mask, and what the reward model reads. Writes token_level_scores (B, R), the score on
        the last valid token; reward_failed and reward_timed_out (B,); and the extra values that the reward function
        returned, as `reward/<name>` (B,). With a reward model also `reward/model` and `reward/function`, each before
        its weight.

        Metrics: reward/<name>/mean of each extra value that is a number, over the sampled answers that have one;
        reward/error_rate, and the part of it that was late, reward/timeout_rate; reward/processes_replaced, counted
        from the start of the run.
        Raises RewardFailure where too many failed, UserError for an extra value with the name of a part.
        """
        parts: dict[str, tuple[float, list[RewardResult]]] = {}
        if self.model is not None:  # the pool goes on working while the model scores
            parts["model"] = (self.model.weight, self.model.score(batch))
        if self.pool is not None:
            keys = list(batch.non_tensor_batch["sample_id"])
            found = self.pool.call("collect", keys)
            parts["function"] = (self.config.function_weight, [found[key] for key in keys])
        weights = [weight for weight, _ in parts.values()]
        results = [_weighted_sum(weights, row) for row in zip(*(each for _, each in parts.values()), strict=True)]
        self.failures.check(batch, results)
        failed, timed_out = (np.array([getattr(x, name) for x in results], bool) for name in ("failed", "timed_out"))
        metrics = {
            "reward/error_rate": Metric.mean(int(failed.sum()), len(results)),
            "reward/timeout_rate": Metric.mean(int(timed_out.sum()), len(results)),
        }
        if self.pool is not None:
            metrics["reward/processes_replaced"] = Metric.last(self.pool.call("processes_replaced"))

        scores = torch.tensor([0.0 if result.failed else result.score for result in results])
        mask = batch.batch["response_mask"]
        answered = mask.sum(1) > 0
        token_level_scores = torch.zeros(mask.shape)
        token_level_scores[torch.arange(len(mask)), (mask.sum(1) - 1).clamp(min=0)] = scores * answered
        is_greedy = batch.non_tensor_batch.get("is_greedy", np.zeros(len(mask), bool)).astype(bool)
        counted = answered.numpy() & ~is_greedy
        extras = sorted({name for result in results for name in result.extra})
        columns = {f"reward/{name}": as_column([result.extra.get(name) for result in results]) for name in extras}
        metrics |= _means(columns, counted)
        if self.model is not None:
            check_no_such_entry(parts, columns, "a part of the score beside a reward model: call it something else")
            own = {
                f"reward/{name}": as_column([None if each.failed else each.score for each in part])
                for name, (_, part) in parts.items()
            }
            metrics |= _means(own, counted, with_ends=True)
            columns |= own
        return DataProto.from_dict(
            tensors={"token_level_scores": token_level_scores},
            non_tensors={"reward_failed": failed, "reward_timed_out": timed_out, **columns},
            meta_info={"metrics": metrics},
        )


def mask_failed(batch: DataProto) -> DataProto:
    """The batch in which samples whose reward failed have an empty response_mask, and so no weight anywhere."""
    failed = torch.from_numpy(batch.non_tensor_batch["reward_failed"].astype(bool))
    if not failed.any():
        return batch
    result = batch.select()
    result.batch["response_mask"] = batch.batch["response_mask"] * ~failed[:, None]
    return result


def punish_overlong(batch: DataProto, config: PPOConfig) -> tuple[DataProto, dict[str, Metric]]:
    """The batch with the penalty of `reward.overlong_buffer` added to each answer's score; as it is where that is off.

    DAPO's (arXiv:2503.14476, eq. 13): none up to the last `len` tokens, then linear, to -penalty_factor at the longest.
    Reads token_level_scores and response_mask (B, R). Writes token_level_scores, and outcomes (B,), the scores before,
    by which groups are filtered; with reward.overlong_buffer.log also reward/overlong_reward and reward/overlong (0 or
    1), with the metrics reward/overlong_reward/mean and reward/overlong/mean over answers that count. An answer whose
    reward failed has no penalty. Raises UserError if the reward function gave such a name to a value of its own.
    """
    options = config.reward.overlong_buffer
    if not options.enable:
        return batch, {}
    lengths = (batch.batch["response_mask"] != 0).sum(1)
    exceeding = lengths.float() - (config.data.max_response_length - options.len)
    penalty = torch.where(lengths > 0, (-exceeding / options.len * options.penalty_factor).clamp(max=0.0), 0)
    result = batch.select()
    scores = batch.batch["token_level_scores"].clone()
    result.batch["outcomes"] = scores.sum(1)
    scores[torch.arange(len(batch)), (lengths - 1).clamp(min=0)] += penalty
    result.batch["token_level_scores"] = scores
    if not options.log:
        return result, {}
    check_no_such_entry(OVERLONG, batch.non_tensor_batch, OVERLONG_TAKEN)
    columns = dict(zip(OVERLONG, (penalty, (penalty < 0).float()), strict=True))
    result.non_tensor_batch |= {f"reward/{name}": as_column(values.tolist()) for name, values in columns.items()}
    counted = int((lengths > 0).sum())
    return result, {f"reward/{name}/mean": Metric.mean(float(x.sum()), counted) for name, x in columns.items()}


def take_greedy_baselines(batch: DataProto) -> tuple[DataProto, dict[str, Metric]]:
    """ReMax: the batch without its greedy answers (is_greedy), whose scores are reward_baselines (B,) of the rows of
    their prompt.

    Reads uid, token_level_scores, response_mask. A prompt whose greedy answer has no score, because its reward failed,
    has no baseline: its rows are masked, as `mask_failed` does, and reward/baseline_error_rate is the share of such
    prompts. critic/reward_baselines/mean is over the others. A batch without greedy answers comes back as it is.
    """
    if "is_greedy" not in batch:
        return batch, {}
    is_greedy = batch.non_tensor_batch["is_greedy"].astype(bool)
    greedy, result = batch.select_idxs(is_greedy), batch.select_idxs(~is_greedy)
    del result.non_tensor_batch["is_greedy"]
    is_known = (greedy.batch["response_mask"] != 0).any(-1)
    scores = outcome_scores(greedy.batch["token_level_scores"], greedy.batch["response_mask"])
    place = {uid: row for row, uid in enumerate(greedy.non_tensor_batch["uid"])}
    rows = torch.tensor([place[uid] for uid in result.non_tensor_batch["uid"]])
    result.batch["reward_baselines"] = scores[rows]
    result.batch["response_mask"] = result.batch["response_mask"] * is_known[rows, None]
    return result, {
        "critic/reward_baselines/mean": Metric.mean(float(scores.sum()), int(is_known.sum())),
        "reward/baseline_error_rate": Metric.mean(float((~is_known).sum()), len(is_known)),
    }


def check_no_such_entry(names: Iterable[str], columns: Container[str], what: str) -> None:
    """Raises UserError if one of the names is a column `reward/<name>` already. what: it is, and what to do."""
    for name in names:
        if f"reward/{name}" in columns:
            raise UserError(f"The reward function returned an entry {name!r}, which is {what}")


def _weighted_sum(weights: list[float], row: tuple[RewardResult, ...]) -> RewardResult:
    """The score of one row, of which `row` has a result from each part; failed where any of them is."""
    failure = next((result for result in row if result.failed), None)
    if failure is not None:
        return failure
    score = sum(weight * result.score for weight, result in zip(weights, row, strict=True))
    extra = {name: value for result in row for name, value in result.extra.items()}
    return RewardResult.scored("The weighted sum of reward function and reward model", score, extra)


def _means(columns: Mapping[str, np.ndarray], counted: np.ndarray, with_ends: bool = False) -> dict[str, Metric]:
    """The mean of each column of numbers, and with_ends the largest and the smallest; predictions, which may look like
    numbers, have none. counted: (B,) bool, the rows that it is over, as far as they have a value."""
    metrics = {}
    for name, column in columns.items():
        values = [value for value in column[counted] if value is not None]
        are_numbers = not any(isinstance(value, str) for value in values)
        if values and are_numbers and not is_prediction(name.removeprefix("reward/")):
            metrics[f"{name}/mean"] = Metric.mean(sum(values), len(values))
            if with_ends:
                metrics |= {f"{name}/max": Metric.max(max(values)), f"{name}/min": Metric.min(min(values))}
    return metrics
