"""When a machine that does not answer counts as lost."""

from __future__ import annotations

import socket

from verl_lite.single_controller.ray_joined import LOST_AFTER_S, Address, NodeWatch, answers_within, silence_of

A, B = ("10.0.0.1", 1), ("10.0.0.2", 2)


class World:
    """A clock, and who does not answer."""

    def __init__(self) -> None:
        self.now, self.silent = 0.0, set[Address]()
        self.watch = NodeWatch({"a": A, "b": B}, clock=lambda: self.now, look=self.look)

    def look(self, address: Address) -> str | None:
        return "refused" if address in self.silent else None

    def pass_by(self, seconds: float, looks: int) -> None:
        for _ in range(looks):
            self.watch.look_once()
            self.now += seconds / looks


def test_silence_for_long_is_a_loss_and_an_answer_ends_it() -> None:
    world = World()
    world.pass_by(10, 5)
    world.silent = {B}
    world.pass_by(LOST_AFTER_S - 1, 10)
    assert world.watch.lost() == {}
    world.pass_by(2, 1)
    assert world.watch.lost() == {"b": "refused, for 16 s"}
    world.silent = set()
    world.watch.look_once()
    assert world.watch.lost() == {}


def test_a_driver_that_was_suspended_does_not_blame_others() -> None:
    world = World()
    world.silent = {A, B}
    world.watch.look_once()
    world.now += 1000  # one failed look, and then a night's sleep
    assert world.watch.lost() == {}


def test_a_port_that_is_taken_answers_and_one_that_is_not_does_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        assert silence_of(address) is None and answers_within(address, 0)
    assert not answers_within(address, 0)
    assert silence_of(address) == f"127.0.0.1:{address[1]} does not answer (Connection refused)"
