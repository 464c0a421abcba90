"""A pool of supervised processes: deadlines, deaths, and what becomes of the others.

Its unit is the session: calls made one after the other in one process, whose state they may keep there (an episode of
an environment), or a single call (a reward). Calls of many sessions run at the same time.

- A call that raises, or takes longer than its deadline, has failed; in the latter case its process is killed.
- When a process dies or is killed, what its other sessions did is done again in another: the same calls, which have to
  give the same replies. A session whose replies differ has failed.
- Who brought a process down has failed, if the stack of a crash tells. Otherwise each that was at work goes on in a
  process that runs one call at a time, and has failed if that dies too. So a process that was killed from outside costs
  nobody a result.
"""

import math
import pickle
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from workers.pool.channel import CONTROL, Reply
from workers.pool.child_main import CONCURRENT, Handler, perform
from workers.pool.process import Process

START_TIMEOUT_S = 120.0
_CHECK_S = 0.25
_ANSWER_S = 3.0
_CANCEL_S = 1.0
_FAILED_STARTS_MAX = 3


@dataclass(frozen=True)
class PoolSpec:
    """What a pool is for.

    make: gives the `Handler` inside each process; pickled. what: is blamed in messages. options: the section of the
    configuration that the limits stand in. digest: of a reply's value, by which repeated calls are compared; None =
    sessions are single calls. error: raised when no process can be used. log_dir: what the code prints goes to
    {name}-{process}.log there; None drops it.
    """

    make: Callable[[], Handler]
    name: str
    what: str
    options: str
    error: type[Exception]
    num_workers: int
    threads: int
    timeout_s: float
    digest: Callable[[Any], str] | None = None
    log_dir: str | None = None


@dataclass
class _Session:
    """process: where it lives. done: the payloads of its calls so far, each with the digest of its reply. seen: how
    many of them its process has run. call: what the caller waits for, in a tuple."""

    number: int
    process: Process
    done: list[tuple[Any, str]] = field(default_factory=list)
    seen: int = 0
    call: tuple[Any] | None = None


class InlinePool:
    """As `ProcessPool`, in the caller's thread, where a debugger can stop: a call has ended when `submit` returns."""

    processes_replaced = 0

    def __init__(self, work: PoolSpec) -> None:
        self._handler = work.make()
        self.end = self._handler.end
        self._replies: list[Reply] = []

    def submit(self, number: int, payload: Any) -> None:
        self._replies.append(perform(number, partial(self._handler.run, number, payload)))

    def poll(self, timeout_s: float) -> list[Reply]:
        replies, self._replies = self._replies, []
        return replies

    def close(self) -> None:
        """Nothing is open."""


