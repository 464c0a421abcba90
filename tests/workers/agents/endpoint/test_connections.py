"""Limits of connections: clients without a key never keep programs from connecting."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator

import pytest

from tests.workers.agents.endpoint.live import SAMPLING, Live, new_trace
from tests.workers.agents.endpoint.test_clients import CHAT, Session, body_of, parrot, until
from verl_lite.config import EndpointConfig
from workers.agents.endpoint import connections, server

HEAD = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> Iterator[Live]:
    monkeypatch.setattr(connections, "most_connections", lambda: 20)
    monkeypatch.setattr(connections, "MAX_CONNECTIONS_PER_EPISODE", 5)
    made = Live(parrot)
    yield made
    made.stop()


@contextlib.contextmanager
def connected(live: Live, number: int) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        address = ("127.0.0.1", live.endpoint.port)
        yield [stack.enter_context(socket.create_connection(address, timeout=20)) for _ in range(number)]


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(4096) == b""
    except ConnectionError:
        return True


def test_connections_without_a_key_are_replaced_and_counted(live: Live) -> None:
    with connected(live, 60) as idle:
        assert Session(live).create(CHAT).choices[0].message.content == "hi"
        assert all(is_closed(connection) for connection in idle[:40])
    # 60 idle connections and at most one of the client, for 20 places
    assert live.endpoint.take_refused()["connections"] in (40, 41)


def test_a_connection_that_sends_no_key_in_time_is_closed(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "ANONYMOUS_S", 0.2)
    with connected(live, 3) as (silent, slow, unknown):
        slow.sendall(HEAD.encode())
        unknown.sendall(f"{HEAD}Authorization: Bearer sk-unknown\r\nContent-Length: 0\r\n\r\n".encode())
        assert b"401" in unknown.recv(4096)
        begin = time.monotonic()
        assert is_closed(silent) and is_closed(slow) and is_closed(unknown)
        assert time.monotonic() - begin < 10
    refused = live.endpoint.take_refused()
    assert (refused["slow"], refused["key"]) == (3, 1)


def test_a_body_that_does_not_arrive_is_refused(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "BODY_S", 0.2)
    key = live.open()
    with connected(live, 1) as [slow]:
        slow.sendall(f"{HEAD}Authorization: Bearer {key}\r\nContent-Length: 100\r\n\r\n{{".encode())
        assert b"408" in slow.recv(4096)
    assert live.endpoint.take_refused() == {"slow": 1}


def test_an_episode_has_a_share_of_the_connections_until_it_ends(live: Live) -> None:
    key = live.open()
    request = f"{HEAD}Authorization: Bearer {key}\r\nContent-Length: 0\r\n\r\n".encode()
    with connected(live, 6) as own:
        for connection in own:
            connection.sendall(request)
        replies = [connection.recv(4096) for connection in own]
        assert sorted(reply.split()[1] for reply in replies) == [b"400"] * 5 + [b"429"]
        live.close_episode(key)
        with connected(live, 30):
            assert Session(live).post(CHAT, body_of(CHAT)).status_code == 200
        until(lambda: live.endpoint.take_refused().get("connections", 0) > 0 or True)


def test_the_limit_follows_the_files_that_the_process_may_open(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {1024: 512, 4: 8, 1 << 20: 4096, connections.resource.RLIM_INFINITY: 4096}
    for soft, most in expected.items():
        monkeypatch.setattr(connections.resource, "getrlimit", lambda kind, soft=soft: (soft, soft))
        assert connections.most_connections() == most


def test_an_episode_ends_although_a_client_left_a_request_that_no_engine_took(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "RETRY_S", 0.05)
    # nobody takes the requests, as during an update of the weights
    endpoint = server.Endpoint(EndpointConfig(), 0, "policy", lambda: None)
    key = endpoint.open("episode", new_trace(), SAMPLING, 7)
    body = json.dumps(body_of(CHAT))
    with socket.create_connection(("127.0.0.1", endpoint.port), timeout=20) as connection:
        head = f"{HEAD}Authorization: Bearer {key}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        connection.sendall(f"{head}\r\n\r\n{body}".encode())
        until(lambda: endpoint._new)
    until(lambda: endpoint._aborted)
    assert endpoint.close_episode(key) == []
    assert endpoint.take()[0] == []
    endpoint.close()
