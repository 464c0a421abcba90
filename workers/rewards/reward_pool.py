"""Scores answers in supervised processes, which are killed when they hang and replaced when they die.

Any thread can `submit` `RewardItem`s at any time and `collect` their `RewardResult`s by key. A sample is `failed` if
its reward function raises, returns an invalid value, exceeds `reward.timeout_s` or crashes its process. Other samples
in the same process are still scored (see `workers.pool.process_pool`).
"""

import functools
import itertools
import json
import math
import threading
import time
from collections import deque
from collections.abc import Hashable, Iterable, Sequence

from verl_lite.config import RewardConfig
from verl_lite.errors import UserError, printable
from verl_lite.json_types import JsonMapping
from verl_lite.registry import import_modules
from verl_lite.rewards import RewardItem, RewardResult, Scorer, asks_by_source, check_source, load_scorer
from workers.pool.channel import Reply
from workers.pool.child_main import AsyncCalls
from workers.pool.process_pool import PoolSpec, ProcessPool

_SENT_AHEAD_S = 0.05
"""A process gets calls for this time ahead, so that it need not wait for the pool between short calls."""
_SENT_AHEAD_MAX = 256
"""Largest number of calls that a process gets at once."""
_AVERAGED_CALLS = 8
"""Number of calls over which their duration is averaged, about."""
_ROW_CHARACTERS = 4000
"""Longest row in an error message."""


class RewardError(UserError):
    """The reward function cannot be used: it does not load, or fails on a row of the dataset."""


class RewardHandler:
    """Handler of a pool's process that calls the reward function on lists of samples. It does not import torch.

    Only the style `batch` gets lists of several samples. Calls of an async function run concurrently in one event loop
    in a separate thread; an overdue call is cancelled, and the others continue.

    Attributes:
        style, thread: see `workers.pool.child_main.Handler`.
    """

    def __init__(self, config: RewardConfig, modules: tuple[str, ...]) -> None:
        self._scorer = _load(config, modules)
        self._timeout_s = config.timeout_s
        self.style: str = self._scorer.style
        self.thread: int | None = None
        if self.style == "async":
            self._coroutines = AsyncCalls()
            self.thread = self._coroutines.thread

    def run(self, session: int, items: list[RewardItem]) -> list[RewardResult]:
        """Scores a list of samples. Raises if the call fails for the whole list."""
        if self.style == "async":
            [item] = items
            coroutine = self._scorer.score(item)
            return [self._coroutines.run(coroutine, self._timeout_s, "reward function", "reward.timeout_s")]
        if self.style == "batch":
            return self._scorer.score_list(items)
        return self._scorer.score_all(items)

    def end(self, session: int) -> None:
        """Does nothing: calls keep no state."""


def _load(config: RewardConfig, modules: tuple[str, ...]) -> Scorer:
    """Loads the reward function, after the modules that register rewards."""
    import_modules(modules)
    return load_scorer(config)


