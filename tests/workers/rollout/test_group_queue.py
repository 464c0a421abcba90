"""The queue from which engines of a separate pool pull their groups."""

from __future__ import annotations

import random

from workers.rollout.group_queue import GroupQueue, QueuedGroup


def group(key: str, engine: int | None = None, size: int = 2) -> QueuedGroup:
    return QueuedGroup(key, size, key.encode(), engine)


def test_engines_take_in_order_as_many_samples_as_they_have_room_for() -> None:
    queue = GroupQueue()
    queue.put(map(group, "abcd"))
    assert queue.take(0, room=3) == [b"a", b"b"], "a group starts while there is room for one of its samples"
    assert queue.take(1, room=1) == [b"c"]
    assert queue.take(0, room=0) == []
    assert queue.take(0, room=9) == [b"d"]


def test_assigned_groups_go_to_their_engine_whatever_its_room() -> None:
    queue = GroupQueue()
    queue.put([group("a", 1), group("b", 0), group("c"), group("d", 1)])
    assert queue.take(1, room=-3) == [b"a", b"d"]
    assert queue.take(0, room=9) == [b"b", b"c"]


def test_groups_of_a_lost_engine_come_first_again_in_their_order() -> None:
    queue = GroupQueue()
    queue.put(map(group, "abc"))
    queue.take(0, room=3)
    queue.remove(["a"])  # complete
    lost = queue.taken_by(0)
    assert lost == ["b"]
    queue.put(map(group, lost), first=True)
    assert queue.take(1, room=9) == [b"b", b"c"]
    assert queue.taken_by(0) == [] and queue.taken_by(1) == ["b", "c"]


def test_removed_groups_are_not_taken_and_no_group_is_taken_twice() -> None:
    randomness, queue = random.Random(0), GroupQueue()
    waiting, taken = [str(number) for number in range(200)], list[bytes]()
    queue.put(map(group, waiting))
    removed = set(randomness.sample(waiting, 60))
    while len(taken) < 140:
        queue.remove([key for key in removed if randomness.random() < 0.5] if len(taken) else removed)
        taken += queue.take(randomness.randrange(3), randomness.randrange(6))
    assert sorted(map(bytes.decode, taken)) == sorted(set(waiting) - removed)
