"""A reward that a server computes: one HTTP POST for each sample, repeated where the failure may pass.

The request is JSON with data_source, solution_str, ground_truth, extra_info, prompt (chat messages) and what
`reward.reward_kwargs` adds; the answer is JSON, a number or an object with "score". How many requests are under way and
how many go out a minute is the pool's part (`reward.max_concurrent`, `reward.max_rpm`), and so is the deadline.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import random
from typing import Any

import aiohttp

from verl_lite.errors import UserError
from verl_lite.reward_config import RemoteRewardConfig

_FIRST_WAIT_S = 0.5
_LONGEST_WAIT_S = 60.0
_ANSWER_BYTES_MAX = 1 << 20
_SHOWN_CHARACTERS = 500


class RemoteRewardError(RuntimeError):
    """The server gave no score."""


class _Passing(RemoteRewardError):
    """A failure that may be over soon. wait_s: what the server asked for, None if nothing."""

    def __init__(self, message: str, wait_s: float | None = None) -> None:
        super().__init__(message)
        self.wait_s = wait_s


class RemoteReward:
    """Asks `config.url`. Belongs to one event loop, where it keeps its connections open.

    A connection that fails and the status codes 429 and 5xx are tried again `config.max_retries` times, after 0.5, 1,
    2 ... seconds (give or take a half) or what the server says in Retry-After. Any other answer is final.
    Raises UserError if the variable `config.api_key_env` is not set.
    """

    def __init__(self, config: RemoteRewardConfig) -> None:
        assert config.url is not None
        self._url, self._max_retries = config.url, config.max_retries
        self._headers = {"Authorization": f"Bearer {_token(config.api_key_env)}"} if config.api_key_env else {}
        self._session: aiohttp.ClientSession | None = None

    async def __call__(self, **sample: Any) -> Any:
        """What the server answered. Raises RemoteRewardError with the status and the beginning of its answer."""
        for attempt in range(self._max_retries + 1):
            try:
                return await self._ask(sample)
            except _Passing as failure:
                if attempt == self._max_retries:
                    raise RemoteRewardError(f"{failure} (tried {attempt + 1} times)") from failure
                wait_s = min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2**attempt * random.uniform(0.5, 1.5))
                await asyncio.sleep(failure.wait_s if failure.wait_s is not None else wait_s)
        raise AssertionError("the last attempt returns or raises")

    async def close(self) -> None:
        """Closes the connections."""
        if self._session is not None:
            await self._session.close()

    async def _ask(self, sample: dict[str, Any]) -> Any:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None),
                headers=self._headers,
                json_serialize=functools.partial(json.dumps, default=str),
            )
        try:
            async with self._session.post(self._url, json=sample) as response:
                text = await _text_of(response)
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            raise _Passing(f"{self._url}: {type(error).__name__}: {error}") from error
        if response.status != 200:
            message = f"{self._url} answered with status {response.status}: {text[:_SHOWN_CHARACTERS]}"
            if response.status == 429 or response.status >= 500:
                raise _Passing(message, _seconds(response.headers.get("Retry-After")))
            raise RemoteRewardError(message)
        try:
            return json.loads(text)
        except ValueError as error:
            raise RemoteRewardError(f"{self._url} answered without JSON: {text[:_SHOWN_CHARACTERS]}") from error


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


def _token(variable: str) -> str:
    token = os.environ.get(variable)
    if not token:
        raise UserError(f"reward.remote.api_key_env={variable}: the environment variable {variable} is not set")
    return token
