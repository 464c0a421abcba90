"""What the endpoint costs: added latency, many episodes at once, tokens a second against episodes without HTTP.

    latency   32 clients in another process, each in a conversation of 8 requests; a simulated engine answers every
              request after exactly 50 ms. Added latency = time in the client - 50 ms (the goal: at most 3 ms at p50).
    episodes  500 episodes of 3 requests at the same time, as coroutines of one program process; the simulated engine
              answers after 50 ms. Every episode must end with one row of three turns.
    live      16 episodes of 6 turns with 48 tokens each on the Hugging Face engine, random Qwen2 of 12M parameters:
              as programs over HTTP, and the same requests made by this process without HTTP, in turns (the goal: at
              least 0.9 of its tokens per second).
    templates rows per episode of four turns with thinking and a tool call, as the endpoint builds them, and if each
              prompt had to begin with the sampled tokens as the chat template writes them (strict token prefix).

Options: --rounds N, --parts ...
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from tests.bench.frame import in_a_process, options, print_row

CLIENTS, TURNS, ENGINE_S = 32, 8, 0.05
EPISODES, EPISODE_TURNS = 500, 3
LIVE_EPISODES, LIVE_TURNS, LIVE_TOKENS = 16, 6, 48


class TimedEngine:
    """Finishes each request ENGINE_S seconds after it was submitted."""

    extra_outputs: dict[str, tuple[int, ...]] = {}

    def __init__(self, end: int) -> None:
        self.due: dict[str, float] = {}
        self.end = end

    def submit(self, request: Any) -> None:
        self.due[request.request_id] = time.perf_counter() + ENGINE_S

    def step(self) -> list[Any]:
        from workers.engines.base import Completion

        time.sleep(max(0.0, min(min(self.due.values()) - time.perf_counter(), 0.001)))
        now = time.perf_counter()
        done = [name for name, due in self.due.items() if due <= now]
        for name in done:
            del self.due[name]
        ids = [40, 41, 42, 43, self.end]
        return [Completion(name, ids, [-1.0] * len(ids), "stop", [0] * len(ids)) for name in done]

    @property
    def unfinished(self) -> int:
        return len(self.due)

    def abort(self, request_ids: Sequence[str]) -> None:
        for name in request_ids:
            self.due.pop(name, None)


class NoPrograms:
    """Episodes whose clients are started by the benchmark. ends: episodes that end in the next poll."""

    processes_replaced = 0

    def __init__(self) -> None:
        self.woken, self.ends = threading.Event(), list[Any]()
        self.runs: dict[int, Any] = {}

    def submit(self, number: int, payload: Any) -> None:
        self.runs[number] = payload

    def poll(self, timeout_s: float) -> list[Any]:
        self.woken.wait(timeout_s)
        self.woken.clear()
        ends, self.ends = self.ends, []
        return ends


def make_runner(
    engine: Any, programs: Any, wake: Callable[[], None], max_live: int, tokenizer: Any, limits: Any
) -> Any:
    from verl_lite.config import EndpointConfig
    from workers.agents.conversation import ChatJoins
    from workers.agents.endpoint.server import Endpoint
    from workers.agents.endpoint.trace import Trace
    from workers.agents.programs import ProgramRunner
    from workers.rollout.runner import Runner

    joins = ChatJoins(tokenizer, most_tokens=limits.max_model_len)
    endpoint = Endpoint(EndpointConfig(), 0, "policy", wake)
    return endpoint, ProgramRunner(
        Runner(engine), endpoint, programs, new_trace=lambda: Trace(joins, tokenizer, limits, [joins.end_of_turn]),
        stop_token_ids=[joins.end_of_turn], rewards=None, engine=0, seed=0, max_live=max_live, rows=list,  # type: ignore[arg-type]
    )  # fmt: skip


def begin(runner: Any, number: int, max_tokens: int, ignore_eos: bool = False, **row: Any) -> list[str]:
    from workers.engines.base import SamplingParams
    from workers.rollout.specs import GroupPlan, ProgramSpec

    names = [str(n) for n in range(number)]
    for n, name in enumerate(names):
        spec = ProgramSpec(name, name, "bench", start_step=1, row={"number": n, **row})
        runner.begin(GroupPlan(name, (spec,)), SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos))
    return names


# ------------------------------------------------------------------------------------------------------------- latency


def clients(url: str, keys: list[str]) -> list[float]:
    """Seconds of each request of all clients, which speak HTTP on bare sockets, so that little of it is their own."""
    host, port = url.removeprefix("http://").split(":")

    async def talk(key: str) -> list[float]:
        messages, found = [{"role": "user", "content": "how are you? " * 10}], []
        reader, writer = await asyncio.open_connection(host, int(port))
        await asyncio.sleep(random.random() * ENGINE_S)
        for _ in range(TURNS):
            body = json.dumps({"messages": messages}).encode()
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
            started = time.perf_counter()
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            fields = (await reader.readuntil(b"\r\n\r\n")).lower()
            reply = await reader.readexactly(int(fields.partition(b"content-length:")[2].split()[0]))
            found.append(time.perf_counter() - started)
            messages += [json.loads(reply)["choices"][0]["message"], {"role": "user", "content": "and now? " * 5}]
        writer.close()
        return found

    async def all_of_them() -> list[float]:
        return [x for each in await asyncio.gather(*map(talk, keys)) for x in each]

    return asyncio.run(all_of_them())


def latency(rounds: int) -> None:
    from tests.workers.agents.endpoint.live import END, LIMITS, TOKENIZER
    from workers.pool.channel import Reply

    p50, p99 = [], []
    for _ in range(rounds):
        programs = NoPrograms()
        endpoint, runner = make_runner(TimedEngine(END), programs, programs.woken.set, CLIENTS, TOKENIZER, LIMITS)
        names = begin(runner, CLIENTS, 64)
        runner.advance()
        found: list[float] = []

        def ask(endpoint: Any = endpoint, programs: Any = programs, found: list[float] = found) -> None:
            found += in_a_process("spawn", clients, endpoint.url, [run.api_key for run in programs.runs.values()])
            programs.ends = [Reply(number, None, error="done") for number in programs.runs]

        asking = threading.Thread(target=ask)
        asking.start()
        while not all(map(runner.is_finished, names)):
            runner.advance(0.05)
        asking.join()
        endpoint.close()
        added = [(x - ENGINE_S) * 1e3 for x in found]
        p50.append(statistics.median(added))
        p99.append(statistics.quantiles(added, n=100)[98])
    print(
        f"latency, {CLIENTS} clients, {CLIENTS * TURNS} requests in each of {rounds} rounds (ms, median of the rounds):"
    )
    print_row(["added p50", "smallest", "largest", "added p99"], head=True)
    print_row(f"{x:.2f}" for x in (statistics.median(p50), min(p50), max(p50), statistics.median(p99)))


# ------------------------------------------------------------------------------------------------------------ programs


async def program(base_url: str, api_key: str, row: dict[str, Any], session: list[Any] = []) -> float:  # noqa: B006
    """Makes the requests of an episode; all episodes of a process share the connections."""
    import aiohttp

    if not session:
        session.append(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
    messages: list[Any] = [{"role": "user", "content": f"question {row['number']}"}]
    for _ in range(row["turns"]):
        headers = {"Authorization": f"Bearer {api_key}"}
        async with session[0].post(
            f"{base_url}/chat/completions", json={"messages": messages}, headers=headers
        ) as reply:
            answer = (await reply.json())["choices"][0]["message"]
        messages += [answer, {"role": "user", "content": "go on"}]
    return 1.0


def programs_of(threads: int, on_repeat: Callable[[int], None]) -> Any:
    from verl_lite.config import AgenticConfig
    from workers.agents.program_host import program_pool
    from workers.pool.process_pool import ProcessPool

    agentic = AgenticConfig(program=f"{__name__ if __name__ != '__main__' else 'tests.bench.endpoint'}:program")
    agentic.env_pool.threads = threads
    return ProcessPool(program_pool(agentic, on_repeat=on_repeat))


def episodes() -> None:
    from tests.workers.agents.endpoint.live import END, LIMITS, TOKENIZER

    pool = programs_of(EPISODES, lambda number: None)
    while pool.style is None:
        pool.poll(0.1)
    endpoint, runner = make_runner(TimedEngine(END), pool, pool.wake, EPISODES, TOKENIZER, LIMITS)
    started = time.perf_counter()
    names = begin(runner, EPISODES, 64, turns=EPISODE_TURNS)
    while not all(map(runner.is_finished, names)):
        runner.advance(0.05)
    seconds = time.perf_counter() - started
    trajectories = [one for name in names for one in runner.take(name).rows]
    whole = [one for one in trajectories if one.rows and [len(turns) for turns in one.rows] == [EPISODE_TURNS]]
    endpoint.close()
    pool.close()
    print(f"\nepisodes: {EPISODES} at once, {EPISODE_TURNS} requests each, in {seconds:.1f} s: ", end="")
    print(f"{EPISODES - len(whole)} lost, {EPISODES * EPISODE_TURNS / seconds:.0f} requests/s")


# ---------------------------------------------------------------------------------------------------------------- live


class LiveBench:
    def __init__(self, folder: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from tests.tiny_model import tiny_qwen2
        from verl_lite.config import RolloutConfig
        from workers.agents.episodes import TokenLimits
        from workers.engines.base import build_rollout_engine

        torch.set_num_threads(1)
        path = tiny_qwen2(folder, vocab=512, hidden=384, layers=5, heads=12, max_positions=640, initializer_range=0.02)
        self.tokenizer, self.limits = AutoTokenizer.from_pretrained(path), TokenLimits(64, 576, 640)
        config = RolloutConfig(max_num_seqs=LIVE_EPISODES, kv_cache_memory_mb=1024)
        built = build_rollout_engine(
            "hf", path, config, max_model_len=640, device=torch.device("cpu"), dtype=torch.float32, seed=0
        )
        self.engine: Any = built
        self.engine.load_weights(
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict().items(), 0
        )

    def over_http(self) -> float:
        pool = programs_of(LIVE_EPISODES, lambda number: None)
        while pool.style is None:
            pool.poll(0.1)
        endpoint, runner = make_runner(self.engine, pool, pool.wake, LIVE_EPISODES, self.tokenizer, self.limits)
        started = time.perf_counter()
        names = begin(runner, LIVE_EPISODES, LIVE_TOKENS, ignore_eos=True, turns=LIVE_TURNS)
        while not all(map(runner.is_finished, names)):
            runner.advance(0.05)
        rate = LIVE_EPISODES * LIVE_TURNS * LIVE_TOKENS / (time.perf_counter() - started)
        endpoint.close()
        pool.close()
        return rate

    def in_process(self) -> float:
        from workers.agents.conversation import ChatJoins
        from workers.agents.endpoint.trace import Conversation, Trace
        from workers.engines.base import Request, SamplingParams

        joins = ChatJoins(self.tokenizer, most_tokens=640)
        traces = [Trace(joins, self.tokenizer, self.limits, [joins.end_of_turn]) for _ in range(LIVE_EPISODES)]
        talks: list[list[Any]] = [[{"role": "user", "content": f"question {n}"}] for n in range(LIVE_EPISODES)]
        nodes: dict[str, Any] = {}

        def submit(number: int) -> None:
            node = traces[number].add(Conversation(list(talks[number])), LIVE_TOKENS)
            name = f"{number}/{node.number}"
            nodes[name] = node
            sampling = SamplingParams(max_tokens=node.room, ignore_eos=True, seed=len(nodes))
            self.engine.submit(Request(name, tuple(node.context()), sampling))

        started, tokens = time.perf_counter(), 0
        for number in range(LIVE_EPISODES):
            submit(number)
        while self.engine.unfinished:
            for done in self.engine.step():
                number = int(done.request_id.partition("/")[0])
                node, tokens = nodes[done.request_id], tokens + len(done.token_ids)
                answer = traces[number].commit(node, done)
                talks[number] += [answer.message, {"role": "user", "content": "go on"}]
                if node.number + 1 < LIVE_TURNS:
                    submit(number)
        return tokens / (time.perf_counter() - started)


def live(rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        bench = LiveBench(folder)
        bench.in_process()
        pairs = [(bench.over_http(), bench.in_process()) for _ in range(rounds)]
    ratios = [http / inside for http, inside in pairs]
    print(f"\nlive, {LIVE_EPISODES} episodes, 12M parameters, {rounds} rounds (tokens/s, medians; range of the ratio):")
    print_row(["over HTTP", "in process", "ratio", "smallest", "largest"], head=True)
    medians = [statistics.median(column) for column in zip(*pairs, strict=True)]
    print_row(
        [*(f"{x:.0f}" for x in medians), *(f"{x:.3f}" for x in (statistics.median(ratios), min(ratios), max(ratios)))]
    )


# ----------------------------------------------------------------------------------------------------------- templates

THOUGHTFUL = ("<think>\nlet me see\n</think>\n\nfirst \n", "<think>\nhm\n</think>\n\nsecond")


def templates() -> None:
    """Rows of an episode under chat templates in the style of the known families."""
    from tests.workers.rollout import chat_templates
    from workers.agents.conversation import ChatJoins
    from workers.agents.endpoint.trace import Conversation, Trace
    from workers.agents.episodes import TokenLimits
    from workers.engines.base import Completion

    limits = TokenLimits(1024, 4096, 5120)
    print("\ntemplates: rows of one episode of four turns with thinking and white space around the answers")
    print_row(["template", "endpoint", "strict token prefix"], head=True)
    for name in ("chatml", "qwen3", "llama3", "gemma", "mistral"):
        tokenizer = getattr(chat_templates, name)()
        joins = ChatJoins(tokenizer, most_tokens=limits.max_model_len)
        trace, talk, strict, ids = Trace(joins, tokenizer, limits, [joins.end_of_turn]), list[Any](), 1, list[int]()
        for turn in range(4):
            talk.append({"role": "user", "content": f"question {turn}"})
            whole = list(joins.prompt(talk))
            strict += bool(ids) and whole[: len(ids)] != ids
            node = trace.add(Conversation(list(talk)), 256)
            sampled = [*tokenizer.encode(THOUGHTFUL[turn % 2], add_special_tokens=False), joins.end_of_turn]
            answer = trace.commit(node, Completion("r", sampled, [-1.0] * len(sampled), "stop", [0] * len(sampled)))
            node.is_delivered = True
            ids = [*whole, *sampled[:-1]]
            talk.append({"role": "assistant", "content": f"<think>\n{answer.thinking}\n</think>\n\n{answer.text}"})
        print_row([name, len(trace.rows(1.0)), strict])


def main(argv: list[str]) -> None:
    chosen = options("endpoint", __doc__, argv, rounds=5, parts=["latency", "episodes", "live", "templates"])
    if "latency" in chosen.parts:
        latency(chosen.rounds)
    if "episodes" in chosen.parts:
        episodes()
    if "live" in chosen.parts:
        live(chosen.rounds)
    if "templates" in chosen.parts:
        templates()
