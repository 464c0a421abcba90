"""What is said of a cluster without room, and of an address where there is none; no Ray is started."""

from __future__ import annotations

import socket

import pytest

from verl_lite.errors import NoRoomError, UserError
from verl_lite.single_controller.ray_joined import Machine, require_answer
from verl_lite.single_controller.ray_resource_pool import RayResourcePool
from verl_lite.single_controller.ray_worker_group import interface_of

HEAD = Machine("h", "10.0.0.1 (login)", ("10.0.0.1", 1), {"memory": 1.0})
ONE = Machine("a", "10.0.0.2 (gpu-a)", ("10.0.0.2", 1), {"CPU": 8.0, "GPU": 4.0})
TWO = Machine("b", "10.0.0.3 (gpu-b)", ("10.0.0.3", 1), {"CPU": 8.0, "GPU": 4.0})
POOL = RayResourcePool([4, 4], use_gpu=True)


def test_each_machine_is_asked_for_all_its_slots_at_once() -> None:
    assert POOL.bundles == [{"CPU": 4.0, "GPU": 4.0}] * 2
    assert RayResourcePool([2], cpus_per_process=0.25).bundles == [{"CPU": 0.5}]


def test_a_missing_machine_is_told_with_what_to_do() -> None:
    assert POOL.shortage([HEAD, ONE], {"CPU": 8.0, "GPU": 3.0}) == (
        "8 slots are asked for, on 2 machines with 4 CPU, 4 GPU each; 1 of the 2 machines there can hold that:\n"
        "  10.0.0.1 (login): 0 CPU\n"
        "  10.0.0.2 (gpu-a): 8 CPU, 4 GPU\n"
        "  free now, in all: 8 CPU, 3 GPU\n"
        "Add machines (`ray start --address=...`), or go on with fewer, trainer.nnodes=1: any number of devices can "
        "load a checkpoint"
    )


def test_machines_that_others_use_are_told_as_that() -> None:
    said = POOL.shortage([ONE, TWO], {"CPU": 16.0, "GPU": 4.0})
    assert "2 of the 2 machines there can hold that, but others use them:" in said
    assert said.endswith("or wait for the others")


def test_no_machine_that_is_large_enough() -> None:
    said = POOL.shortage([HEAD], {})
    assert "0 of the 1 machines there" in said and said.endswith("lower trainer.n_gpus_per_node or trainer.nnodes")


def test_an_address_where_nobody_answers_is_an_error_soon() -> None:
    with socket.create_server(("127.0.0.2", 0)) as server:
        port = server.getsockname()[1]
        require_answer(f"127.0.0.2:{port}", 0, print)
    told: list[str] = []
    with pytest.raises(NoRoomError, match=rf"127.0.0.2:{port}: nobody has answered .* for 0.5 s.*`ray start --head`"):
        require_answer(f"127.0.0.2:{port}", 0.5, told.append)
    assert "waiting up to 0.5 s" in told[0]


@pytest.mark.parametrize("address", ["somewhere", "ray://10.0.0.1:10001", "10.0.0.1"])
def test_an_address_that_is_none(address: str) -> None:
    with pytest.raises(UserError, match="expected HOST:PORT"):
        require_answer(address, 0, print)


def test_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") is not None and interface_of("203.0.113.7") is None
