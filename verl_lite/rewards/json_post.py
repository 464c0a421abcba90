"""One HTTP POST of JSON, repeated where the failure may pass: what a reward over HTTP and a judge have in common."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import random
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp

from verl_lite.errors import UserError

_FIRST_WAIT_S = 0.5
_LONGEST_WAIT_S = 60.0
_ANSWER_BYTES_MAX = 1 << 20
_SHOWN_CHARACTERS = 500

_Lasting = AsyncGenerator[aiohttp.ClientSession, None]


class RemoteRewardError(RuntimeError):
    """The server gave no score."""


class _Passing(RemoteRewardError):
    """A failure that may be over soon. wait_s: what the server asked for, None if nothing."""

    def __init__(self, message: str, wait_s: float | None = None) -> None:
        super().__init__(message)
        self.wait_s = wait_s


class JsonPost:
    """Posts to `url`, with `token` as the bearer's. Keeps its connections open, in each event loop its own.

    A connection that fails and the status codes 429 and 5xx are tried again `max_retries` times, after 0.5, 1, 2 ...
    seconds (give or take a half) or what the server says in Retry-After. Any other answer is final.
    """

    def __init__(self, url: str, *, max_retries: int, token: str | None = None) -> None:
        self.url = url
        self._max_retries = max_retries
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._sessions: dict[asyncio.AbstractEventLoop, tuple[aiohttp.ClientSession, _Lasting]] = {}

    async def post(self, body: Any) -> Any:
        """What the server answered, read as JSON. Raises RemoteRewardError with the status and the beginning of it."""
        for attempt in range(self._max_retries + 1):
            try:
                return await self._ask(body)
            except _Passing as failure:
                if attempt == self._max_retries:
                    raise RemoteRewardError(f"{failure} (tried {attempt + 1} times)") from failure
                wait_s = min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2**attempt * random.uniform(0.5, 1.5))
                await asyncio.sleep(failure.wait_s if failure.wait_s is not None else wait_s)
        raise AssertionError("the last attempt returns or raises")

    async def close(self) -> None:
        """Closes the connections of this event loop."""
        if kept := self._sessions.get(asyncio.get_running_loop()):
            await kept[1].aclose()

    async def _ask(self, body: Any) -> Any:
        session = await self._session()
        try:
            async with session.post(self.url, json=body) as response:
                text = await _text_of(response)
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            raise _Passing(f"{self.url}: {type(error).__name__}: {error}") from error
        if response.status != 200:
            message = f"{self.url} answered with status {response.status}: {text[:_SHOWN_CHARACTERS]}"
            if response.status == 429 or response.status >= 500:
                raise _Passing(message, _seconds(response.headers.get("Retry-After")))
            raise RemoteRewardError(message)
        try:
            return json.loads(text)
        except ValueError as error:
            raise RemoteRewardError(f"{self.url} answered without JSON: {text[:_SHOWN_CHARACTERS]}") from error

    async def _session(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        if loop not in self._sessions:
            lasting = self._lasting_session()
            session = await anext(lasting)
            self._sessions[loop] = (session, lasting)
        return self._sessions[loop][0]

    async def _lasting_session(self) -> _Lasting:
        """A session that is closed with its event loop: `asyncio.run` ends generators that are still open."""
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            headers=self._headers,
            json_serialize=functools.partial(json.dumps, default=str),
        )
        try:
            yield session
        finally:
            del self._sessions[asyncio.get_running_loop()]
            await session.close()


async def _text_of(response: aiohttp.ClientResponse) -> str:
    body = b""
    async for chunk in response.content.iter_chunked(1 << 16):
        body += chunk
        if len(body) > _ANSWER_BYTES_MAX:
            raise RemoteRewardError(f"{response.url} answered with more than {_ANSWER_BYTES_MAX} bytes")
    return body.decode(errors="replace")


def _seconds(retry_after: str | None) -> float | None:
    """Retry-After in seconds; its other form, a date, is not read."""
    return float(retry_after) if retry_after is not None and retry_after.strip().isdigit() else None


def token_of(variable: str, option: str) -> str:
    """The key in an environment variable that `option` names. Raises UserError if it is not set."""
    token = os.environ.get(variable)
    if not token:
        raise UserError(f"{option}={variable}: the environment variable {variable} is not set")
    return token
