"""Rollout engines on devices of their own (hybrid_engine=false): starts them, replaces those whose process died, and
gives them groups and weights.

Each engine is a worker group of its own, so that the failure of one leaves the others running. With
async_training.max_off_policy_threshold=0 each engine runs the groups that it would run on the trainer's devices.
Otherwise an engine pulls its next groups from a queue when it has room for them.
"""

import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from trainer.ppo.roles import ActorRole, Metrics
from verl_lite.config import PPOConfig
from verl_lite.errors import NoRoomError, StalledError, TransferError, WorkerDiedError
from verl_lite.metrics import combine
from verl_lite.protocol import DataProto, chunk_bounds
from verl_lite.single_controller.resource_pool import ServiceHandle
from verl_lite.single_controller.worker_group import WorkerGroup
from workers.engines.base import SamplingParams
from workers.engines.weight_transfer import ChannelEnd
from workers.rollout.group_queue import QueuedGroup
from workers.rollout.specs import AnswerSpec, GroupPlan, GroupResults

POLL_S = 0.1
"""Seconds between two looks at the engines for complete groups."""
MOST_TRANSFER_S = 600.0
"""Longest time of a transfer of weights."""
_STARTS_AT_ONCE = 8

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class EngineCall(Protocol[T_co]):
    """A running call of an engine."""

    def get(self) -> Sequence[T_co]:
        """Waits for the call. Returns the results of the engine's ranks."""


@dataclass(frozen=True)
class CallResults(Generic[T]):
    """The results of a call of several engines.

    Attributes:
        of_first_ranks: result of the first rank of each engine, without those that died.
        replaced: the engines whose process died and was replaced.
    """

    of_first_ranks: list[T]
    replaced: list[int]


class EnginePool:
    """The worker groups of the engines.

    Args:
        start: starts the engine with this index and builds its model.
        num_engines: number of engines.
        tell: shows a sentence to the user.
    """

    def __init__(self, start: Callable[[int], WorkerGroup], num_engines: int, tell: Callable[[str], None]) -> None:
        self._start = start
        self._tell = tell
        self._failures: dict[int, WorkerDiedError] = {}  # since the last weight update, by engine
        with ThreadPoolExecutor(_STARTS_AT_ONCE) as threads:
            starts = [threads.submit(start, engine) for engine in range(num_engines)]

        self.groups: list[WorkerGroup] = []
        errors: list[BaseException] = []
        for future in starts:
            error = future.exception()
            if error is None:
                self.groups.append(future.result())
            else:
                errors.append(error)
        if errors:
            # the engines that did start would keep their devices
            self.shutdown()
            raise errors[0]

    def call(self, start: Callable[[WorkerGroup], EngineCall[T]]) -> CallResults[T]:
        """Calls all engines at the same time, and replaces those whose process died.

        Args:
            start: starts the call of one engine, with blocking=False.

        Raises:
            WorkerDiedError: a replaced engine died before the next weight update. This is the first cause.
        """
        return self.gather({engine: start(group) for engine, group in enumerate(self.groups)})

    def gather(self, calls: Mapping[int, EngineCall[T]]) -> CallResults[T]:
        """Waits for calls that have started, by index of the engine, and replaces engines like `call`."""
        results: list[T] = []
        deaths: dict[int, WorkerDiedError] = {}
        for engine, call in calls.items():
            try:
                results.append(call.get()[0])
            except WorkerDiedError as error:
                deaths[engine] = error
        # after the calls of all engines: a replacement takes long, and the others must not wait for it
        for engine, death in deaths.items():
            self._replace(engine, death)
        return CallResults(results, list(deaths))

    def _replace(self, engine: int, error: WorkerDiedError) -> None:
        """Starts an engine again whose process died. Raises the first cause if it already is a replacement since the
        last weight update, or if there is no room for a new one."""
        first_cause = self._failures.get(engine)
        if first_cause is not None:
            first_cause.add_note(f"the engine that replaced it died in the same step: {error}")
            raise first_cause
        self._failures[engine] = error
        self._tell(f"{error}. The engine is replaced, and its samples are sampled again")
        # the other ranks of the engine hold devices, which the replacement needs
        self.groups[engine].shutdown()
        try:
            self.groups[engine] = self._start(engine)
        except NoRoomError as no_room:
            error.add_note(f"it cannot be replaced: {no_room}")
            raise error from None

    def forget_failures(self) -> None:
        """Allows each engine to be replaced again. Called when all engines have received new weights."""
        self._failures.clear()

    def shutdown(self) -> None:
        """Ends the processes of all engines."""
        for group in self.groups:
            group.shutdown()


