"""The HTTP server of the endpoint. It runs in a thread of the process that has a rollout engine.

The thread of the engine opens an episode, takes the requests of all episodes, delivers their completions, and closes
the episode when its program has ended. The server's own thread reads requests, builds their token ids and writes
answers. Only that thread uses the traces of open episodes.
"""

import asyncio
import contextlib
import hashlib
import hmac
import secrets
import threading
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass, field, replace
from typing import TypeVar
from weakref import WeakKeyDictionary

from aiohttp import web

from verl_lite.config import EndpointConfig
from verl_lite.errors import UserError
from workers.agents.conversation import Message
from workers.agents.endpoint.callers import Callers, Verdict
from workers.agents.endpoint.connections import Connections, LimitedProtocol
from workers.agents.endpoint.messages import Messages
from workers.agents.endpoint.protocols import APIS, Api
from workers.agents.endpoint.replies import new_name, openai_error
from workers.agents.endpoint.request_fields import Body, Settings, is_retry, parsed_body
from workers.agents.endpoint.responses import Responses
from workers.agents.endpoint.trace import Conversation, Refusal, SampledAnswer, Trace, TraceNode
from workers.engines.base import Completion, SamplingParams, derive_seed

PING_S = 5.0
"""Seconds after which a stream without an answer begins, and between its pings."""
RETRY_S = 15.0
"""Seconds for which a request without a client continues, because the client may repeat it."""
BODY_S = 60.0
"""Seconds within which the body of a request has to arrive."""
READERS = 8
"""Number of bodies of one episode that are in memory while they arrive."""
KEEPALIVE_S = 75.0
"""Seconds for which a connection without a request stays open."""
ENDED_KEYS = 10_000
"""Number of closed episodes whose keys the server recognizes."""
_ENDED = "the episode of this API key has ended, because its program returned"


T = TypeVar("T")


@dataclass(eq=False)
class Call:
    """A running or answered request.

    Attributes:
        episode, node: its episode, and its place in the trace.
        request_id, prompt_ids, sampling: the request of the engine.
        future: the answer, or the Refusal of a request that failed.
        waiters: number of clients that wait for the answer.
        deliveries: number of clients that received the answer, or are receiving it.
    """

    episode: "Episode"
    node: TraceNode
    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    future: "asyncio.Future[SampledAnswer]"
    waiters: int = 0
    deliveries: int = 0


@dataclass(eq=False)
class Episode:
    """An open episode.

    Attributes:
        key: its API key.
        name: prefix of its request ids.
        settings: how its requests are read.
        sampling: sampling parameters of its answers.
        seed: number from which the seeds of its requests are derived.
        calls: its requests, by the digest of API and body; a request that is made again may have several calls.
        running: the calls without an answer.
        histories: conversations of the Responses API, by the id of the reply that ends them.
        is_open: False after its end.
        readers: lets only some of its bodies arrive at the same time.
    """

    key: str
    name: str
    trace: Trace
    settings: Settings
    sampling: SamplingParams
    seed: int
    calls: dict[bytes, list[Call]] = field(default_factory=dict)
    running: set[Call] = field(default_factory=set)
    histories: dict[str, list[Message]] = field(default_factory=dict)
    is_open: bool = True
    readers: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(READERS))


