"""A pool of supervised processes with deadlines, which survives the death of its processes.

The pool runs sessions. A session is a sequence of calls in one process that may keep state there (an episode of an
environment), or a single call (a reward). Calls of many sessions run at the same time.

- A call fails if it raises or exceeds its deadline. In the second case its process is killed.
- When a process dies or is killed, its other sessions continue in another process, which repeats their calls. A session
  fails if a repeated call gives another reply.
- If a crash's stack shows which session caused it, that session fails. Otherwise every session that was running a call
  is a suspect: it continues in a process that runs one call at a time (`Process.is_alone`), and fails if that process
  dies too. A process that is killed from outside therefore costs no result.
"""

import contextlib
import math
import pickle
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Generic, TypeVar

from workers.pool.channel import CONTROL, Reply
from workers.pool.child_main import CANCEL_S, CONCURRENT, Handler, perform
from workers.pool.process import Process

Payload = TypeVar("Payload")
Value = TypeVar("Value")

START_TIMEOUT_S = 120.0
"""Longest time that a process may take to start; it imports the user's modules."""
_CHECK_S = 0.25
"""Seconds between two looks at the deadlines."""
_ANSWER_S = 3.0
"""Seconds after which a process that does not answer a ping is frozen."""
_FAILED_STARTS_MAX = 3
"""Number of processes in a row that may die while they start."""


@dataclass(frozen=True)
class PoolSpec(Generic[Payload, Value]):
    """Description of a pool whose calls take a Payload and return a Value.

    Attributes:
        make: picklable function that creates the `Handler` in each process.
        name: prefix of log files.
        what: name of the called code in messages, such as "reward function".
        options: section of the configuration with the limits.
        error: exception type that is raised if no process can be used.
        num_workers: number of processes.
        threads: calls per process at the same time, for handlers that support it.
        timeout_s: deadline of a call, in seconds.
        digest: function of a reply's value, by which repeated calls are compared; None if sessions are single calls.
        log_dir: folder of the logs {name}-{process}.log with the output of the code; None discards the output.
        environment: all environment variables of the processes; None = those of this process.
        on_repeat: receives the number of a session whose running call is repeated in another process.
    """

    make: Callable[[], Handler[Payload, Value]]
    name: str
    what: str
    options: str
    error: type[Exception]
    num_workers: int
    threads: int
    timeout_s: float
    digest: Callable[[Value], str] | None = None
    log_dir: str | None = None
    environment: Mapping[str, str] | None = None
    on_repeat: Callable[[int], None] | None = None


@dataclass
class _Session(Generic[Payload]):
    """A session.

    Attributes:
        number: its number.
        process: the process that runs it.
        done: payload of each finished call, and digest of its reply; empty in a pool of single calls.
        num_run: number of these calls that the current process has run. After a change of the process it runs the
            others again, to bring the session into the same state.
        call: payload of the running call, in a tuple because a payload may be None.
    """

    number: int
    process: Process
    done: list[tuple[Payload, str]] = field(default_factory=list)
    num_run: int = 0
    call: tuple[Payload] | None = None


class InlinePool(Generic[Payload, Value]):
    """The interface of `ProcessPool` in the caller's thread, for debuggers: a call has ended when `submit` returns."""

    processes_replaced = 0

    def __init__(self, spec: PoolSpec[Payload, Value]) -> None:
        self._handler = spec.make()
        self.end = self._handler.end
        self._replies: list[Reply[Value]] = []

    def submit(self, number: int, payload: Payload) -> None:
        call = partial(self._handler.run, number, payload)
        self._replies.append(perform(number, call))

    def poll(self, timeout_s: float) -> list[Reply[Value]]:
        replies = self._replies
        self._replies = []
        return replies

    def close(self) -> None:
        """Does nothing."""


