"""The groups that no engine has started yet. Rollout engines of a separate pool pull them from here, so that a slow
engine delays no group.

The queue is a service in a process of its own. The plans are pickled, so that this process does not import torch.
"""

import threading
from collections import deque
from collections.abc import Collection, Iterable
from typing import NamedTuple


class QueuedGroup(NamedTuple):
    """A group in the queue.

    Attributes:
        key: Name of the group.
        num_samples: Number of its samples.
        data: The pickled pair of `GroupPlan` and `SamplingParams`.
        engine: Index of the engine that must run the group; None = the first engine with room.
    """

    key: str
    num_samples: int
    data: bytes
    engine: int | None = None


class GroupQueue:
    """The queue. All methods can be called from several threads."""

    def __init__(self) -> None:
        self._waiting: deque[QueuedGroup] = deque()
        # engines of the groups that were taken and not removed
        self._engine_of: dict[str, int] = {}
        self._lock = threading.Lock()

    def put(self, groups: Iterable[QueuedGroup], first: bool = False) -> None:
        """Adds groups, at the head of the queue if `first`."""
        with self._lock:
            if first:
                # `extendleft` adds one group after the other at the head, so that the last of them comes first
                self._waiting.extendleft(reversed(list(groups)))
            else:
                self._waiting.extend(groups)

    def take(self, engine: int, room: int) -> list[bytes]:
        """Removes the groups that this engine should start: all that it must run, and others while it has room.

        Args:
            engine: Index of the engine.
            room: Number of samples that the engine can start.

        Returns:
            The data of the groups, in the order of the queue.
        """
        with self._lock:
            taken = []
            waiting: deque[QueuedGroup] = deque()
            for group in self._waiting:
                # the last group may exceed the room, because a group is never split
                has_room = group.engine is None and room > 0
                if group.engine == engine or has_room:
                    room -= group.num_samples
                    self._engine_of[group.key] = engine
                    taken.append(group.data)
                else:
                    waiting.append(group)
            self._waiting = waiting
            return taken

    def remove(self, keys: Collection[str]) -> None:
        """Forgets groups, whether they wait or were taken."""
        with self._lock:
            keys = set(keys)
            self._waiting = deque(group for group in self._waiting if group.key not in keys)
            for key in keys:
                self._engine_of.pop(key, None)

    def taken_by(self, engine: int) -> list[str]:
        """Returns the keys of the groups that this engine has taken and that were not removed.

        These groups are lost if the engine dies.
        """
        with self._lock:
            return [key for key, owner in self._engine_of.items() if owner == engine]
