"""Messages in the channel of a pool's process, which the code in the process can write itself."""

from __future__ import annotations

import math
import pickle
import socket
import struct
from collections.abc import Iterator

import pytest

from verl_lite.rewards.results import RewardResult
from workers.pool.channel import PoolEnd, Reply, packed
from workers.pool.process import Process
from workers.rewards.reward_pool import _checked_results


@pytest.fixture
def ends() -> Iterator[tuple[PoolEnd, socket.socket]]:
    """The pool's end of a channel, and the socket of the process."""
    ours, theirs = socket.socketpair()
    end = PoolEnd(ours)
    yield end, theirs
    end.close()
    theirs.close()


def framed(number: int, content: bytes) -> bytes:
    """A message as `multiprocessing.Connection` sends it."""
    message = packed(number, content)
    return struct.pack("!i", len(message)) + message


class WithoutSession:
    """Becomes a reply without attributes."""

    def __reduce__(self) -> tuple[object, tuple[object]]:
        return Reply.__new__, (Reply,)


class RaisesExit:
    """Raises SystemExit when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, ("raise SystemExit(3)",)


@pytest.mark.parametrize("size", [-4, 0, 7])
def test_a_message_that_cannot_hold_its_number_closes_the_channel(
    ends: tuple[PoolEnd, socket.socket], size: int
) -> None:
    """With a negative size the reader would never come to the end of what it has received."""
    end, theirs = ends
    theirs.sendall(framed(5, b"whole") + struct.pack("!iq", size, 5) + framed(6, b"lost"))
    assert end.receive() == [(5, b"whole")]
    assert end.is_closed


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (pickle.dumps(5), "is no reply of this call"),
        (pickle.dumps(Reply(8, 1.0)), "is no reply of this call"),
        (pickle.dumps(Reply(7, 1.0, seconds="long")), "is no reply of this call"),
        (pickle.dumps(Reply(7, 1.0, seconds=math.nan)), "is no reply of this call"),
        (pickle.dumps(Reply(7, error=5)), "is no reply of this call"),
        (pickle.dumps(WithoutSession()), "is no reply of this call"),
        (pickle.dumps(RaisesExit()), "cannot be unpickled: SystemExit: 3"),
        (b"no pickle", "cannot be unpickled"),
    ],
    ids=["number", "other session", "text", "NaN", "number as error", "no session", "SystemExit", "no pickle"],
)
def test_what_is_no_reply_of_the_call_is_an_error_of_this_call(
    ends: tuple[PoolEnd, socket.socket], content: bytes, reason: str
) -> None:
    end, theirs = ends
    process = Process.__new__(Process)
    process.channel = end
    process.sent = {7: 0.0, 8: 0.0}
    process.threads = 1
    theirs.sendall(framed(7, content) + framed(9, pickle.dumps(Reply(9, 1.0))) + framed(8, pickle.dumps(Reply(8, 0.5))))

    failed, fine = process.receive()
    assert failed.session == 7 and reason in str(failed.error)
    # nobody has called session 9
    assert (fine.session, fine.result) == (8, 0.5)
    assert not process.sent


@pytest.mark.parametrize("results", [5, None, [], [RewardResult(1.0)] * 3, [1.0, RewardResult(1.0)]])
def test_what_is_no_list_of_results_fails_the_samples_of_its_call(results: object) -> None:
    checked = _checked_results(results, 2)
    assert [result.failed for result in checked] == [True, True]


def test_results_are_stored_as_they_are() -> None:
    results = [RewardResult(1.0), RewardResult.failure("no")]
    assert _checked_results(results, 2) is results