class SeparateActorRole(ActorRole):
    """The driver's interface to policy workers that train and to engines in a separate pool.

    Args:
        group: the policy workers.
        config: the options of the run.
        engines: the engines.
        queue: the queue of the engines (`workers.rollout.group_queue`).
        rewards: handle of the reward pool; None if there is none.
    """

    def __init__(
        self,
        group: WorkerGroup,
        config: PPOConfig,
        engines: EnginePool,
        queue: ServiceHandle,
        rewards: ServiceHandle | None,
    ) -> None:
        super().__init__(group, config)
        self.engines = engines
        self._queue = queue
        self._rewards = rewards
        self._incomplete: dict[str, tuple[GroupPlan, SamplingParams]] = {}  # groups in the queue or in an engine
        self._engine_version = 0  # of the engines' weights
        self._trained_version = 0  # of the trainer's weights
        self._address: tuple[str, int] | None = None  # of the channel to all engines; None if it must be opened
        # shorter than the stall timeout, which would end the run without the name of the silent receiver
        self._transfer_s = MOST_TRANSFER_S
        if config.trainer.stall_timeout_s is not None:
            self._transfer_s = min(MOST_TRANSFER_S, config.trainer.stall_timeout_s / 2)

    @property
    def groups(self) -> list[WorkerGroup]:
        return [self.group, *self.engines.groups]

    @property
    def num_engines(self) -> int:
        return len(self.engines.groups)

    def begin_groups(self, plans: Sequence[GroupPlan], sampling: SamplingParams) -> None:
        for plan in plans:
            self._incomplete[plan.key] = (plan, sampling)

        owners: list[int | None] = [None] * len(plans)
        if not self.config.async_training.max_off_policy_threshold:
            # the engine that would have the group on the trainer's devices, so that the numbers of the run are the same
            bounds = chunk_bounds(len(plans), self.num_engines)
            for engine, (start, stop) in enumerate(bounds):
                owners[start:stop] = [engine] * (stop - start)
        queued = []
        for plan, owner in zip(plans, owners, strict=True):
            queued.append(self._queued(plan.key, owner))
        self._queue.call("put", queued)

    def _queued(self, key: str, engine: int | None) -> QueuedGroup:
        """Returns the group with this key as it waits in the queue, for one engine or for any (None)."""
        plan, sampling = self._incomplete[key]
        # as bytes, because the process of the queue does not import torch
        content = pickle.dumps((plan, sampling))
        return QueuedGroup(key, len(plan.samples), content, engine)

    def run_groups(self, keys: Sequence[str], seconds: float | None = None) -> list[GroupResults]:
        wanted = set(keys)
        collected: list[GroupResults] = []
        limit_s = self.config.trainer.stall_timeout_s
        poll_s = POLL_S
        if seconds is not None:
            poll_s = min(POLL_S, seconds)
        started_at = time.monotonic()
        last_progress_at = started_at
        while wanted & self._incomplete.keys():
            now = time.monotonic()
            if seconds is not None and now - started_at >= seconds:
                break
            # every call of an engine returns in time, even if no group ever ends; so the timeouts of the calls do not
            # notice a stall
            if limit_s is not None and now - last_progress_at > limit_s:
                raise StalledError(f"no rollout engine has completed a group for {limit_s:g} s")
            results = self._take(poll_s, with_metrics=False)
            if results:
                last_progress_at = time.monotonic()
                collected += results
        # only calls without a time limit return the metrics of the engines
        return collected + self._take(0.0, with_metrics=seconds is None)

    def _take(self, seconds: float, with_metrics: bool) -> list[GroupResults]:
        """Returns the groups that the engines complete within this time.

        Args:
            seconds: the longest time that an engine waits for a complete group.
            with_metrics: True to return the metrics of every engine, too, whether it completed a group or not.
        """
        taken: CallResults[GroupResults] = self.engines.call(
            lambda engine: engine.take_groups(seconds, with_metrics, blocking=False)
        )
        self._restore(taken.replaced)
        complete_keys: list[str] = []
        for result in taken.of_first_ranks:
            complete_keys += [report.key for report in result.reports]
        for key in complete_keys:
            del self._incomplete[key]
        if complete_keys:
            self._queue.send("remove", complete_keys)
        return [result for result in taken.of_first_ranks if result.reports or with_metrics]

    def _restore(self, replaced: Sequence[int]) -> None:
        """Queues the groups of replaced engines again, and gives these engines the weights."""
        if replaced:
            self._requeue(replaced)
            self._address = None
            self._transfer(max(self._engine_version, self._trained_version), replaced)

    def _requeue(self, replaced: Sequence[int]) -> None:
        """Queues the groups that replaced engines had taken, before those that wait: they are the oldest."""
        for engine in replaced:
            taken_keys = self._queue.call("taken_by", engine)
            # without groups that were completed or aborted before
            lost_keys = [key for key in taken_keys if key in self._incomplete]
            if self._rewards is not None:
                self._cancel_rewards(lost_keys, self._rewards)

            owner: int | None = engine
            if self.config.async_training.max_off_policy_threshold:
                # any engine may take it, see `begin_groups`
                owner = None
            self._queue.call("put", [self._queued(key, owner) for key in lost_keys], first=True)

    def _cancel_rewards(self, keys: Sequence[str], rewards: ServiceHandle) -> None:
        """Cancels the rewards of answers that will be sampled again."""
        items = []
        for key in keys:
            plan, _ = self._incomplete[key]
            for spec in plan.samples:
                if isinstance(spec, AnswerSpec) and spec.item is not None:
                    items.append(spec.item.key)
        if items:
            rewards.call("cancel", items)

    def snapshot_groups(self) -> list[GroupPlan]:
        snapshots: CallResults[list[GroupPlan]] = self.engines.call(
            lambda engine: engine.snapshot_groups(blocking=False)
        )
        self._restore(snapshots.replaced)
        running: dict[str, GroupPlan] = {}
        for plans in snapshots.of_first_ranks:
            for plan in plans:
                running[plan.key] = plan
        # a group that waits in the queue, or whose engine died, continues from its plan
        return [running.get(key, plan) for key, (plan, _) in self._incomplete.items()]

    def abort_groups(self, keys: Sequence[str]) -> int:
        for key in keys:
            del self._incomplete[key]
        # from the queue first, so that no engine takes one of them meanwhile
        self._queue.call("remove", keys)
        num_tokens: CallResults[int] = self.engines.call(lambda engine: engine.abort_groups(list(keys), blocking=False))
        self._restore(num_tokens.replaced)
        return sum(num_tokens.of_first_ranks)

    def update(self, batch: DataProto, step: int) -> Metrics:
        # an engine that is replaced from now on gets the weights of this step
        self._trained_version = step
        return super().update(batch, step)

    def update_weights(self, version: int) -> Metrics:
        self._engine_version = version
        metrics = self._transfer(version, range(self.num_engines))
        self.engines.forget_failures()
        return metrics

    def _transfer(self, version: int, engines: Sequence[int]) -> Metrics:
        """Sends the trainer's weights to these engines, and sends them again if one was replaced during the transfer.

        Args:
            version: the version that the samples of the engines then carry.
            engines: indices of the engines.

        Returns:
            Metrics of the transfer.

        Raises:
            TransferError: a rank failed although no engine died.
        """
        ranks_per_engine = self.config.rollout.tensor_model_parallel_size
        names = self._names_of_ends(engines)
        while True:
            address = self._address or self.group.open_channel()
            ends = [ChannelEnd(address, names, rank, self._transfer_s) for rank in range(len(names))]
            # all ends at the same time, because a broadcast waits for every receiver
            sending = self.group.send_weights(ends[0], blocking=False)
            receiving = {}
            for number, engine in enumerate(engines):
                # end 0 is the trainer's
                first_end = ends[1 + number * ranks_per_engine]
                group = self.engines.groups[engine]
                receiving[engine] = group.receive_weights(version, first_end, blocking=False)
            sent = sending.get()
            received: CallResults[object] = self.engines.gather(receiving)

            results = (*sent, *received.of_first_ranks)
            failures = [result for result in results if isinstance(result, TransferError)]
            # the next transfer to all engines uses the same channel, unless one of its ends is lost
            self._address = None
            if len(engines) == self.num_engines and not failures and not received.replaced:
                self._address = address
            if received.replaced:
                # the death of an engine explains the failures of the others
                self._requeue(received.replaced)
            elif failures:
                raise failures[0]
            else:
                return combine(sent)

    def _names_of_ends(self, engines: Sequence[int]) -> tuple[str, ...]:
        """Returns the names of the ends of a channel to these engines, for messages. The trainer is the first."""
        ranks_per_engine = self.config.rollout.tensor_model_parallel_size
        names = ["the trainer"]
        for engine in engines:
            if ranks_per_engine == 1:
                names.append(f"engine {engine}")
                continue
            for rank in range(ranks_per_engine):
                names.append(f"engine {engine} (rank {rank})")
        return tuple(names)

    def close(self) -> None:
        """Closes the engines. An engine that dies meanwhile is not replaced."""
        closings = [group.close(blocking=False) for group in self.engines.groups]
        for closing in closings:
            closing.get()
