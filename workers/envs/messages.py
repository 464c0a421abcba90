"""What goes between the pool of environments and the places where they run: calls there, replies back.

An episode has a number, its `EnvId`, and at most one call under way; its reply carries that number as key.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

EnvId = int
"""The number of one episode in one pool."""


@dataclass(frozen=True)
class EnvReply:
    """What a reset or step came to.

    observation: None after a reset: the environment's dataset is exhausted. frame: what `render()` gave, if asked for.
    seconds: the call itself took. error: the environment failed, as a traceback or a sentence; nothing else is set
    then, and the episode is over. is_timeout: it failed because it took too long.
    """

    key: Hashable
    observation: str | None
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: dict[str, Any] = field(default_factory=dict)
    frame: Any = None
    seconds: float = 0.0
    error: str | None = None
    is_timeout: bool = False


@dataclass(frozen=True)
class Begin:
    """Reset an environment of `tag`. render: a frame comes with each reply of this episode."""

    env: EnvId
    tag: str
    seed: int
    render: bool = False


@dataclass(frozen=True)
class Act:
    """One step of a begun episode."""

    env: EnvId
    tag: str
    action: str


@dataclass(frozen=True)
class Rebuild:
    """Begin the episode again and take the same actions. actions: with the digest of what each gave at first."""

    begin: Begin
    digest: str
    actions: tuple[tuple[str, str], ...]

    @property
    def env(self) -> EnvId:
        return self.begin.env

    @property
    def tag(self) -> str:
        return self.begin.tag


@dataclass(frozen=True)
class Trial:
    """A new environment, one reset, one step, one frame if it has any: whether an environment works at all."""

    env: EnvId
    tag: str


Call = Begin | Act | Rebuild | Trial