class Endpoint:
    """The server. All methods may be called from the engine's thread.

    Args:
        model: name that /v1/models returns.
        on_request: called in the server's thread when `take` has something new.
        training: sampling parameters of training, which requests may repeat, also in a validation with others; None =
            those of the episode.

    Raises:
        UserError: the address cannot be used.
    """

    def __init__(
        self,
        config: EndpointConfig,
        port: int,
        model: str,
        on_request: Callable[[], None],
        training: SamplingParams | None = None,
    ) -> None:
        self._config = config
        self._model = model
        self._on_request = on_request
        self._training = training
        # by the digest of the API key
        self._episodes: dict[bytes, Episode] = {}
        self._ended: deque[bytes] = deque(maxlen=ENDED_KEYS)
        # from the server's thread to the engine's, until `take`
        self._new: deque[Call] = deque()
        self._aborted: deque[Call] = deque()
        self._failure: str | None = None
        # set by the owner of the endpoint if programs are commands
        self.callers: Callers | None = None
        # whose process sent the requests of a connection, by connection and API key
        self._verdicts: WeakKeyDictionary[asyncio.Transport, dict[str, Verdict]] = WeakKeyDictionary()
        self._refused: Counter[str] = Counter()
        self._connections = Connections(self._count_refusal)
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=self._loop.run_forever, name="endpoint", daemon=True)
        thread.start()
        try:
            self.port = self._run(self._start(port))
        except OSError as error:
            self._loop.call_soon_threadsafe(self._loop.stop)
            raise UserError(
                f"agentic.endpoint.host={config.host}, port {port}: the endpoint cannot listen: "
                f"{error.strerror}; set agentic.endpoint.port=0 for any free port, or another port (engine number i "
                "uses port + i)"
            ) from error

    @property
    def url(self) -> str:
        """Address of the endpoint, without /v1."""
        # a server that listens on all addresses is called at the local one
        local_address = {"0.0.0.0": "127.0.0.1", "::": "::1"}
        host = local_address.get(self._config.host, self._config.host)
        # an IPv6 address needs brackets before a port
        if ":" in host:
            host = f"[{host}]"
        return f"http://{host}:{self.port}"

    # ----------------------------------------------------------------------------------------- the engine's thread

    def open(self, name: str, trace: Trace, sampling: SamplingParams, seed: int, key: str | None = None) -> str:
        """Opens an episode. Returns its API key.

        Args:
            name: unique name of the episode.
            sampling: sampling parameters of its answers.
            seed: number from which the seeds of its requests are derived.
            key: its API key; None for a new one.
        """
        key = key or f"sk-{secrets.token_urlsafe(24)}"
        settings = Settings(
            self._training or sampling,
            removed_blocks=tuple(self._config.removed_blocks),
            ignored_fields=frozenset(self._config.ignored_fields),
        )
        self._episodes[_digest(key)] = Episode(key, name, trace, settings, sampling, seed)
        return key

    def take(self) -> tuple[list[Call], list[Call]]:
        """Returns the requests that are new, and those that must be aborted, since the last call."""
        new_calls = _drained(self._new)
        aborted_calls = _drained(self._aborted)
        return new_calls, aborted_calls

    def deliver(self, call: Call, completion: Completion) -> None:
        """Delivers the completion of a request."""
        self._loop.call_soon_threadsafe(self._commit, call, completion)

    def refuse(self, call: Call, reason: str) -> None:
        """Answers a request that the engine has rejected."""
        self._loop.call_soon_threadsafe(_fail, call, Refusal(reason))

    def take_refused(self) -> dict[str, int]:
        """Returns the numbers of refused requests and connections by reason, since the last call."""
        refused = self._refused
        self._refused = Counter()
        return dict(refused)

    def close_episode(self, key: str) -> list[Call]:
        """Closes an episode: its key is no longer valid, and answers that come later are dropped. Returns the calls
        that are still running."""
        # waits, so that no other thread uses the trace of the episode afterwards
        return self._run(self._close_episode(_digest(key)))

    def fail(self, reason: str) -> None:
        """Answers all running and later requests with status 503."""
        self._failure = reason
        self._loop.call_soon_threadsafe(self._fail_running, Refusal(reason, status=503))

    def close(self) -> None:
        """Ends the server and cancels the requests that are running."""
        self.fail("the trainer has ended")
        self._run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self, work: Coroutine[None, None, T]) -> T:
        """Runs a coroutine in the server's thread and waits for its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    # ----------------------------------------------------------------------------------------- the server's thread

    async def _start(self, port: int) -> int:
        """Starts to listen. Returns the port."""
        app = web.Application(client_max_size=self._config.max_request_mb << 20)
        for api in APIS:
            app.router.add_post(api.path, self._handler(api, self._answer))
        count_tokens = self._handler(Messages(), self._count_tokens)
        app.router.add_post(f"{Messages.path}/count_tokens", count_tokens)
        app.router.add_get("/v1/models", self._models)
        app.router.add_route("*", "/{path:.*}", self._unknown_route)

        # a handler whose client has left is cancelled, and `_answer` then notices that nobody waits
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0, keepalive_timeout=KEEPALIVE_S
        )
        await self._runner.setup()
        web_server = self._runner.server
        assert web_server is not None

        # not aiohttp's own listener, which admits any number of connections
        def new_protocol() -> LimitedProtocol:
            return LimitedProtocol(self._connections, web_server)

        self._listener = await self._loop.create_server(new_protocol, self._config.host, port, backlog=1024)
        own_address = self._listener.sockets[0].getsockname()
        return int(own_address[1])

    async def _stop(self) -> None:
        self._listener.close()
        await self._runner.cleanup()

    def _count_refusal(self, kind: str) -> None:
        self._refused[kind] += 1

    async def _close_episode(self, digest: bytes) -> list[Call]:
        """Refuses the running requests of an episode. Returns those that the engine has to abort."""
        episode = self._episodes.pop(digest)
        episode.is_open = False
        self._connections.release(episode)
        # programs may leave requests behind, whose refusal says that the episode has ended
        self._ended.append(digest)
        running = list(episode.running)
        for call in running:
            _fail(call, Refusal(_ENDED))
        # the engine does not know the requests that it has not taken yet, so it has nothing to abort
        not_taken = [call for call in self._new if call.episode is episode]
        for call in not_taken:
            self._new.remove(call)
        return [call for call in running if call not in not_taken]

    def _fail_running(self, refusal: Refusal) -> None:
        """Refuses all running requests."""
        for episode in self._episodes.values():
            for call in list(episode.running):
                _fail(call, refusal)

    def _commit(self, call: Call, completion: Completion) -> None:
        """Adds an answer to the trace, and hands it to the clients that wait for it."""
        trace = call.episode.trace
        # The client has left or the episode has ended meanwhile. The tokens are counted, but not trained on.
        if call.future.done():
            num_tokens = len(completion.token_ids)
            trace.counts.update({"sampled": num_tokens, "discarded/late": num_tokens})
            return
        call.future.set_result(trace.commit(call.node, completion))
        call.episode.running.discard(call)

    def _handler(
        self, api: Api, answer: Callable[[web.Request, Api], Awaitable[web.StreamResponse]]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """Returns a handler that answers requests of this API with `answer`, and refusals with the API's errors."""

        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                return await answer(request, api)
            except Refusal as refusal:
                return self._refused_reply(api, refusal)
            except RecursionError as error:
                return self._refused_reply(api, Refusal(f"the request is nested too deeply: {error}"))

        return handle

    def _refused_reply(self, api: Api, refusal: Refusal) -> web.Response:
        """Returns the reply to a request that is refused, and counts it."""
        if refusal.kind is not None:
            self._count_refusal(refusal.kind)
        # the clients of OpenAI and Anthropic would also repeat 408 and 429
        headers = {"x-should-retry": "true" if refusal.status >= 500 else "false"}
        reply = web.json_response(api.error(refusal), status=refusal.status, headers=headers)
        if refusal.status in (408, 413, 429):
            # the connection may still send the rest of the body
            reply.force_close()
        return reply

    async def _answer(self, request: web.Request, api: Api) -> web.StreamResponse:
        """Begins a request, or joins the call that an SDK repeats. Sends the answer when it is complete."""
        read_request = await self._read(request)
        episode = read_request.episode
        body = read_request.body
        # an SDK repeats a request with the same body
        content = api.path.encode() + read_request.raw
        digest = hashlib.blake2b(content).digest()
        calls = episode.calls.setdefault(digest, [])
        call = _repeated(calls) if is_retry(request.headers) else None
        if call is None:
            call = self._begin(episode, self._conversation(api, episode, body))
            calls.append(call)

        call.waiters += 1
        try:
            if body.get("stream") is True:
                return await self._stream(request, api, call, body)
            # shielded: a client that leaves cancels its handler, but not the request of others that wait for it
            answer = await asyncio.shield(call.future)
            reply = api.reply(answer, body, _new_reply_name(api, call, body))
            response = web.json_response(reply)
            with _counted_delivery(call, request):
                await response.prepare(request)
                await response.write_eof()
            return response
        finally:
            call.waiters -= 1
            if not call.waiters and not call.future.done():
                self._loop.call_later(RETRY_S, self._abandon, call)

    async def _stream(self, request: web.Request, api: Api, call: Call, body: Body) -> web.StreamResponse:
        """Sends the answer as server-sent events, and pings until it is complete.

        The stream begins with the first ping. Until then, an error is a reply with its own status.
        """
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        while True:
            done, _ = await asyncio.wait([call.future], timeout=PING_S)
            if done:
                break
            if not response.prepared:
                await response.prepare(request)
            await response.write(api.ping)

        if not response.prepared:
            # raises Refusal, which `_handler` answers
            call.future.result()
            await response.prepare(request)
        # the status of a stream that has begun is sent already, so that an error can only be an event
        refusal = call.future.exception()
        if refusal is not None:
            assert isinstance(refusal, Refusal)
            await response.write(api.error_event(refusal).written())
            return response
        with _counted_delivery(call, request):
            name = _new_reply_name(api, call, body)
            events = api.events(call.future.result(), body, name)
            await response.write(b"".join(event.written() for event in events))
            await response.write_eof()
        return response

    def _conversation(self, api: Api, episode: Episode, body: Body) -> Conversation:
        """Returns the conversation of a request. In the Responses API, a request may contain only the new messages and
        name the response that it continues."""
        conversation = api.read(body, episode.settings)
        if not isinstance(api, Responses):
            return conversation
        previous_id = body.get("previous_response_id")
        if previous_id is None:
            return conversation
        if not isinstance(previous_id, str) or previous_id not in episode.histories:
            name = "previous_response_id"
            raise Refusal(f"{name}={previous_id!r}: this episode has no such response", field=name)
        # the instructions come before the history
        instructions = api.instructions(body, episode.settings)
        new_messages = conversation.messages[len(instructions) :]
        messages = [*instructions, *episode.histories[previous_id], *new_messages]
        return replace(conversation, messages=messages)

    def _begin(self, episode: Episode, conversation: Conversation) -> Call:
        """Adds a request to the trace and to the queue of the engine."""
        trace = episode.trace
        most = self._config.max_requests
        if self._failure is not None:
            raise Refusal(self._failure, status=503)
        if len(trace.nodes) >= most:
            raise Refusal(
                f"the episode has made {most} requests, the limit of agentic.endpoint.max_requests", kind="requests"
            )

        node = trace.add(conversation, episode.sampling.max_tokens)
        # the answer to a request with a seed does not depend on the number of requests before it
        number = node.number if conversation.seed is None else f"seed {conversation.seed}"
        # combined with the seed of the episode, so that the members of a group stay different
        seed = derive_seed(episode.seed, 0, number, 0)
        sampling = replace(episode.sampling, max_tokens=node.room, seed=seed)

        future: asyncio.Future[SampledAnswer] = self._loop.create_future()
        # asyncio logs the error of a future that nobody reads, such as that of a client that has left
        future.add_done_callback(lambda done: done.exception())
        request_id = f"{episode.name}/{node.number}"
        prompt_ids = tuple(node.context())
        call = Call(episode, node, request_id, prompt_ids, sampling, future)
        episode.running.add(call)
        self._new.append(call)
        self._on_request()
        return call

    def _abandon(self, call: Call) -> None:
        """Aborts a request whose client has left and did not repeat it."""
        if call.waiters or call.future.done():
            return
        _fail(call, Refusal("the client left before the answer was complete"))
        self._aborted.append(call)
        self._on_request()

    def _authenticated(self, request: web.Request) -> Episode:
        """Returns the episode of a request's API key. Raises Refusal for an unknown key."""
        # Anthropic's client sends the first header, OpenAI's the second
        authorization = request.headers.get("Authorization", "")
        key = request.headers.get("x-api-key") or authorization.removeprefix("Bearer ")
        digest = _digest(key)
        episode = self._episodes.get(digest)
        key_bytes = key.encode(errors="replace")
        if episode is not None and hmac.compare_digest(episode.key.encode(), key_bytes):
            return episode
        if digest in self._ended:
            raise Refusal(_ENDED)
        raise Refusal(
            "the API key belongs to no episode: pass the api_key that the program receives to its client. The "
            "environment has it if the program is a command, or with agentic.env_pool.threads=1",
            status=401,
            code="invalid_api_key",
            kind="key",
        )

    async def _check_caller(self, request: web.Request, key: str) -> None:
        """Raises Refusal if another episode's process sent the request. The process is searched once per connection."""
        if self.callers is None or request.transport is None:
            return
        verdicts = self._verdicts.setdefault(request.transport, {})
        if key not in verdicts:
            _, client_port, *_ = request.transport.get_extra_info("peername")
            # reading the table of processes would keep other clients waiting
            verdicts[key] = await asyncio.to_thread(self.callers.verdict, key, client_port, self.port)
        if verdicts[key] == "foreign":
            raise Refusal("the API key was given to another episode", status=401, code="invalid_api_key", kind="key")

    async def _read(self, request: web.Request) -> "_ReadRequest":
        """Checks the key and the sender of a request, and then reads its body into memory."""
        episode = self._authenticated(request)
        await self._check_caller(request, episode.key)
        if not self._connections.give(request.transport, episode):
            raise Refusal("the episode has too many connections", status=429, kind="connections")
        async with episode.readers:
            raw = await self._body(request)
        # it may have ended while the body was arriving
        if not episode.is_open:
            raise Refusal(_ENDED)
        return _ReadRequest(episode, raw, parsed_body(raw))

    async def _body(self, request: web.Request) -> bytes:
        """Returns the body of a request. Raises Refusal if it is too large or arrives too slowly."""
        try:
            async with asyncio.timeout(BODY_S):
                return await request.read()
        except TimeoutError as error:
            raise Refusal(f"the body did not arrive within {BODY_S:g} s", status=408, kind="slow") from error
        except web.HTTPRequestEntityTooLarge as error:
            most = self._config.max_request_mb
            raise Refusal(
                f"the request is larger than agentic.endpoint.max_request_mb={most}", status=413, kind="size"
            ) from error
        except web.RequestPayloadError as error:
            raise Refusal(f"the body cannot be read: {error}") from error

    async def _count_tokens(self, request: web.Request, api: Api) -> web.Response:
        """Answers with the number of tokens of a prompt, which is not sampled from."""
        read_request = await self._read(request)
        episode = read_request.episode
        conversation = api.read(read_request.body, episode.settings)
        num_tokens = episode.trace.count_tokens(conversation)
        return web.json_response({"input_tokens": num_tokens})

    async def _models(self, request: web.Request) -> web.Response:
        """Lists one model. This route needs no key."""
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "verl_lite"}
        models = {"object": "list", "data": [model], "has_more": False}
        return web.json_response(models)

    async def _unknown_route(self, request: web.Request) -> web.Response:
        """Answers with the list of routes."""
        paths = [api.path for api in APIS]
        routes = ", ".join([*paths, f"{Messages.path}/count_tokens", "/v1/models"])
        refusal = Refusal(f"{request.method} {request.path}: the endpoint has the routes {routes}")
        return web.json_response(openai_error(refusal), status=404)


