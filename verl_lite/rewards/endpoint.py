"""JSON posted to a server by the `openai` client: what a reward over HTTP and a judge have in common."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator
from typing import Any

import openai  # takes a second: this file is imported by those that need it
from openai import AsyncOpenAI

from verl_lite.errors import UserError

_SHOWN_CHARACTERS = 500


class RemoteRewardError(RuntimeError):
    """The server gave no score."""


class Endpoint:
    """Posts to `url`. Keeps its connections open, in each event loop its own.

    A connection that fails and the statuses 408, 409, 429 and 5xx are tried again `max_retries` times, after 0.5, 1,
    2 ... 8 seconds or what the server says in Retry-After. api_key_env: environment variable with a key, sent as
    `Authorization: Bearer KEY`; option: what names it. Raises UserError if it is not set.
    """

    def __init__(self, url: str, *, max_retries: int, api_key_env: str | None, option: str) -> None:
        self.url, self._max_retries = url, max_retries
        self._key = os.environ.get(api_key_env) if api_key_env else "none"  # a client without a key is refused
        self._clients: dict[asyncio.AbstractEventLoop, tuple[AsyncOpenAI, AsyncGenerator[AsyncOpenAI, None]]] = {}
        if not self._key:
            raise UserError(f"{option}={api_key_env}: the environment variable {api_key_env} is not set")

    async def post(self, body: dict[str, Any]) -> Any:
        """What the server answered, read as JSON. Raises RemoteRewardError with the status and the beginning of it."""
        client = await self._client()
        try:
            answer = await client.post(self.url, cast_to=object, body=json.loads(json.dumps(body, default=str)))
        except openai.APIStatusError as error:
            told = f"answered with status {error.status_code}: {error.response.text[:_SHOWN_CHARACTERS]}"
            raise RemoteRewardError(f"{self.url} {told}") from error
        except openai.APIConnectionError as error:
            raise RemoteRewardError(f"{self.url}: {error} ({error.__cause__!r})") from error
        try:
            return json.loads(answer) if isinstance(answer, str) else answer
        except ValueError as error:
            raise RemoteRewardError(f"{self.url} answered without JSON: {answer!s:.{_SHOWN_CHARACTERS}}") from error

    async def _client(self) -> AsyncOpenAI:
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            lasting = self._lasting_client(loop)
            self._clients[loop] = (await anext(lasting), lasting)
        return self._clients[loop][0]

    async def _lasting_client(self, loop: asyncio.AbstractEventLoop) -> AsyncGenerator[AsyncOpenAI, None]:
        """A client that is closed with its event loop: `asyncio.run` ends generators that are still open."""
        async with AsyncOpenAI(api_key=self._key, base_url=self.url, max_retries=self._max_retries) as client:
            try:
                yield client
            finally:
                del self._clients[loop]