class RewardPool:
    """The reward function of a run in `num_workers` processes.

    With 0 processes the function runs in the caller's thread, without deadlines, for debuggers.

    Args:
        config: section `reward`.
        num_workers: number of processes.
        modules: modules that each process imports because they register rewards (`verl_lite.rewards.reward_modules()`).
        log_dir: folder for the logs reward-{process}.log with the function's output; None discards it.
    """

    def __init__(
        self, config: RewardConfig, num_workers: int, *, modules: Sequence[str] = (), log_dir: str | None = None
    ) -> None:
        self._config = config
        self._modules = tuple(modules)
        self._spec = PoolSpec[list[RewardItem], list[RewardResult]](
            functools.partial(RewardHandler, config, self._modules),
            name="reward",
            what="reward function",
            options="reward",
            error=RewardError,
            num_workers=num_workers,
            threads=math.ceil(config.max_concurrent / max(1, num_workers)),
            timeout_s=config.timeout_s,
            log_dir=log_dir,
        )
        # guards the three attributes after it: keys of the samples without a result, results that were not collected,
        # and the reason why there will be no more results
        self._changed = threading.Condition()
        self._expected: set[Hashable] = set()
        self._results: dict[Hashable, RewardResult] = {}
        self._failure: str | None = None
        # calls the reward function if there are no processes
        self._inline: Scorer | None = None
        # samples that wait, and those of failed lists, which are scored one by one
        self._queue: deque[RewardItem] = deque()
        self._alone: deque[RewardItem] = deque()
        # samples of the calls in processes, by the number of the call
        self._sent: dict[int, list[RewardItem]] = {}
        self._numbers = itertools.count()
        self._rate = RateLimit(config.max_rpm)
        self._seconds_per_call = _SENT_AHEAD_S
        self._thread: threading.Thread | None = None
        self._pool: ProcessPool[list[RewardItem], list[RewardResult]] | None = None
        self._is_closing = False

    def start(self) -> None:
        """Starts the processes without waiting for them. The first `submit` calls it, too."""
        with self._changed:
            if self._spec.num_workers == 0:
                self._inline = self._inline or _load(self._config, self._modules)
            elif self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="reward-pool", daemon=True)
                self._thread.start()

    def submit(self, items: Iterable[RewardItem]) -> None:
        """Queues samples and returns immediately. Raises ValueError for a key that is queued or not yet collected."""
        self.start()
        items = list(items)
        with self._changed:
            self._raise_failure()
            for item in items:
                if item.key in self._expected or item.key in self._results:
                    raise ValueError(f"reward sample {item.key!r} is already submitted and not yet collected")
                self._expected.add(item.key)
        if self._inline is not None:
            self._score_inline(self._inline, items)
            return
        self._queue.extend(items)
        if self._pool is not None:
            self._pool.wake()

    def _score_inline(self, scorer: Scorer, items: list[RewardItem]) -> None:
        """Scores samples in this thread, in lists of the size that processes would get."""
        size = self._config.batch_size if scorer.style == "batch" else 1
        for start in range(0, len(items), size):
            called_items = items[start : start + size]
            self._store_results(called_items, scorer.score_all(called_items))

    def collect(self, keys: Iterable[Hashable]) -> dict[Hashable, RewardResult]:
        """Waits for the results of these keys and returns them in the order of the keys, each result once.

        Another thread can submit the samples later. Raises RewardError if the reward function does not load.
        """
        keys = list(keys)
        missing = set(keys)
        with self._changed:
            missing.difference_update(self._results)
            while missing:
                self._raise_failure()
                self._changed.wait()
                missing.difference_update(self._results)
            return {key: self._results.pop(key) for key in keys}

    def ready(self, keys: Iterable[Hashable]) -> set[Hashable]:
        """Returns the keys whose results are available. Raises RewardError as `collect`."""
        with self._changed:
            self._raise_failure()
            return {key for key in keys if key in self._results}

    def cancel(self, keys: Iterable[Hashable]) -> None:
        """Forgets these samples: those in the queue are not scored, and the results of the others are discarded."""
        with self._changed:
            for key in keys:
                self._expected.discard(key)
                self._results.pop(key, None)

    def dry_run(self, rows: Iterable[JsonMapping], data_sources: Iterable[str] = ()) -> list[dict[str, float | str]]:
        """Scores dataset rows with their ground truth as the answer, to find errors before the run starts.

        The score is not checked, because a bare ground truth need not be a complete answer.

        Args:
            rows: data_source, reward_model["ground_truth"] and optionally extra_info.
            data_sources: all sources of the dataset; each must have a reward function.

        Returns:
            For each row the values that the reward returned besides the score.

        Raises:
            RewardError: if the function fails on a row, with its traceback and the row.
            UserError: for a source without a reward function, or whose function does not accept the kwargs.
        """
        # a function of the user's own scores every source
        if asks_by_source(self._config):
            _load(self._config, self._modules)
            for data_source in data_sources:
                check_source(self._config, data_source)

        rows = list(rows)
        items = []
        for number, row in enumerate(rows):
            answer = str(row["reward_model"]["ground_truth"])
            item = RewardItem.of_row(("dry_run", number), row, answer, row.get("images", ()))
            items.append(item)
        self.submit(items)
        results = self.collect(item.key for item in items)
        for row, result in zip(rows, results.values(), strict=True):
            if result.failed:
                raise _row_error(row, result)
        return [result.extra for result in results.values()]

    def processes_replaced(self) -> int:
        """Returns the number of reward processes that died or were killed, and were replaced."""
        if self._pool is None:
            return 0
        return self._pool.processes_replaced

    def close(self) -> None:
        """Kills all reward processes. Samples that are not collected are lost."""
        self._is_closing = True
        if self._pool is not None:
            self._pool.wake()
        if self._thread is not None:
            self._thread.join()

    def _store_results(self, items: Sequence[RewardItem], results: Sequence[RewardResult]) -> None:
        """Stores the results of samples that were not cancelled, and notifies the waiting threads."""
        with self._changed:
            for item, result in zip(items, results, strict=True):
                if item.key in self._expected:
                    self._expected.remove(item.key)
                    self._results[item.key] = result
            self._changed.notify_all()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise RewardError(self._failure)

    # ------------------------------------------------------------------------ the thread that uses the processes

    def _serve(self) -> None:
        """Runs the processes until the pool is closed. The thread that starts them must outlive them."""
        try:
            pool = ProcessPool(self._spec)
            self._pool = pool
            while not self._is_closing:
                next_call = self._send_queued(pool)
                wait_s = max(0.0, next_call - time.monotonic())
                for reply in pool.poll(wait_s):
                    self._handle_reply(reply)
            reason = "The reward pool is closed."
        except RewardError as error:
            reason = printable(str(error))
        # such as a full process table, too many open files or a full disk
        except OSError as error:
            reason = f"The rewards' processes cannot be started or reached on this machine: {printable(str(error))}"
        except BaseException as error:
            reason = f"The reward pool's thread died: {type(error).__name__}: {printable(str(error))}"
            raise
        finally:
            # also after an unexpected error, so that no thread waits forever
            if self._pool is not None:
                self._pool.close()
            with self._changed:
                self._failure = reason
                self._changed.notify_all()

    def _send_queued(self, pool: ProcessPool[list[RewardItem], list[RewardResult]]) -> float:
        """Sends samples to processes with free capacity.

        Returns the time (`time.monotonic`) at which the rate limit allows the next call; infinity if the limit does not
        delay any sample.
        """
        # samples of failed lists first: their lists were sent before all that wait
        while items := self._alone or self._queue:
            process = pool.emptiest()
            # the pool ends its wait when a process becomes ready
            if not process.is_loaded:
                break
            self._drop_cancelled(items)
            if not items:
                continue

            # an even share, so that the last samples do not wait for one process while others are idle
            share = math.ceil(len(items) / self._spec.num_workers)
            items_per_call = 1
            if pool.style == "batch" and items is self._queue:
                items_per_call = min(share, self._config.batch_size)
            num_calls = self._allowed_calls(pool.style, len(process.sessions), share)
            if num_calls <= 0:
                break
            for _ in range(num_calls):
                self._drop_cancelled(items)
                if not items:
                    break
                if not self._rate.take():
                    return self._rate.next_call
                number = next(self._numbers)
                called_items = self._take_items(items, items_per_call)
                self._sent[number] = called_items
                pool.submit(number, called_items, process)
        return math.inf

    def _drop_cancelled(self, items: deque[RewardItem]) -> None:
        """Removes cancelled samples from the front of a queue."""
        while items and items[0].key not in self._expected:
            items.popleft()

    def _take_items(self, items: deque[RewardItem], count: int) -> list[RewardItem]:
        """Removes up to `count` samples from the front of a queue, without cancelled ones, and returns them."""
        taken: list[RewardItem] = []
        while items and len(taken) < count:
            taken.append(items.popleft())
            self._drop_cancelled(items)
        return taken

    def _allowed_calls(self, style: str | None, in_flight: int, share: int) -> int:
        """Returns the number of calls that a process may receive now; 0 or less if it has to wait.

        Args:
            style: style of the reward function.
            in_flight: number of calls that the process has not answered.
            share: the process's share of the queued samples.
        """
        if style == "async":
            free_in_process = self._spec.threads - in_flight
            # the threads of all processes may be more than reward.max_concurrent, because they are rounded up
            free_in_run = self._config.max_concurrent - len(self._sent)
            return min(share, free_in_process, free_in_run)
        # a hanging call delays only the samples sent together with it
        if in_flight:
            return 0
        if style == "batch":
            return 1
        ahead = max(1, int(_SENT_AHEAD_S / self._seconds_per_call))
        return min(share, ahead, _SENT_AHEAD_MAX)

    def _handle_reply(self, reply: Reply[list[RewardResult]]) -> None:
        """Stores the results of a call, or repeats it for its samples one by one."""
        items = self._sent.pop(reply.session)
        # a moving average, above 0 because `_allowed_calls` divides by it
        seconds = max(1e-6, reply.seconds)
        self._seconds_per_call += (seconds - self._seconds_per_call) / _AVERAGED_CALLS
        if reply.error is None:
            self._store_results(items, _checked_results(reply.result, len(items)))
        elif len(items) > 1:
            # one sample may have failed the whole list
            self._alone.extend(items)
        else:
            failure = RewardResult.failure(reply.error, timed_out=reply.is_timeout)
            self._store_results(items, [failure])


