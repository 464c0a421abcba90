"""Scores of a batch from the reward function, the reward model, or their weighted sum, and their adjustments.

The adjustments are masks for failed samples, the penalty of long answers, and baselines from greedy answers.

Workers send finished samples to the pool of reward functions while other samples are still generated. The driver then
runs the reward model and collects the remaining results of the pool. A sample whose reward failed has no weight.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from trainer.rewards.failures import FailureLog, note_failed_rewards
from trainer.validation.sample import is_prediction
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
_SOURCE_TAKEN = "the name of a part of the score with a reward model: rename the entry"


class RewardStage(Protocol):
    """Scores the batches of a trainer: a `RewardManager`, or the rewards that episodes bring with them."""

    def score(self, batch: DataProto) -> DataProto:
        """Returns columns to add to the batch, such as token_level_scores and reward_failed, and meta_info metrics."""
        ...


class RewardModel(Protocol):
    """A reward model.

    Attributes:
        weight: Factor of its score in the sum with the score of the reward function.
    """

    weight: float

    def score(self, batch: DataProto) -> list[RewardResult]:
        """Returns one result per row."""
        ...


class RewardManager:
    """Collects the scores of a batch from the reward function, the reward model, or both.

    Without both every score is 0, as in distillation without task rewards.

    Args:
        pool: service of `workers.rewards.reward_pool.RewardPool`; None: no reward function.
        config: section `reward`.
        failures: log of failed rewards.
        model: the reward model; None: no reward model.
        decode: converts the token ids of an answer to text.
    """

    def __init__(
        self,
        pool: ServiceHandle | None,
        config: RewardConfig,
        failures: FailureLog,
        model: RewardModel | None = None,
        decode: Callable[[list[int]], str] = str,
    ) -> None:
        self.pool = pool
        self.config = config
        self.failures = failures
        self.model = model
        self.decode = decode

    def are_ready(self, batch: DataProto) -> np.ndarray:
        """Returns (B,) bool: True where `score` would not wait. A reward model scores only when it has the devices."""
        if self.model is not None:
            return np.zeros(len(batch), dtype=bool)
        if self.pool is None:
            return np.ones(len(batch), dtype=bool)

        is_ready = np.zeros(len(batch), dtype=bool)
        keys = list(batch.non_tensor_batch["sample_id"])
        ready_keys = self.pool.call("ready", keys)
        for row, key in enumerate(keys):
            is_ready[row] = key in ready_keys
        return is_ready

    def submit(self, batch: DataProto) -> None:
        """Sends sampled answers to the reward functions, as workers do when an answer is complete."""
        if self.pool is None:
            return
        columns = batch.non_tensor_batch
        answers = batch.batch["responses"]
        is_answer = batch.batch["response_mask"].bool()
        image_inputs = columns.get(MULTI_MODAL_INPUTS)
        items = []
        for row, key in enumerate(columns["sample_id"]):
            answer_ids = answers[row][is_answer[row]].tolist()
            answer = self.decode(answer_ids)
            entries = {name: columns[name][row] for name in READ_BY_REWARDS}
            images: Sequence[bytes] = ()
            # None in rows without images
            if image_inputs is not None and image_inputs[row] is not None:
                images = image_inputs[row].files
            items.append(RewardItem.of_row(key, entries, answer, images))
        self.pool.call("submit", items)

    def cancel(self, sample_ids: Sequence[str]) -> None:
        """Cancels the rewards of these answers without waiting for the calls that are running."""
        if self.pool is not None:
            self.pool.call("cancel", sample_ids)

    def score(self, batch: DataProto) -> DataProto:
        """Computes the rewards of a batch, or waits for them, and returns them as columns.

        Reads sample_id, response_mask and the reward model's inputs.

        Returns:
            - token_level_scores (B, R) with the score on the last valid token.
            - reward_failed and reward_timed_out (B,).
            - reward/<name> (B,), additional entries of the reward function's result.
            - With a reward model, the unweighted scores reward/model and reward/function (B,).
            - The metrics reward/<name>/mean of each numeric entry over the sampled answers that have it;
              reward/error_rate, and the part of it that timed out, reward/timeout_rate; reward/processes_replaced,
              since the start of the run.

        Raises:
            RewardFailure: if too many rewards failed.
            UserError: if an entry has the name of a written column.
        """
        sources = self._collect(batch)
        results = _weighted_sums(sources, len(batch))
        note_failed_rewards(self.failures, batch, results, self.decode)

        failed = np.array([result.failed for result in results], dtype=bool)
        timed_out = np.array([result.timed_out for result in results], dtype=bool)
        metrics = {
            "reward/error_rate": _share(failed),
            "reward/timeout_rate": _share(timed_out),
        }
        if self.pool is not None:
            num_replaced = self.pool.call("processes_replaced")
            metrics["reward/processes_replaced"] = Metric.last(num_replaced)

        counted = _counted_rows(batch)
        entries = _entries_as_columns(results)
        metrics |= _means(entries, counted)
        columns = {"reward_failed": failed, "reward_timed_out": timed_out, **entries}
        if self.model is not None:
            check_no_such_entry([source.name for source in sources], entries, _SOURCE_TAKEN)
            scores_of_sources = {f"reward/{source.name}": source.score_column() for source in sources}
            metrics |= _means(scores_of_sources, counted, with_extremes=True)
            columns |= scores_of_sources
        token_level_scores = _token_level_scores(results, batch.batch["response_mask"])
        return DataProto.from_dict(
            tensors={"token_level_scores": token_level_scores},
            non_tensors=columns,
            meta_info={"metrics": metrics},
        )

    def _collect(self, batch: DataProto) -> list[_SourceResults]:
        """Returns the results of the reward model and of the reward function, as far as the run has them."""
        sources = []
        # the model first, because the pool continues in parallel while the model scores
        if self.model is not None:
            results = self.model.score(batch)
            sources.append(_SourceResults("model", self.model.weight, results))
        if self.pool is not None:
            keys = list(batch.non_tensor_batch["sample_id"])
            results_by_key = self.pool.call("collect", keys)
            results = [results_by_key[key] for key in keys]
            sources.append(_SourceResults("function", self.config.function_weight, results))
        return sources


@dataclass(frozen=True)
class _SourceResults:
    """The results of one source of the score for the rows of a batch.

    Attributes:
        name: "model" or "function".
        weight: Factor of the source's score in the sum.
        results: One result per row.
    """

    name: str
    weight: float
    results: list[RewardResult]

    def score_column(self) -> np.ndarray:
        """Returns the scores (B,) before the weight; None for a failed row."""
        scores = []
        for result in self.results:
            scores.append(None if result.failed else result.score)
        return as_column(scores)


def _share(is_counted: np.ndarray) -> Metric:
    """Returns the share of True in (B,) bool."""
    return Metric.mean(int(is_counted.sum()), len(is_counted))


def _weighted_sums(sources: Sequence[_SourceResults], size: int) -> list[RewardResult]:
    """Returns for each of `size` rows the weighted sum of its results, or the first of its results that failed."""
    sums = []
    for row in range(size):
        score = 0.0
        extra: dict[str, float | str] = {}
        failure = None
        for source in sources:
            result = source.results[row]
            if result.failed:
                failure = result
                break
            score += source.weight * result.score
            extra |= result.extra
        if failure is None:
            # `scored` fails a sum that float32 cannot hold: as a tensor it would be infinite, and the whole step lost
            total = RewardResult.scored("The weighted sum of reward function and reward model", score, extra)
            sums.append(total)
        else:
            sums.append(failure)
    return sums


def _token_level_scores(results: Sequence[RewardResult], mask: torch.Tensor) -> torch.Tensor:
    """Returns (B, R) scores on the last token of each answer. Failed rewards and empty answers have only zeros."""
    scores = []
    for result in results:
        scores.append(0.0 if result.failed else result.score)
    lengths = mask.sum(1)
    is_answered = lengths > 0
    # an empty answer has no last token; the product below writes 0 to its first position
    last_tokens = (lengths - 1).clamp(min=0)
    rows = torch.arange(len(mask))
    token_level_scores = torch.zeros(mask.shape)
    token_level_scores[rows, last_tokens] = torch.tensor(scores) * is_answered
    return token_level_scores


def _counted_rows(batch: DataProto) -> np.ndarray:
    """Returns (B,) bool: True for the rows whose entries count in the means, answers with tokens that were sampled.

    Greedy answers do not count, because they are the baselines of ReMax and not samples of the policy.
    """
    lengths = batch.batch["response_mask"].sum(1)
    is_answered = (lengths > 0).numpy()
    if "is_greedy" not in batch:
        return is_answered
    is_greedy = batch.non_tensor_batch["is_greedy"].astype(bool)
    return is_answered & ~is_greedy


def _entries_as_columns(results: Sequence[RewardResult]) -> dict[str, np.ndarray]:
    """Returns a column `reward/<name>` (B,) for each further entry of the results; None in rows without it."""
    names: set[str] = set()
    for result in results:
        names.update(result.extra)
    columns = {}
    # sorted, so that batches have the same order of columns
    for name in sorted(names):
        entries = [result.extra.get(name) for result in results]
        columns[f"reward/{name}"] = as_column(entries)
    return columns


def _means(columns: Mapping[str, np.ndarray], counted: np.ndarray, with_extremes: bool = False) -> dict[str, Metric]:
    """Returns the mean of each numeric column over the counted rows with a value.

    Predictions, which are the votes of maj@n, have no mean, even if they are numbers.

    Args:
        columns: columns (B,) by their names.
        counted: (B,) bool.
        with_extremes: True to also return the maximum and the minimum.
    """
    metrics = {}
    for name, column in columns.items():
        if is_prediction(name.removeprefix("reward/")):
            continue
        values = [value for value in column[counted] if value is not None]
        # an entry that is a text in any row has no mean
        has_text = any(isinstance(value, str) for value in values)
        if has_text or not values:
            continue
        metrics[f"{name}/mean"] = Metric.mean(sum(values), len(values))
        if with_extremes:
            metrics[f"{name}/max"] = Metric.max(max(values))
            metrics[f"{name}/min"] = Metric.min(min(values))
    return metrics


# -------------------------------------------------------------------------------------------- adjustments of the scores


def mask_failed(batch: DataProto) -> DataProto:
    """Returns the batch with an empty response_mask, and so no weight, for samples whose reward failed."""
    column = batch.non_tensor_batch["reward_failed"]
    failed = torch.from_numpy(column.astype(bool))
    if not failed.any():
        return batch
    # `select` copies the table of columns, so the caller's batch keeps its mask
    result = batch.select()
    mask = batch.batch["response_mask"]
    result.batch["response_mask"] = mask * ~failed[:, None]
    return result


def punish_overlong(batch: DataProto, config: PPOConfig) -> tuple[DataProto, dict[str, Metric]]:
    """Adds the penalty of `reward.overlong_buffer` to each answer's score; without it, returns the batch unchanged.

    The penalty of DAPO (arXiv:2503.14476, eq. 13) is 0 up to the last `len` tokens of the maximal length, and then
    linear up to -penalty_factor. Answers whose reward failed have no penalty.

    Reads token_level_scores and response_mask (B, R). Writes token_level_scores, and outcomes (B,) with the unpenalized
    scores for the filter of groups. With reward.overlong_buffer.log, also writes reward/overlong_reward and
    reward/overlong (0 or 1).

    Returns:
        The batch, and with reward.overlong_buffer.log the means of the two columns over counted answers.

    Raises:
        UserError: if the reward function returned an entry with the name of a written column.
    """
    options = config.reward.overlong_buffer
    if not options.enable:
        return batch, {}
    lengths = (batch.batch["response_mask"] != 0).sum(1)
    penalty = _overlong_penalty(lengths, config)

    # the score of an answer is on its last token; an empty answer gets the penalty 0 on its first position
    last_tokens = (lengths - 1).clamp(min=0)
    rows = torch.arange(len(batch))
    # a copy, because the caller's batch keeps its scores
    scores = batch.batch["token_level_scores"].clone()
    result = batch.select()
    result.batch["outcomes"] = scores.sum(1)
    scores[rows, last_tokens] += penalty
    result.batch["token_level_scores"] = scores
    if not options.log:
        return result, {}

    check_no_such_entry(OVERLONG, batch.non_tensor_batch, OVERLONG_TAKEN)
    is_punished = (penalty < 0).float()
    counted = int((lengths > 0).sum())
    metrics = {}
    for name, values in zip(OVERLONG, (penalty, is_punished), strict=True):
        column = f"reward/{name}"
        total = float(values.sum())
        result.non_tensor_batch[column] = as_column(values.tolist())
        metrics[f"{column}/mean"] = Metric.mean(total, counted)
    return result, metrics


def _overlong_penalty(lengths: torch.Tensor, config: PPOConfig) -> torch.Tensor:
    """Returns the (B,) penalties of answers with these numbers of tokens, which are 0 or negative."""
    options = config.reward.overlong_buffer
    # the buffer is the last part of the largest length
    longest_unpunished = config.data.max_response_length - options.len
    exceeding = lengths.float() - longest_unpunished
    penalty = -exceeding / options.len * options.penalty_factor
    # positive for answers that end before the buffer
    penalty = penalty.clamp(max=0.0)
    # an empty answer, such as that of a failed reward, has no penalty
    return torch.where(lengths > 0, penalty, 0)


def take_greedy_baselines(batch: DataProto) -> tuple[DataProto, dict[str, Metric]]:
    """Removes ReMax's greedy answers and writes their scores as reward_baselines (B,) of the rows with the same prompt.

    Reads is_greedy, uid, token_level_scores and response_mask. If the reward of a greedy answer failed, its prompt has
    no baseline and the prompt's rows are masked as in `mask_failed`. A batch without greedy answers is returned
    unchanged.

    Returns:
        The batch, and the metrics reward/baseline_error_rate, the share of prompts without a baseline, and
        critic/reward_baselines/mean, the mean over the others.
    """
    if "is_greedy" not in batch:
        return batch, {}
    is_greedy = batch.non_tensor_batch["is_greedy"].astype(bool)
    greedy = batch.select_idxs(is_greedy)
    result = batch.select_idxs(~is_greedy)
    del result.non_tensor_batch["is_greedy"]

    # `mask_failed` has emptied the masks of failed rewards before
    greedy_mask = greedy.batch["response_mask"]
    has_baseline = (greedy_mask != 0).any(-1)
    baselines = outcome_scores(greedy.batch["token_level_scores"], greedy_mask)

    # each prompt has one greedy answer
    greedy_row_by_uid = {uid: row for row, uid in enumerate(greedy.non_tensor_batch["uid"])}
    greedy_rows = [greedy_row_by_uid[uid] for uid in result.non_tensor_batch["uid"]]
    row_has_baseline = has_baseline[greedy_rows]
    mask = result.batch["response_mask"]
    result.batch["reward_baselines"] = baselines[greedy_rows]
    result.batch["response_mask"] = mask * row_has_baseline[:, None]

    # the baseline of a failed reward is 0 and adds nothing to the sum
    total = float(baselines.sum())
    num_prompts = len(has_baseline)
    num_baselines = int(has_baseline.sum())
    num_failed = float(num_prompts - num_baselines)
    return result, {
        "critic/reward_baselines/mean": Metric.mean(total, num_baselines),
        "reward/baseline_error_rate": Metric.mean(num_failed, num_prompts),
    }


def check_no_such_entry(names: Iterable[str], columns: Container[str], use: str) -> None:
    """Raises UserError if a column `reward/<name>` exists.

    Args:
        names: Names that the trainer writes itself.
        columns: Names of the existing columns.
        use: Use of the column and advice, for the message.
    """
    for name in names:
        if f"reward/{name}" in columns:
            raise UserError(f"The reward function returned an entry {name!r}, which is {use}")
