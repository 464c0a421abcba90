"""The loop over one rollout engine that answers and episodes share: submit requests, step the engine, take completions.

An engine with tensor parallelism runs in several processes, which must receive the same requests before the same steps.
Its first rank is the leader. It alone decides what runs, because only the leader reads the clock and the replies of
environments. It broadcasts its calls, and the other ranks repeat them in `Runner.lead`.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Generic, NamedTuple, TypeVar

import torch.distributed as dist

from verl_lite.machine.profiling import span
from verl_lite.metrics import Metric
from workers.engines.base import Completion, Request, RolloutEngine

Owner = TypeVar("Owner")
Value = TypeVar("Value")


class _Calls(NamedTuple):
    """Calls that all ranks of an engine make in the same order.

    Attributes:
        requests: Requests to submit.
        aborted: Names of the requests to abort.
        steps: Number of engine steps that follow; None = step until a request finishes.
    """

    requests: list[Request]
    aborted: list[str]
    steps: int | None


class Runner(Generic[Owner]):
    """Runs requests on one engine. Each request has an owner, which `step` returns together with its completion.

    Args:
        engine: the engine; nothing else may submit requests to it.
        group: process group of the engine's ranks; None if the engine runs in this process alone.
        interrupts: False if no request is interrupted; see `Request.is_interruptible`.
    """

    def __init__(self, engine: RolloutEngine, group: dist.ProcessGroup | None = None, interrupts: bool = True) -> None:
        self.engine = engine
        self._group = group
        self._interrupts = interrupts
        self.leads = group is None or dist.get_rank(group) == 0
        self._owners: dict[str, Owner] = {}
        # calls of `submit` and `abort` that were not yet sent to the other ranks
        self._requests: list[Request] = []
        self._aborted: list[str] = []
        # stays True if an engine step fails
        self._is_stepping = False
        self._clear_metrics()

    def _clear_metrics(self) -> None:
        self._busy_s = 0.0
        self._steps = 0
        # the number of running sequences, added up over the steps
        self._sequences = 0
        self._tokens = 0

    @contextmanager
    def lead(self) -> Iterator[bool]:
        """Yields True on the leader, and False on the other ranks.

        The other ranks first repeat all calls that the leader makes inside the block. All ranks of the engine enter the
        block together.
        """
        if self.leads:
            try:
                yield True
            finally:
                # after a failed engine step the other ranks may not be waiting for calls
                if not self._is_stepping:
                    # the calls since the last step, and then the end of the block
                    self._send(steps=0)
                    self._broadcast(None)
            return

        # the argument is the leader's, whatever this rank passes
        while (calls := self._broadcast(None)) is not None:
            self._repeat(calls)
        yield False

    def agree(self, value: bool) -> bool:
        """Returns the leader's value on all ranks of the engine. Collective, outside of `lead`."""
        return self._of_leader(value)

    def submit(self, request: Request, owner: Owner) -> None:
        """Submits a request. Raises ValueError as `RolloutEngine.submit`."""
        # engines take less time for requests that nobody interrupts
        request = replace(request, is_interruptible=self._interrupts)
        self.engine.submit(request)
        self._owners[request.request_id] = owner
        self._requests.append(request)

    def abort(self, request_ids: Sequence[str]) -> None:
        """Ends these requests without a completion."""
        self.engine.abort(request_ids)
        for request_id in request_ids:
            del self._owners[request_id]
        self._aborted += request_ids

    @property
    def is_decoding(self) -> bool:
        """True if the engine has unfinished requests."""
        return bool(self.engine.unfinished)

    def step(self, until_completion: bool = False) -> list[tuple[Owner, Completion]]:
        """Makes one engine step, or steps until a request finishes. Returns the finished requests with their owners."""
        started = time.perf_counter()
        num_running = self.engine.unfinished
        limit = None if until_completion else 1
        # the other ranks make the same steps at the same time, because the weights are split among them
        self._send(limit)
        self._is_stepping = True
        completions, num_steps = self._run(limit)
        self._is_stepping = False
        self._busy_s += time.perf_counter() - started
        self._steps += num_steps
        self._sequences += num_running * num_steps

        owned_completions = []
        for completion in completions:
            self._tokens += len(completion.token_ids)
            owner = self._owners.pop(completion.request_id)
            owned_completions.append((owner, completion))
        return owned_completions

    def take_metrics(self, seconds: float) -> dict[str, Metric]:
        """Returns the engine's metrics since the last call, `seconds` ago."""
        metrics = {
            "rollout/engine_busy_frac": Metric.mean(self._busy_s, seconds),
            "rollout/engine_sequences": Metric.mean(self._sequences, self._steps),
            "rollout/tokens_per_second_per_gpu": Metric.mean(self._tokens, seconds),
        }
        self._clear_metrics()
        return metrics

    def _run(self, steps: int | None) -> tuple[list[Completion], int]:
        """Makes this number of engine steps; None = until a request finishes. Returns the finished requests and the
        number of steps."""
        completions: list[Completion] = []
        num_steps = 0
        with span("generate"):
            while num_steps != steps:
                # without a running request, no further one can finish
                is_done = bool(completions) or not self.is_decoding
                if steps is None and is_done:
                    break
                completions += self.engine.step()
                num_steps += 1
        return completions, num_steps

    def _repeat(self, calls: _Calls) -> None:
        """Makes the calls of the leader on another rank."""
        for request in calls.requests:
            self.engine.submit(request)
        self.engine.abort(calls.aborted)
        self._run(calls.steps)

    def _send(self, steps: int | None) -> None:
        """Sends the calls since the last step to the other ranks."""
        self._broadcast(_Calls(self._requests, self._aborted, steps))
        self._requests = []
        self._aborted = []

    def _broadcast(self, calls: _Calls | None) -> _Calls | None:
        """Returns the leader's calls on all ranks; None at the end of its block."""
        return self._of_leader(calls)

    def _of_leader(self, value: Value) -> Value:
        """Returns the argument of the leader on all ranks of the engine. Collective."""
        if self._group is None:
            return value
        broadcast = [value]
        dist.broadcast_object_list(broadcast, group=self._group, group_src=0)
        return broadcast[0]


def group_of_engine(tensor_parallel: int) -> dist.ProcessGroup | None:
    """Returns the process group of the ranks that share this rank's engine, `tensor_parallel` consecutive ones; None if
    each rank has an engine of its own. Collective: all ranks of the default group call this function."""
    if tensor_parallel == 1:
        return None
    # ranks wait for the leader while it waits for environments, which have their own time limits
    group, _ = dist.new_subgroups(tensor_parallel, backend="gloo", timeout=timedelta(days=1))
    return group
