"""The environments of a rollout engine: asynchronous reset and step in supervised processes.

For each `reset` and `step`, `poll` returns exactly one `EnvReply`, in the order in which they end, unless the episode
was discarded before. If an environment raises, hangs, returns invalid values or crashes its process, its reply has
`error` set, and the other environments continue. One thread uses a pool (see `workers.pool.process_pool`).
"""

import functools
import itertools
import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from verl_lite.config import EnvPoolConfig
from verl_lite.envs import EnvTemplate
from verl_lite.errors import UserError, printable
from workers.agents.env_host import Act, Begin, EnvCall, EnvHost, EnvReply
from workers.pool.channel import Reply
from workers.pool.process_pool import InlinePool, PoolSpec, ProcessPool

__all__ = ["EnvError", "EnvPool", "EnvReply"]


THREADS = 64
"""Default number of environments that step at once in one process."""


Pool = ProcessPool[EnvCall, EnvReply] | InlinePool[EnvCall, EnvReply]


class EnvError(UserError):
    """The environments cannot be used: one fails in the dry run, or their processes do not start."""


@dataclass
class _Episode:
    """An episode.

    Attributes:
        key: The caller's name of it.
        tag: Tag of its environment.
        is_busy: Whether a call is waiting or running.
        is_discarded: Whether the caller wants no more replies of it.
    """

    key: Hashable
    tag: str
    is_busy: bool = False
    is_discarded: bool = False


