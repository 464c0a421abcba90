"""Environments of a rollout engine: reset and step at any time, replies as they come, none lost and none late.

Takes keys of episodes chosen by the caller; each `reset` and each `step` gives exactly one `EnvReply` from `poll`, in
the order in which they end, unless the episode was discarded meanwhile. An environment that raises, hangs, returns
nonsense or takes its process down gives a reply with `error`, and the others go on.

A pool belongs to one thread: it works only inside its methods, and its processes end with that thread.
"""

from __future__ import annotations

import itertools
import queue
import time
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from verl_lite.config import EnvPoolConfig
from verl_lite.envs import EnvTemplate
from verl_lite.errors import UserError
from workers.envs.host import EnvHost
from workers.envs.messages import Act, Begin, Call, EnvId, EnvReply, Trial
from workers.envs.processes import EnvProcesses

__all__ = ["EnvError", "EnvPool", "EnvReply"]


class EnvError(UserError):
    """Environments cannot be used at all: one fails in the dry run, or their processes do not start."""


class EnvPlace(Protocol):
    """Where environments live. One reply for each call; `end` frees an episode, whose call may still be under way."""

    processes_replaced: int

    def submit(self, call: Call) -> None: ...
    def end(self, env: EnvId) -> None: ...
    def poll(self, timeout_s: float) -> list[EnvReply]: ...
    def close(self) -> None: ...


@dataclass
class _Episode:
    key: Hashable
    tag: str
    is_busy: bool = False
    is_discarded: bool = False


