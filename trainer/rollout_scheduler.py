"""Decides which groups of samples run, for which training step and how far ahead, and filters the scored groups.

A group is the answers to a prompt, or the episodes of an environment. A source (`trainer.group_sources`) draws groups
in a fixed order, and the ranks sample them (`workers.rollout.group_run`). The batch of a step consists of the first N
groups in the order of the source that pass the filter; each dropped group is replaced by the next group of the source
at once. The result does not depend on time.

With async_training.batches_ahead = A, groups of the next A steps are sampled while the trainer works. Version v denotes
the weights after step v. The staleness of a group in step s is s - 1 minus the version with which it was started. No
group with a staleness above async_training.max_off_policy_threshold = K is trained on, because `get_batch` waits for a
group that would otherwise become too old. Without async_training.partial_rollout each batch consists of the groups that
were drawn for it, and the weights change only when none is running. With it (default for K > 1) groups continue under
new weights, and the oldest complete groups are trained on first, so that they may overtake running ones.

With rollout.oversample = 1.25, a quarter more groups run than a batch needs, and the first complete ones form it. The
others are aborted, or with partial rollouts carried over to the next step.
"""

import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from verl_lite.config import PPOConfig
from verl_lite.metrics import Metric, combine
from verl_lite.protocol import DataProto
from workers.rollout.base import SamplingParams
from workers.rollout.specs import EpisodeCounts, GroupPlan, GroupResults

SLICE_S = 0.1
"""Seconds between two checks of the scores of complete groups while other groups are running."""

torch.serialization.add_safe_globals([Metric])  # the metrics since the last batch are part of a checkpoint


class Rows(NamedTuple):
    """Consecutive rows of a batch."""

    batch: DataProto
    start: int
    stop: int


@dataclass
class Group:
    """A group that was drawn and is not resolved yet, that is, neither trained on nor dropped.

    Attributes:
        plan: what the engines sample; without samples if the group was complete when a checkpoint was written.
        columns: the columns that the source knows. None if the engines return all columns, or if the group was complete
            when a checkpoint was written.
        version: weights with which the group was started.
        step: batch for which it was started.
        sampled: its rows once it is complete, with all columns: those of the source, those of the engines, and the
            scores if the filter needed them. A complete group therefore needs nothing else, whether its rows were
            sampled by this process or read from a checkpoint.
        counts: counts of its episodes.
        kind: verdict of the filter, "kept" or a reason to drop the group; None before that.
    """

    plan: GroupPlan
    columns: Rows | None = None
    version: int = 0
    step: int = 0
    sampled: Rows | None = None
    counts: EpisodeCounts | None = None
    kind: str | None = None


class Engines(Protocol):
    """Runs groups on the rollout engines, as `trainer.roles.ActorRole` does."""

    @property
    def num_engines(self) -> int: ...

    def begin_groups(self, plans: Sequence[GroupPlan], sampling: SamplingParams) -> None: ...

    def run_groups(self, keys: Sequence[str], seconds: float | None = None) -> list[GroupResults]: ...

    def snapshot_groups(self) -> list[GroupPlan]: ...

    def abort_groups(self, keys: Sequence[str]) -> int: ...


