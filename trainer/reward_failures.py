"""Samples whose reward failed: kept in a file, the first one shown, and the run stopped where there are too many.

Takes the results of each batch in turn, of training and validation alike.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from verl_lite.protocol import DataProto
from verl_lite.rewards import RewardResult

LEAST_REWARDS = 20
"""The share of failures is taken over at least so many rewards: one hang among four answers is no reason to stop."""

_KEPT_PER_BATCH = 100
_SHOWN_CHARACTERS = 1000


class RewardFailure(RuntimeError):
    """Too many rewards failed. Carries the first failure of the batch."""


class FailureRate:
    """Failures among the things of the last batches, at least 20 of them, against the share that may fail."""

    def __init__(self, max_error_rate: float) -> None:
        self._max_error_rate = max_error_rate
        self._recent: deque[tuple[int, int]] = deque()  # failures and things of the last batches

    def note(self, failed: int, total: int) -> tuple[int, int, float]:
        """Takes in a batch. Gives the failures and things that count now, and how many may have failed: while there are
        fewer than 20, the share of 20."""
        self._recent.append((failed, total))
        while sum(things for _, things in self._recent) - self._recent[0][1] >= LEAST_REWARDS:
            self._recent.popleft()
        failures, things = (sum(column) for column in zip(*self._recent, strict=True))
        return failures, things, self._max_error_rate * max(LEAST_REWARDS, things)


class FailureLog:
    """Counts failures against `max_error_rate` and writes them to reward_failures.jsonl in `run_dir`.

    decode: token ids to text, for the answers in file and message. show: gets the first failure of the run as text.
    """

    def __init__(
        self,
        max_error_rate: float,
        run_dir: Path,
        decode: Callable[[list[int]], str] = str,
        show: Callable[[str], None] = print,
    ) -> None:
        self._max_error_rate = max_error_rate
        self._path = run_dir / "reward_failures.jsonl"
        self._decode, self._show = decode, show
        self._rate = FailureRate(max_error_rate)
        self._shown = False

    def check(self, batch: DataProto, results: Sequence[RewardResult]) -> None:
        """Notes the results of a batch's rows. Reads sample_id, data_source, responses and response_mask.

        Raises RewardFailure if more than `max_error_rate` of them failed. A batch of fewer than 20 rewards counts
        together with those before it, and while there are none, as 20.
        """
        failed = [row for row, result in enumerate(results) if result.failed]
        failures, rewards, allowed = self._rate.note(len(failed), len(results))
        if not failed:
            return
        samples = [self._sample(batch, row, results[row]) for row in failed[:_KEPT_PER_BATCH]]
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(sample, default=str) + "\n" for sample in samples)
        first = self._text(samples[0])
        if failures > allowed:
            raise RewardFailure(
                f"{failures} of {rewards} rewards failed; reward.max_error_rate={self._max_error_rate} allows "
                f"{int(allowed)}. They are in {self._path}. Mend the reward, or raise the limit. The first of this "
                f"batch: {first}"
            )
        if not self._shown:
            self._shown = True
            self._show(
                "a reward failed; its answer is left out of loss, groups and metrics, and counts in reward/error_rate. "
                f"Later ones are not shown; all are in {self._path}. It was {first}"
            )

    def _sample(self, batch: DataProto, row: int, result: RewardResult) -> dict[str, Any]:
        columns = batch.non_tensor_batch
        ids = batch.batch["responses"][row][batch.batch["response_mask"][row].bool()].tolist()
        truths = columns.get("reward_model")
        return {
            "sample_id": columns["sample_id"][row],
            "data_source": columns["data_source"][row],
            "ground_truth": None if truths is None else truths[row].get("ground_truth"),
            "response": self._decode(ids),
            "response_ids": ids,
            "timed_out": result.timed_out,
            "error": result.error,
        }

    def _text(self, sample: dict[str, Any]) -> str:
        answer = sample["response"]
        cut = answer if len(answer) <= _SHOWN_CHARACTERS else answer[:_SHOWN_CHARACTERS] + " ..."
        return (
            f"sample {sample['sample_id']} of data_source={sample['data_source']!r}, with the answer\n{cut}\n"
            f"and the error\n{sample['error']}"
        )
