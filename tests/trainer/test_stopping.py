"""The first signal asks, the second interrupts, and afterwards everything is as it was."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from trainer.cli import stopping_on_signal


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_asks_second_interrupts(number: signal.Signals) -> None:
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    asked: list[str] = []
    with pytest.raises(KeyboardInterrupt), stopping_on_signal(lambda: asked.append("stop"), asked.append):
        os.kill(os.getpid(), number)
        assert asked[1:] == ["stop"] and number.name in asked[0]
        os.kill(os.getpid(), signal.SIGTERM)
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before


def test_no_signal_no_change() -> None:
    with stopping_on_signal(lambda: pytest.fail("stopped"), print):
        pass


def test_in_another_thread_nothing_is_touched() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen: list[object] = []

    def enter() -> None:
        with stopping_on_signal(lambda: None, print):
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [before]
