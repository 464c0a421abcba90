"""Decides which groups of samples run, for which training step and how far ahead, and filters the scored groups.

A group is the answers to a prompt, or the episodes of an environment. A source (`trainer.rollout.group_sources`) draws
groups in a fixed order, and the ranks sample them (`workers.rollout.group_run`). The batch of a step consists of the
first N groups in the order of the source that pass the filter; each dropped group is replaced by the next group of the
source at once. The result does not depend on time.

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
from typing import TypeAlias, TypedDict

import torch

from trainer.rollout.sample_groups import (
    AnswerRewards,
    Engines,
    Group,
    GroupFilter,
    GroupSource,
    Rows,
    SavedRows,
    SourceState,
    add_counts,
    assembled,
    sample_ids,
    saved_rows,
    version_metrics,
    with_columns,
)
from verl_lite.config import PPOConfig
from verl_lite.metrics import Metric, combine
from verl_lite.protocol import DataProto
from workers.engines.base import SamplingParams
from workers.rollout.specs import EpisodeCounts, GroupPlan

SLICE_S = 0.1
"""Seconds between two checks of the complete groups while other groups are running."""

# the metrics since the last batch are part of a checkpoint
torch.serialization.add_safe_globals([Metric])

SavedGroup: TypeAlias = tuple[GroupPlan, int, int, EpisodeCounts | None, str | None, SavedRows | None]
"""A group in a checkpoint: plan, version, step, counts and kind of `Group`, and its rows."""


class Snapshot(TypedDict):
    """The state of a scheduler in memory: that of its source, and its attributes of these names."""

    source: SourceState
    groups: list[Group]
    sizes: dict[int, int]
    counts: dict[str, int]
    metrics: list[dict[str, Metric]]


class SchedulerState(TypedDict):
    """The state of a scheduler in a checkpoint, which `torch.load` reads without the classes of this file."""

    source: SourceState
    groups: list[SavedGroup]
    sizes: dict[int, int]
    counts: dict[str, int]
    metrics: list[dict[str, Metric]]


class RolloutScheduler:
    """Schedules the batches of one source.

    Args:
        config: the options of the run.
        source: draws the groups.
        engines: run the groups.
        sampling: sampling parameters.
        group_filter: chooses among the complete groups; None = every complete group is trained on.
        last_step: no group is started for steps after this one.
        rewards: rewards of the samples; None if the rows of the engines contain them, as those of episodes do.
    """

    def __init__(
        self,
        config: PPOConfig,
        source: GroupSource,
        engines: Engines,
        sampling: SamplingParams,
        group_filter: GroupFilter | None = None,
        last_step: int = 0,
        rewards: AnswerRewards | None = None,
    ) -> None:
        self.source = source
        self.engines = engines
        self.sampling = sampling
        self.filter = group_filter
        self.last_step = last_step
        self.rewards = rewards

        self.threshold = config.async_training.max_off_policy_threshold
        self.batches_ahead = config.async_training.depth
        self.spans_updates = config.spans_updates
        self.oversample = config.rollout.oversample
        # the weights after the steps of the warm-up are those of version 0
        self.warmup = config.trainer.critic_warmup
        # Where groups may overtake each other, a group is complete only with its rewards, so that slow rewards delay no
        # batch. A reward model scores the batch after sampling, because it shares the devices.
        overtakes_with_rewards = self.spans_updates and not config.reward_model.enable
        self._awaits_rewards = group_filter is not None or overtakes_with_rewards

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
        self._restart_restored()
        if step not in self.sizes:
            self._begin_batch(step, step)
        if self.spans_updates:
            # so that the engines have work while the last groups of this batch end
            self.begin_ahead(step)

        started = time.perf_counter()
        chosen = self._sample_batch(step)
        waited = time.perf_counter() - started

        # the other groups remain and may be trained on in a later step
        dropped = [group for group in self.groups if group.is_dropped]
        surplus = self._surplus(step, chosen)
        resolved = {*chosen, *dropped, *surplus}
        self.groups = [group for group in self.groups if group not in resolved]
        del self.sizes[step]

        batch = assembled(chosen)
        oversampling_metrics = self._abort(surplus, batch, len(chosen))
        self._count_resolved(step, chosen, dropped)
        engine_metrics = self._take_metrics()
        metrics = engine_metrics | oversampling_metrics
        if self.filter is not None:
            metrics |= self.filter.metrics(step, chosen, dropped)
        if self.batches_ahead or self.spans_updates:
            metrics |= self._async_metrics(step, chosen, waited, engine_metrics)
            metrics |= version_metrics(batch)
        batch.meta_info["metrics"] = metrics
        self._ended_at = time.perf_counter()
        add_counts(batch, [*chosen, *dropped])
        return batch

    def begin_ahead(self, step: int) -> None:
        """Starts the batches of the next steps, with the weights that the engines have.

        They run between micro-batches of training; `get_batch` and `finish` complete them. Call it after `get_batch` of
        the step. Does nothing for batches that are started already.
        """
        self._restart_restored()
        last = min(step + self.batches_ahead, self.last_step)
        for later_step in range(step + 1, last + 1):
            if later_step not in self.sizes:
                self._begin_batch(later_step, step)

    def run(self, groups: Sequence[Group], sampling: SamplingParams) -> DataProto:
        """Samples these groups and returns their rows, for example of a validation. Running training groups continue
        during the call."""
        # the metrics of this call are no part of the next training batch
        training_metrics = self._metrics
        self._metrics = []
        self.engines.begin_groups([group.plan for group in groups], sampling)
        # training groups may end during the call, too
        self._run_engines([group.plan.key for group in groups], [*groups, *self.groups])
        batch = assembled(groups)
        batch.meta_info["metrics"] = self._take_metrics()
        self._metrics = training_metrics
        add_counts(batch, groups)
        return batch

    def finish(self) -> None:
        """Waits for all running groups."""
        running_keys = self._running_keys()
        if running_keys:
            self._run_engines(running_keys, self.groups)

    # ----------------------------------------------------------------------------------------- waiting and choosing

    def _sample_batch(self, step: int) -> list[Group]:
        """Runs and replaces groups until the batch of this step is complete. Returns its groups."""
        size = self.sizes[step]
        max_groups: float = size
        if self.filter is not None:
            max_groups = self.filter.max_groups(size)
        # the groups that this step may still draw; those that an earlier step dropped without a replacement do not
        # count against the limit of this batch
        budget = max_groups - size + max(0, self._missing(step))

        chosen = self._chosen(step)
        while chosen is None:
            self._run_and_judge()
            budget -= self._replace_dropped(step, budget)
            chosen = self._chosen(step)
        if self._judges_while_running:
            # the calls above have a time limit, and such calls return no metrics of the engines
            self._run_engines((), self.groups)
        return chosen

    def _chosen(self, step: int) -> list[Group] | None:
        """Returns the groups of the batch of this step, or None while it must wait."""
        size = self.sizes[step]
        kept_groups = [group for group in self._candidates(step) if group.is_kept]
        if len(kept_groups) < size:
            return None
        # the groups are in the order of the source, so these are the oldest
        chosen = kept_groups[:size]
        if self._aborts_surplus:
            return chosen

        rest = [group for group in self._others(chosen) if not group.is_dropped]
        if all(group.is_kept for group in rest):
            return chosen
        # no group is dropped for its age: the chosen groups may overtake a running one only if that one will not be too
        # old in the earliest step that can train on it
        for earliest, group in zip(self._earliest_steps(step, len(rest)), rest, strict=True):
            if self.staleness(earliest, group) > self.threshold:
                return None
        return chosen

    def _others(self, chosen: Sequence[Group]) -> list[Group]:
        """Returns the unresolved groups without the chosen ones."""
        chosen_groups = set(chosen)
        return [group for group in self.groups if group not in chosen_groups]

    def _surplus(self, step: int, chosen: Sequence[Group]) -> list[Group]:
        """Returns the groups that are aborted now that the batch of this step is complete."""
        if not self._aborts_surplus:
            return []
        surplus = []
        for group in self._others(chosen):
            # batches that were started ahead need their groups
            if group.step <= step and not group.is_dropped:
                surplus.append(group)
        return surplus

    def _earliest_steps(self, step: int, count: int) -> list[int]:
        """Returns the earliest step that can train on each of the `count` groups that remain after this step, if older
        groups are trained on first."""
        steps: list[int] = []
        for later_step in sorted(self.sizes):
            if later_step > step:
                steps += [later_step] * self.sizes[later_step]

        # groups beyond the batches that are begun form further batches, of the size of the last one
        last = max(self.sizes)
        for number in range(count - len(steps)):
            steps.append(last + 1 + number // self.sizes[last])
        return steps[:count]

    def staleness(self, step: int, group: Group) -> int:
        """Returns the number of weight updates between the start of a group and the update of this step."""
        return max(step - 1, self.warmup) - max(group.version, self.warmup)

    @property
    def _aborts_surplus(self) -> bool:
        """True if the surplus groups of a batch are aborted when the batch is complete."""
        return self.oversample > 1 and not self.spans_updates

    def _candidates(self, step: int) -> list[Group]:
        """Returns the groups that the batch of this step may consist of."""
        if not self._aborts_surplus:
            return self.groups
        return [group for group in self.groups if group.step <= step]

    def _missing(self, step: int) -> int:
        """Returns the number of groups that the begun batches lack because of dropped ones; negative for a surplus."""
        if self._aborts_surplus:
            num_wanted = self.sizes[step]
        else:
            num_wanted = sum(self.sizes.values())
        usable = [group for group in self._candidates(step) if not group.is_dropped]
        return num_wanted - len(usable)

    @property
    def _judges_while_running(self) -> bool:
        """True if the driver judges complete groups while others are running, because that can start, end or carry
        over some of them."""
        drops = self.filter is not None and self.filter.drops
        return drops or self.spans_updates or self.oversample > 1

    def _abort(self, surplus: Sequence[Group], batch: DataProto, num_chosen: int) -> dict[str, Metric]:
        """Aborts the surplus groups of a batch, and cancels their rewards.

        Args:
            surplus: the groups, running or complete.
            batch: rows of the chosen groups.
            num_chosen: number of the chosen groups.

        Returns:
            Metrics: the number of aborted groups, and the bias of the lengths, which is the mean number of tokens of
            the chosen groups relative to that of all groups, minus 1. An aborted group counts with the tokens that it
            had sampled, so the true bias is at least as large. No metrics without surplus groups.
        """
        if not surplus:
            return {}
        running_keys = [group.plan.key for group in surplus if group.sampled is None]
        aborted_tokens = self.engines.abort_groups(running_keys)
        for group in surplus:
            if group.sampled is not None:
                rows, start, stop = group.sampled
                aborted_tokens += int(rows.batch["response_mask"][start:stop].sum())
        if self.rewards is not None:
            self.rewards.cancel(sample_ids(surplus))
        self.counts["aborted"] += len(surplus)

        chosen_tokens = int(batch.batch["response_mask"].sum())
        mean_of_all = (chosen_tokens + aborted_tokens) / (num_chosen + len(surplus))
        mean_of_chosen = chosen_tokens / num_chosen
        length_bias = mean_of_chosen / max(mean_of_all, 1e-9) - 1
        return {
            "rollout/oversample/aborted_groups": Metric.last(len(surplus)),
            "rollout/oversample/length_bias": Metric.last(length_bias),
        }

    def _run_and_judge(self) -> None:
        """Runs the engines, and decides which of the complete groups are kept."""
        running_keys = self._running_keys()
        if running_keys:
            limit_s: float | None = None
            if self._judges_while_running:
                # so that dropped groups are replaced while others are running
                limit_s = SLICE_S
            self._run_engines(running_keys, self.groups, limit_s)

        complete = [group for group in self.groups if group.sampled is not None and group.kind is None]
        # when no group is running, there is nothing to do but to wait for the rewards
        if self._running_keys():
            complete = self._with_rewards(complete)
        if not complete:
            return
        if self.filter is not None:
            self.filter.judge(complete)
            return
        for group in complete:
            group.kind = "kept"

    def _with_rewards(self, groups: list[Group]) -> list[Group]:
        """Returns the groups that need not wait for their rewards while other groups are running."""
        if self.rewards is None or not self._awaits_rewards or not groups:
            return groups
        is_ready = self.rewards.are_ready(assembled(groups))
        ready = []
        start = 0
        for group in groups:
            assert group.sampled is not None
            stop = start + group.sampled.stop - group.sampled.start
            if is_ready[start:stop].all():
                ready.append(group)
            start = stop
        return ready

    def _replace_dropped(self, step: int, budget: float) -> int:
        """Starts groups that replace dropped ones, at most `budget`. Returns their number."""
        missing = self._missing(step)
        if missing <= 0:
            return 0
        replacements: list[Group] = []
        if budget > 0:
            number = int(min(missing, budget))
            replacements = self.source.draw(number, step)
        if replacements:
            self._begin(replacements, step)
        elif not self._running_keys():
            # a running group could still be kept
            if self.filter is None:
                raise RuntimeError(f"step {step}: {missing} groups are missing, and the source has no more")
            self.filter.fill_batch(step, self.groups, missing)
        return len(replacements)

    def _begin_batch(self, step: int, start_step: int) -> None:
        """Starts the batch of `step`, and with rollout.oversample more groups than it needs."""
        groups = self.source.draw_batch(step, start_step)
        size = len(groups)

        surplus = 0
        # no step after the last one could train on groups that are carried over
        if step < self.last_step or self._aborts_surplus:
            surplus = math.ceil(size * (self.oversample - 1))
        if self.spans_updates:
            # earlier batches may have left a surplus, which counts here, or lack groups
            surplus += self._missing(step)
        self.sizes[step] = size
        if surplus > 0:
            groups = groups + self.source.draw(surplus, step)
        self._begin(groups, step)

    def _begin(self, groups: Sequence[Group], step: int) -> None:
        """Starts groups for the batch of this step, with the weights that the engines have."""
        for group in groups:
            group.version = self.version or 0
            group.step = step
        self.groups += groups
        self.counts["started"] += len(groups)
        self.engines.begin_groups([group.plan for group in groups], self.sampling)

    def _running_keys(self) -> list[str]:
        """Returns the keys of the groups that are not complete."""
        return [group.plan.key for group in self.groups if group.sampled is None]

    def _run_engines(self, keys: Sequence[str], groups: Iterable[Group], seconds: float | None = None) -> None:
        """Runs the engines and stores the rows of the groups that are complete.

        Args:
            keys: keys of the groups to wait for.
            groups: all groups that may become complete during the call.
            seconds: time limit; None = until the groups of `keys` are complete.
        """
        group_of_key = {group.plan.key: group for group in groups}
        for result in self.engines.run_groups(keys, seconds):
            self._metrics.append(result.metrics)
            start = 0
            for report in result.reports:
                group = group_of_key[report.key]
                stop = start + report.num_rows
                assert result.rows is not None
                group.sampled = with_columns(group.columns, Rows(result.rows, start, stop))
                group.counts = report.counts
                start = stop

    # -------------------------------------------------------------------------------------------- numbers and state

    def _count_resolved(self, step: int, chosen: Sequence[Group], dropped: Sequence[Group]) -> None:
        """Counts the groups of this step that are trained on or dropped. Raises RuntimeError if a started group is
        neither resolved nor in `groups`, or if a group of the batch is too old."""
        self.counts.update(trained=len(chosen), dropped=len(dropped))
        started = self.counts["started"]
        resolved = self.counts["trained"] + self.counts["dropped"] + self.counts["aborted"]
        # otherwise a fault of the scheduler would lose groups unnoticed
        if started != resolved + len(self.groups):
            raise RuntimeError(f"step {step}: {started} groups started, {resolved} resolved, {len(self.groups)} left")

        oldest = max(self.staleness(step, group) for group in chosen)
        if oldest > self.threshold:
            raise RuntimeError(
                f"step {step}: a group has staleness {oldest}, and {self.threshold} is allowed: raise "
                "async_training.max_off_policy_threshold, or update the engines' weights more often"
            )

    def _take_metrics(self) -> dict[str, Metric]:
        """Returns the metrics of the engines since the last call."""
        metrics = combine(self._metrics)
        self._metrics = []
        slowest = metrics.get("rollout/slowest_rank_seconds")
        mean = metrics.get("rollout/mean_rank_seconds")
        if slowest is not None and mean is not None and slowest.value > 0:
            metrics["rollout/idle_frac"] = Metric.last(1 - mean.value / slowest.value)
        return metrics

    def _async_metrics(
        self, step: int, chosen: Sequence[Group], waited: float, engine_metrics: dict[str, Metric]
    ) -> dict[str, Metric]:
        """Returns the metrics of staleness and waiting.

        Args:
            step: the step of the batch.
            chosen: its groups.
            waited: seconds that the trainer waited for the batch.
            engine_metrics: metrics of the engines since the last batch.
        """
        ages = [self.staleness(step, group) for group in chosen]
        metrics = {
            "async/staleness/newest": Metric.last(min(ages)),
            "async/staleness/oldest": Metric.last(max(ages)),
            "async/staleness/mean": Metric.mean(sum(ages), len(ages)),
            "async/batches_started": Metric.last(len(self.sizes)),
            "async/groups_in_flight": Metric.last(len(self._running_keys())),
            # constant: a step waits for a group instead of dropping it for its age
            "async/dropped_for_staleness": Metric.last(0),
            "async/trainer_wait_seconds": Metric.last(waited),
        }
        busy = engine_metrics.get("rollout/engine_busy_frac")
        if self._ended_at is not None and busy is not None:
            period = time.perf_counter() - self._ended_at
            # the numerator of the fraction: busy seconds, added over the engines
            busy_seconds = float(busy.total)
            idle = max(0.0, period - busy_seconds / self.engines.num_engines)
            metrics["async/engine_wait_seconds"] = Metric.last(idle)
            metrics["async/engine_idle_frac"] = Metric.last(idle / period)
            metrics["async/trainer_idle_frac"] = Metric.last(min(1.0, waited / period))
        return metrics

    def snapshot(self) -> Snapshot:
        """Returns the current state, which shares its groups with the scheduler."""
        return {
            "source": self.source.state_dict(),
            "groups": list(self.groups),
            "sizes": dict(self.sizes),
            "counts": dict(self.counts),
            "metrics": list(self._metrics),
        }

    def restore(self, snapshot: Snapshot) -> None:
        """Restores a snapshot, in this process or in another one. The next `get_batch` starts the groups again that
        were not complete."""
        self.source.load_state_dict(snapshot["source"])
        self.groups = list(snapshot["groups"])
        self.sizes = dict(snapshot["sizes"])
        self.counts = Counter(snapshot["counts"])
        self._metrics = list(snapshot["metrics"])
        self._is_restored = True

    def state_dict(self) -> SchedulerState:
        """Returns the state for a checkpoint.

        Groups that continue under new weights are saved as far as they were sampled, if their samples can be continued
        in another process. Waits for all others.
        """
        continued: dict[str, GroupPlan] = {}
        if self.spans_updates:
            continued = {plan.key: plan for plan in self.engines.snapshot_groups()}
        other_keys = [key for key in self._running_keys() if key not in continued]
        if other_keys:
            self._run_engines(other_keys, self.groups)

        groups: list[SavedGroup] = []
        for group in self.groups:
            # a complete group needs only its rows; a running one continues from its plan and the source's columns
            if group.sampled is not None:
                plan = GroupPlan(group.plan.key, ())
                rows: Rows | None = group.sampled
            else:
                plan = continued[group.plan.key]
                rows = group.columns
            columns: SavedRows | None = None
            if rows is not None:
                # without the other rows of their batches, which may be large
                columns = saved_rows(rows.copied())
            groups.append((plan, group.version, group.step, group.counts, group.kind, columns))
        return {**self.snapshot(), "groups": groups}

    def load_state_dict(self, state: SchedulerState) -> None:
        """Restores the result of `state_dict`."""
        groups = []
        for plan, version, step, counts, kind, columns in state["groups"]:
            rows: Rows | None = None
            if columns is not None:
                saved = DataProto.from_dict(*columns)
                rows = Rows(saved, 0, len(saved))
            group = Group(plan, version=version, step=step, counts=counts, kind=kind)
            # a plan without samples marks a group that was complete
            if plan.samples:
                group.columns = rows
            else:
                group.sampled = rows
            groups.append(group)
        self.restore({**state, "groups": groups})

    def _restart_restored(self) -> None:
        """Starts the incomplete groups of a restored state, and the rewards of complete ones, once."""
        if not self._is_restored:
            return
        self._is_restored = False
        plans = [group.plan for group in self.groups if group.sampled is None]
        if plans:
            self.engines.begin_groups(plans, self.sampling)
        if self.rewards is None:
            return
        # rewards that had not been collected have ended with the processes of the earlier run
        unscored = []
        for group in self.groups:
            if group.sampled is not None and "token_level_scores" not in group.sampled.batch:
                unscored.append(group)
        if unscored:
            self.rewards.submit(assembled(unscored))
