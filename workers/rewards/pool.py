"""Scores answers in processes of their own, which are killed when they hang and replaced when they die.

Takes `RewardItem`s at any time from any thread (`submit`), gives `RewardResult`s by key (`collect`). A sample whose
reward raises, returns nonsense, takes longer than `reward.timeout_s` or takes its process down is `failed`; the samples
that were in the process with it are scored all the same. `workers.rewards.supervisor` is the thread that sees to it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_lite.config import RewardConfig
from verl_lite.errors import UserError
from verl_lite.rewards import RewardItem, RewardResult, Scorer, asks_by_source, find_reward
from workers.rewards.process import ProcessOptions, load
from workers.rewards.supervisor import Supervisor


class RewardError(UserError):
    """The reward function cannot be used at all: it does not load, or fails on a row of the dataset."""


class RewardPool:
    """The reward function of a run, in `num_workers` processes; 0 = in the caller's thread, where a debugger can stop
    (and no deadline holds).

    modules: imported in each process, for the rewards that they register (`verl_lite.rewards.reward_modules()`).
    log_dir: what reward functions print goes to reward-{process}.log there; None drops it.
    """

    def __init__(
        self, config: RewardConfig, num_workers: int, *, modules: Sequence[str] = (), log_dir: str | None = None
    ) -> None:
        self._config = config
        self._num_workers = num_workers
        self._modules = tuple(modules)
        self._log_dir = log_dir
        self._mailbox = _Mailbox()
        self._scorer: Scorer | None = None
        self._supervisor: Supervisor | None = None
        self._starting = threading.Lock()

    def start(self) -> None:
        """Starts the processes without waiting for them; `submit` does it at first use."""
        with self._starting:
            if self._num_workers == 0:
                self._scorer = self._scorer or load(self._config, self._modules)
            elif self._supervisor is None:
                self._supervisor = Supervisor(self._config, self._options(), self._mailbox.put, self._mailbox.fail)
                self._supervisor.start()

    def submit(self, items: Iterable[RewardItem]) -> None:
        """Queues samples and returns at once. Raises ValueError for a key that is queued or not yet collected."""
        self.start()
        items = list(items)
        self._mailbox.expect([item.key for item in items])
        if self._supervisor is not None:
            self._supervisor.queue(items)
        elif self._scorer is not None:
            size = self._config.batch_size if self._scorer.style == "batch" else 1
            for start in range(0, len(items), size):
                batch = items[start : start + size]
                results = self._scorer.score_all(batch)
                self._mailbox.put([(item.key, result) for item, result in zip(batch, results, strict=True)])

    def collect(self, keys: Iterable[Hashable]) -> dict[Hashable, RewardResult]:
        """The results of these keys, in their order, each handed out once. Blocks until all are there; they may be
        submitted later, by another thread. Raises RewardError if the reward function does not load."""
        return self._mailbox.take(list(keys))

    def dry_run(self, rows: Iterable[Mapping[str, Any]], data_sources: Iterable[str] = ()) -> list[RewardResult]:
        """Scores dataset rows with their ground truth as the answer, before anything heavy starts.

        rows: data_source, reward_model["ground_truth"] and optionally extra_info. data_sources: every source of the
        dataset, each of which must have a reward function. Raises RewardError with the traceback and the row, or
        UserError for an unknown source. The score itself is not judged: a bare ground truth need not be an answer.
        """
        if asks_by_source(self._config):
            load(self._config, self._modules)
            for data_source in data_sources:
                find_reward(data_source)
        rows = list(rows)
        items = [_ground_truth_item(index, row) for index, row in enumerate(rows)]
        self.submit(items)
        results = list(self.collect(item.key for item in items).values())
        for row, result in zip(rows, results, strict=True):
            if result.failed:
                raise RewardError(
                    "The reward function fails on a row of the dataset, given its ground truth as the answer. "
                    f"Nothing was started.\n{result.error}\nThe row:\n{json.dumps(row, indent=2, default=str)[:4000]}"
                )
        return results

    def processes_replaced(self) -> int:
        """How many reward processes were replaced so far: killed, dead, or grown too large."""
        return 0 if self._supervisor is None else self._supervisor.processes_replaced

    def close(self) -> None:
        """Ends all reward processes, busy or not. Samples that are not collected are lost."""
        if self._supervisor is not None:
            self._supervisor.close()

    def _options(self) -> list[ProcessOptions]:
        if self._log_dir is not None:
            Path(self._log_dir).mkdir(parents=True, exist_ok=True)
        logs = [self._log_dir and str(Path(self._log_dir) / f"reward-{slot}.log") for slot in range(self._num_workers)]
        return [ProcessOptions(self._config, self._modules, log) for log in logs]


def _ground_truth_item(index: int, row: Mapping[str, Any]) -> RewardItem:
    truth = row["reward_model"]["ground_truth"]
    return RewardItem(
        ("dry_run", index), row["data_source"], str(truth), truth, row.get("extra_info"), row.get("prompt")
    )


class _Mailbox:
    """Results by key, between the threads that make them and those that wait for them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._expected: set[Hashable] = set()
        self._results: dict[Hashable, RewardResult] = {}
        self._failure: str | None = None

    def expect(self, keys: list[Hashable]) -> None:
        with self._changed:
            self._raise_failure()
            for key in keys:
                if key in self._expected or key in self._results:
                    raise ValueError(f"reward sample {key!r} is already submitted and not yet collected")
                self._expected.add(key)

    def put(self, results: list[tuple[Hashable, RewardResult]]) -> None:
        with self._changed:
            self._results.update(results)
            self._expected.difference_update(key for key, _ in results)
            self._changed.notify_all()

    def take(self, keys: list[Hashable]) -> dict[Hashable, RewardResult]:
        missing = set(keys)
        with self._changed:
            missing.difference_update(self._results)
            while missing:
                self._raise_failure()
                self._changed.wait()
                missing.difference_update(self._results)
            return {key: self._results.pop(key) for key in keys}

    def fail(self, reason: str) -> None:
        """From now on whoever waits or submits gets a RewardError; the first reason stands."""
        with self._changed:
            self._failure = self._failure or reason
            self._changed.notify_all()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise RewardError(self._failure)
