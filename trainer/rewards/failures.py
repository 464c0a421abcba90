"""Samples whose reward failed: kept in a file, the first one shown, and the run stopped where there are too many.

Takes the results of each batch in turn, of training and validation alike.
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
"""The share of failures is taken over at least so many rewards: one hang among four answers is no reason to stop."""

_KEPT_PER_BATCH = 100
_SHOWN_CHARACTERS = 1000


class RewardFailure(RuntimeError):
    """Too many rewards failed. Carries the first failure of the batch."""


@dataclass
class Failures:
    """What failed among the last batches, against a limit.

    what: failed, in one word. option, max_error_rate: the limit and its key. error: raised beyond it. path: of the
    file, json lines. show: gets the first failure of the run as text.
    """

    what: str
    option: str
    max_error_rate: float
    error: type[Exception]
    path: Path
    show: Callable[[str], None]
    _recent: deque[tuple[int, int]] = field(default_factory=deque)  # failures and things of the last batches
    _shown: bool = False

    def note(self, failed: int, total: int, rows: Iterable[dict[str, Any]], first: str | None) -> None:
        """Takes in a batch. rows: of the file. first: the first failure of the batch as text.

        Raises the error if more than the limit failed: of the last batches that have at least 20 things together, and
        while there are fewer, of 20.
        """
        self._recent.append((failed, total))
        while sum(things for _, things in self._recent) - self._recent[0][1] >= LEAST_REWARDS:
            self._recent.popleft()
        if not failed:
            return
        where = f"See {self.path}"
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(row, default=str) + "\n" for row in rows)
        except OSError as error:  # a full disk does not end a run
            where = f"They could not be written to {self.path} ({error.strerror})"
        failures, things = (sum(column) for column in zip(*self._recent, strict=True))
        allowed = self.max_error_rate * max(LEAST_REWARDS, things)
        if failures > allowed:
            failure = self.error(
                f"{failures} of {things} {self.what}s failed; {self.option}={self.max_error_rate} allows "
                f"{int(allowed)}. {where}. Mend what fails, or raise the limit.\n{printable(str(first))}"
            )
            add_circumstances(failure, traceback=printable(str(first)))
            raise failure
        if not self._shown:
            self._shown = True
            self.show(
                f"a {self.what} failed: it is left out of loss, groups and metrics, and counted. Later ones are not "
                f"shown. {where}. It was {printable(str(first))}"
            )


class FailureLog:
    """Counts failed rewards against `max_error_rate` and writes them to reward_failures.jsonl in `run_dir`.

    decode: token ids to text, for the answers in file and message. show: gets the first failure of the run as text.
    """

    def __init__(
        self,
        max_error_rate: float,
        run_dir: Path,
        decode: Callable[[list[int]], str] = str,
        show: Callable[[str], None] = print,
    ) -> None:
        path = run_dir / "reward_failures.jsonl"
        self._failures = Failures("reward", "reward.max_error_rate", max_error_rate, RewardFailure, path, show)
        self._decode = decode

    def check(self, batch: DataProto, results: Sequence[RewardResult]) -> None:
        """Notes the results of a batch's rows. Reads sample_id, data_source, responses and response_mask.

        Raises RewardFailure if more than `max_error_rate` of them failed; see `Failures.note`.
        """
        columns, rows, first = batch.non_tensor_batch, [], None
        failed = [row for row, result in enumerate(results) if result.failed]
        for row in failed[:_KEPT_PER_BATCH]:
            ids = batch.batch["responses"][row][batch.batch["response_mask"][row].bool()].tolist()
            given = columns["reward_model"][row] if "reward_model" in columns else {}
            kept = {name: columns[name][row] for name in ("sample_id", "data_source")}
            kept |= {"ground_truth": given.get("ground_truth"), "response": self._decode(ids), "response_ids": ids}
            rows.append(kept | {"timed_out": results[row].timed_out, "error": results[row].error})
        if rows:
            answer = rows[0]["response"]
            cut = answer if len(answer) <= _SHOWN_CHARACTERS else answer[:_SHOWN_CHARACTERS] + " ..."
            where = f"sample {rows[0]['sample_id']} of data_source={rows[0]['data_source']!r}"
            first = f"{where}, with the answer\n{cut}\nand the error\n{rows[0]['error']}"
        self._failures.note(len(failed), len(results), rows, first)