class GroupSource(Protocol):
    """Draws groups in a fixed order; see `trainer.group_sources`. epoch: epoch of the last group, from 0."""

    epoch: int

    def draw_batch(self, step: int, start_step: int) -> list[Group]:
        """Returns the groups of the batch of `step`, which are started in `start_step`."""

    def draw(self, number: int, step: int) -> list[Group]:
        """Returns up to `number` groups that replace dropped ones in this step; none if there are no more."""

    def update(self, batch: DataProto) -> dict[str, float]:
        """Receives a finished training batch, in the order of the steps. Returns metrics."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class GroupFilter:
    """Judges complete groups. This base class keeps every group."""

    drops = False
    """True if the filter may drop groups, so that the driver judges complete groups while others are running."""
    adds_scores = False
    """True if the filter adds the scores to the rows of the groups."""

    def judge(self, groups: Sequence[Group], wait: bool) -> None:
        """Sets `kind` of the groups whose scores are available; with wait=True waits for all scores."""
        for group in groups:
            group.kind = "kept"

    def most(self, wanted: int) -> float:
        """Returns the maximum number of groups that may be drawn for a batch of `wanted` groups."""
        return wanted

    def complete(self, step: int, groups: Sequence[Group], missing: int) -> None:
        """Keeps `missing` of the dropped groups, or raises. Called if no more groups may be drawn to replace them."""
        raise NotImplementedError

    def metrics(self, step: int, chosen: Sequence[Group], dropped: Sequence[Group]) -> dict[str, Metric]:
        """Returns metrics of the batch of this step. dropped: groups that were dropped since the last batch."""
        return {}

    def discard(self, groups: Sequence[Group]) -> None:
        """Called with groups that were aborted, whose scores are not needed."""

    def restore(self, groups: Sequence[Group]) -> None:
        """Called with the complete groups of a checkpoint, whose scores may have been lost with the processes."""


class RolloutScheduler:
    """Schedules the batches of one source.

    Args:
        engines: run the groups.
        sampling: sampling parameters.
        last_step: no group is started for steps after this one.
    """

    def __init__(
        self,
        config: PPOConfig,
        source: GroupSource,
        engines: Engines,
        sampling: SamplingParams,
        group_filter: GroupFilter | None = None,
        last_step: int = 0,
    ) -> None:
        self.source, self.engines, self.sampling = source, engines, sampling
        self.filter, self.last_step = group_filter or GroupFilter(), last_step
        self.threshold, self.batches_ahead = config.async_training.max_off_policy_threshold, config.async_training.depth
        self.spans_updates, self.oversample = config.spans_updates, config.rollout.oversample
        self.warmup = config.trainer.critic_warmup  # the weights after these steps are those of version 0
        self.version: int | None = None  # of the weights in the engines
        self.groups: list[Group] = []  # unresolved groups in the order of the source
        self.sizes: dict[int, int] = {}  # number of groups of each batch that was begun, by step
        self.counts: Counter[str] = Counter()
        self._metrics: list[dict[str, Metric]] = []
        self._is_restored = False  # True until the groups of a restored state are started again
        self._ended_at: float | None = None  # end of the last `get_batch`

    # ----------------------------------------------------------------------------------------------------- batches

    def get_batch(self, step: int) -> DataProto:
        """Returns the rows of the batch of this step (from 1), ordered by group.

        meta_info has `metrics` of the engines, the scheduler and the filter, and for episodes `episodes`, an
        EpisodeCounts that includes dropped groups.
        """
        self._begin_again()
        if step not in self.sizes:
            self._begin_batch(step, step)
        started = time.perf_counter()
        # groups of this batch that an earlier step dropped without a replacement are replaced in addition
        budget = self.filter.most(self.sizes[step]) - self.sizes[step] + max(0, self._missing(step))
        while (chosen := self._chosen(step)) is None:
            budget -= self._advance(step, budget)
        if self._is_sliced:
            self._collect((), self.groups)  # calls with a time limit return no metrics
        waited = time.perf_counter() - started
        taken = {id(group) for group in chosen}
        dropped = [group for group in self.groups if group.kind not in ("kept", None) and id(group) not in taken]
        gone = taken | {id(group) for group in dropped}
        surplus = [group for group in self._candidates(step) if id(group) not in gone] if self._aborts else []
        gone |= {id(group) for group in surplus}
        self.groups = [group for group in self.groups if id(group) not in gone]
        del self.sizes[step]
        batch = assembled(chosen)
        bias = self._abort(batch, len(chosen), surplus)
        self._account(step, chosen, dropped)
        metrics = self._take_metrics()
        batch.meta_info["metrics"] = metrics | bias | self.filter.metrics(step, chosen, dropped)
        if self.batches_ahead or self.spans_updates:
            batch.meta_info["metrics"] |= self._async_metrics(step, chosen, waited, metrics) | _version_metrics(batch)
        self._ended_at = time.perf_counter()
        _add_counts(batch, [*chosen, *dropped])
        return batch

    def begin_ahead(self, step: int) -> None:
        """Starts the batches of the next steps, with the weights that the engines have. They run between micro-batches
        of training; `get_batch` and `finish` complete them. If groups span updates, call it before `get_batch` of the
        step, so that the engines do not idle while the last groups of its batch end; otherwise after it."""
        self._begin_again()
        first = step if self.spans_updates else step + 1
        for later in range(first, min(step + self.batches_ahead, self.last_step) + 1):
            if later not in self.sizes:
                self._begin_batch(later, step)

    def run(self, groups: Sequence[Group], sampling: SamplingParams) -> DataProto:
        """Samples these groups and returns their rows, for example of a validation. Running training
        groups continue during the call."""
        of_training, self._metrics = self._metrics, []
        self.engines.begin_groups([group.plan for group in groups], sampling)
        self._collect([group.plan.key for group in groups], [*groups, *self.groups])
        batch = assembled(groups)
        batch.meta_info["metrics"], self._metrics = self._take_metrics(), of_training
        _add_counts(batch, groups)
        return batch

    def finish(self) -> None:
        """Waits for all running groups."""
        if keys := self._running():
            self._collect(keys, self.groups)

    # ----------------------------------------------------------------------------------------- waiting and choosing

    def _chosen(self, step: int) -> list[Group] | None:
        """Returns the groups of the batch of this step, or None while it must wait."""
        wanted = self.sizes[step]
        chosen = [group for group in self._candidates(step) if group.kind == "kept"][:wanted]
        if len(chosen) < wanted:
            return None
        if self._aborts:
            return chosen
        taken = {id(group) for group in chosen}
        rest = [group for group in self.groups if group.kind in ("kept", None) and id(group) not in taken]
        # group number i of the rest is trained on in this step at the earliest, if older ones are trained on first
        earliest = [later for later in sorted(self.sizes) if later > step for _ in range(self.sizes[later])]
        last = max(self.sizes)
        earliest += [last + 1 + number // self.sizes[last] for number in range(len(rest) - len(earliest))]
        are_in_time = all(later <= self._last_step_of(group) for later, group in zip(earliest, rest, strict=False))
        are_complete = all(group.kind is not None for group in rest)
        return chosen if are_in_time or are_complete else None

    def _last_step_of(self, group: Group) -> int:
        """Returns the last step in which the staleness of a group does not exceed the threshold."""
        return max(group.version, self.warmup) + self.threshold + 1

    def staleness(self, step: int, group: Group) -> int:
        """Returns the number of weight updates between the start of a group and the update of this step."""
        return max(step - 1, self.warmup) - max(group.version, self.warmup)

    @property
    def _aborts(self) -> bool:
        """True if the surplus groups of a batch are aborted when the batch is complete."""
        return self.oversample > 1 and not self.spans_updates

    def _candidates(self, step: int) -> list[Group]:
        """Returns the groups that the batch of this step may consist of."""
        return [group for group in self.groups if group.step <= step] if self._aborts else self.groups

    def _missing(self, step: int) -> int:
        """Returns the number of groups that the begun batches lack because of dropped ones; negative for a surplus."""
        sizes = self.sizes[step] if self._aborts else sum(self.sizes.values())
        return sizes - sum(group.kind in ("kept", None) for group in self._candidates(step))

    @property
    def _is_sliced(self) -> bool:
        return self.filter.drops or self.spans_updates or self.oversample > 1

    def _abort(self, batch: DataProto, chosen: int, surplus: Sequence[Group]) -> dict[str, Metric]:
        """Aborts the surplus groups of a batch. Returns metrics: their number, and the bias of the lengths, which is
        the mean number of tokens of the chosen groups relative to that of all groups, minus 1. An aborted group counts
        with the tokens that it had sampled, so the true bias is at least as large."""
        if not surplus:
            return {}
        aborted = self.engines.abort_groups([group.plan.key for group in surplus if group.sampled is None])
        for group in surplus:
            if group.sampled is not None:
                rows, start, stop = group.sampled
                aborted += int(rows.batch["response_mask"][start:stop].sum())
        self.filter.discard(surplus)
        self.counts["aborted"] += len(surplus)
        kept = int(batch.batch["response_mask"].sum())
        mean = (kept + aborted) / (chosen + len(surplus))
        return {
            "rollout/oversample/aborted_groups": Metric.last(len(surplus)),
            "rollout/oversample/length_bias": Metric.last(kept / chosen / max(mean, 1e-9) - 1),
        }

    def _advance(self, step: int, budget: float) -> int:
        """Runs groups, judges those that are complete and replaces dropped ones, at most `budget`. Returns the number
        of replacements."""
        if keys := self._running():
            self._collect(keys, self.groups, SLICE_S if self._is_sliced else None)
        is_running = bool(self._running())
        unjudged = [group for group in self.groups if group.sampled is not None and group.kind is None]
        self.filter.judge(unjudged, wait=not is_running)
        missing = self._missing(step)
        replacements = self.source.draw(int(min(missing, budget)), step) if missing > 0 and budget > 0 else []
        if replacements:
            self._begin(replacements, step)
        elif missing > 0 and not is_running:
            self.filter.complete(step, self.groups, missing)
        return len(replacements)

    def _begin_batch(self, step: int, start_step: int) -> None:
        groups = self.source.draw_batch(step, start_step)
        self.sizes[step] = size = len(groups)
        more = math.ceil(size * (self.oversample - 1)) if step < self.last_step or self._aborts else 0
        if self.spans_updates:  # the surplus that earlier batches left over counts
            more += self._missing(step) - size
        self._begin(groups + (self.source.draw(more, step) if more > 0 else []), step)

    def _begin(self, groups: Sequence[Group], step: int) -> None:
        for group in groups:
            group.version, group.step = self.version or 0, step
        self.groups += groups
        self.counts["started"] += len(groups)
        self.engines.begin_groups([group.plan for group in groups], self.sampling)

    def _running(self) -> list[str]:
        return [group.plan.key for group in self.groups if group.sampled is None]

    def _collect(self, keys: Sequence[str], groups: Iterable[Group], seconds: float | None = None) -> None:
        """Runs the engines and stores the rows of the groups that are complete."""
        of_key = {group.plan.key: group for group in groups}
        results = self.engines.run_groups(keys, seconds)
        for result in results:
            self._metrics.append(result.metrics)
            start = 0
            for report in result.reports:
                group = of_key[report.key]
                stop = start + report.num_rows
                assert result.rows is not None
                group.sampled = _with_columns(group.columns, Rows(result.rows, start, stop))
                group.counts = report.counts
                start = stop

    # -------------------------------------------------------------------------------------------- numbers and state

    def _account(self, step: int, chosen: Sequence[Group], dropped: Sequence[Group]) -> None:
        """Checks that every started group is trained on, dropped, aborted or still here, and that none is too old."""
        self.counts.update(trained=len(chosen), dropped=len(dropped))
        started, resolved = self.counts["started"], sum(self.counts[name] for name in ("trained", "dropped", "aborted"))
        if started != resolved + len(self.groups):
            raise RuntimeError(f"step {step}: {started} groups started, {resolved} resolved, {len(self.groups)} left")
        oldest = max(self.staleness(step, group) for group in chosen)
        if oldest > self.threshold:
            raise RuntimeError(
                f"step {step}: a group has staleness {oldest}, and {self.threshold} is allowed: raise "
                "async_training.max_off_policy_threshold, or update the engines' weights more often"
            )

    def _take_metrics(self) -> dict[str, Metric]:
        metrics, self._metrics = combine(self._metrics), []
        slowest, mean = (metrics.get(f"rollout/{name}_rank_seconds") for name in ("slowest", "mean"))
        if slowest is not None and mean is not None and slowest.value > 0:
            metrics["rollout/idle_frac"] = Metric.last(1 - mean.value / slowest.value)
        return metrics

    def _async_metrics(
        self, step: int, chosen: Sequence[Group], waited: float, engines: dict[str, Metric]
    ) -> dict[str, Metric]:
        """Returns the metrics of staleness and waiting. waited: seconds that the trainer waited for this batch."""
        ages = [self.staleness(step, group) for group in chosen]
        metrics = {
            "async/staleness/newest": Metric.last(min(ages)),
            "async/staleness/oldest": Metric.last(max(ages)),
            "async/staleness/mean": Metric.mean(sum(ages), len(ages)),
            "async/batches_started": Metric.last(len(self.sizes)),
            "async/groups_in_flight": Metric.last(len(self._running())),
            "async/dropped_for_staleness": Metric.last(0),
            "async/trainer_wait_seconds": Metric.last(waited),
        }
        busy = engines.get("rollout/engine_busy_frac")
        if self._ended_at is not None and busy is not None:
            period = time.perf_counter() - self._ended_at
            idle = max(0.0, period - float(busy.total) / self.engines.num_engines)
            metrics["async/engine_wait_seconds"] = Metric.last(idle)
            metrics["async/engine_idle_frac"] = Metric.last(idle / period)
            metrics["async/trainer_idle_frac"] = Metric.last(min(1.0, waited / period))
        return metrics

    def snapshot(self) -> dict[str, Any]:
        """Returns the current state, which shares its groups with the scheduler."""
        return {
            "source": self.source.state_dict(),
            "groups": list(self.groups),
            "sizes": dict(self.sizes),
            "counts": dict(self.counts),
            "metrics": list(self._metrics),
        }

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Restores a snapshot, in this process or in another one. The next `get_batch` starts the groups again that
        were not complete."""
        self.source.load_state_dict(snapshot["source"])
        self.groups, self.sizes = list(snapshot["groups"]), dict(snapshot["sizes"])
        self.counts, self._metrics = Counter(snapshot["counts"]), list(snapshot["metrics"])
        self._is_restored = True

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint. Groups that continue under new weights are saved as far as they were
        sampled, if their samples can be continued in another process. Waits for all others."""
        plans = {plan.key: plan for plan in self.engines.snapshot_groups()} if self.spans_updates else {}
        if others := [key for key in self._running() if key not in plans]:
            self._collect(others, self.groups)
        groups = []
        for group in self.groups:
            # of a complete group its rows are saved, and of a running one what continues it
            if group.sampled is not None:
                plan = GroupPlan(group.plan.key, ())
                rows: Rows | None = group.sampled
            else:
                plan = plans[group.plan.key]
                rows = group.columns
            saved = None if rows is None else rows.batch.select_idxs(np.arange(rows.start, rows.stop))
            columns = None if saved is None else (dict(saved.batch.items()), saved.non_tensor_batch)
            groups.append((plan, group.version, group.step, group.counts, group.kind, columns))
        return self.snapshot() | {"groups": groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the result of `state_dict`."""
        groups = []
        for plan, version, step, counts, kind, columns in state["groups"]:
            saved = None if columns is None else DataProto.from_dict(*columns)
            rows = None if saved is None else Rows(saved, 0, len(saved))
            is_complete = not plan.samples
            source_columns = None if is_complete else rows
            sampled = rows if is_complete else None
            groups.append(Group(plan, source_columns, version, step, sampled, counts, kind))
        self.restore(state | {"groups": groups})

    def _begin_again(self) -> None:
        """Starts the incomplete groups of a restored state, once."""
        if not self._is_restored:
            return
        self._is_restored = False
        if plans := [group.plan for group in self.groups if group.sampled is None]:
            self.engines.begin_groups(plans, self.sampling)
        self.filter.restore([group for group in self.groups if group.sampled is not None])


