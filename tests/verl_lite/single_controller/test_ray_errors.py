"""What Ray says of a death, translated; what is said of a cluster without room, and when a machine counts as lost."""

from __future__ import annotations

import os
import signal
import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.exceptions import OutOfMemoryError, RayActorError

from verl_lite.errors import ClusterLostError, NoRoomError, UserError, circumstances
from verl_lite.single_controller import liveness, ray_cluster
from verl_lite.single_controller.liveness import (
    LOOK_EVERY_S,
    LOST_AFTER_LOOKS,
    Address,
    Lookout,
    silence_of,
    silent_process,
)
from verl_lite.single_controller.ray_cluster import (
    Cluster,
    Machine,
    call_ray,
    require_answer,
)
from verl_lite.single_controller.ray_errors import cause_of_death, death, is_consequence
from verl_lite.single_controller.ray_worker_group import interface_of, shortage

EMPTY_SETTINGS = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))  # RFC 9113, section 6.5: length 0, type 4


class Greeting(socketserver.BaseRequestHandler):
    """Answers the whole beginning of an HTTP/2 connection, as a gRPC server does."""

    def handle(self) -> None:
        if self.request.recv(24 + 9, socket.MSG_WAITALL)[24:] == EMPTY_SETTINGS:
            self.request.sendall(EMPTY_SETTINGS)


@contextmanager
def grpc_server(host: str = "127.0.0.1") -> Iterator[Address]:
    with socketserver.TCPServer((host, 0), Greeting) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server.server_address
        server.shutdown()


SLOW = "The current node timed out during startup"
# As Ray 2.60 wrote it on a machine whose threshold was set to 17%, shortened.
OUT_OF_MEMORY = """ 1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 192.0.2.2, \
ID: c6bef4155a) was 4.05GB used / 23.54GB limit (0.172165)
Selected to kill: (Actor(5a5681): job ID=01000000, task name=A.__init__, pid=21490, actual memory used=0.57GB)
"""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OutOfMemoryError(OUT_OF_MEMORY), "the machine's memory ran out (4.05GB of 23.54GB in use). Reduce"),
        (RayActorError(error_msg="exits with a connection error code 2. End"), "kill -9, the kernel's out-of-memory"),
        (RayActorError(error_msg="Worker exits with an exit code 3."), "its process called exit with code 3"),
        (RayActorError(error_msg="The actor is dead because of a\n\tnew cause. Some common causes"), "of a new cause."),
    ],
)
def test_a_death_names_its_cause(error: Exception, said: str, tmp_path: Path) -> None:
    log = tmp_path / "actor-1.log"
    log.write_text("one\nlast words\n")
    died = death(cause_of_death(error), "actor", 1, "generate_sequences", str(log), "10.0.0.3", "held much")
    assert str(died).startswith("actor rank 1 on node 10.0.0.3 died in generate_sequences: ") and said in str(died)
    assert died.__notes__ == ["held much", f"the end of {log}:\none\nlast words"]
    place = circumstances(died)
    assert (place.role, place.rank, place.method, place.log) == ("actor", 1, "generate_sequences", str(log))
    assert not is_consequence(died) and is_consequence(RuntimeError("[gloo] Connection closed by peer"))


def test_the_object_store_leaves_half_of_the_shared_memory_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for free, expected in ((8000, 512), (600, 300), (64, 80)):
        monkeypatch.setattr("shutil.disk_usage", lambda path, free=free: SimpleNamespace(free=free << 20))
        assert ray_cluster.object_store_bytes(512 << 20, tmp_path) == expected << 20