class ProcessPool(Generic[Payload, Value]):
    """A pool of `num_workers` processes, which the constructor starts.

    One thread uses the pool and must outlive it; the pool works only inside its methods.

    Attributes:
        processes_replaced: number of processes that died or were killed.
        style: `Handler.style`; None until a process is ready.
    """

    def __init__(self, spec: PoolSpec[Payload, Value]) -> None:
        self.processes_replaced = 0
        self.style: str | None = None
        self._spec = spec
        self._make = pickle.dumps(spec.make)
        self._overdue_text = f"took longer than {spec.options}.timeout_s={spec.timeout_s:g} seconds"
        self._check_s = min(_CHECK_S, spec.timeout_s / 4)
        self._timeout_s = spec.timeout_s
        self._sessions: dict[int, _Session[Payload]] = {}
        self._processes: list[Process] = []
        self._replies: list[Reply[Value]] = []
        self._failed_starts = 0
        self._next_check = 0.0
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_writer.setblocking(False)
        self._start_missing()

    def submit(self, number: int, payload: Payload, process: Process | None = None) -> None:
        """Sends the next call of a session. `poll` returns its reply; an error ends the session.

        Args:
            number: Number of the session; a number that is not in use begins a session.
            payload: Argument of the call.
            process: Process in which a new session starts; None = the process with the fewest sessions.
        """
        session = self._sessions.get(number)
        if session is None:
            session = _Session(number, process or self.emptiest())
            self._sessions[number] = session
            session.process.sessions.add(number)
        session.call = (payload,)
        self._send_next(session)

    def end(self, number: int) -> None:
        """Ends a session that has no running call."""
        if number in self._sessions:
            self._end_session(self._sessions[number])

    def poll(self, timeout_s: float) -> list[Reply[Value]]:
        """Returns the replies since the last call. Waits up to timeout_s for the first reply, for `wake` or for a
        process that becomes ready. Raises the spec's `error` if no process can be used."""
        until = time.monotonic() + timeout_s
        while True:
            if time.monotonic() >= self._next_check:
                self._check()
            # the check may have ended sessions, whose replies need no wait
            sleep_s = 0.0
            if not self._replies:
                wake_up = min(until, self._next_check)
                sleep_s = max(0.0, wake_up - time.monotonic())
            is_woken = self._receive(sleep_s)
            if is_woken or self._replies or time.monotonic() >= until:
                replies = self._replies
                self._replies = []
                return replies

    def wake(self) -> None:
        """Interrupts a waiting `poll`. Can be called from any thread."""
        # the socket is full of unread wake-ups, or the pool is closed
        with contextlib.suppress(OSError):
            self._wake_writer.send(b"w")

    def emptiest(self) -> Process:
        """Returns the process with the fewest sessions, preferring processes that are ready."""

        def priority(process: Process) -> tuple[bool, int]:
            return not process.is_loaded, len(process.sessions)

        return min(self._open_processes(), key=priority)

    def _open_processes(self) -> list[Process]:
        """Returns the processes that accept new sessions."""
        return [process for process in self._processes if not process.is_alone]

    @property
    def pids(self) -> list[int]:
        """Returns the ids of the running processes."""
        return [process.pid for process in list(self._processes)]

    def close(self) -> None:
        """Kills all processes."""
        for process in list(self._processes):
            self._dispose(process)
        self._sessions = {}
        self._wake_reader.close()
        self._wake_writer.close()

    # -------------------------------------------------------------------------------------------- starting and ending

    def _start_missing(self) -> None:
        """Starts processes until `num_workers` of them accept new sessions."""
        missing = self._spec.num_workers - len(self._open_processes())
        for _ in range(missing):
            self._start(self._spec.threads)

    def _start(self, threads: int, *, is_alone: bool = False) -> Process:
        """Starts a process, which accepts calls when it has reported its start."""
        log_path = None
        if self._spec.log_dir is not None:
            log_path = self._free_log_path(Path(self._spec.log_dir))
        process = Process(self._make, threads, log_path, is_alone=is_alone, environment=self._spec.environment)
        self._processes.append(process)
        # its start has a time limit, too
        self._next_check = 0.0
        return process

    def _free_log_path(self, folder: Path) -> str:
        """Returns the first log that no running process writes to. Creates the folder."""
        # without the folder, on a full disk, the output is dropped
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
        used = {process.log_path for process in self._processes}
        number = 0
        while True:
            path = str(folder / f"{self._spec.name}-{number}.log")
            if path not in used:
                return path
            number += 1

    def _dispose(self, process: Process) -> None:
        """Kills a process, removes it and closes its files."""
        process.kill()
        self._processes.remove(process)
        process.close()

    # ---------------------------------------------------------------------------------------------- calls and replies

    def _send_next(self, session: _Session[Payload]) -> None:
        """Sends the next call of a session to its process, unless one is running or there is none. Finished calls that
        this process has not run are repeated first."""
        process = session.process
        if session.call is None or session.number in process.sent:
            return
        # one call at a time, so that the next crash of such a process names its session
        if process.is_alone and process.sent:
            return
        if session.num_run < len(session.done):
            payload, _ = session.done[session.num_run]
        else:
            [payload] = session.call
        process.send(session.number, payload)
        self._next_check = min(self._next_check, time.monotonic() + self._check_s)

    def _return_reply(self, session: _Session[Payload], reply: Reply[Value]) -> None:
        """Lets the next `poll` return a reply. Ends the session after an error, or if it is a single call."""
        session.call = None
        self._replies.append(reply)
        if reply.error is not None or self._spec.digest is None:
            self._end_session(session)

    def _end_session(self, session: _Session[Payload]) -> None:
        """Ends a session, and its process if this ran only suspects of a crash and has none left."""
        process = session.process
        del self._sessions[session.number]
        process.sessions.discard(session.number)
        # the process of a session that failed with it has ended already
        if process not in self._processes:
            return
        if process.is_alone and not process.sessions:
            self._dispose(process)
        elif self._spec.digest is not None:
            # the handler keeps a state for sessions of several calls
            process.end(session.number)

    def _receive(self, timeout_s: float) -> bool:
        """Processes the messages that arrive within timeout_s. Returns True if `wake` was called."""
        # a list, because each channel must be flushed, and `any` ends at the first one with unsent data
        have_unsent_data = [process.channel.flush() for process in self._processes]
        if any(have_unsent_data):
            # `wait` does not tell when a socket accepts data again, so the rest is sent soon
            timeout_s = min(timeout_s, self._check_s / 10)

        processes = list(self._processes)
        channels = [process.channel for process in processes]
        limit_s = None if math.isinf(timeout_s) else timeout_s
        ready = wait([self._wake_reader, *channels], limit_s)  # type: ignore[list-item]
        for process in processes:
            # the messages of one process can end another one
            if process.channel not in ready or process not in self._processes:
                continue
            self._take_messages(process)
            if process.channel.is_closed and process in self._processes:
                self._handle_crash(process, process.cause_of_death())
        return self._wake_reader in ready and bool(self._wake_reader.recv(4096))

    def _take_messages(self, process: Process) -> None:
        """Processes the messages of a process: replies of calls, the report of its start, and answers to pings."""
        for reply in process.receive():
            if reply.session != CONTROL:
                self._take_reply(process, reply)
            elif process.is_loaded:
                # the answer to a ping: the stacks of the running calls by session
                process.pinged_at = None
                # untrusted code can write such an answer, too
                stacks = reply.value if isinstance(reply.value, dict) else None
                self._end_overdue(process, stacks, is_frozen=False)
            elif reply.error is not None:
                raise self._spec.error(f"The {self._spec.what} does not load.\n{reply.error}")
            else:
                self._take_start(process, style=str(reply.value))

    def _take_start(self, process: Process, style: str) -> None:
        """Marks a process as ready. style: how its handler runs calls; see `Handler.style`."""
        process.is_loaded = True
        self.style = style
        self._failed_starts = 0
        process.begin(process.threads if style in CONCURRENT else 1)
        # handlers that end late calls themselves get time for it before their process is killed
        self._timeout_s = self._spec.timeout_s + CANCEL_S.get(style, 0.0)
        # new sessions can start
        self.wake()

    def _take_reply(self, process: Process, reply: Reply[Value]) -> None:
        """Processes the reply of a call, which may repeat one that another process has run."""
        session = self._sessions.get(reply.session)
        # a session that has failed, or that continues in another process
        if session is None or session.process is not process:
            return
        digest: str | None = None
        if reply.error is None and self._spec.digest is not None:
            digest = self._spec.digest(reply.result)

        is_repeated = session.num_run < len(session.done)
        if is_repeated:
            self._take_repeated_reply(session, reply, digest)
        else:
            if digest is not None and session.call is not None:
                [payload] = session.call
                session.done.append((payload, digest))
                session.num_run += 1
            self._return_reply(session, reply)

        # the next of its sessions can run
        if process.is_alone and process in self._processes:
            for number in sorted(process.sessions):
                self._send_next(self._sessions[number])

    def _take_repeated_reply(self, session: _Session[Payload], reply: Reply[Value], digest: str | None) -> None:
        """Continues a session whose repeated call gave the same reply as before; any other session fails."""
        _, first_digest = session.done[session.num_run]
        if digest == first_digest:
            session.num_run += 1
            self._send_next(session)
            return
        call = f"call {session.num_run + 1} of {len(session.done)}"
        reason = reply.error or (
            f"When its calls were repeated, {call} returned another result: it "
            "depends on something else (time, another process, its own random state) and cannot continue."
        )
        self._return_reply(session, replace(reply, error=f"Its process died because of another session. {reason}"))

    # ------------------------------------------------------------------------------------------------------- watching

    def _check(self) -> None:
        """Handles calls and starts that take too long."""
        now = time.monotonic()
        # none, unless a process has a call or starts
        self._next_check = math.inf
        for process in list(self._processes):
            # the check of another one has ended it
            if process not in self._processes:
                continue
            is_idle = process.is_loaded and not process.sent
            if not is_idle:
                self._next_check = now + self._check_s
                self._check_process(process, now)

    def _check_process(self, process: Process, now: float) -> None:
        """Raises the spec's `error` for a start that takes too long. Looks closer at a process with an overdue call,
        and ends it if it is frozen."""
        if not process.is_loaded:
            if now > process.started_at + START_TIMEOUT_S:
                how = f"took longer than {START_TIMEOUT_S:g} s to start.{process.last_words()}"
                raise self._spec.error(f"The {self._spec.what}'s process {how}")
        elif process.pinged_at is None:
            latest_start = now - self._timeout_s
            if any(started < latest_start for started in process.running().values()):
                process.ping()
        elif now > process.pinged_at + _ANSWER_S:
            stacks = process.stacks()
            # the answer may have come in the meantime
            self._take_messages(process)
            if process.pinged_at is not None and process in self._processes:
                self._end_overdue(process, dict.fromkeys(process.sent, stacks), is_frozen=True)

    def _end_overdue(self, process: Process, stacks: Mapping[int, str] | None, *, is_frozen: bool) -> None:
        """Kills a process that has an overdue call.

        Args:
            process: the process.
            stacks: stacks of the running calls by session, if they are known.
            is_frozen: whether one call holds the interpreter's lock, so that no thread of the process runs.
        """
        latest_start = time.monotonic() - self._timeout_s
        running = process.running()
        overdue = [session for session, start_time in running.items() if start_time < latest_start]
        if not overdue:
            return
        # If other threads still run, the overdue call itself is the cause. In a frozen process, and if calls share a
        # thread, any running call can be what the overdue one waits for.
        culprits = overdue
        if len(running) > 1 and (is_frozen or self.style == "async"):
            culprits = []
        self._handle_crash(process, self._overdue_text, culprits, stacks, is_timeout=True)

    def _handle_crash(
        self,
        process: Process,
        how: str,
        culprits: Sequence[int] = (),
        stacks: Mapping[int, str] | None = None,
        is_timeout: bool = False,
    ) -> None:
        """Replaces a process that died or must be killed.

        Args:
            process: the process.
            how: how it ended, for messages: "was killed by SIGKILL", "took longer than ...".
            culprits: sessions that caused it; empty = unknown.
            stacks: stacks of the running calls by session, if they are known.
            is_timeout: True if a call exceeded its deadline.
        """
        process.kill()
        # a call that ended just before the process did has its reply in the channel, and must not be repeated
        self._take_messages(process)
        # a last message has already removed the process
        if process not in self._processes:
            return
        running = list(process.running())
        # without known culprits, any running call may have caused it; a call that has just ended did not
        candidates = [number for number in culprits or running if number in running]
        # of several running calls, the stack of a crash does not name the session
        stack_names_session = len(running) == 1 and process.crash() != ""
        is_certain = bool(culprits) or process.is_alone or stack_names_session
        last_words = process.last_words()
        sessions = [self._sessions[number] for number in sorted(process.sessions)]
        self._replace(process, how, last_words)

        failed = candidates if is_certain else []
        suspects = [] if is_certain else candidates
        survivors: list[_Session[Payload]] = []
        for session in sessions:
            # the next process has run none of its calls
            session.num_run = 0
            if session.number not in failed:
                survivors.append(session)
                continue
            stack = (stacks or {}).get(session.number)
            details = f" Stack of the call:\n{stack}" if stack else last_words
            error = f"The {self._spec.what} {how}; its process was replaced.{details}"
            reply: Reply[Value] = Reply(session.number, error=error, is_timeout=is_timeout)
            self._return_reply(session, reply)
        self._continue_elsewhere(survivors, running, suspects)

    def _replace(self, process: Process, how: str, last_words: str) -> None:
        """Removes a process and starts another one. Raises the spec's `error` if processes die while they start.

        Args:
            process: The process.
            how: How it ended, for messages.
            last_words: Its crash stack or the end of its output.
        """
        process.note(f"this process was replaced: the {self._spec.what} {how}")
        if not process.is_alone:
            self.processes_replaced += 1
        self._dispose(process)
        if not process.is_loaded:
            self._failed_starts += 1
            if self.style is None or self._failed_starts >= _FAILED_STARTS_MAX:
                raise self._spec.error(f"The {self._spec.what} {how} while it started.{last_words}")
        self._start_missing()

    def _continue_elsewhere(
        self, sessions: Sequence[_Session[Payload]], running: Sequence[int], suspects: Sequence[int]
    ) -> None:
        """Continues the sessions of a process that has ended.

        Args:
            sessions: The sessions.
            running: Numbers of those that were running a call.
            suspects: Numbers of those that may have ended the process. They share a process that runs one call at a
                time, so that the next crash names its session and hits no other.
        """
        alone: Process | None = None
        for session in sessions:
            if session.number in running and self._spec.on_repeat is not None:
                self._spec.on_repeat(session.number)
            if session.number in suspects:
                alone = alone or self._start(1, is_alone=True)
                session.process = alone
            else:
                session.process = self.emptiest()
            session.process.sessions.add(session.number)
            self._send_next(session)
