"""The channel that carries weights to engines in other processes: equal bytes, no mixture, and names of who is late."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from verl_lite.errors import TransferError
from verl_lite.single_controller.worker import host_store
from workers.engines.weight_transfer import ChannelEnd, WeightChannel

CPU = torch.device("cpu")
NAMES = ("the trainer", "engine 0", "engine 1")
WEIGHTS = {
    "matrix": torch.randn(3, 5),
    "half": torch.randn(7).bfloat16(),
    "counts": torch.arange(4).view(2, 2),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
    "large": torch.randn(5000),
}
Weights = Iterator[tuple[str, torch.Tensor]]


class Receivers:
    """Threads that each hold an end of the channel and run a function on it."""

    def __init__(self, timeout_s: float, *functions: Callable[[WeightChannel], None]) -> None:
        store = host_store("127.0.0.1")
        ends = [
            ChannelEnd(("127.0.0.1", store.port), NAMES[: len(functions) + 1], rank, timeout_s) for rank in range(3)
        ]
        self.errors: dict[str, Exception] = {}
        self.threads = [
            threading.Thread(target=self._run, args=(end, function), daemon=True)
            for end, function in zip(ends[1:], functions, strict=False)
        ]
        for thread in self.threads:
            thread.start()
        self.sender = ends[0].connect(CPU, store)

    def _run(self, end: ChannelEnd, function: Callable[[WeightChannel], None]) -> None:
        try:
            function(end.connect(CPU))
        except Exception as error:
            self.errors[end.names[end.rank]] = error

    def join(self) -> None:
        for thread in self.threads:
            thread.join(20)
            assert not thread.is_alive()


def receive_into(found: list[dict[str, torch.Tensor]], times: int = 1) -> Callable[[WeightChannel], None]:
    """Returns a function that receives so many updates and stores their weights."""

    def run(channel: WeightChannel) -> None:
        for _ in range(times):
            channel.receive(lambda weights: found.append({name: tensor.clone() for name, tensor in weights}))

    return run


@pytest.mark.parametrize("bucket_bytes", [1, 64, 1 << 20])
def test_each_receiver_gets_the_same_tensors_in_any_buckets_and_again(bucket_bytes: int) -> None:
    found: list[list[dict[str, torch.Tensor]]] = [[], []]
    receivers = Receivers(20.0, *(receive_into(each, times=2) for each in found))
    for _ in range(2):
        sent = receivers.sender.send(iter(WEIGHTS.items()), bucket_bytes)
    receivers.join()
    assert not receivers.errors
    assert sum(tensor.nbytes for tensor in WEIGHTS.values()) <= sent < 21_000
    for update in (*found[0], *found[1]):
        assert list(update) == list(WEIGHTS)
        for name, tensor in WEIGHTS.items():
            assert update[name].dtype == tensor.dtype and torch.equal(update[name], tensor)


def test_a_receiver_that_cannot_load_does_not_delay_the_others() -> None:
    found: list[dict[str, torch.Tensor]] = []

    def fail(channel: WeightChannel) -> None:
        def load(weights: Weights) -> None:
            next(weights)
            raise ValueError("does not fit")

        channel.receive(load)

    receivers = Receivers(20.0, fail, receive_into(found))
    started = time.monotonic()
    receivers.sender.send(iter(WEIGHTS.items()), 64)
    receivers.join()
    assert time.monotonic() - started < 5
    assert set(receivers.errors) == {"engine 0"} and "does not fit" in str(receivers.errors["engine 0"])
    assert list(found[0]) == list(WEIGHTS)


def test_a_receiver_that_does_not_answer_is_named_after_the_time_limit() -> None:
    """A collective without a time limit would wait forever."""
    release = threading.Event()

    def hang(channel: WeightChannel) -> None:
        channel.receive(lambda weights: release.wait(30) and None)

    receivers = Receivers(1.0, receive_into([]), hang)
    started = time.monotonic()
    with pytest.raises(TransferError, match=r"engine 1 failed, or did not answer for 1 s"):
        receivers.sender.send(iter(WEIGHTS.items()), 64)
    assert time.monotonic() - started < 10
    release.set()
    receivers.join()


def test_the_sender_waits_until_each_receiver_has_loaded_the_last_bucket() -> None:
    """A receiver has all bytes and is still loading them. If the sender did not wait, the trainer would go on with an
    engine that has a mixture of two versions."""
    is_loading, may_end = threading.Event(), threading.Event()
    is_sent = threading.Event()

    def slow(channel: WeightChannel) -> None:
        def load(weights: Weights) -> None:
            for name, _ in weights:
                if name == list(WEIGHTS)[-1]:
                    is_loading.set()
                    assert may_end.wait(20)

        channel.receive(load)

    receivers = Receivers(20.0, receive_into([]), slow)

    def send() -> None:
        receivers.sender.send(iter(WEIGHTS.items()), 64)
        is_sent.set()

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    assert is_loading.wait(20)
    assert not is_sent.wait(0.5), "the sender did not wait for the receiver"
    may_end.set()
    sender.join(20)
    assert is_sent.is_set()
    receivers.join()
    assert not receivers.errors


def test_a_receiver_that_does_not_load_the_last_bucket_is_named() -> None:
    release = threading.Event()

    def hang(channel: WeightChannel) -> None:
        def load(weights: Weights) -> None:
            for name, _ in weights:
                if name == list(WEIGHTS)[-1]:
                    release.wait(30)

        channel.receive(load)

    receivers = Receivers(1.0, receive_into([]), hang)
    with pytest.raises(TransferError, match=r"weight update: engine 1 failed, or did not answer for 1 s"):
        receivers.sender.send(iter(WEIGHTS.items()), 64)
    release.set()
    receivers.join()


def test_a_receiver_that_ends_between_two_buckets_is_named_at_once() -> None:
    def stop(channel: WeightChannel) -> None:
        channel._next_bucket()  # the thread ends, and the channel with it

    receivers = Receivers(60.0, stop)
    started = time.monotonic()
    with pytest.raises(TransferError, match="engine 0 failed"):
        receivers.sender.send(iter(WEIGHTS.items()), 64)
    assert time.monotonic() - started < 20


def test_a_receiver_whose_sender_ends_between_two_buckets_raises() -> None:
    """An interrupted update raises inside of `load`; the engines then have no weights (tests of the engines)."""
    loaded: list[str] = []

    def load(weights: Weights) -> None:
        loaded.extend(name for name, _ in weights)

    receivers = Receivers(2.0, lambda channel: channel.receive(load))

    def interrupted() -> Weights:
        yield from list(WEIGHTS.items())[:3]
        raise RuntimeError("the trainer fails")

    with pytest.raises(TransferError):
        receivers.sender.send(interrupted(), 1)
    receivers.join()
    assert isinstance(receivers.errors["engine 0"], TransferError)


def test_an_end_without_a_partner_says_so() -> None:
    store = host_store("127.0.0.1")
    end = ChannelEnd(("127.0.0.1", store.port), NAMES, 0, 0.5)
    with pytest.raises(TransferError, match="no connection between the trainer, engine 0, engine 1 within 0.5 s"):
        end.connect(CPU, store)
    closed = ChannelEnd(("127.0.0.1", 1), NAMES, 1, 0.5)
    with pytest.raises(TransferError, match="engine 0 cannot reach the trainer"):
        closed.connect(CPU)