class EnvPool:
    """The environments of `templates`, in `config.num_workers` processes; 0 = in threads of this process, without
    deadlines, where a debugger can stop.

    modules: imported in each process, for the environments that they register (`verl_lite.envs.env_modules()`).
    log_dir: what environments print goes to env-{process}.log there; None drops it.
    """

    def __init__(
        self,
        config: EnvPoolConfig,
        templates: Mapping[str, EnvTemplate],
        *,
        modules: Sequence[str] = (),
        log_dir: str | None = None,
    ) -> None:
        self._config = config
        self._templates = dict(templates)
        self._modules = tuple(modules)
        self._log_dir = log_dir
        self._place: EnvPlace | None = None
        self._numbers = itertools.count()
        self._ids: dict[Hashable, EnvId] = {}
        self._episodes: dict[EnvId, _Episode] = {}
        self._running: Counter[str] = Counter()
        self._waiting: dict[str, deque[Call]] = {tag: deque() for tag in self._templates}

    def start(self) -> None:
        """Starts the processes without waiting for them; the first `reset` does it too."""
        self._started()

    def reset(self, key: Hashable, tag: str, seed: int, render: bool = False) -> None:
        """Begins an episode; a previous one of the same key is discarded. render: with a frame in each of its replies.

        Raises KeyError for a tag that has no template.
        """
        if tag not in self._templates:
            raise KeyError(f"no environment has the tag {tag!r}; tags are {', '.join(self._templates)}")
        self.discard(key)
        env = self._ids[key] = next(self._numbers)
        self._episodes[env] = _Episode(key, tag)
        self._call(Begin(env, tag, seed, render))

    def step(self, key: Hashable, action: str) -> None:
        """Takes an action. Raises KeyError for an episode that is not there (never begun, failed, or discarded),
        ValueError for one whose last reply has not come yet."""
        env = self._ids.get(key)
        if env is None:
            raise KeyError(f"episode {key!r} was not reset, has failed, or was discarded")
        episode = self._episodes[env]
        if episode.is_busy:
            raise ValueError(f"episode {key!r} has a call under way: it can be stepped after its reply")
        self._call(Act(env, episode.tag, action))

    def discard(self, key: Hashable) -> None:
        """Frees an episode; nothing more is heard of it. Unknown keys are welcome."""
        env = self._ids.pop(key, None)
        if env is None:
            return
        self._started().end(env)
        if self._episodes[env].is_busy:
            self._episodes[env].is_discarded = True  # its reply is still to come, to be dropped
            self._withdraw(env)
        else:
            del self._episodes[env]

    def poll(self, timeout_s: float = 0.0) -> list[EnvReply]:
        """What ended since; waits up to `timeout_s` for the first. Raises EnvError if no process can be started."""
        until = time.monotonic() + timeout_s
        while True:
            replies = self._started().poll(max(0.0, until - time.monotonic()))
            wanted = [reply for reply in map(self._settle, replies) if reply is not None]
            if wanted or time.monotonic() >= until:
                return wanted

    def dry_run(self, tags: Iterable[str]) -> None:
        """Makes an environment of each tag, resets it with seed 0, takes one step and looks at all that it gives.

        Raises EnvError naming the tag, what is wrong and what to change. Not while episodes are under way.
        """
        waited_for: set[Hashable] = set()
        for tag in dict.fromkeys(tags):
            if tag not in self._templates:
                known = ", ".join(self._templates) or "none"
                raise EnvError(
                    f"environments of the tag {tag!r}: agentic.custom_envs has no such entry; it has {known}"
                )
            env = self._ids["dry_run", tag] = next(self._numbers)
            self._episodes[env] = _Episode(("dry_run", tag), tag)
            self._call(Trial(env, tag))
            waited_for.add(("dry_run", tag))
        failures = []
        while waited_for:
            replies = self.poll(1.0)
            failures += [self._explain(reply) for reply in replies if reply.error is not None]
            waited_for.difference_update(reply.key for reply in replies)
            for reply in replies:
                self.discard(reply.key)
        if failures:
            raise EnvError("\n\n".join(failures))

    @property
    def processes_replaced(self) -> int:
        """How many environment processes were replaced so far: killed, dead, or grown too large."""
        return 0 if self._place is None else self._place.processes_replaced

    def close(self) -> None:
        """Ends all environment processes, busy or not. Replies that were not polled are lost."""
        if self._place is not None:
            self._place.close()

    # ------------------------------------------------------------------------------------------------------- calls

    def _started(self) -> EnvPlace:
        if self._place is None and self._config.num_workers == 0:
            self._place = EnvThreads(self._templates, self._config.threads)
        elif self._place is None:
            self._place = EnvProcesses(self._config, self._templates, self._modules, self._log_dir, EnvError)
        return self._place

    def _call(self, call: Call) -> None:
        self._episodes[call.env].is_busy = True
        limit = self._templates[call.tag].max_env_step_concurrent
        if limit is not None and self._running[call.tag] >= limit:
            self._waiting[call.tag].append(call)
            return
        self._running[call.tag] += 1
        self._started().submit(call)

    def _settle(self, reply: EnvReply) -> EnvReply | None:
        """A reply as the caller gets it; None if nobody wants it."""
        env = reply.key
        assert isinstance(env, EnvId)
        episode = self._episodes[env]
        episode.is_busy = False
        self._running[episode.tag] -= 1
        if self._waiting[episode.tag]:
            self._call(self._waiting[episode.tag].popleft())
        if episode.is_discarded:
            del self._episodes[env]
            return None
        if reply.error is not None and self._ids.pop(episode.key, None) is not None:
            del self._episodes[env]
        return replace(reply, key=episode.key)

    def _withdraw(self, env: EnvId) -> None:
        """Takes back the call of a discarded episode if it waits for its tag's limit."""
        waiting = self._waiting[self._episodes[env].tag]
        for call in waiting:
            if call.env == env:
                waiting.remove(call)
                del self._episodes[env]
                return

    def _explain(self, reply: EnvReply) -> str:
        assert isinstance(reply.key, tuple)
        tag = reply.key[1]
        template = self._templates[tag]
        return (
            f"agentic.custom_envs.{tag} (env_type {template.env_type}, env_config {template.env_config}) does not "
            f"work; nothing was started. Made, reset with seed 0, and stepped once:\n{reply.error}\n"
            "Change the entry, or the environment: verl_lite/envs/README.md says what it has to give."
        )


class EnvThreads:
    """Environments in threads of this process."""

    processes_replaced = 0

    def __init__(self, templates: Mapping[str, EnvTemplate], threads: int) -> None:
        self._replies: queue.SimpleQueue[EnvReply] = queue.SimpleQueue()
        self._host = EnvHost(templates, threads, self._replies.put)
        self.submit, self.end, self.close = self._host.submit, self._host.end, self._host.close

    def poll(self, timeout_s: float) -> list[EnvReply]:
        """What there is; waits for the first."""
        replies: list[EnvReply] = []
        try:
            if timeout_s > 0:
                replies.append(self._replies.get(timeout=timeout_s))
            while True:
                replies.append(self._replies.get_nowait())
        except queue.Empty:
            return replies
