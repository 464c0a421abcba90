"""A reward server on 127.0.0.1 for tests: answers as a script says, and notes what it was asked and when."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Answer:
    """status -1: the connection is closed without a word. body: text, or something to write as JSON."""

    body: Any = 1.0
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    after_s: float = 0.0


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


class RewardServer:
    """`url` to post to. answer: gives the answer to the n-th request (from 0) with this JSON."""

    def __init__(self, answer: Callable[[int, dict[str, Any]], Answer]) -> None:
        self.answer = answer
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.times: list[float] = []
        self.most_at_once = self._under_way = 0
        self._lock = threading.Lock()
        self._server = _Listener(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_port}/score"

    def _begin(self, sample: dict[str, Any], headers: dict[str, str], path: str) -> int:
        with self._lock:
            self.paths.append(path)
            self.asked.append(sample)
            self.headers.append(headers)
            self.times.append(time.monotonic())
            self._under_way += 1
            self.most_at_once = max(self.most_at_once, self._under_way)
            return len(self.asked) - 1

    def _end(self) -> None:
        with self._lock:
            self._under_way -= 1

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                sample = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                number = server._begin(sample, dict(self.headers), self.path)
                answer = server.answer(number, sample)
                time.sleep(answer.after_s)
                server._end()
                if answer.status == -1:
                    self.close_connection = True
                    return
                body = (answer.body if isinstance(answer.body, str) else json.dumps(answer.body)).encode()
                self.send_response(answer.status)
                for name, value in {**answer.headers, "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                with suppress(BrokenPipeError):  # whoever asked waits no longer
                    self.wfile.write(body)

            def log_message(self, *arguments: Any) -> None:
                pass

        return Handler


@contextmanager
def reward_server(answer: Callable[[int, dict[str, Any]], Answer]) -> Iterator[RewardServer]:
    """A running server, ended with the block."""
    server = RewardServer(answer)
    thread = threading.Thread(target=server._server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server._server.shutdown()
        server._server.server_close()
        thread.join()
