"""Environments in supervised processes: who lives where, what is overdue, and what becomes of the others.

Nothing happens outside the methods. An episode whose call hangs has failed; its process gets no new episodes and is
killed when the others in it are through. When a process dies, the episode that did it has failed, and the others are
begun again elsewhere with the same seed and actions; where one answers differently then, it has failed too. If several
calls ran when it died, and nothing tells whose fault it is, their episodes go on in a process that runs one call at a
time: who does it again is found out.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from verl_lite.config import EnvPoolConfig
from verl_lite.envs import EnvTemplate
from workers.envs.checks import digest
from workers.envs.handle import EnvProcess
from workers.envs.messages import Act, Begin, Call, EnvId, EnvReply, Rebuild, Trial
from workers.envs.process import End, GivenUp, Loaded, NotLoaded, ProcessOptions

START_TIMEOUT_S = 120.0
_CHECK_S = 0.25
_ANSWER_S = 2.0
_GRACE_S = 5.0
_UNEXPLAINED_DEATHS_MAX = 2
_MEMORY_FACTOR_IN_CALL = 2.0


@dataclass
class _Record:
    """What it takes to begin an episode again, and what is under way.

    begin: how it began. digest: of the reset's reply, None until it is there. actions: taken, each with the digest of
    its reply. call: what the caller waits for. sent: what the process is to answer, which is a Rebuild after a death.
    failure: why it cannot go on, to be told at its next call. deaths: of its processes that nobody was blamed for.
    """

    begin: Begin | Trial
    process: EnvProcess
    digest: str | None = None
    actions: list[tuple[str, str]] = field(default_factory=list)
    call: Call | None = None
    sent: Call | None = None
    failure: EnvReply | None = None
    deaths: int = 0
    is_ended: bool = False


class EnvProcesses:
    """Environments in `config.num_workers` processes, and in those that are being retired. fail: makes the error that
    is raised when no process can be used."""

    def __init__(
        self,
        config: EnvPoolConfig,
        templates: Mapping[str, EnvTemplate],
        modules: tuple[str, ...],
        log_dir: str | None,
        fail: Callable[[str], Exception],
    ) -> None:
        self.processes_replaced = 0
        self._config = config
        self._templates = dict(templates)
        self._modules = modules
        self._log_dir = log_dir
        self._fail = fail
        self._records: dict[EnvId, _Record] = {}
        self._processes: list[EnvProcess] = []
        self._replies: list[EnvReply] = []
        self._selector = selectors.DefaultSelector()
        self._check_s = min(_CHECK_S, config.timeout_s / 4)
        self._next_check = 0.0
        self._fill()

    def submit(self, call: Call) -> None:
        """Sends a call; its reply comes from `poll`."""
        record = self._records.get(call.env)
        if record is None:
            assert isinstance(call, Begin | Trial)
            record = self._records[call.env] = _Record(call, self._place_for(call.env))
        record.call = call
        if record.failure is not None:
            self._answer(call.env, record.failure)
        elif record.sent is None:
            self._send(record, call)

    def end(self, env: EnvId) -> None:
        """Frees an episode. If a call is under way, its reply comes all the same."""
        record = self._records.get(env)
        if record is None:
            return
        record.is_ended = True
        record.process.send(End(env))
        if record.call is None and record.sent is None:
            self._forget(env)

    def poll(self, timeout_s: float) -> list[EnvReply]:
        """What ended since; waits up to that long for the first. Raises what `fail` makes if no process works."""
        until = time.monotonic() + timeout_s
        while True:
            now = time.monotonic()
            self._receive(max(0.0, min(until, self._next_check) - now) if not self._replies else 0.0)
            if time.monotonic() >= self._next_check:
                self._check()
            if self._replies or time.monotonic() >= until:
                replies, self._replies = self._replies, []
                return replies

    def close(self) -> None:
        """Ends all processes, busy or not."""
        for process in self._processes:
            process.kill()
            process.close()
        self._processes, self._records = [], {}
        self._selector.close()

    # ---------------------------------------------------------------------------------------------------- processes

    def _fill(self) -> None:
        """Starts processes until `num_workers` take new episodes."""
        for _ in range(self._config.num_workers - sum(not process.is_retiring for process in self._processes)):
            self._start(self._config.threads)

    def _start(self, threads: int) -> EnvProcess:
        log_path = None
        if self._log_dir is not None:
            Path(self._log_dir).mkdir(parents=True, exist_ok=True)
            taken = {process.log_path for process in self._processes}
            paths = (str(Path(self._log_dir) / f"env-{number}.log") for number in range(len(taken) + 1))
            log_path = next(path for path in paths if path not in taken)
        process = EnvProcess(ProcessOptions(self._templates, threads, self._modules, log_path))
        self._processes.append(process)
        for pipe in (process.channel.fileno(), *process.child.stderr):
            self._selector.register(pipe, selectors.EVENT_READ, process)
        return process

    def _place_for(self, env: EnvId) -> EnvProcess:
        """The process with the fewest episodes, which gets this one too."""
        process = min(
            (process for process in self._processes if not process.is_retiring), key=lambda each: len(each.episodes)
        )
        process.episodes.add(env)
        return process

    def _retire(self, process: EnvProcess, why: str) -> None:
        """It gets no new episodes and ends with those that it has; another takes its place. Of several such, the oldest
        does not wait for that."""
        if not process.is_retiring:
            process.is_retiring = True
            process.child.note(f"this process is being replaced: {why}")
            self.processes_replaced += 1
            self._fill()
        if not process.episodes:
            self._dispose(process)
        retiring = [each for each in self._processes if each.is_retiring]
        if len(retiring) > max(2, self._config.num_workers):
            self._move(self._dispose(retiring[0]))

    def _dispose(self, process: EnvProcess) -> set[EnvId]:
        """Ends a process for good. Returns the episodes that lived there."""
        process.kill()
        if process in self._processes:
            self._processes.remove(process)
            for key in [key for key in self._selector.get_map().values() if key.data is process]:
                self._selector.unregister(key.fd)
            process.close()
        return process.episodes

    # ------------------------------------------------------------------------------------------- calls and replies

    def _send(self, record: _Record, call: Call) -> None:
        record.sent = call
        record.process.send(call)

    def _answer(self, env: EnvId, reply: EnvReply) -> None:
        """Hands out the reply to the call that is waited for. An episode with an error is over."""
        record = self._records[env]
        record.call = None
        self._replies.append(reply)
        if reply.error is not None or record.is_ended or isinstance(record.begin, Trial):
            self._forget(env)

    def _forget(self, env: EnvId) -> None:
        process = self._records.pop(env).process
        process.episodes.discard(env)
        if process.is_retiring and not process.episodes:
            self._dispose(process)

    def _fail_episode(self, env: EnvId, error: str, *, is_timeout: bool = False) -> None:
        """Tells the error now, if a call is waited for, else at the next one."""
        record = self._records[env]
        record.sent = None
        record.process.episodes.discard(env)
        reply = EnvReply(env, None, error=error, is_timeout=is_timeout)
        if record.call is not None:
            self._answer(env, reply)
        elif record.is_ended:
            self._forget(env)
        else:
            record.failure = reply

    def _receive(self, timeout_s: float) -> None:
        for process in self._processes:
            if process.channel.has_unsent:
                process.channel.flush()
                timeout_s = min(timeout_s, self._check_s / 10)
        for key, _ in self._selector.select(timeout_s):
            process = key.data
            if process not in self._processes:
                continue
            if key.fd != process.channel.fileno():
                process.child.read_stderr()
                if not process.child.stderr:
                    self._selector.unregister(key.fd)
                continue
            self._take_messages(process)
            if process.channel.is_closed and process in self._processes:
                self._bury(process, process.child.cause_of_death("closed its connection to the pool"))

    def _take_messages(self, process: EnvProcess) -> None:
        messages = process.receive()
        for message in messages:
            if isinstance(message, EnvReply):
                self._take_reply(message)
            elif isinstance(message, NotLoaded):
                raise self._fail(f"Environment processes do not start.\n{message.error}")
            elif isinstance(message, Loaded):
                process.is_loaded = True
                self._check_start(process)
        for message in messages:  # at last: they may end the process and send its episodes elsewhere
            if isinstance(message, GivenUp):
                self._take_given_up(process, message)

    def _take_reply(self, reply: EnvReply) -> None:
        assert isinstance(reply.key, int)  # inside a process an environment's key is its number
        record = self._records.get(reply.key)
        if record is None or record.sent is None:
            return
        env, sent, record.sent = record.begin.env, record.sent, None
        if isinstance(sent, Rebuild):
            if reply.error is not None:
                self._fail_episode(env, f"Its process died, for another's fault. {reply.error}")
            elif record.call is not None:
                self._send(record, record.call)
            elif record.is_ended:
                self._forget(env)
            return
        if reply.error is None and isinstance(sent, Act):
            record.actions.append((sent.action, digest(reply)))
        elif reply.error is None:
            record.digest = digest(reply)
        self._answer(env, reply)

    def _take_given_up(self, process: EnvProcess, message: GivenUp) -> None:
        record = self._records.get(message.env)
        if record is None or record.process is not process:
            return
        how = self._overdue()
        self._fail_episode(message.env, f"The environment {how}. It was here:\n{message.stack}", is_timeout=True)
        if self._templates[record.begin.tag].use_thread_lock or process.given_up >= process.threads:
            self._bury(process, f"was ended, as a call {how}", blamed=[])  # others wait for what the hanging call holds
        else:
            self._retire(process, f"a call {how}")

    def _overdue(self) -> str:
        return f"took longer than agentic.env_pool.timeout_s={self._config.timeout_s:g} seconds"

    # ----------------------------------------------------------------------------------------------------- watching

    def _check(self) -> None:
        """What takes too long or holds too much."""
        now = time.monotonic()
        self._next_check = now + self._check_s
        for process in list(self._processes):
            if process not in self._processes:
                continue
            if not process.is_loaded:
                if now > process.started_at + START_TIMEOUT_S:
                    process.child.write_stack()
                    words = process.child.last_words()
                    raise self._fail(f"An environment process took longer than {START_TIMEOUT_S:g} s to start.{words}")
                continue
            for env in process.overdue(self._config.timeout_s):
                process.give_up(env)
            if any(now > asked_at + _ANSWER_S for asked_at in process.asked_at.values()):
                self._end_frozen(process)
            elif self._is_stalled(process, now):
                self._bury(process, "stopped answering", blamed=[])
            else:
                self._check_memory(process)

    def _end_frozen(self, process: EnvProcess) -> None:
        """A call is overdue, and no other thread of its process runs either: it holds the interpreter's lock."""
        process.child.write_stack()
        self._take_messages(process)
        if process.asked_at and process in self._processes:
            process.kill()
            self._bury(process, self._overdue(), is_timeout=True)

    def _is_stalled(self, process: EnvProcess, now: float) -> bool:
        awaited = any(self._records[env].sent is not None for env in process.episodes)
        return awaited and process.is_idle() and now > process.last_sign_at + self._config.timeout_s + _GRACE_S

    def _check_start(self, process: EnvProcess) -> None:
        limit = self._config.max_memory_mb
        if limit is not None and process.child.memory_mb() > limit:
            held = f"{process.child.memory_mb():.0f} MiB before its first episode"
            raise self._fail(f"agentic.env_pool.max_memory_mb={limit}: a process holds {held}; raise the limit.")

    def _check_memory(self, process: EnvProcess) -> None:
        limit = self._config.max_memory_mb
        if limit is None:
            return
        held = process.child.memory_mb()
        if held > _MEMORY_FACTOR_IN_CALL * limit:
            times = f"{_MEMORY_FACTOR_IN_CALL:g} times agentic.env_pool.max_memory_mb={limit}"
            process.kill()
            self._bury(process, f"held {held:.0f} MiB, more than {times}")
        elif held > limit and not process.is_retiring:
            self._retire(process, f"it holds {held:.0f} MiB, more than agentic.env_pool.max_memory_mb={limit}")

    # ------------------------------------------------------------------------------------------------------- deaths

    def _bury(
        self, process: EnvProcess, how: str, *, blamed: list[EnvId] | None = None, is_timeout: bool = False
    ) -> None:
        """A process is dead, or has to be. blamed: whose fault that is; None = whoever it looks like."""
        process.kill()
        self._take_messages(process)
        if process not in self._processes:
            return  # by a message that came in
        suspects = blamed if blamed is not None else process.suspects()
        suspects = [env for env in suspects if env in process.episodes and self._records[env].sent is not None]
        words = process.child.last_words()
        was_loaded = process.is_loaded
        if not process.is_retiring:
            self.processes_replaced += 1
        process.child.note(f"this process was replaced: the environment {how}")
        episodes = self._dispose(process)
        if not was_loaded:
            raise self._fail(f"An environment process {how} while it started.{words}")
        self._fill()
        if len(suspects) == 1:
            error = f"The environment {how}; its process was replaced.{words}"
            self._fail_episode(suspects[0], error, is_timeout=is_timeout)
        elif blamed is None and not suspects:
            self._count_unexplained(episodes, f"An environment process {how}, three times.{words}")
        self._move(episodes - set(suspects))
        if len(suspects) > 1:
            self._move_alone(set(suspects))

    def _count_unexplained(self, episodes: set[EnvId], error: str) -> None:
        """Nobody was running. Who lived in such a process time and again has failed."""
        for env in list(episodes):
            self._records[env].deaths += 1
            if self._records[env].deaths > _UNEXPLAINED_DEATHS_MAX:
                self._fail_episode(env, error)

    def _move_alone(self, episodes: set[EnvId]) -> None:
        """Begins these episodes again in a process of one thread, which gets no others."""
        process = self._start(threads=1)
        process.is_retiring = True
        process.episodes.update(episodes)
        for env in sorted(episodes):
            self._begin_again(env, process)

    def _move(self, episodes: set[EnvId]) -> None:
        """Begins these episodes again, in the processes that take new ones."""
        for env in sorted(episodes):
            if env in self._records and self._records[env].failure is None:
                self._begin_again(env, self._place_for(env))

    def _begin_again(self, env: EnvId, process: EnvProcess) -> None:
        record = self._records[env]
        record.process, record.sent = process, None
        if record.is_ended:
            self._fail_episode(env, "It was discarded.")
        elif record.digest is None or isinstance(record.begin, Trial):
            self._send(record, record.begin)
        else:
            assert isinstance(record.begin, Begin)
            self._send(record, Rebuild(record.begin, record.digest, tuple(record.actions)))
