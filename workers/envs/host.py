"""Environments that live in this process: made, reset, stepped and rendered by a number of threads.

Takes calls at any time, gives one reply for each, in the order in which they end. It is what runs inside an environment
process, and what `agentic.env_pool.num_workers: 0` runs in the rollout worker's own. An environment object serves
one episode after another; one that failed is not used again.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from verl_lite.envs import Env, EnvTemplate
from verl_lite.errors import UserError
from workers.envs.checks import NonsenseError, digest, read_reset, read_step
from workers.envs.messages import Act, Begin, Call, EnvId, EnvReply, Rebuild, Trial

_TRACEBACK_CHARS = 8000

Watch = Callable[[int, EnvId | None], None]
"""Told whenever a thread, by its number, begins with the code of an episode, and when it is through with it (None)."""


@dataclass
class _Episode:
    """env: None until it is made. is_ended: nobody waits for it any more."""

    tag: str
    render: bool = False
    env: Env | None = None
    is_busy: bool = False
    is_ended: bool = False


class EnvHost:
    """deliver: gets each reply, from any thread. threads: calls that run at the same time at most."""

    def __init__(
        self,
        templates: Mapping[str, EnvTemplate],
        threads: int,
        deliver: Callable[[EnvReply], None],
        watch: Watch = lambda slot, env: None,
    ) -> None:
        self._templates = templates
        self._threads_max = threads
        self._deliver = deliver
        self._watch = watch
        self._changed = threading.Condition()
        self._queue: deque[Call] = deque()
        self._episodes: dict[EnvId, _Episode] = {}
        self._spare: dict[str, list[Env]] = {tag: [] for tag in templates}
        self._running: Counter[str] = Counter()
        self._threads = 0
        self._idle_threads = 0
        self._closing = False

    def submit(self, call: Call) -> None:
        """Queues a call and returns at once."""
        with self._changed:
            episode = self._episodes.setdefault(call.env, _Episode(call.tag))
            episode.is_busy = True
            self._queue.append(call)
            if len(self._queue) > self._idle_threads and self._threads < self._threads_max:
                name = f"env-{self._threads}"
                threading.Thread(target=self._serve, args=(self._threads,), name=name, daemon=True).start()
                self._threads += 1
            self._changed.notify()

    def end(self, env: EnvId) -> None:
        """Nobody needs this episode any more. A call that is under way goes on, and its reply comes."""
        with self._changed:
            episode = self._episodes.get(env)
            if episode is None:
                return
            episode.is_ended = True
            if not episode.is_busy:
                self._put_aside(env)

    def give_up(self, env: EnvId) -> bool:
        """Another call may run in the stead of this episode's, whose reply, if it comes, is dropped. False: it has
        ended already."""
        with self._changed:
            episode = self._episodes.get(env)
            if episode is None or not episode.is_busy:
                return False
            del self._episodes[env]
            self._threads_max += 1
            return True

    def close(self) -> None:
        """Ends the threads that have nothing to do; one that hangs ends with the process."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            spare = [env for envs in self._spare.values() for env in envs]
            free = [episode.env for episode in self._episodes.values() if not episode.is_busy]
            self._episodes, self._spare = {}, {}
        for env in [*spare, *free]:
            _close(env)

    # ---------------------------------------------------------------------------------------------------- threads

    def _serve(self, slot: int) -> None:
        while (call := self._next()) is not None:
            self._watch(slot, call.env)
            reply = self._perform(call, slot)
            self._watch(slot, None)
            if self._finish(call, failed=reply.error is not None):
                self._deliver(reply)
            else:
                return

    def _next(self) -> Call | None:
        """The first call in the queue that may run now. Blocks until there is one; None when the host is closed."""
        with self._changed:
            self._idle_threads += 1
            try:
                while not self._closing:
                    for place, call in enumerate(self._queue):
                        if not (self._templates[call.tag].use_thread_lock and self._running[call.tag]):
                            del self._queue[place]
                            self._running[call.tag] += 1
                            return call
                    self._changed.wait()
                return None
            finally:
                self._idle_threads -= 1

    def _finish(self, call: Call, *, failed: bool) -> bool:
        """Notes the end of a call. False: it was given up, its reply is not for anybody and its thread is replaced."""
        with self._changed:
            self._running[call.tag] -= 1
            if self._queue:
                self._changed.notify()  # it may have waited for this call to end
            episode = self._episodes.get(call.env)
            if episode is None:
                return self._closing
            episode.is_busy = False
            if failed or isinstance(call, Trial):
                del self._episodes[call.env]
            elif episode.is_ended:
                self._put_aside(call.env)
            return True

    def _take_spare(self, tag: str) -> Env | None:
        with self._changed:
            spare = self._spare.get(tag)
            return spare.pop() if spare else None

    def _put_aside(self, env: EnvId) -> None:
        episode = self._episodes.pop(env)
        if episode.env is not None and not self._closing:
            self._spare[episode.tag].append(episode.env)

    # ------------------------------------------------------------------------------------------ environments' code

    def _perform(self, call: Call, slot: int) -> EnvReply:
        started = time.monotonic()
        episode = self._episodes.get(call.env) or _Episode(call.tag)
        try:
            reply = self._run(call, episode, slot)
        except (UserError, NonsenseError) as error:
            reply = EnvReply(call.env, None, error=str(error))
        except BaseException:  # the one door to untrusted code, which may even raise SystemExit
            reply = EnvReply(call.env, None, error=traceback.format_exc()[-_TRACEBACK_CHARS:])
        if reply.error is not None or isinstance(call, Trial):
            _close(episode.env)
        return replace(reply, seconds=time.monotonic() - started)

    def _run(self, call: Call, episode: _Episode, slot: int) -> EnvReply:
        if isinstance(call, Begin):
            return self._begin(call, episode)
        if isinstance(call, Act):
            return self._act(call.env, call.action, episode)
        if isinstance(call, Rebuild):
            return self._rebuild(call, episode, slot)
        return self._try(call, episode)

    def _begin(self, call: Begin, episode: _Episode) -> EnvReply:
        episode.render = call.render
        if episode.env is None:
            episode.env = self._take_spare(call.tag) or self._templates[call.tag].make()
        observation, info = read_reset(episode.env.reset(call.seed))
        return EnvReply(call.env, observation, info=info, frame=_frame(episode))

    def _act(self, env: EnvId, action: str, episode: _Episode) -> EnvReply:
        if episode.env is None:
            raise NonsenseError("a step was taken before the reset of its episode")
        observation, reward, terminated, truncated, info = read_step(episode.env.step(action))
        return EnvReply(env, observation, reward, terminated, truncated, info, _frame(episode))

    def _rebuild(self, call: Rebuild, episode: _Episode, slot: int) -> EnvReply:
        reply = self._begin(call.begin, episode)
        expected = [call.digest, *(told for _, told in call.actions)]
        for number, action in enumerate([None, *(action for action, _ in call.actions)]):
            if action is not None:
                self._watch(slot, call.env)  # each has its own deadline
                reply = self._act(call.env, action, episode)
            if digest(reply) != expected[number]:
                when = f"after action {number} of {len(call.actions)}" if number else "after reset"
                raise NonsenseError(
                    f"begun again with the same seed and actions, the environment answered differently {when}: it "
                    f"depends on something else (time, another process, a random state of its own) and so cannot go on"
                )
        return reply

    def _try(self, call: Trial, episode: _Episode) -> EnvReply:
        episode.env = self._templates[call.tag].make()
        observation, _ = read_reset(episode.env.reset(0))
        if observation is None:
            raise NonsenseError("reset(0) gave no observation: its dataset is empty")
        sample = getattr(episode.env, "sample_random_action", None)
        action = sample() if callable(sample) else ""
        if not isinstance(action, str):
            raise NonsenseError(f"sample_random_action gave {action!r}, expected the text of an action")
        return self._act(call.env, action, replace(episode, render=callable(getattr(episode.env, "render", None))))


def _frame(episode: _Episode) -> object:
    render = getattr(episode.env, "render", None)
    if not episode.render or not callable(render):
        return None
    return render()


def _close(env: Env | None) -> None:
    close = getattr(env, "close", None)
    if callable(close):
        try:
            close()
        except BaseException:  # it is thrown away; what it says in its last breath changes nothing
            return
