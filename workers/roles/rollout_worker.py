"""The worker of a rollout engine in a separate pool, on devices without a training engine.

The engine runs in a thread, because a Ray actor executes one call at a time: while the thread generates, the process
answers the driver's calls. The thread alone uses the engine. It pulls groups from the queue, runs them in slices, and
between two slices it executes the driver's commands, such as a weight update.
"""

import pickle
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple, TypeVar

import torch

from verl_lite.config import PPOConfig
from verl_lite.errors import TransferError
from verl_lite.machine.device import device_memory, dist_backend, get_device, set_deterministic
from verl_lite.metrics import Metric
from verl_lite.single_controller.decorator import Dispatch, register
from verl_lite.single_controller.resource_pool import ServiceHandle
from workers.engines.base import SamplingParams
from workers.engines.weight_transfer import ChannelEnd, WeightChannel
from workers.policy.adapter import KeptBase, sends_adapter
from workers.policy.tokenizer import load_tokenizer
from workers.roles.sampling_worker import SamplingWorker
from workers.rollout.specs import GroupPlan, GroupResults

SLICE_S = 0.1
"""Longest time between two looks at the driver's commands and at the queue, besides the duration of an engine step."""
_IDLE_S = 0.01
_MOST_IDLE_S = 0.1
"""Seconds between two looks of an idle engine at the queue: the first pause, which then doubles, and the longest."""

Result = TypeVar("Result")


