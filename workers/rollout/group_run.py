"""Runs the groups of samples of one rollout engine: answers to a prompt, or episodes of an environment.

The driver (`trainer.rollout.scheduler`) decides which groups run. `GroupRun` starts them (`begin`), runs them until the
driver's call ends (`run`), in slices between training micro-batches (`run_slice`), or in slices of a thread that does
nothing else (`run_for`), and returns the groups that are complete.
"""

import math
import time
from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

import torch

from verl_lite.machine.profiling import count_moved
from verl_lite.metrics import Metric
from verl_lite.protocol import DataProto
from workers.engines.base import SamplingParams
from workers.rollout.specs import EpisodeCounts, GroupPlan, GroupReport, GroupResults

MOST_SLICE_S = 1.0
"""Longest slice between two training micro-batches."""
WAIT_S = 0.05
"""Longest wait for other processes, after which a loop looks at the clock and at the complete groups again."""


class CompleteGroup(NamedTuple):
    """The rows of a group in which no sample is running.

    Attributes:
        rows: The rows.
        counts: Counts of its episodes; None for answers.
    """

    rows: DataProto
    counts: EpisodeCounts | None = None


class SampleRunner(Protocol):
    """Runs one kind of samples: `answers.AnswerRunner`, `episodes.EpisodeRunner` or `programs.ProgramRunner`."""

    def begin(self, plan: GroupPlan, sampling: SamplingParams) -> None:
        """Starts the samples of a group. Raises TypeError if they are of another kind."""

    def advance(self, wait_s: float = 0.0, until_completion: bool = False) -> None:
        """Makes at most one engine step, or steps until a request finishes.

        Args:
            wait_s: Seconds to wait for other processes if there is nothing to decode.
            until_completion: True to step until a request finishes, where nothing else needs attention meanwhile.
        """

    def is_finished(self, key: str) -> bool:
        """Returns True if no sample of the group is running."""

    def snapshot(self, key: str) -> GroupPlan | None:
        """Returns a plan that continues a running group; None if its samples cannot be continued."""

    def abort(self, key: str) -> int:
        """Ends a group without rows. Returns the number of tokens that it had sampled."""

    def take(self, key: str) -> CompleteGroup:
        """Removes a group in which no sample is running, and returns its rows."""

    @property
    def is_decoding(self) -> bool:
        """True if the engine has tokens to sample."""

    def take_metrics(self, seconds: float) -> dict[str, Metric]:
        """Returns the metrics since the last call, in which `seconds` were spent sampling."""

    def close(self) -> None:
        """Ends the processes and threads that the runner uses besides the engine."""