@dataclass(frozen=True)
class _ReadRequest:
    """A request with a valid key, and its body as bytes (`raw`) and as an object."""

    episode: Episode
    raw: bytes
    body: Body


def _new_reply_name(api: Api, call: Call, body: Body) -> str:
    """Returns a new name for the reply of a call. In the Responses API, stores the conversation under this name, so
    that a later request can continue it."""
    name = new_name()
    if isinstance(api, Responses):
        # as in OpenAI's API, a continued response does not contain the instructions of the earlier one
        instructions = api.instructions(body, call.episode.settings)
        messages = call.node.conversation.messages[len(instructions) :]
        answer = call.future.result()
        call.episode.histories[f"resp_{name}"] = [*messages, answer.message]
    return name


@contextlib.contextmanager
def _counted_delivery(call: Call, request: web.Request) -> Iterator[None]:
    """Context manager in which the answer is sent. Counts it as delivered, unless the client has left, sending fails,
    or the episode has ended."""
    is_connected = request.transport is not None and not request.transport.is_closing()
    # before sending, because the client may end the episode right after it
    _count_delivery(call, int(is_connected))
    try:
        yield
    except BaseException:
        _count_delivery(call, -int(is_connected))
        raise


def _count_delivery(call: Call, change: int) -> None:
    """Adds to the number of deliveries, and sets whether a client has the answer."""
    call.deliveries += change
    # the rows of an episode that has ended are decided
    if call.episode.is_open:
        call.node.is_delivered = call.deliveries > 0


def _fail(call: Call, refusal: Refusal) -> None:
    """Lets the clients of a call receive an error, unless it has an answer."""
    if not call.future.done():
        call.future.set_exception(refusal)
    call.episode.running.discard(call)


def _repeated(calls: list[Call]) -> Call | None:
    """Returns the call that a retry repeats: the oldest whose client has left before its answer, else the newest.

    None if all calls have failed: the request is then made again.
    """
    newest: Call | None = None
    for call in calls:
        has_failed = call.future.done() and call.future.exception() is not None
        if has_failed:
            continue
        if not call.waiters and not call.node.is_delivered:
            return call
        newest = call
    return newest


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="replace")).digest()


def _drained(queue: deque[Call]) -> list[Call]:
    """Removes and returns the calls of a queue, to which another thread may append meanwhile."""
    calls = []
    while queue:
        calls.append(queue.popleft())
    return calls