class RolloutWorker(SamplingWorker):
    """Runs groups with an engine that receives its weights from the trainer.

    Args:
        groups_queue: the queue from which this engine pulls groups (`workers.rollout.group_queue`).
        engine: index of this engine, from 0.
        num_engines: number of engines of the run.
        rewards, env_modules, log_dir: see `SamplingWorker`.
    """

    def __init__(
        self,
        config: PPOConfig,
        rewards: ServiceHandle | None,
        groups_queue: ServiceHandle,
        engine: int,
        num_engines: int,
        env_modules: Sequence[str] = (),
        log_dir: str | None = None,
    ) -> None:
        self.config = config
        self.engine_index = engine
        self.num_engines = num_engines
        self.rewards = rewards
        self.env_modules = tuple(env_modules)
        self.log_dir = log_dir
        self._groups_queue = groups_queue
        # from the trainer, and its address
        self._channel: WeightChannel | None = None
        self._address: tuple[str, int] | None = None
        # the base model, if the channel brings only an adapter
        self._base = KeptBase(config.model) if sends_adapter(config) else None
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        # groups from the queue that the engine has not started yet
        self._pulled: list[tuple[GroupPlan, SamplingParams]] = []
        # set while there are complete groups that were not taken
        self._completed = threading.Event()
        self._is_closed = False
        self._pulled_at = 0.0
        self._reported_at = 0.0

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Builds the engine and starts its thread."""
        trainer = self.config.trainer
        set_deterministic(trainer.deterministic)
        self.device = get_device(trainer.device)
        self.tokenizer = load_tokenizer(self.config.model, self.config.data.chat_template)
        # only for the ranks of this engine: the weights come over a group of their own
        if self.world_size > 1:
            self.init_process_group(dist_backend(self.device))
        self.build_rollout()
        # a daemon, so that a process whose driver is gone can end without `close`
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------------ the driver's commands

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_groups(self, seconds: float, with_metrics: bool = False) -> GroupResults | None:
        """Waits until a group is complete, at most for this time. Returns the complete groups on the first rank of the
        engine, None on the others."""
        if not self.runner.leads:
            return None
        # in the thread of the call, while the engine's thread generates
        self._completed.wait(seconds)
        return self._run_in_thread(lambda: self._take_results(with_metrics), together=False)

    def _take_results(self, with_metrics: bool) -> GroupResults:
        """Returns the complete groups, with the metrics of the engine and of its device on request."""
        # cleared first: a group that ends after `take` sets it again
        self._completed.clear()
        results = self.groups.take(with_metrics)
        if not with_metrics:
            return results

        now = time.perf_counter()
        active_s = results.metrics["rollout/slowest_rank_seconds"].value
        share = min(1.0, active_s / (now - self._reported_at))
        self._reported_at = now
        results.metrics[f"rollout/active_frac/engine_{self.engine_index}"] = Metric.last(share)
        for name, value in device_memory(self.device).items():
            results.metrics[f"rollout/perf/{name}"] = Metric.max(value)
        return results

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def snapshot_groups(self) -> list[GroupPlan]:
        """Returns plans that continue the running groups; see `GroupRun.snapshot`."""
        # no engine step, so that the other ranks of the engine need not take part
        if not self.runner.leads:
            return []
        return self._run_in_thread(self.groups.snapshot, together=False)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def abort_groups(self, keys: Sequence[str]) -> int:
        """Ends groups without rows; see `GroupRun.abort`. Returns 0 except on the first rank of the engine."""

        def abort() -> int:
            with self.runner.lead() as leads:
                if not leads:
                    return 0
                return self.groups.abort(keys)

        return self._run_in_thread(abort)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def receive_weights(self, version: int, end: ChannelEnd) -> TransferError | None:
        """Receives the weights of `ActorWorker.send_weights`.

        Args:
            version: number of the weights.
            end: the engine's end of the channel; for an engine with several ranks, that of its first rank.

        Returns:
            The error if the weights did not arrive. The engine then generates nothing until the next update.

        Raises:
            RuntimeError: groups are running, and the run is not allowed to change the weights under them.
        """
        return self._run_in_thread(lambda: self._receive_from(version, end))

    def _receive_from(self, version: int, end: ChannelEnd) -> TransferError | None:
        """Does the work of `receive_weights`. Connects first if the trainer has opened another channel."""
        if not (self.groups.is_idle or self.config.spans_updates):
            raise RuntimeError("groups are running, and new weights would change the policy within them")
        try:
            # the ends of an engine's ranks have consecutive numbers
            if self._address != end.address:
                own_end = replace(end, rank=end.rank + self.rank)
                self._channel = own_end.connect(self.device)
                self._address = end.address
            assert self._channel is not None
            self._channel.receive(lambda weights: self._load_weights(weights, version))
            self.rollout.reset_cache()
        except TransferError as error:
            # the ends no longer agree on the buckets that were sent; the trainer opens another channel
            self._channel = None
            self._address = None
            return error
        return None

    def _load_weights(self, weights: Iterator[tuple[str, torch.Tensor]], version: int) -> None:
        """Gives weights to the engine."""
        # if only an adapter arrives, the engine gets the model into which it is merged
        if self._base is not None:
            weights = self._base.merged(weights, self.device)
        self.rollout.load_weights(weights, version)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def close(self) -> None:
        """Ends the thread, closes the rollout engine and releases its resources."""
        # a command, so that the thread ends between two slices
        self._run_in_thread(self._end_thread)
        self._thread.join()
        super().close()

    def _end_thread(self) -> None:
        self._is_closed = True

    # --------------------------------------------------------------------------------------------- the engine's thread

    def _run_in_thread(self, function: Callable[[], Result], together: bool = True) -> Result:
        """Executes a function in the engine's thread, and returns its result.

        Args:
            function: the function.
            together: True if the driver has called all ranks of the engine with it. They then execute it at the same
                time; otherwise the first rank executes it alone.
        """
        future = Future[Result]()

        def execute() -> None:
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        self._commands.put(_Command(execute, future.set_exception, together))
        return future.result()

    def _serve(self) -> None:
        """Executes commands and runs groups until `close`, or until the engine fails."""
        try:
            self._reported_at = time.perf_counter()
            while not self._is_closed:
                self._serve_once()
        except Exception as error:
            # `take_groups` may be waiting for this event; it and all later calls get the cause
            self._completed.set()
            while True:
                self._commands.get().fail(error)

    def _serve_once(self) -> None:
        """Executes the next command, or runs the groups for a slice of time."""
        # the first rank decides for all ranks of the engine
        command = self._next_command() if self.runner.leads else None
        if command is not None and not command.together:
            command.execute()
        elif self.runner.agree(command is not None):
            # on another rank: the driver has given it the same command
            if command is None:
                command = self._commands.get()
            command.execute()
        else:
            with self.runner.lead() as leads:
                if leads:
                    self._run_slice()

    def _next_command(self) -> "_Command | None":
        """Returns the driver's next command, or None if there are groups to run. Waits for one of them."""
        idle_s = 0.0
        while True:
            # commands before groups, so that a weight update does not wait for groups that are not running yet
            with suppress(queue.Empty):
                # an engine without weights can run nothing before the command that brings them
                if not self.rollout.has_weights:
                    return self._commands.get()
                return self._commands.get(block=idle_s > 0, timeout=idle_s)
            self._pull_groups()
            if self._pulled or not self.groups.is_idle:
                return None
            idle_s = min(max(2 * idle_s, _IDLE_S), _MOST_IDLE_S)

    def _pull_groups(self) -> None:
        """Takes groups from the queue as far as the engine has room for their samples."""
        room = self.config.rollout.max_num_seqs - self.groups.num_samples
        now = time.perf_counter()
        # not more often: each call is a message to another process
        if room <= 0 or now - self._pulled_at < _IDLE_S:
            return
        self._pulled_at = now
        entries = self._groups_queue.call("take", self.engine_index, room)
        for entry in entries:
            self._pulled.append(pickle.loads(entry))

    def _run_slice(self) -> None:
        """Starts the groups that were pulled, and runs all groups for a slice of time."""
        pulled = self._pulled
        self._pulled = []
        for sampling, entries in groupby(pulled, key=itemgetter(1)):
            plans = [plan for plan, _ in entries]
            self.groups.begin(plans, sampling)
        self.groups.run_for(SLICE_S)
        if self.groups.has_complete:
            self._completed.set()


class _Command(NamedTuple):
    """A function for the engine's thread.

    Attributes:
        execute: calls the function, and gives its result or its error to the caller.
        fail: gives an error to the caller, without a call of the function.
        together: see `RolloutWorker._run_in_thread`.
    """

    execute: Callable[[], None]
    fail: Callable[[BaseException], None]
    together: bool