class ProcessPool:
    """`work.num_workers` processes, started by the constructor, and those that are being retired.

    It belongs to one thread, which has to outlive it: nothing happens outside its methods. processes_replaced: how
    many died or were killed. style: of the handlers; None until one is ready.
    """

    def __init__(self, work: PoolSpec) -> None:
        self.processes_replaced = 0
        self.style: str | None = None
        self._work = work
        self._make = pickle.dumps(work.make)
        self._overdue = f"took longer than {work.options}.timeout_s={work.timeout_s:g} seconds"
        self._check_s = min(_CHECK_S, work.timeout_s / 4)
        self._timeout_s = work.timeout_s
        self._sessions: dict[int, _Session] = {}
        self._processes: list[Process] = []
        self._replies: list[Reply] = []
        self._failed_starts = 0
        self._next_check = 0.0
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_writer.setblocking(False)
        self._fill()

    def submit(self, number: int, payload: Any, process: Process | None = None) -> None:
        """Sends the next call of a session, or begins it in `process`, None = the emptiest; its reply comes from
        `poll`. An error ends the session."""
        session = self._sessions.get(number)
        if session is None:
            session = self._sessions[number] = _Session(number, process or self.emptiest())
            session.process.sessions.add(number)
        session.call = (payload,)
        self._advance(session)

    def end(self, number: int) -> None:
        """Frees a session, of which no call is under way."""
        if number in self._sessions:
            self._forget(self._sessions[number])

    def poll(self, timeout_s: float) -> list[Reply]:
        """What ended since; waits up to that long for the first, for `wake`, or for a process that is ready. Raises
        `work.error` if no process can be used."""
        until = time.monotonic() + timeout_s
        while True:
            if time.monotonic() >= self._next_check:
                self._check()
            sleep_s = 0.0 if self._replies else max(0.0, min(until, self._next_check) - time.monotonic())
            if self._receive(sleep_s) or self._replies or time.monotonic() >= until:
                replies, self._replies = self._replies, []
                return replies

    def wake(self) -> None:
        """Ends a `poll` that waits; from any thread."""
        try:
            self._wake_writer.send(b"w")
        except OSError:  # thousands of them unread, or the pool is closed
            pass

    def emptiest(self) -> Process:
        """The process for a new session: with the fewest others, of those that are ready if one is."""
        open_ones = [process for process in self._processes if not process.is_alone]
        return min(open_ones, key=lambda process: (not process.is_loaded, len(process.sessions)))

    def close(self) -> None:
        """Ends all processes, busy or not."""
        for process in list(self._processes):
            self._dispose(process)
        self._sessions = {}
        self._wake_reader.close()
        self._wake_writer.close()

    # -------------------------------------------------------------------------------------------- starting and ending

    def _fill(self) -> None:
        """Starts processes until `num_workers` take new sessions."""
        for _ in range(self._work.num_workers - sum(not process.is_alone for process in self._processes)):
            self._start(self._work.threads)

    def _start(self, threads: int, *, is_alone: bool = False) -> Process:
        work, log_path = self._work, None
        if work.log_dir is not None:
            Path(work.log_dir).mkdir(parents=True, exist_ok=True)
            taken = {process.log_path for process in self._processes}
            paths = (str(Path(work.log_dir) / f"{work.name}-{number}.log") for number in range(len(taken) + 1))
            log_path = next(path for path in paths if path not in taken)
        process = Process(self._make, threads, log_path, is_alone=is_alone)
        self._processes.append(process)
        self._next_check = 0.0
        return process

    def _dispose(self, process: Process) -> None:
        process.kill()
        self._processes.remove(process)
        process.close()

    # ---------------------------------------------------------------------------------------------- calls and replies

    def _advance(self, session: _Session) -> None:
        """Sends a call if one is waited for: first those that the session's process has not run yet."""
        process = session.process
        if session.call is None or session.number in process.sent or (process.is_alone and process.sent):
            return
        payload, *_ = session.done[session.seen] if session.seen < len(session.done) else session.call
        process.send(session.number, payload)
        self._next_check = min(self._next_check, time.monotonic() + self._check_s)

    def _answer(self, session: _Session, reply: Reply) -> None:
        session.call = None
        self._replies.append(reply)
        if reply.error is not None or self._work.digest is None:
            self._forget(session)

    def _forget(self, session: _Session) -> None:
        process = session.process
        del self._sessions[session.number]
        process.sessions.discard(session.number)
        if process in self._processes:
            if process.is_alone and not process.sessions:
                self._dispose(process)
            elif self._work.digest is not None:
                process.end(session.number)

    def _receive(self, timeout_s: float) -> bool:
        """Takes what comes within that time. True: it was woken."""
        if any([process.channel.flush() for process in self._processes]):
            timeout_s = min(timeout_s, self._check_s / 10)
        of_channel = {process.channel: process for process in self._processes}
        ready = wait([self._wake_reader, *of_channel], None if math.isinf(timeout_s) else timeout_s)  # type: ignore[list-item]
        for channel, process in of_channel.items():
            if channel in ready and process in self._processes:
                self._take_messages(process)
                if process.channel.is_closed and process in self._processes:
                    self._handle_crash(process, process.cause_of_death())
        return self._wake_reader in ready and bool(self._wake_reader.recv(4096))

    def _take_messages(self, process: Process) -> None:
        for reply in process.receive():
            if reply.session != CONTROL:
                self._take_reply(process, reply)
            elif process.is_loaded:
                process.pinged_at = None
                self._end_overdue(process, reply.value, is_frozen=False)
            elif reply.error is not None:
                raise self._work.error(f"The {self._work.what} does not load.\n{reply.error}")
            else:
                process.is_loaded, self.style, self._failed_starts = True, reply.value, 0
                process.begin(process.threads if self.style in CONCURRENT else 1)
                if self.style == "async":  # where no call blocks the loop, its handler cancels what is late
                    self._timeout_s = self._work.timeout_s + _CANCEL_S
                self.wake()  # there is room for new sessions

    def _take_reply(self, process: Process, reply: Reply) -> None:
        session, digest = self._sessions.get(reply.session), self._work.digest
        if session is None or session.process is not process:
            return
        told = None if reply.error is not None or digest is None else digest(reply.value)
        if session.seen == len(session.done):
            if told is not None and session.call is not None:
                session.done.append((*session.call, told))
                session.seen += 1
            self._answer(session, reply)
        elif told == session.done[session.seen][1]:  # a call that was done again
            session.seen += 1
            self._advance(session)
        else:
            why = reply.error or (
                f"Done again, it answered differently to its call {session.seen + 1} of {len(session.done)}: it depends"
                " on something else (time, another process, a random state of its own) and so cannot go on."
            )
            self._answer(session, replace(reply, error=f"Its process died, for another's fault. {why}"))
        for number in sorted(process.sessions) if process.is_alone and process in self._processes else ():
            self._advance(self._sessions[number])

    # ------------------------------------------------------------------------------------------------------- watching

    def _check(self) -> None:
        """What takes too long; nothing if there is nothing to watch."""
        now = time.monotonic()
        self._next_check = math.inf
        for process in list(self._processes):
            if process not in self._processes or (process.is_loaded and not process.sent):
                continue
            self._next_check = now + self._check_s
            if not process.is_loaded:
                if now > process.started_at + START_TIMEOUT_S:
                    how = f"took longer than {START_TIMEOUT_S:g} s to start.{process.last_words()}"
                    raise self._work.error(f"The {self._work.what}'s process {how}")
            elif process.pinged_at is not None:
                if now > process.pinged_at + _ANSWER_S:
                    stacks = process.stacks()
                    self._take_messages(process)
                    if process.pinged_at is not None and process in self._processes:
                        self._end_overdue(process, dict.fromkeys(process.sent, stacks), is_frozen=True)
            elif any(now > since + self._timeout_s for since in process.running().values()):
                process.ping()

    def _end_overdue(self, process: Process, stacks: Mapping[int, str], *, is_frozen: bool) -> None:
        """Ends a process in which a call is overdue. If others of its threads go on, that call is so by itself; if it
        is frozen, because one holds the interpreter's lock, or if calls share a thread, any of them may be the one."""
        before, running = time.monotonic() - self._timeout_s, process.running()
        culprits = [session for session, since in running.items() if since < before]
        if culprits:
            is_known = len(running) == 1 or not (is_frozen or self.style == "async")
            self._handle_crash(process, self._overdue, culprits if is_known else [], stacks, is_timeout=True)

    def _handle_crash(
        self,
        process: Process,
        how: str,
        culprits: Sequence[int] = (),
        stacks: Mapping[int, str] | None = None,
        is_timeout: bool = False,
    ) -> None:
        """A process is dead, or has to be. culprits: whose fault that certainly is; none = whoever it looks like."""
        process.kill()
        self._take_messages(process)
        if process not in self._processes:
            return  # by what it still said
        running = list(process.running())
        candidates = [number for number in culprits or running if number in running]
        is_certain = bool(culprits) or process.is_alone or (len(running) == 1 and process.crash() != "")
        last_words = process.last_words()
        process.note(f"this process was replaced: the {self._work.what} {how}")
        self.processes_replaced += not process.is_alone
        sessions = [self._sessions[number] for number in sorted(process.sessions)]
        self._dispose(process)
        if not process.is_loaded:
            self._failed_starts += 1
            if self.style is None or self._failed_starts >= _FAILED_STARTS_MAX:
                raise self._work.error(f"The {self._work.what} {how} while it started.{last_words}")
        self._fill()
        alone = None
        for session in sessions:
            session.seen, is_candidate = 0, session.number in candidates
            if is_candidate and is_certain:
                stack = (stacks or {}).get(session.number)
                details = f" It was here:\n{stack}" if stack else last_words
                error = f"The {self._work.what} {how}; its process was replaced.{details}"
                self._answer(session, Reply(session.number, error=error, is_timeout=is_timeout))
                continue
            alone = alone or (self._start(1, is_alone=True) if is_candidate else None)
            session.process = alone if is_candidate and alone else self.emptiest()
            session.process.sessions.add(session.number)
            self._advance(session)
