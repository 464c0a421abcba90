"""Environments inside a process of the pool, or in threads of the rollout worker (`agentic.env_pool.num_workers: 0`).

An environment object serves one episode after another; one that failed is not used again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from verl_lite.envs import Env, EnvTemplate, find_env
from verl_lite.registry import import_modules
from workers.envs.reply import EnvReply, NonsenseError, read_reset, read_step


@dataclass(frozen=True)
class Begin:
    """Reset an environment of `tag`. render: a frame comes with each reply of this episode."""

    tag: str
    seed: int
    render: bool = False


@dataclass(frozen=True)
class Act:
    """One step of a begun episode."""

    action: str


@dataclass(frozen=True)
class Trial:
    """A new environment, one reset, one step, one frame if it has any: whether an environment works at all."""

    tag: str


@dataclass
class _Episode:
    tag: str
    env: Env
    render: bool = False


class EnvHost:
    """The environments of `templates`; a session is an episode.

    modules: imported first, for the environments that they register.
    """

    info, is_async = None, False

    def __init__(self, templates: Mapping[str, EnvTemplate], modules: tuple[str, ...] = ()) -> None:
        import_modules(modules)
        for template in templates.values():
            find_env(template.env_type)  # now, and not within the deadline of a reset
        self._templates = templates
        self._episodes: dict[int, _Episode] = {}
        self._spare: dict[str, list[Env]] = {tag: [] for tag in templates}
        self._changing = threading.Lock()

    def run(self, session: int, payload: Begin | Act | Trial) -> EnvReply:
        """A reset, a step, or a trial. Raises whatever the environment does, and NonsenseError."""
        if isinstance(payload, Trial):
            return self._try(payload.tag)
        try:
            return self._begin(session, payload) if isinstance(payload, Begin) else self._act(session, payload)
        except BaseException:
            with self._changing:
                episode = self._episodes.pop(session, None)
            if episode is not None:
                _close(episode.env)
            raise

    def end(self, session: int) -> None:
        """The environment of this episode may serve another."""
        with self._changing:
            if (episode := self._episodes.pop(session, None)) is not None:
                self._spare[episode.tag].append(episode.env)

    def _begin(self, session: int, payload: Begin) -> EnvReply:
        with self._changing:
            spare = self._spare[payload.tag]
            env = spare.pop() if spare else None
        episode = _Episode(payload.tag, env or self._templates[payload.tag].make(), payload.render)
        with self._changing:
            self._episodes[session] = episode
        observation, info = read_reset(episode.env.reset(payload.seed))
        return EnvReply(None, observation, info=info, frame=_frame(episode))

    def _act(self, session: int, payload: Act) -> EnvReply:
        episode = self._episodes[session]
        return replace(read_step(episode.env.step(payload.action)), frame=_frame(episode))

    def _try(self, tag: str) -> EnvReply:
        episode = _Episode(tag, self._templates[tag].make(), render=True)
        try:
            observation, _ = read_reset(episode.env.reset(0))
            if observation is None:
                raise NonsenseError("reset(0) gave no observation: its dataset is empty")
            sample = _method(episode.env, "sample_random_action")
            action = sample() if sample is not None else ""
            if not isinstance(action, str):
                raise NonsenseError(f"sample_random_action gave {action!r}, expected the text of an action")
            reply = read_step(episode.env.step(action))
            _frame(episode)
            return reply
        finally:
            _close(episode.env)


def _method(env: Env, name: str) -> Callable[[], Any] | None:
    method = getattr(env, name, None)
    return method if callable(method) else None


def _frame(episode: _Episode) -> object:
    render = _method(episode.env, "render") if episode.render else None
    return None if render is None else render()


def _close(env: Env) -> None:
    close = _method(env, "close")
    if close is not None:
        try:
            close()
        except BaseException:  # it is thrown away: what it raises now changes nothing
            return
