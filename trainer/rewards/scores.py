"""Scores of a batch from the reward function, the reward model, or their weighted sum, and adjustments of the scores:
masks for failed samples, the penalty of long answers, and baselines from greedy answers.

Workers send finished samples to the pool of reward functions while other samples are still generated. The driver then
runs the reward model and collects the remaining results of the pool. A sample whose reward failed has no weight.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

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
from verl_lite.rewards import READ_BY_REWARDS, RewardItem, RewardResult
from verl_lite.single_controller.resource_pool import ServiceHandle
from workers.policy.vision import MULTI_MODAL_INPUTS

OVERLONG = ("overlong_reward", "overlong")
"""verl's names of the columns `reward/<name>` with the penalty of a long answer, and with 1 if there is a penalty."""

OVERLONG_TAKEN = "a column of reward.overlong_buffer.log: rename the entry, or set reward.overlong_buffer.log=false"


class Scorer(Protocol):
    """The trainer's interface for scoring a batch."""

    def score(self, batch: DataProto) -> DataProto:
        """Returns columns to add to the batch, such as token_level_scores and reward_failed, and meta_info metrics."""
        ...


class Rewards:
    """Collects the scores of a batch from the reward functions, the reward model, or both.

    pool: service of `workers.rewards.reward_pool.RewardPool`; None: no reward function. model: None: no reward model.
    Without both every score is 0, as in distillation without task rewards. failures: log of failed rewards; None: a new
    log in `run_dir`.
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

    def are_ready(self, batch: DataProto) -> np.ndarray:
        """Returns (B,) bool: True where `score` would not wait. A reward model scores only when it has the devices."""
        if self.pool is None or self.model is not None:
            return np.zeros(len(batch), dtype=bool)
        ready = self.pool.call("ready", list(batch.non_tensor_batch["sample_id"]))
        return np.array([key in ready for key in batch.non_tensor_batch["sample_id"]], dtype=bool)

    def submit(self, batch: DataProto) -> None:
        """Sends sampled answers to the reward functions, as workers do when an answer is complete."""
        if self.pool is None:
            return
        columns = batch.non_tensor_batch
        inputs: Any = columns.get(MULTI_MODAL_INPUTS, [None] * len(batch))
        items = []
        for number, key in enumerate(columns["sample_id"]):
            is_answer = batch.batch["response_mask"][number].bool()
            answer = self.failures.decode(batch.batch["responses"][number][is_answer].tolist())
            row = {name: columns[name][number] for name in READ_BY_REWARDS}
            images = () if inputs[number] is None else inputs[number].files
            items.append(RewardItem.of_row(key, row, answer, images))
        self.pool.call("submit", items)

    def cancel(self, sample_ids: Sequence[str]) -> None:
        """Cancels the rewards of these answers without waiting for the calls that are running."""
        if self.pool is not None:
            self.pool.call("cancel", sample_ids)

    def score(self, batch: DataProto) -> DataProto:
        """Computes or waits for the batch's rewards.

        Reads sample_id, response_mask and the reward model's inputs. Writes token_level_scores (B, R) with the score on
        the last valid token, reward_failed and reward_timed_out (B,), and additional entries of the reward function's
        result as `reward/<name>` (B,). With a reward model, also writes the unweighted scores `reward/model` and
        `reward/function`.

        Metrics: reward/<name>/mean of each numeric entry over the sampled answers that have it; reward/error_rate, and
        the part of it that timed out, reward/timeout_rate; reward/processes_replaced, since the start of the run.

        Raises RewardFailure if too many rewards failed, and UserError if an entry has the name of a written column.
        """
        parts: dict[str, tuple[float, list[RewardResult]]] = {}
        if self.model is not None:  # the pool continues in parallel while the model scores
            parts["model"] = (self.model.weight, self.model.score(batch))
        if self.pool is not None:
            keys = list(batch.non_tensor_batch["sample_id"])
            found = self.pool.call("collect", keys)
            parts["function"] = (self.config.function_weight, [found[key] for key in keys])
        weights = [weight for weight, _ in parts.values()]
        rows = zip(*(each for _, each in parts.values()), strict=True) if parts else [()] * len(batch)
        results = [_weighted_sum(weights, row) for row in rows]
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
            check_no_such_entry(parts, columns, "the name of a part of the score with a reward model: rename the entry")
            by_part = {
                f"reward/{name}": as_column([None if each.failed else each.score for each in part])
                for name, (_, part) in parts.items()
            }
            metrics |= _means(by_part, counted, with_extremes=True)
            columns |= by_part
        return DataProto.from_dict(
            tensors={"token_level_scores": token_level_scores},
            non_tensors={"reward_failed": failed, "reward_timed_out": timed_out, **columns},
            meta_info={"metrics": metrics},
        )


def mask_failed(batch: DataProto) -> DataProto:
    """Returns the batch with an empty response_mask, and so no weight, for samples whose reward failed."""
    failed = torch.from_numpy(batch.non_tensor_batch["reward_failed"].astype(bool))
    if not failed.any():
        return batch
    result = batch.select()
    result.batch["response_mask"] = batch.batch["response_mask"] * ~failed[:, None]
    return result


def punish_overlong(batch: DataProto, config: PPOConfig) -> tuple[DataProto, dict[str, Metric]]:
    """Adds the penalty of `reward.overlong_buffer` to each answer's score, or returns the batch unchanged without one.

    The penalty of DAPO (arXiv:2503.14476, eq. 13) is 0 up to the last `len` tokens of the maximal length, and then
    linear up to -penalty_factor. Answers whose reward failed have no penalty. Reads token_level_scores and
    response_mask (B, R). Writes token_level_scores, and outcomes (B,) with the unpenalized scores for the filter of
    groups. With reward.overlong_buffer.log, also writes reward/overlong_reward and reward/overlong (0 or 1) and the
    metrics of their means over counted answers. Raises UserError if the reward function returned an entry of that name.
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
    """Removes the greedy answers (is_greedy) of ReMax and writes their scores as reward_baselines (B,) of the rows with
    the same prompt.

    Reads uid, token_level_scores, response_mask. If the reward of a greedy answer failed, its prompt has no baseline
    and the prompt's rows are masked as in `mask_failed`. reward/baseline_error_rate is the share of such prompts;
    critic/reward_baselines/mean is the mean over the others. A batch without greedy answers is returned unchanged.
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
    """Raises UserError if a column `reward/<name>` exists. what: use of the column and advice, for the message."""
    for name in names:
        if f"reward/{name}" in columns:
            raise UserError(f"The reward function returned an entry {name!r}, which is {what}")


def _weighted_sum(weights: list[float], row: tuple[RewardResult, ...]) -> RewardResult:
    """Returns the weighted sum of the results of one row, or the first failed result. row: result of each part."""
    failure = next((result for result in row if result.failed), None)
    if failure is not None:
        return failure
    score = sum((weight * result.score for weight, result in zip(weights, row, strict=True)), start=0.0)
    extra = {name: value for result in row for name, value in result.extra.items()}
    return RewardResult.scored("The weighted sum of reward function and reward model", score, extra)


def _means(columns: Mapping[str, np.ndarray], counted: np.ndarray, with_extremes: bool = False) -> dict[str, Metric]:
    """Returns the mean (and with_extremes maximum and minimum) of each numeric column over the counted rows with a
    value. Predictions have no mean, even if they are numbers. counted: (B,) bool."""
    metrics = {}
    for name, column in columns.items():
        values = [value for value in column[counted] if value is not None]
        are_numbers = not any(isinstance(value, str) for value in values)
        if values and are_numbers and not is_prediction(name.removeprefix("reward/")):
            metrics[f"{name}/mean"] = Metric.mean(sum(values), len(values))
            if with_extremes:
                metrics |= {f"{name}/max": Metric.max(max(values)), f"{name}/min": Metric.min(min(values))}
    return metrics