class EnvPool:
    """A pool of environments in `config.num_workers` processes.

    With 0 processes, environments run in the caller's thread, one call at a time and without deadlines, for debuggers.

    Args:
        config: section `agentic.env_pool`.
        templates: environment templates by tag.
        modules: modules that each process imports because they register environments (`verl_lite.envs.env_modules()`).
        log_dir: folder for the logs env-{process}.log with the environments' output; None discards it.
    """

    def __init__(
        self,
        config: EnvPoolConfig,
        templates: Mapping[str, EnvTemplate],
        *,
        modules: Sequence[str] = (),
        log_dir: str | None = None,
    ) -> None:
        self._templates = dict(templates)
        self._spec = PoolSpec[EnvCall, EnvReply](
            functools.partial(EnvHost, self._templates, tuple(modules)),
            name="env",
            what="environment",
            options="agentic.env_pool",
            error=EnvError,
            num_workers=config.num_workers,
            threads=THREADS if config.threads is None else config.threads,
            timeout_s=config.timeout_s,
            digest=EnvReply.digest,
            log_dir=log_dir,
        )
        self._pool: Pool | None = None
        # An episode keeps its number until its last call has ended, and a caller may reuse its key before that.
        self._next_number = itertools.count()
        self._number_of_key: dict[Hashable, int] = {}
        self._episodes: dict[int, _Episode] = {}
        # calls by tag, because a template may limit how many of its environments step at once
        self._running: Counter[str] = Counter()
        self._waiting: defaultdict[str, deque[tuple[int, EnvCall]]] = defaultdict(deque)

    def start(self) -> Pool:
        """Starts the processes without waiting for them; the first `reset` does it too."""
        if self._pool is not None:
            return self._pool
        if self._spec.num_workers:
            self._pool = ProcessPool(self._spec)
        else:
            self._pool = InlinePool(self._spec)
        return self._pool

    def reset(self, key: Hashable, tag: str, seed: int) -> None:
        """Starts an episode and discards an earlier one with the same key. KeyError for a tag without a template."""
        self.discard(key)
        if tag not in self._templates:
            raise KeyError(f"no environment has the tag {tag!r}; tags are {', '.join(self._templates)}")
        number = next(self._next_number)
        self._number_of_key[key] = number
        self._episodes[number] = _Episode(key, tag)
        self._queue_call(number, Begin(tag, seed))

    def step(self, key: Hashable, action: str | None) -> None:
        """Takes a step in an episode.

        Args:
            key: Key of the episode.
            action: The action; None = the environment draws one.

        Raises:
            KeyError: The episode was not reset, has failed or was discarded.
            ValueError: Its last reply has not been polled.
        """
        number = self._number_of_key.get(key)
        if number is None:
            raise KeyError(f"episode {key!r} was not reset, has failed, or was discarded")
        if self._episodes[number].is_busy:
            raise ValueError(f"episode {key!r} has a running call; step it after its reply")
        self._queue_call(number, Act(action))

    def discard(self, key: Hashable) -> None:
        """Ends an episode, of which `poll` then returns no more replies. Unknown keys are ignored."""
        number = self._number_of_key.pop(key, None)
        if number is None:
            return
        episode = self._episodes[number]
        episode.is_discarded = True
        # a running call cannot be interrupted: its environment is free when the call has ended
        if not episode.is_busy:
            self._forget(number)

    def poll(self, timeout_s: float = 0.0) -> list[EnvReply]:
        """Returns the new replies; waits up to `timeout_s` for the first. Raises EnvError if no process can be
        started."""
        until = time.monotonic() + timeout_s
        while True:
            remaining_s = max(0.0, until - time.monotonic())
            replies = self.start().poll(remaining_s)
            current = []
            for reply in replies:
                env_reply = self._finish_call(reply)
                if env_reply is not None:
                    current.append(env_reply)

            # without processes, a call has ended when it is submitted, so that waiting brings nothing
            is_exhausted = self._spec.num_workers == 0 and not replies
            if current or is_exhausted or time.monotonic() >= until:
                return current

    def dry_run(self, tags: Iterable[str]) -> list[str]:
        """Resets one environment of each tag with seed 0, takes one step, resets it again, and checks the returned
        values. Must not be called while episodes run.

        Returns:
            The tags whose second episode of the same seed began with another observation or instruction.

        Raises:
            EnvError: An environment does not work. The message has the tag, the problem and what to change.
        """
        tags = list(dict.fromkeys(tags))
        unknown = set(tags) - set(self._templates)
        if unknown:
            entries = ", ".join(self._templates) or "none"
            raise EnvError(f"the tag {min(unknown)!r}: agentic.custom_envs has no such entry; it has {entries}")

        errors, begun_differently = self._try_environments(tags)
        failures = []
        # in the order of the configuration, not in that of the replies
        for tag, template in self._templates.items():
            error = errors.get(tag)
            if error is not None:
                failures.append(
                    f"agentic.custom_envs.{tag} (env_type {template.env_type}, env_config {template.env_config}) does "
                    "not work; nothing was started. Construction, a reset with seed 0, one step or a second reset "
                    "failed:\n"
                    f"{printable(error)}\n"
                    "Change the entry or the environment; trainer/AGENTIC.md lists the values that it must return."
                )
        if failures:
            raise EnvError("\n\n".join(failures))
        return begun_differently

    def _try_environments(self, tags: Sequence[str]) -> tuple[dict[str, str], list[str]]:
        """Resets, steps and resets one environment of each tag. Returns the errors by tag, and the tags whose two
        episodes began differently."""
        first_resets = self._reset_all(tags)
        working = _without_error(first_resets)
        for tag in working:
            self.step(tag, None)
        steps = self._wait_for_replies(len(working))
        working = _without_error(steps)

        # the end of an episode makes its environment available, so that the second reset is one of the same object
        for tag in tags:
            self.discard(tag)
        second_resets = self._reset_all(working)
        working = _without_error(second_resets)
        for tag in tags:
            self.discard(tag)

        errors = {}
        for replies in (first_resets, steps, second_resets):
            for tag, reply in replies.items():
                if reply.error is not None:
                    errors[tag] = reply.error
        begun_differently = []
        for tag in working:
            if _beginning(first_resets[tag]) != _beginning(second_resets[tag]):
                begun_differently.append(tag)
        return errors, begun_differently

    def _reset_all(self, tags: Sequence[str]) -> dict[str, EnvReply]:
        """Resets one environment of each tag with seed 0, all at the same time. Returns the replies by tag."""
        for tag in tags:
            self.reset(tag, tag, 0)
        return self._wait_for_replies(len(tags))

    def _wait_for_replies(self, number: int) -> dict[str, EnvReply]:
        """Waits for this number of replies of episodes whose keys are tags. Returns them by tag."""
        replies: dict[str, EnvReply] = {}
        while len(replies) < number:
            for reply in self.poll(1.0):
                replies[str(reply.key)] = reply
        return replies

    @property
    def processes_replaced(self) -> int:
        """Number of environment processes that died or were killed, and were replaced."""
        return 0 if self._pool is None else self._pool.processes_replaced

    def close(self) -> None:
        """Kills all environment processes. Replies that were not polled are lost."""
        if self._pool is not None:
            self._pool.close()

    def _queue_call(self, number: int, call: EnvCall) -> None:
        """Queues a call of an episode, and sends it unless its tag is at its limit."""
        episode = self._episodes[number]
        episode.is_busy = True
        self._waiting[episode.tag].append((number, call))
        self._send_waiting(episode.tag)

    def _send_waiting(self, tag: str) -> None:
        """Sends the queued calls of a tag while its template allows more of them at the same time."""
        template = self._templates[tag]
        if template.use_thread_lock:
            limit: float = 1
        else:
            limit = template.max_env_step_concurrent or math.inf
        while self._waiting[tag] and self._running[tag] < limit:
            number, call = self._waiting[tag].popleft()
            # an episode that was discarded while it waited has no use for its call
            if self._episodes[number].is_discarded:
                self._forget(number)
            else:
                self._running[tag] += 1
                self.start().submit(number, call)

    def _finish_call(self, reply: Reply[EnvReply]) -> EnvReply | None:
        """Returns the reply for the caller, or None if its episode was discarded."""
        episode = self._episodes[reply.session]
        episode.is_busy = False
        self._running[episode.tag] -= 1
        self._send_waiting(episode.tag)

        has_failed = reply.error is not None
        if episode.is_discarded or has_failed:
            self._forget(reply.session)
        if episode.is_discarded:
            return None
        if has_failed:
            # a later `step` of the key is then an error of the caller
            del self._number_of_key[episode.key]
            return EnvReply(episode.key, None, seconds=reply.seconds, error=reply.error, is_timeout=reply.is_timeout)
        return replace(reply.result, key=episode.key, seconds=reply.seconds)

    def _forget(self, number: int) -> None:
        """Ends the session of an episode whose last call has ended."""
        del self._episodes[number]
        self.start().end(number)


def _without_error(replies: Mapping[str, EnvReply]) -> list[str]:
    """Returns the tags whose environment replied without an error."""
    return [tag for tag, reply in replies.items() if reply.error is None]


def _beginning(reply: EnvReply) -> tuple[str | None, object]:
    """Returns what the agent sees of the reply to a reset."""
    return reply.observation, reply.info.get("env_instruction")
