"""What Ray says of a death, translated; and the memory of a worker, by the calls in which it grew."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ray.exceptions import OutOfMemoryError, RayActorError

from verl_lite.errors import circumstances
from verl_lite.single_controller import ray_errors
from verl_lite.single_controller.ray_cluster import plan_object_store
from verl_lite.single_controller.ray_errors import GIB, SlotMemory, cause_of_death, death, resident_bytes

MIB = 1 << 20
# As Ray 2.60 wrote it on a machine whose threshold was set to 17%, shortened.
OUT_OF_MEMORY = """ 1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 192.0.2.2, \
ID: c6bef4155a) was 4.05GB used / 23.54GB limit (0.172165)
OOM kill reason: Memory usage 4335505408B exceeded threshold of 4334921216B (17.1% of 25276510208B limit)
Ray killed 1 worker(s) based on the killing policy
Selected to kill: (Actor(5a5681): job ID=01000000, task name=A.__init__, pid=21490, actual memory used=0.57GB)
Top 10 memory users: PID\tMEM(GB)\tCOMMAND
21490\t0.57\tray::A.die
20529\t0.51\t/somebody/elses/python offline.py
Refer to the documentation on how to address the out of memory issue: https://docs.ray.io
"""


def test_a_memory_kill_says_how_much_who_and_in_which_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sizes = iter([GIB, 2 * GIB, 2 * GIB, 9 * GIB, None])
    monkeypatch.setattr(ray_errors, "resident_bytes", lambda pid: next(sizes))
    memory = SlotMemory()
    memory.watch(1, 21490)
    for call in ("critic.init_model", "actor.update_actor", "actor.generate_sequences", "actor.generate_sequences"):
        memory.look(1, call)
    log = tmp_path / "actor-1.log"
    log.write_text("one\nlast words\n")
    error = death(OutOfMemoryError(OUT_OF_MEMORY), "actor", 1, "generate_sequences", str(log), memory.describe(1))
    assert str(error).startswith(
        "actor rank 1 died in generate_sequences: the machine's memory ran out (4.05GB of 23.54GB in use); "
        "Ray ends workers above 17.1%. Take less"
    )
    held, users, tail = error.__notes__
    assert held == (
        "memory of rank 1: 1.00 GiB at its start, 9.00 GiB when last seen; it grew most by +7.00 in "
        "actor.generate_sequences, +1.00 in critic.init_model"
    )
    assert users.splitlines()[1:] == ["21490\t0.57\tray::A.die", "20529\t0.51\t/somebody/elses/python offline.py"]
    assert tail.endswith("one\nlast words")
    place = circumstances(error)
    assert (place.role, place.rank, place.method, place.log) == ("actor", 1, "generate_sequences", str(log))


def test_a_death_without_words_names_what_it_may_have_been() -> None:
    ray_says = RayActorError(error_msg="Worker unexpectedly exits with a connection error code 2. End of file. Some")
    assert "kill -9, the kernel's out-of-memory killer" in cause_of_death(ray_says)
    left = RayActorError(error_msg="Worker exits unexpectedly. Worker exits with an exit code 3.")
    assert cause_of_death(left) == "its process ended itself by a call of exit, with code 3"
    other = RayActorError(
        error_msg="died.\n\tpid: 7\nThe actor is dead because of a\n\tnew cause. Some common causes include: everything"
    )
    assert cause_of_death(other) == "of a new cause."
    assert str(death(ray_says, "RewardPool", None, "collect", None, "")).startswith("RewardPool died in collect: ")


def test_memory_of_processes_that_are_not_seen() -> None:
    assert (resident_bytes(os.getpid()) or 0) > MIB and resident_bytes(2**22 + 1) is None
    memory = SlotMemory()
    memory.look(0, "call")
    assert memory.describe(0) == ""


def test_the_object_store_leaves_shared_memory_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(free: int, asked: int = 512 * MIB) -> tuple[int, bool, str]:
        monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": free}))
        store = plan_object_store(asked, tmp_path)
        return store.size, store.in_shared_memory, store.note

    assert plan(8 * GIB) == (512 * MIB, True, "")
    size, shared, note = plan(600 * MIB)
    assert (size, shared) == (300 * MIB, True) and "object_store_memory_mb=512 lowered to 300" in note
    size, shared, note = plan(64 * MIB)  # what a container has that nobody told otherwise
    assert (size, shared) == (512 * MIB, False) and "64 MiB free" in note and "--shm-size" in note
    assert not plan_object_store(512 * MIB, tmp_path / "none").in_shared_memory
