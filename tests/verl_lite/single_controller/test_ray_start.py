"""Starting Ray where the machine is slow, or a signal handler is somebody else's."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest

from verl_lite.single_controller import ray_cluster

TOO_SLOW = "The current node timed out during startup. This could happen because some of the raylet failed to startup."


class FakeRay:
    """`ray.init` that fails as often as there are errors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *errors: Exception) -> None:
        self.errors, self.starts, self.cleaned = list(errors), 0, 0
        monkeypatch.setattr(ray_cluster, "ray", SimpleNamespace(init=self.init))
        monkeypatch.setattr(ray_cluster, "_end_processes", self.clean)

    def init(self, **options: Any) -> None:
        self.starts += 1
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as Ray does with a handler of its own
        if self.errors:
            raise self.errors.pop(0)

    def clean(self, guard: object) -> None:
        self.cleaned += 1


@pytest.fixture(autouse=True)
def handler_is_restored() -> Any:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_a_start_that_was_too_slow_is_made_again_from_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay(monkeypatch, Exception(TOO_SLOW), Exception(TOO_SLOW))
    ray_cluster._init_patiently(None, address="local")  # type: ignore[arg-type]
    assert (ray.starts, ray.cleaned) == (3, 2)
    ray = FakeRay(monkeypatch, *[Exception(TOO_SLOW)] * 9)
    with pytest.raises(RuntimeError, match="did not start within 30 s, 3 times: is this machine overloaded"):
        ray_cluster._init_patiently(None)  # type: ignore[arg-type]
    assert (ray.starts, ray.cleaned) == (3, 3)


def test_any_other_failure_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay(monkeypatch, ConnectionError("no"))
    with pytest.raises(ConnectionError):
        ray_cluster._init_patiently(None)  # type: ignore[arg-type]
    assert (ray.starts, ray.cleaned) == (1, 0)


@pytest.mark.parametrize("errors", [[], [ConnectionError("no")]])
def test_signals_stay_the_runs_own(errors: list[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def mine(number: int, frame: object) -> None: ...

    signal.signal(signal.SIGTERM, mine)
    FakeRay(monkeypatch, *errors)
    try:
        with ray_cluster._signal_handlers_kept():
            ray_cluster._init_patiently(None)  # type: ignore[arg-type]
    except ConnectionError:
        pass
    assert signal.getsignal(signal.SIGTERM) is mine