def _checked_results(results: object, count: int) -> Sequence[RewardResult]:
    """Returns the results of a call; failures if they are something else, which untrusted code may have sent."""
    if type(results) is list and len(results) == count and all(type(result) is RewardResult for result in results):
        return results
    return [RewardResult.failure("The process of the reward has sent something else than results.")] * count


def _row_error(row: JsonMapping, result: RewardResult) -> RewardError:
    """Returns the error of a row of the dataset on which the reward function fails."""
    # the number of its images instead of their data
    row_without_images = {**row, "images": len(row.get("images", ()))}
    row_text = json.dumps(row_without_images, indent=2, default=str)[:_ROW_CHARACTERS]
    return RewardError(
        "The reward function fails on a row of the dataset, given its ground truth as the answer. "
        f"Nothing was started.\n{printable(result.error or '')}\nThe row:\n{row_text}"
    )


class RateLimit:
    """Spaces calls evenly.

    Args:
        per_minute: Number of calls in a minute; None: no limit.

    Attributes:
        next_call: Value of `time.monotonic` at the next call.
    """

    _CATCH_UP_S = 0.1
    """Time by which a call may start earlier after a late one."""

    def __init__(self, per_minute: float | None) -> None:
        self._interval_s = 60.0 / per_minute if per_minute else 0.0
        self.next_call = -math.inf

    def take(self) -> bool:
        """Returns True and counts a call if it may start now."""
        now = time.monotonic()
        if self.next_call > now:
            return False
        if self._interval_s:
            # a long pause must not allow many calls at once
            planned = max(self.next_call, now - self._CATCH_UP_S)
            self.next_call = planned + self._interval_s
        return True
