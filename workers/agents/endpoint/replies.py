"""What the replies of the three APIs have in common: names, token counts, OpenAI's errors, and server-sent events.

A stream contains the whole answer in few events, because it is sent when the answer is complete.
"""

import json
import time
import uuid
from collections.abc import Mapping
from typing import NamedTuple, TypedDict

from workers.agents.endpoint.trace import Refusal, SampledAnswer

Reply = Mapping[str, object]
"""A reply, or a part of one, that is written as JSON."""


class Event(NamedTuple):
    """A server-sent event.

    Attributes:
        name: Its name; None for an API that uses no names.
        data: Its content. A text is sent as it is, and anything else as JSON.
    """

    name: str | None
    data: Reply | str

    def written(self) -> bytes:
        """Returns the event as bytes."""
        text = self.data if isinstance(self.data, str) else json.dumps(self.data)
        lines = f"data: {text}\n\n"
        if self.name is not None:
            lines = f"event: {self.name}\n{lines}"
        return lines.encode()


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


def usage_of(answer: SampledAnswer) -> Usage:
    """Returns the numbers of tokens of an answer. Its prompt is the whole context, sampled tokens included."""
    num_prompt = len(answer.prompt_ids)
    num_sampled = len(answer.token_ids)
    return {"prompt_tokens": num_prompt, "completion_tokens": num_sampled, "total_tokens": num_prompt + num_sampled}


def openai_error(refusal: Refusal) -> Reply:
    """Returns the body of an error in the format of OpenAI's APIs."""
    kind = "invalid_request_error" if refusal.status < 500 else "server_error"
    return {"error": {"message": refusal.message, "type": kind, "param": refusal.field, "code": refusal.code}}
