"""The scores of a batch: of the reward function, of a reward model, or the weighted sum of both, laid out as columns.

Workers send finished samples to the pool of reward functions while others still generate; here the driver lets the
reward model score, and then waits for the rest of the pool. A reward that failed is a third outcome: its sample is
masked, so that it has no weight in any loss, metric or group statistic, and `trainer.rewards.failures` counts it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from trainer.evaluate.sample import is_prediction
from trainer.rewards.failures import FailureLog
from verl_lite.config import RewardConfig
from verl_lite.errors import UserError
from verl_lite.metrics import Metric
from verl_lite.protocol import DataProto, as_column
from verl_lite.rewards import RewardResult
from verl_lite.single_controller.worker_group import ServiceHandle


class Scorer(Protocol):
    """What scores a batch, as the trainer sees it."""

    def score(self, batch: DataProto) -> DataProto:
        """Columns to be added to the batch, and meta_info metrics. Afterwards it has token_level_scores and
        reward_failed."""
        ...


class RewardModel(Protocol):
    """A model that scores answers, as the driver sees it. weight: what its score counts times."""

    weight: float

    def score(self, batch: DataProto) -> list[RewardResult]:
        """One result for each row."""
        ...


@dataclass(frozen=True)
class _Part:
    """One source of scores: its name, what they count times, and a result for each row."""

    name: str
    weight: float
    results: list[RewardResult]


class Rewards:
    """Collects scores.

    pool: the service that runs `workers.rewards.pool.RewardPool`; None = no reward function is called. model: None = no
    reward model. There is at least one of them. failures: gets every result; null = one that writes into `run_dir`.
    """

    def __init__(
        self,
        pool: ServiceHandle | None,
        config: RewardConfig,
        run_dir: Path,
        model: RewardModel | None = None,
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
        Raises RewardFailure where too many failed.
        """
        parts = self._parts(batch)
        ordered = [_weighted_sum(parts, row) for row in zip(*(part.results for part in parts), strict=True)]
        failed, timed_out = (np.array([getattr(x, name) for x in ordered], bool) for name in ("failed", "timed_out"))
        self.failures.check(batch, ordered)
        scores = torch.tensor([0.0 if result.failed else result.score for result in ordered])
        mask = batch.batch["response_mask"]
        answered = mask.sum(1) > 0
        token_level_scores = torch.zeros(mask.shape)
        token_level_scores[torch.arange(len(mask)), (mask.sum(1) - 1).clamp(min=0)] = scores * answered
        extras = sorted({name for result in ordered for name in result.extra})
        columns = {f"reward/{name}": as_column([result.extra.get(name) for result in ordered]) for name in extras}
        metrics = {
            "reward/error_rate": Metric.mean(int(failed.sum()), len(ordered)),
            "reward/timeout_rate": Metric.mean(int(timed_out.sum()), len(ordered)),
        }
        if self.pool is not None:
            metrics["reward/processes_replaced"] = Metric.last(self.pool.call("processes_replaced"))
        greedy = batch.non_tensor_batch.get("is_greedy", np.zeros(len(mask), bool)).astype(bool)
        counted = answered.numpy() & ~greedy
        metrics |= _means(columns, counted)
        if self.model is not None:
            own = _part_columns(parts, extras)
            metrics |= _means(own, counted, with_ends=True)
            columns |= own
        return DataProto.from_dict(
            tensors={"token_level_scores": token_level_scores},
            non_tensors={"reward_failed": failed, "reward_timed_out": timed_out, **columns},
            meta_info={"metrics": metrics},
        )

    def _parts(self, batch: DataProto) -> list[_Part]:
        """The sources of scores; the pool goes on working while the model scores."""
        parts = []
        if self.model is not None:
            parts.append(_Part("model", self.model.weight, self.model.score(batch)))
        if self.pool is not None:
            keys = list(batch.non_tensor_batch["sample_id"])
            results = self.pool.call("collect", keys)
            parts.append(_Part("function", self.config.function_weight, [results[key] for key in keys]))
        return parts


def _weighted_sum(parts: list[_Part], row: Sequence[RewardResult]) -> RewardResult:
    """The score of one row, of which `row` has a result from each part; failed where any of them is."""
    failure = next((result for result in row if result.failed), None)
    if failure is not None:
        return failure
    score = sum(part.weight * result.score for part, result in zip(parts, row, strict=True))
    return RewardResult(score, {name: value for result in row for name, value in result.extra.items()})


def _part_columns(parts: list[_Part], extras: Collection[str]) -> dict[str, np.ndarray]:
    """reward/<part> (B,), before its weight; None where the part failed.

    Raises UserError if the reward function gave such a name to a value of its own.
    """
    for part in parts:
        if part.name in extras:
            raise UserError(
                f"The reward function returned an entry {part.name!r}, which with a reward model is the name of a part "
                "of the score; call it something else"
            )
    return {
        f"reward/{part.name}": as_column([None if each.failed else each.score for each in part.results])
        for part in parts
    }


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


def mask_failed(batch: DataProto) -> DataProto:
    """The batch in which samples whose reward failed have an empty response_mask, and so no weight anywhere."""
    failed = torch.from_numpy(batch.non_tensor_batch["reward_failed"].astype(bool))
    if not failed.any():
        return batch
    result = batch.select()
    result.batch["response_mask"] = batch.batch["response_mask"] * ~failed[:, None]
    return result
