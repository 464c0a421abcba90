"""Handles samples whose reward failed: logs them to a file, shows the first, and stops the run if too many fail.

The results of every training and validation batch pass through this module.
"""

import json
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_lite.errors import add_circumstances, printable
from verl_lite.protocol import DataProto
from verl_lite.rewards import RewardResult

LEAST_REWARDS = 20
"""Smallest number of rewards for the share of failures, so that one failure among four answers does not stop a run."""

_KEPT_PER_BATCH = 100
_SHOWN_CHARACTERS = 1000


class RewardFailure(RuntimeError):
    """Raised if too many rewards failed. Contains the first failure of the batch."""


@dataclass
class Failures:
    """Counts the failures in recent batches and compares them with a limit.

    what: name of the kind of failed item. option: configuration key of max_error_rate, the limit. error: exception
    that is raised above the limit. path: jsonl file of the failures. show: called with the first failure as text.
    least: smallest number of items over which the share is computed.
    """

    what: str
    option: str
    max_error_rate: float
    error: type[Exception]
    path: Path
    show: Callable[[str], None]
    least: int = LEAST_REWARDS
    _recent: deque[tuple[int, int]] = field(default_factory=deque)  # (failed, total) of the last batches
    _shown: bool = False

    def note(self, failed: int, total: int, rows: Iterable[dict[str, Any]], first: str | None) -> None:
        """Adds the failures of a batch. rows: rows for the file. first: first failure of the batch as text.

        Raises the error if the share of failures is above the limit. The share is computed over the most recent batches
        that together have at least `least` items, and over `least` while there are fewer.
        """
        self._recent.append((failed, total))
        while sum(items for _, items in self._recent) - self._recent[0][1] >= self.least:
            self._recent.popleft()
        if not failed:
            return
        where = f"See {self.path}"
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(row, default=str) + "\n" for row in rows)
        except OSError as error:  # a full disk does not end a run
            where = f"They could not be written to {self.path} ({error.strerror})"
        failures, items = (sum(column) for column in zip(*self._recent, strict=True))
        allowed = self.max_error_rate * max(self.least, items)
        if failures > allowed:
            failure = self.error(
                f"{failures} of {items} {self.what}s failed; {self.option}={self.max_error_rate} allows "
                f"{int(allowed)}. {where}. Fix the cause, or raise the limit.\n{printable(str(first))}"
            )
            add_circumstances(failure, traceback=printable(str(first)))
            raise failure
        if not self._shown:
            self._shown = True
            article = "an" if self.what[0] in "aeiou" else "a"
            self.show(
                f"{article} {self.what} failed: its sample is left out of loss, groups and metrics, and counted. Later "
                f"failures are not shown. {where}. The failure was {printable(str(first))}"
            )


class FailureLog:
    """Counts failed rewards against `max_error_rate` and writes them to reward_failures.jsonl in `run_dir`.

    decode: converts token ids to text, for the answers in the file. show: called with the first failure as text. least:
    see `Failures`; with dynamic sampling, groups are scored a few at a time.
    """

    def __init__(
        self,
        max_error_rate: float,
        run_dir: Path,
        decode: Callable[[list[int]], str] = str,
        show: Callable[[str], None] = print,
        least: int = LEAST_REWARDS,
    ) -> None:
        path = run_dir / "reward_failures.jsonl"
        self._failures = Failures("reward", "reward.max_error_rate", max_error_rate, RewardFailure, path, show, least)
        self.decode = decode

    def check(self, batch: DataProto, results: Sequence[RewardResult]) -> None:
        """Adds the results of a batch's rows. Reads sample_id, data_source, responses and response_mask.

        Raises RewardFailure if more than `max_error_rate` of them failed; see `Failures.note`.
        """
        columns, rows, first = batch.non_tensor_batch, [], None
        failed = [row for row, result in enumerate(results) if result.failed]
        for row in failed[:_KEPT_PER_BATCH]:
            ids = batch.batch["responses"][row][batch.batch["response_mask"][row].bool()].tolist()
            reward_model = columns["reward_model"][row] if "reward_model" in columns else {}
            kept = {name: columns[name][row] for name in ("sample_id", "data_source")}
            kept |= {"ground_truth": reward_model.get("ground_truth")}
            kept |= {"response": self.decode(ids), "response_ids": ids}
            rows.append(kept | {"timed_out": results[row].timed_out, "error": results[row].error})
        if rows:
            answer = rows[0]["response"]
            cut = answer if len(answer) <= _SHOWN_CHARACTERS else answer[:_SHOWN_CHARACTERS] + " ..."
            where = f"sample {rows[0]['sample_id']} of data_source={rows[0]['data_source']!r}"
            first = f"{where}, with the answer\n{cut}\nand the error\n{rows[0]['error']}"
        self._failures.note(len(failed), len(results), rows, first)