def assembled(groups: Sequence[Group]) -> DataProto:
    """Returns the rows of complete groups, ordered by group."""
    return _gathered([group.sampled for group in groups if group.sampled is not None])


def _with_columns(columns: Rows | None, sampled: Rows) -> Rows:
    """Adds the columns of the source, if there are any, to the rows that an engine returned."""
    if columns is None:
        return sampled
    known = columns.batch.slice(columns.start, columns.stop)
    rows = known | sampled.batch.slice(sampled.start, sampled.stop)
    return Rows(rows, 0, len(rows))


def _gathered(parts: Sequence[Rows]) -> DataProto:
    """Concatenates the parts. Columns that are missing in some batches are None there; they have to be objects."""
    batches = list({id(part.batch): part.batch for part in parts}.values())
    starts = dict(zip(map(id, batches), np.cumsum([0, *map(len, batches)]), strict=False))
    names = dict.fromkeys(name for batch in batches for name in batch.non_tensor_batch)
    complete = []
    for batch in batches:
        batch = batch.select(meta_info_keys=[])
        batch.non_tensor_batch = {name: batch.non_tensor_batch.get(name, np.full(len(batch), None)) for name in names}
        complete.append(batch)
    order = np.concatenate([starts[id(part.batch)] + np.arange(part.start, part.stop) for part in parts])
    return DataProto.concat(complete).select_idxs(order.astype(np.int64))


def _version_metrics(batch: DataProto) -> dict[str, Metric]:
    """Returns the number of versions of the weights that sampled each row."""
    if "rollout_versions" not in batch:
        return {}
    counts = [len(set(row) - {-1}) for row in batch.batch["rollout_versions"].tolist()]
    name = "async/versions_per_sample"
    return {f"{name}/mean": Metric.mean(sum(counts), len(counts)), f"{name}/max": Metric.max(max(counts))}


def _add_counts(batch: DataProto, groups: Sequence[Group]) -> None:
    """Adds meta_info `episodes` if the groups consist of episodes."""
    if counts := [group.counts for group in groups if group.counts is not None]:
        batch.meta_info["episodes"] = sum(counts, start=EpisodeCounts())
