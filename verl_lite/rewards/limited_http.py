"""An HTTP client whose replies have a limited size. Imported on first use, since openai takes a second to import."""

import importlib
from collections.abc import AsyncIterator
from typing import Any

import openai

from verl_lite.machine.proxies import local_mounts

_CLIENT_BASE = openai.DefaultAsyncHttpxClient.__mro__[1]
_HTTPX_NAME, _, _ = _CLIENT_BASE.__module__.partition(".")
# Any: mypy cannot know the types of a module that is imported by a computed name
_HTTPX: Any = importlib.import_module(_HTTPX_NAME)
"""The package on which openai is built: httpx, or httpx2 in later versions."""

Response: type = _HTTPX.Response
MOST_REPLY_BYTES = 32 << 20


class ReplyTooLarge(RuntimeError):
    """A reply exceeds `MOST_REPLY_BYTES`."""


class LimitedBody(_HTTPX.AsyncByteStream):
    """The body of a response, which raises ReplyTooLarge after `most_bytes`."""

    def __init__(self, body: Any, most_bytes: int) -> None:
        self._body = body
        self._most_bytes = most_bytes

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        async for chunk in self._body:
            size += len(chunk)
            if size > self._most_bytes:
                raise ReplyTooLarge(f"the reply has more than {self._most_bytes:,} bytes")
            yield chunk

    async def aclose(self) -> None:
        await self._body.aclose()


def limited_client() -> Any:
    """Returns a client with the defaults of openai, for `AsyncOpenAI(http_client=...)`, but without a proxy for servers
    on this machine."""
    return openai.DefaultAsyncHttpxClient(event_hooks={"response": [_limit_body]}, mounts=local_mounts())


async def _limit_body(response: Any) -> None:
    """Limits the body of a response before it is read."""
    # a compressed body, which was not requested, stays compressed: a few bytes of it can become gigabytes
    response.stream = LimitedBody(response.stream, MOST_REPLY_BYTES)
    response.headers.pop("content-encoding", None)