def test_a_server_is_lost_after_long_silence_and_not_for_a_driver_that_slept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel accepts connections for a stopped process, as for a socket of which nobody takes them."""
    now = [0.0]
    monkeypatch.setattr(liveness, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(liveness, "_ANSWER_S", 0.05)
    with grpc_server() as answering, socket.create_server(("127.0.0.1", 0)) as stopped:
        silent, lookout = stopped.getsockname(), Lookout()

        def looks(number: int) -> list[list[Address]]:
            now[0] += 1000  # suspended for a night: one failed look
            return [lookout.lost([answering, silent]) for now[0] in now[0] + LOOK_EVERY_S * np.arange(number)]

        assert looks(LOST_AFTER_LOOKS) == [[]] * (LOST_AFTER_LOOKS - 1) + [[silent]]
        now[0] += LOOK_EVERY_S / 2  # too early to look again
        assert lookout.lost([answering, silent]) == [silent]
        assert silent_process(silent).endswith(f"(pid {os.getpid()}) has not answered for 16 s")
        assert silent_process(("203.0.113.7", 1), 5) == "203.0.113.7:1 (pid 5 on its machine) has not answered for 16 s"
        assert Lookout(never_return=[answering, silent]).lost([]) == []
    assert Lookout(never_return=[silent]).lost([]) == [silent]  # as after kill -9: nobody listens
    assert silent_process(silent).startswith(f"nobody listens at 127.0.0.1:{silent[1]} any more (killed")


@pytest.mark.parametrize("address", [None, "10.0.0.9:1"])
def test_a_call_of_ray_that_never_returns_ends_with_the_part_that_is_lost(
    address: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ("127.0.0.1", 9)
    cluster = Cluster(address, 1.0, print, {store: "control store"})
    monkeypatch.setattr(ray_cluster, "_cluster", cluster)
    monkeypatch.setattr(ray_cluster, "_POLL_S", 0.01)
    lost = iter([[], [], [store]])
    cluster.lookout = SimpleNamespace(lost=lambda parts: next(lost))  # type: ignore[assignment]
    whose = "the run's own Ray" if address is None else "the Ray cluster at 10.0.0.9:1"
    with pytest.raises(ClusterLostError, match=rf"{whose} has lost its control store: .*127.0.0.1:9.*resume_mode=auto"):
        call_ray(threading.Event().wait)


def test_a_missing_machine_is_named_with_what_to_do() -> None:
    there = [
        Machine("h", "10.0.0.1 (login)", ("10.0.0.1", 1), {"memory": 1.0}),
        Machine("a", "10.0.0.2 (gpu-a)", ("10.0.0.2", 1), {"CPU": 8.0, "GPU": 4.0}),
    ]
    said = shortage([{"CPU": 4.0, "GPU": 4.0}] * 2, 8, there, {"CPU": 8.0, "GPU": 3.0})
    assert "on 2 machines with 4 CPU, 4 GPU each; 1 of the 2 machines in the cluster can hold that" in said
    assert "10.0.0.2 (gpu-a): 8 CPU, 4 GPU" in said and "free now, in total: 8 CPU, 3 GPU" in said
    assert "continue with trainer.nnodes=1" in said


def test_an_address_where_nobody_answers_is_an_error_soon() -> None:
    with grpc_server("127.0.0.2") as (_, port):
        require_answer(f"127.0.0.2:{port}", 0, print)
    assert silence_of(("127.0.0.2", port)) == f"127.0.0.2:{port} does not answer (Connection refused)"
    logged: list[str] = []
    with pytest.raises(NoRoomError, match=rf"127.0.0.2:{port}: nobody has answered .* for 0.5 s.*`ray start --head`"):
        require_answer(f"127.0.0.2:{port}", 0.5, logged.append)
    assert "waiting up to 0.5 s" in logged[0]
    for address in ("somewhere", "ray://10.0.0.1:10001", "10.0.0.1"):
        with pytest.raises(UserError, match="expected HOST:PORT"):
            require_answer(address, 0, print)


def test_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") is not None and interface_of("203.0.113.7") is None


@pytest.mark.parametrize(
    ("errors", "starts", "raised"),
    [([SLOW] * 2, 3, None), ([SLOW] * 9, 3, RuntimeError), (["no"], 1, OSError)],
)
def test_a_start_that_was_too_slow_is_made_again_and_signals_stay_the_runs_own(
    errors: list[str], starts: int, raised: type[Exception] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def init(**options: Any) -> None:
        made.append("start")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as Ray does with a handler of its own
        if errors:
            raise OSError(errors.pop(0))

    monkeypatch.setattr(ray_cluster, "ray", SimpleNamespace(init=init))
    monkeypatch.setattr(ray_cluster, "_end_processes", lambda guard: None)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with ray_cluster._sigterm_handler_restored():
            ray_cluster._init_with_retries(None)  # type: ignore[arg-type]
        assert raised is None
    except (RuntimeError, OSError) as error:
        assert type(error) is raised and (raised is OSError or "overloaded" in str(error))
    assert len(made) == starts and signal.getsignal(signal.SIGTERM) is before