class GroupRun:
    """Runs groups on one engine. A `SampleRunner` runs their samples."""

    def __init__(self, runner: SampleRunner) -> None:
        self._runner = runner
        # number of samples of each running group, by key
        self._open: dict[str, int] = {}
        # groups that `take` has not returned yet
        self._complete: list[tuple[GroupReport, DataProto]] = []
        # end of the last slice
        self._sliced_at = time.perf_counter()
        # seconds in calls that only sample, and in slices between other work (`run_slice`), since the last metrics
        self._active_s = 0.0
        self._beside_s = 0.0

    @property
    def is_idle(self) -> bool:
        """True if no group is running."""
        return not self._open

    @property
    def num_samples(self) -> int:
        """Number of samples of the running groups."""
        return sum(self._open.values())

    @property
    def has_complete(self) -> bool:
        """True if a group is complete and was not taken yet."""
        return bool(self._complete)

    def begin(self, plans: Sequence[GroupPlan], sampling: SamplingParams) -> None:
        """Starts these groups."""
        started = time.perf_counter()
        for plan in plans:
            self._runner.begin(plan, sampling)
            self._open[plan.key] = len(plan.samples)
        # environments and programs of the groups start now, and not at the next call
        if plans:
            self.advance()
        self._active_s += time.perf_counter() - started

    def run(self, keys: Collection[str], seconds: float | None = None) -> GroupResults:
        """Runs until the groups with these keys are complete, or for this time.

        Returns:
            All groups that were completed since the last call, also others, in the order of their completion.
        """
        started = time.perf_counter()
        wanted = set(keys)
        has_limit = seconds is not None
        until = math.inf if seconds is None else started + seconds
        while not wanted.isdisjoint(self._open) and time.perf_counter() < until:
            # a call with a limit looks at the clock between two engine steps
            self.advance(WAIT_S, until_completion=not has_limit)
        self._active_s += time.perf_counter() - started
        return self.take(with_metrics=not has_limit)

    def run_for(self, seconds: float) -> None:
        """Runs the groups for this time, or until one of them is complete."""
        started = time.perf_counter()
        until = started + seconds
        while self._open and not self._complete and time.perf_counter() < until:
            self.advance(WAIT_S)
        self._active_s += time.perf_counter() - started

    def take(self, with_metrics: bool) -> GroupResults:
        """Returns the complete groups, and the metrics since they were last taken."""
        complete = self._complete
        self._complete = []
        metrics = self._take_metrics() if with_metrics else {}
        if not complete:
            return GroupResults([], None, metrics)

        reports = [report for report, _ in complete]
        rows = DataProto.concat([group_rows for _, group_rows in complete])
        # these bytes go to the driver
        for column in rows.batch.values():
            if isinstance(column, torch.Tensor):
                count_moved(column.nbytes)
        return GroupResults(reports, rows, metrics)

    def snapshot(self) -> list[GroupPlan]:
        """Returns plans that continue the running groups, as far as their samples can be continued."""
        plans = []
        for key in self._open:
            plan = self._runner.snapshot(key)
            if plan is not None:
                plans.append(plan)
        return plans

    def abort(self, keys: Collection[str]) -> int:
        """Ends running groups without rows, and forgets complete ones. Returns the number of tokens of the former."""
        self._complete = [(report, rows) for report, rows in self._complete if report.key not in keys]
        num_tokens = 0
        for key in list(self._open):
            if key in keys:
                del self._open[key]
                num_tokens += self._runner.abort(key)
        return num_tokens

    def run_slice(self) -> None:
        """Runs the groups between two parts of other work of the process: at most as long as that work took since the
        last slice, and only while there is something to decode."""
        if self.is_idle:
            return
        started = time.perf_counter()
        other_work_s = started - self._sliced_at
        until = started + min(other_work_s, MOST_SLICE_S)
        # once in any case, so that replies of environments become requests
        self.advance()
        while self._open and self._runner.is_decoding and time.perf_counter() < until:
            self.advance()
        self._sliced_at = time.perf_counter()
        self._beside_s += self._sliced_at - started

    def advance(self, wait_s: float = 0.0, until_completion: bool = False) -> None:
        """Advances the samples (see `SampleRunner.advance`) and collects the groups that are complete."""
        self._runner.advance(wait_s, until_completion)
        for key in list(self._open):
            if not self._runner.is_finished(key):
                continue
            del self._open[key]
            group = self._runner.take(key)
            report = GroupReport(key, len(group.rows), group.counts)
            self._complete.append((report, group.rows))

    def close(self) -> None:
        """Ends the processes and threads of the runner."""
        self._runner.close()

    def _take_metrics(self) -> dict[str, Metric]:
        """Returns the durations since the last call, and the metrics of the runner in this time."""
        active_s = self._active_s
        beside_s = self._beside_s
        self._active_s = 0.0
        self._beside_s = 0.0
        metrics = {
            "rollout/slowest_rank_seconds": Metric.max(active_s),
            "rollout/mean_rank_seconds": Metric.mean(active_s, 1),
        }
        if beside_s:
            metrics["rollout/seconds_beside_training"] = Metric.mean(beside_s, 1)
        return metrics | self._runner.take_metrics(active_s + beside_s)
