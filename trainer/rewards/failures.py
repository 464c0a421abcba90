"""The log of failed items of a run: it writes them to a file, shows the first, and stops the run if too many fail.

Rewards, episodes and requests to teachers each have a `FailureLog`. The results of every training and validation batch
pass through the one of the rewards.
"""

import json
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from trainer.validation.sample import plain_value
from verl_lite.errors import add_circumstances, printable
from verl_lite.json_types import JsonMapping, JsonObject
from verl_lite.protocol import DataProto
from verl_lite.rewards import RewardResult

LEAST_REWARDS = 20
"""Smallest number of rewards for the share of failures, so that one failure among four answers does not stop a run."""

_LOGGED_PER_BATCH = 100
"""Largest number of failures of a batch in the file, which could otherwise grow by all answers of every step."""
_SHOWN_CHARACTERS = 1000
"""Characters of an answer in a message."""


class RewardFailure(RuntimeError):
    """Raised if too many rewards failed. Contains the first failure of the batch."""


class _BatchCounts(NamedTuple):
    """The number of failed items and of all items of a batch."""

    failed: int
    total: int


@dataclass
class FailureLog:
    """Counts the failures in recent batches and compares them with a limit.

    Attributes:
        what: Name of the kind of failed item, for messages.
        option: Configuration key of the limit.
        max_error_rate: The limit, a share of the items.
        error: Exception that is raised above the limit.
        path: The jsonl file of the failures.
        show: Called with the first failure as text.
        least: Smallest number of items over which the share is computed.
    """

    what: str
    option: str
    max_error_rate: float
    error: type[Exception]
    path: Path
    show: Callable[[str], None]
    least: int = LEAST_REWARDS
    _recent: deque[_BatchCounts] = field(default_factory=deque)
    _has_shown: bool = False

    def note(self, failed: int, total: int, rows: Iterable[JsonMapping], first: str | None) -> None:
        """Adds the failures of a batch.

        The share of failures is computed over the most recent batches that together have at least `least` items, and
        over `least` while there are fewer.

        Args:
            failed: number of failed items of the batch.
            total: number of items of the batch.
            rows: rows for the file.
            first: the first failure of the batch as text.

        Raises:
            The error of the log: if the share of failures is above the limit.
        """
        self._recent.append(_BatchCounts(failed, total))
        items = sum(counts.total for counts in self._recent)
        # the oldest batch leaves as soon as the others are enough: the share follows the present state of the run
        while items - self._recent[0].total >= self.least:
            items -= self._recent.popleft().total
        if not failed:
            return

        # written before the limit is checked, so that the file also explains an error that ends the run
        where = self._write(rows)
        first_text = printable(str(first))
        failures = sum(counts.failed for counts in self._recent)
        # while there are fewer items than `least`, the share is one of `least` items
        allowed = self.max_error_rate * max(self.least, items)
        if failures > allowed:
            failure = self.error(
                f"{failures} of {items} {self.what}s failed; {self.option}={self.max_error_rate} allows "
                f"{int(allowed)}. {where}. Fix the cause, or raise the limit.\n{first_text}"
            )
            add_circumstances(failure, traceback=first_text)
            raise failure

        if not self._has_shown:
            self._has_shown = True
            article = "an" if self.what[0] in "aeiou" else "a"
            self.show(
                f"{article} {self.what} failed: its sample is left out of loss, groups and metrics, and counted. Later "
                f"failures are not shown. {where}. The failure was {first_text}"
            )

    def _write(self, rows: Iterable[JsonMapping]) -> str:
        """Appends rows to the file. Returns the sentence that says where they are."""
        try:
            with self.path.open("a", encoding="utf-8") as file:
                for row in rows:
                    file.write(json.dumps(row, default=str) + "\n")
        # a full disk does not end a run
        except OSError as error:
            return f"They could not be written to {self.path} ({error.strerror})"
        return f"See {self.path}"


def reward_failure_log(
    max_error_rate: float, run_dir: Path, show: Callable[[str], None] = print, least: int = LEAST_REWARDS
) -> FailureLog:
    """Returns the log of failed rewards, which writes reward_failures.jsonl in `run_dir`.

    Args:
        max_error_rate: the option reward.max_error_rate.
        run_dir: the run folder.
        show: called with the first failure as text.
        least: see `FailureLog`; with dynamic sampling, groups are scored a few at a time.
    """
    path = run_dir / "reward_failures.jsonl"
    return FailureLog("reward", "reward.max_error_rate", max_error_rate, RewardFailure, path, show, least)


def note_failed_rewards(
    log: FailureLog, batch: DataProto, results: Sequence[RewardResult], decode: Callable[[list[int]], str]
) -> None:
    """Adds the results of a batch's rows to the log.

    Args:
        log: log of failed rewards.
        batch: reads sample_id, data_source, responses, response_mask, and reward_model if present.
        results: one result per row.
        decode: converts the token ids of an answer to text.

    Raises:
        RewardFailure: if more than `max_error_rate` of the rewards failed; see `FailureLog.note`.
    """
    num_failed = 0
    entries = []
    for row, result in enumerate(results):
        if result.failed:
            num_failed += 1
            if num_failed <= _LOGGED_PER_BATCH:
                entries.append(_entry(batch, row, result, decode))
    first = None
    if entries:
        first = _first_failure(entries[0])
    log.note(num_failed, len(results), entries, first)


def _entry(batch: DataProto, row: int, result: RewardResult, decode: Callable[[list[int]], str]) -> JsonObject:
    """Returns the entry of a failed row in the file.

    Args:
        batch: Scored rows.
        row: Index of the failed row.
        result: Its result.
        decode: Converts the token ids of an answer to text.
    """
    columns = batch.non_tensor_batch
    ground_truth = None
    if "reward_model" in columns:
        ground_truth = columns["reward_model"][row].get("ground_truth")
    answer = batch.batch["responses"][row]
    is_answer = batch.batch["response_mask"][row].bool()
    ids = answer[is_answer].tolist()
    return {
        "sample_id": columns["sample_id"][row],
        "data_source": columns["data_source"][row],
        "ground_truth": plain_value(ground_truth),
        "response": decode(ids),
        "response_ids": ids,
        "timed_out": result.timed_out,
        "error": result.error,
    }


def _first_failure(entry: JsonMapping) -> str:
    """Returns an entry of the file as text, with the beginning of its answer."""
    answer = entry["response"]
    if len(answer) > _SHOWN_CHARACTERS:
        answer = f"{answer[:_SHOWN_CHARACTERS]} ..."
    sample = f"sample {entry['sample_id']} of data_source={entry['data_source']!r}"
    return f"{sample}, with the answer\n{answer}\nand the error\n{entry['error']}"
