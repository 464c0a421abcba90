"""What the replies of the three APIs have in common: names, token counts, OpenAI's errors, and server-sent events.

A stream contains the whole answer in few events, because it is sent when the answer is complete.
"""

import json
import time
import uuid
from collections.abc import Mapping
from typing import NamedTuple, TypedDict

from workers.agents.endpoint.trace import Answer, Refusal

Reply = Mapping[str, object]
"""A reply, or a part of one, that is written as JSON."""


class Event(NamedTuple):
    """A server-sent event. name: None for an API that uses no names. data: written as JSON, except for a text."""

    name: str | None
    data: Reply | str

    def written(self) -> bytes:
        """Returns the event as bytes."""
        text = self.data if isinstance(self.data, str) else json.dumps(self.data)
        head = f"event: {self.name}\n" if self.name else ""
        return f"{head}data: {text}\n\n".encode()


class Usage(TypedDict):
    """Number of tokens, as OpenAI names them."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


def new_name() -> str:
    """Returns a name for a reply."""
    return uuid.uuid4().hex


def unix_time() -> int:
    """Returns the time of a reply, in seconds."""
    return int(time.time())


def usage_of(answer: Answer) -> Usage:
    prompt, sampled = len(answer.prompt_ids), len(answer.token_ids)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def openai_error(refusal: Refusal) -> Reply:
    """Returns the body of an error in the format of OpenAI's APIs."""
    kind = "invalid_request_error" if refusal.status < 500 else "server_error"
    return {"error": {"message": refusal.message, "type": kind, "param": refusal.field, "code": refusal.code}}
