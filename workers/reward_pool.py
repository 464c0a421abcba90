"""Scores answers in processes of their own, which are killed when they hang and replaced when they die.

Takes `RewardItem`s at any time from any thread (`submit`), gives `RewardResult`s by key (`collect`). One thread watches
over all reward processes and sleeps until one of them answers, a sample arrives, or the next deadline passes. It keeps
one batch of samples at a time in each process. A sample whose reward raises, returns nonsense, takes longer than
`reward.timeout_s` or takes its process down is `failed`; the samples that shared its batch are scored all the same.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from verl_lite.config import RewardConfig
from verl_lite.errors import UserError
from verl_lite.rewards import RewardFunction, RewardItem, RewardResult, find_reward, score_item
from workers.reward_process import PROGRESS, ProcessOptions, load_function, write_progress

_START_TIMEOUT_S = 120.0
_BATCH_SECONDS = 0.05
_BATCH_ITEMS_MAX = 256
_FIRST_GUESS_S = 0.005
_UNEXPLAINED_DEATHS_MAX = 3
_STDERR_TAIL_BYTES = 4000


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
        self._function: RewardFunction | None = None
        self._supervisor: _Supervisor | None = None
        self._starting = threading.Lock()

    def start(self) -> None:
        """Starts the processes without waiting for them; `submit` does it at first use."""
        with self._starting:
            if self._num_workers == 0:
                self._function = self._function or load_function(self._config, self._modules)
            elif self._supervisor is None:
                self._supervisor = _Supervisor(self._options(), self._config.timeout_s, self._mailbox)
                self._supervisor.start()

    def submit(self, items: Iterable[RewardItem]) -> None:
        """Queues samples and returns at once. Raises ValueError for a key that is queued or not yet collected."""
        self.start()
        items = list(items)
        self._mailbox.expect([item.key for item in items])
        if self._supervisor is not None:
            self._supervisor.queue(items)
        elif self._function is not None:
            for item in items:
                self._mailbox.put([(item.key, score_item(self._function, item))])

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
        if self._config.custom_reward_function.path is None:
            load_function(self._config, self._modules)
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
    return RewardItem(("dry_run", index), row["data_source"], str(truth), truth, row.get("extra_info"))


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


class _Supervisor(threading.Thread):
    """The thread to which the reward processes belong: it starts them, feeds them, and kills and replaces them."""

    def __init__(self, options: list[ProcessOptions], timeout_s: float, mailbox: _Mailbox) -> None:
        super().__init__(name="reward-pool", daemon=True)
        self._options = options
        self._timeout_s = timeout_s
        self._mailbox = mailbox
        self._queue: deque[RewardItem] = deque()  # its ends are thread-safe
        self._processes: list[_Process] = []
        self._seconds_per_item = _FIRST_GUESS_S
        self._unexplained_deaths = 0
        self._closing = False
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_writer.setblocking(False)

    def queue(self, items: list[RewardItem]) -> None:
        self._queue.extend(items)
        self._wake()

    def close(self) -> None:
        self._closing = True
        self._wake()
        self.join()

    def run(self) -> None:
        try:
            for options in self._options:
                self._processes.append(_Process(options))
            while not self._closing:
                self._feed()
                self._wait()
        finally:  # also when this thread dies of a defect: nobody may wait for it in vain
            for process in self._processes:
                process.kill()
            self._mailbox.fail("The reward pool is closed." if self._closing else "The reward pool's thread died.")

    def _feed(self) -> None:
        """Gives each idle process a batch: some 50 ms of work, and no more than its share of the queue."""
        for slot, process in enumerate(self._processes):
            if not process.ready or process.batch or not self._queue:
                continue
            share = math.ceil(len(self._queue) / len(self._processes))
            size = max(1, min(share, int(_BATCH_SECONDS / self._seconds_per_item), _BATCH_ITEMS_MAX))
            batch = [self._queue.popleft() for _ in range(size)]
            if not process.send(batch):
                self._queue.extendleft(reversed(batch))
                self._replace(slot, timed_out=False)

    def _wait(self) -> None:
        """Sleeps until a process answers or dies, `_wake` is called, or a deadline passes; then deals with it."""
        deadlines = [process.deadline(self._timeout_s) for process in self._processes]
        sleep_s = max(0.0, min(deadlines) - time.monotonic())
        connections = [process.connection for process in self._processes]
        ready = wait([self._wake_reader, *connections], None if math.isinf(sleep_s) else sleep_s)
        if self._wake_reader in ready:
            self._wake_reader.recv(4096)
        for slot, process in enumerate(self._processes):
            if process.connection in ready:
                if not self._receive(process):
                    self._replace(slot, timed_out=False)
            elif time.monotonic() >= process.deadline(self._timeout_s):
                self._replace(slot, timed_out=True)

    def _receive(self, process: _Process) -> bool:
        """Takes one message; False if the process is dead instead."""
        try:
            message = process.connection.recv()
        except (EOFError, OSError):
            return False
        if not process.ready:
            if message is None:
                process.ready = True
            else:
                self._fail(f"The reward function does not load.\n{message}")
            return True
        self._mailbox.put(process.take_results(message))
        self._unexplained_deaths = 0
        if not process.batch:
            self._seconds_per_item = (self._seconds_per_item + process.seconds_per_item) / 2
        return True

    def _replace(self, slot: int, *, timed_out: bool) -> None:
        """Kills a process that is overdue or dead. The sample it worked on is failed, the rest of its batch queued."""
        process = self._processes[slot]
        process.kill()
        while process.ready and process.batch and process.connection.poll():
            if not self._receive(process):
                break
        culprit, rest = process.blame()
        self._queue.extendleft(reversed(rest))
        limit = f"reward.timeout_s={self._timeout_s:g} seconds" if process.ready else f"{_START_TIMEOUT_S:g} seconds"
        how = f"took longer than {limit}" if timed_out else process.cause_of_death()
        if culprit is not None:
            error = f"The reward function {how}; its process was replaced.{process.last_words()}"
            self._mailbox.put([(culprit.key, RewardResult.failure(error, timed_out=timed_out))])
        else:
            self._unexplained_deaths += 1
            if not process.ready or self._unexplained_deaths > _UNEXPLAINED_DEATHS_MAX:
                when = "while it ran no sample" if process.ready else "while it started"
                self._fail(f"A reward process {how} {when}.{process.last_words()}")
        if not self._closing:
            self._processes[slot] = _Process(self._options[slot])

    def _fail(self, reason: str) -> None:
        self._mailbox.fail(reason)
        self._closing = True

    def _wake(self) -> None:
        try:
            self._wake_writer.send(b"w")
        except BlockingIOError:  # thousands of unread wake-ups: it will wake
            pass


class _Process:
    """One reward process: a bare interpreter in a session of its own, so that what it forks is killed with it."""

    def __init__(self, options: ProcessOptions) -> None:
        ours, theirs = socket.socketpair()
        path = f"import sys; sys.path[:] = {sys.path!r}"
        self._stderr = tempfile.TemporaryFile()
        with tempfile.TemporaryFile() as page, theirs:
            page.truncate(PROGRESS.size)
            self._progress = mmap.mmap(page.fileno(), PROGRESS.size)
            run = f"from workers.reward_process import main; main({theirs.fileno()}, {page.fileno()}, {os.getpid()})"
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"{path}; {run}"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                pass_fds=(theirs.fileno(), page.fileno()),
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self.connection = Connection(ours.detach())
        self.ready = False
        self.batch: list[RewardItem] = []
        self.seconds_per_item = 0.0
        self._reported = 0
        self._busy_since = time.monotonic()
        self._killed = False
        self.connection.send(options)

    def send(self, batch: list[RewardItem]) -> bool:
        """Starts a batch in an idle process; False if it is dead."""
        write_progress(self._progress, -1)
        try:
            self.connection.send(batch)
        except OSError:
            return False
        self.batch, self._reported, self._busy_since = batch, 0, time.monotonic()
        return True

    def take_results(self, results: list[RewardResult]) -> list[tuple[Hashable, RewardResult]]:
        """Results that came in, with their keys. With the last of them the process is idle again."""
        items = self.batch[self._reported : self._reported + len(results)]
        self._reported += len(results)
        if self._reported == len(self.batch):
            self.seconds_per_item = max(1e-6, (time.monotonic() - self._busy_since) / len(self.batch))
            self.batch = []
        return [(item.key, result) for item, result in zip(items, results, strict=True)]

    def deadline(self, timeout_s: float) -> float:
        """When the sample it works on is overdue, by `time.monotonic`; infinity if idle."""
        if not self.ready:
            return self._busy_since + _START_TIMEOUT_S
        if not self.batch:
            return math.inf
        started, _ = PROGRESS.unpack_from(self._progress)
        return started + timeout_s

    def blame(self) -> tuple[RewardItem | None, list[RewardItem]]:
        """Of a dead process: the sample it worked on, None if on none, and the others without a result."""
        _, index = PROGRESS.unpack_from(self._progress)
        places = range(self._reported, len(self.batch))
        culprit = self.batch[index] if index in places else None
        return culprit, [self.batch[place] for place in places if place != index]

    def kill(self) -> None:
        """Ends the process and all that it forked; a process that is dying by itself keeps its own exit code."""
        if self._killed:
            return
        self._killed = True
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()

    def cause_of_death(self) -> str:
        code = self._process.wait()
        if code >= 0:
            return f"ended its process with exit code {code}"
        return f"was killed by {signal.Signals(-code).name}"

    def last_words(self) -> str:
        """The end of what the process wrote to stderr below Python: the stack of a segmentation fault."""
        size = os.fstat(self._stderr.fileno()).st_size
        tail = os.pread(self._stderr.fileno(), _STDERR_TAIL_BYTES, max(0, size - _STDERR_TAIL_BYTES))
        return "\n" + tail.decode(errors="replace") if tail else ""
