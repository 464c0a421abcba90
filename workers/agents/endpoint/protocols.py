"""The APIs of the endpoint: OpenAI's chat completions and responses, and Anthropic's messages.

Each API reads the body of a request into a `Conversation`, and writes a `SampledAnswer` as a reply or as a stream of
events.
"""

from collections.abc import Iterator
from typing import Protocol

from workers.agents.endpoint.chat_completions import ChatCompletions
from workers.agents.endpoint.messages import Messages
from workers.agents.endpoint.replies import Event, Reply
from workers.agents.endpoint.request_fields import Body, Settings
from workers.agents.endpoint.responses import Responses
from workers.agents.endpoint.trace import Conversation, Refusal, SampledAnswer


class Api(Protocol):
    """One API.

    Attributes:
        path: Path of its requests.
        ping: What a stream sends while it has no answer.
    """

    path: str
    ping: bytes

    def read(self, body: Body, settings: Settings) -> Conversation:
        """Reads a request. Raises Refusal for a body that the endpoint does not answer."""

    def reply(self, answer: SampledAnswer, body: Body, name: str) -> Reply:
        """Returns the reply to a request with this body, under a unique name (`replies.new_name`)."""

    def events(self, answer: SampledAnswer, body: Body, name: str) -> Iterator[Event]:
        """Yields the events of the reply to a request with `stream`. For the arguments see `reply`."""

    def error(self, refusal: Refusal) -> Reply:
        """Returns the body of a reply with an error."""

    def error_event(self, refusal: Refusal) -> Event:
        """Returns the last event of a stream that fails."""


APIS: tuple[Api, ...] = (ChatCompletions(), Responses(), Messages())
