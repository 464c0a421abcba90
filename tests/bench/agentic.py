"""What environments cost the rollout engine: episodes of four turns in 64 environments whose step takes 0, 50, 200 ms.

Three schedules take turns, over the Hugging Face engine with 64 slots and a random model of 1.1M parameters whose turns
have geometric lengths (32 tokens in the mean, 96 at most):

    continuous   `EpisodeRunner`: a finished turn steps its environment while other sequences decode
    lock step    all environments step, then all turns are generated
    plain        the same prompts and as many tokens, all known from the start: no environment, nothing to wait for

An engine that keeps the beginning of a conversation (`workers/engines/slot_cache.py`) gains from the episodes' order;
plain generation, where hundreds of prompts wait for each slot, hardly does. So a share above 1 is possible.

Printed for each: tokens a second against plain's (the goal: at least 0.9 for continuous at 50 ms), and the share of the
time that the engine works. Up to the beginning of the last episode (for plain: of the last turn), and in brackets over
all, with the end when ever fewer episodes are left. Options: --rounds N.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from typing import Any

from tests.bench.frame import options

SLOTS = ENVIRONMENTS = 64
EPISODES_EACH = 2
TURN_TOKENS = 96
MODEL_LENGTH = 640
LATENCIES_MS = [0, 50, 200]


class Recorder:
    """An engine that notes what it does. requests: (prompt, tokens of the answer); marks: (seconds, tokens, seconds of
    work) after each step; steady: the mark at which the last request or episode began."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.abort = engine, engine.abort
        self.prompts: dict[str, tuple[int, ...]] = {}
        self.requests: list[tuple[tuple[int, ...], int]] = []
        self.marks: list[tuple[float, int, float]] = []
        self.steady = -1
        self.started, self.busy_s, self.tokens = time.perf_counter(), 0.0, 0

    def submit(self, request: Any) -> None:
        self.prompts[request.request_id] = request.prompt_ids
        self.engine.submit(request)

    @property
    def unfinished(self) -> int:
        return self.engine.unfinished

    def step(self) -> list[Any]:
        started = time.perf_counter()
        completions = self.engine.step()
        now = time.perf_counter()
        self.busy_s += now - started
        self.tokens += len(self.engine._running) + len(completions)
        for completion in completions:
            self.requests.append((self.prompts.pop(completion.request_id), len(completion.token_ids)))
        self.marks.append((now - self.started, self.tokens, self.busy_s))
        return completions

    def rate(self, steady: bool) -> float:
        seconds, tokens, _ = self.marks[self.steady if steady else -1]
        return tokens / seconds

    def busy(self) -> float:
        seconds, _, busy_s = self.marks[self.steady]
        return busy_s / seconds


class LockStep:
    """A pool that holds calls back until the engine has nothing left to generate, and answers all of them at once."""

    processes_replaced = 0

    def __init__(self, pool: Any, engine: Recorder) -> None:
        self.pool, self.engine = pool, engine
        self.calls: list[tuple[Any, ...]] = []
        self.discard, self.close = pool.discard, pool.close

    def reset(self, *call: Any) -> None:
        self.calls.append((self.pool.reset, *call))

    def step(self, *call: Any) -> None:
        self.calls.append((self.pool.step, *call))

    def poll(self, timeout_s: float = 0.0) -> list[Any]:
        if self.engine.unfinished:
            return []
        calls, self.calls = self.calls, []
        replies: list[Any] = []
        for function, *call in calls:
            function(*call)
        while len(replies) < len(calls):
            replies += self.pool.poll(1.0)
        return replies


class Bench:
    """Model, tokenizer and engine, once; runs of the three schedules."""

    def __init__(self, folder: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from tests.tiny_model import tiny_qwen2
        from verl_lite.config import RolloutConfig
        from workers.engines.base import build_rollout_engine

        torch.set_num_threads(1)
        path = tiny_qwen2(folder, hidden=128, layers=4, heads=4, max_positions=MODEL_LENGTH, initializer_range=0.02)
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        config = RolloutConfig(max_num_seqs=SLOTS, kv_cache_memory_mb=1024)
        device, dtype = torch.device("cpu"), torch.float32
        built = build_rollout_engine("hf", path, config, max_model_len=MODEL_LENGTH, device=device, dtype=dtype, seed=0)
        self.engine: Any = built
        self.engine.load_weights(AutoModelForCausalLM.from_pretrained(path, dtype=dtype).state_dict().items(), 0)

    def episodes(self, latency_ms: int, *, lock_step: bool) -> Recorder:
        from verl_lite.config import EnvPoolConfig
        from verl_lite.envs import EnvTemplate
        from workers.agents.env_pool import EnvPool
        from workers.agents.episodes import EpisodeRunner, TokenLimits
        from workers.engines.base import SamplingParams
        from workers.rollout.runner import Runner
        from workers.rollout.specs import EpisodeSpec, GroupPlan

        env_config = {"latency_s": latency_ms / 1000, "turns": 4}
        options: dict[str, Any] = {"env_config": env_config, "max_tokens_per_step": TURN_TOKENS}
        template = EnvTemplate("slow", "tests.workers.counting_env:Counting", **options)
        pool: Any = EnvPool(EnvPoolConfig(num_workers=1, threads=ENVIRONMENTS), {"slow": template})
        pool.dry_run(["slow"])
        recorder = Recorder(self.engine)
        runner = EpisodeRunner(
            Runner(recorder),  # type: ignore[arg-type]
            LockStep(pool, recorder) if lock_step else pool,  # type: ignore[arg-type]
            self.tokenizer,
            {"slow": template},
            TokenLimits(MODEL_LENGTH, MODEL_LENGTH, MODEL_LENGTH),
            seed=0,
            stop_token_ids=(0,),
            max_live=ENVIRONMENTS,
            rows=list,  # type: ignore[arg-type]  # they are not read
        )
        names = [str(n) for n in range(ENVIRONMENTS * EPISODES_EACH)]
        for n, name in enumerate(names):
            spec = EpisodeSpec(name, name, "slow", n % ENVIRONMENTS, n, n // ENVIRONMENTS, n, 1, 1)
            runner.begin(GroupPlan(name, (spec,)), SamplingParams(max_tokens=TURN_TOKENS))
        recorder.started = time.perf_counter()
        while not all(map(runner.is_finished, names)):
            runner.advance(1.0)
            if recorder.steady < 0 and not runner._queue:
                recorder.steady = max(0, len(recorder.marks) - 1)
        pool.close()
        return recorder

    def plain(self, requests: list[tuple[tuple[int, ...], int]]) -> Recorder:
        from workers.engines.base import Request, SamplingParams

        recorder = Recorder(self.engine)
        for number, (prompt, tokens) in enumerate(requests):
            sampling = SamplingParams(max_tokens=tokens, seed=number, ignore_eos=True)
            recorder.submit(Request(str(number), prompt, sampling))
        while recorder.unfinished:
            recorder.step()
            if recorder.steady < 0 and not self.engine._waiting:
                recorder.steady = len(recorder.marks) - 1
        return recorder


def main(arguments: list[str]) -> None:
    given = options("agentic", __doc__, arguments, rounds=3, latencies_ms=LATENCIES_MS)
    found: dict[str, list[tuple[Recorder, Recorder]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(folder)
        requests = bench.episodes(0, lock_step=False).requests  # warms up, too
        tokens = sum(tokens for _, tokens in requests)
        print(f"{ENVIRONMENTS} environments, {SLOTS} slots, {len(requests)} turns, {tokens} tokens; medians")
        for _ in range(given.rounds):
            plain = bench.plain(requests)
            found.setdefault(f"{'':7}  plain", []).append((plain, plain))
            for latency_ms in given.latencies_ms:
                for name, lock_step in (("continuous", False), ("lock step", True)):
                    trace = bench.episodes(latency_ms, lock_step=lock_step)
                    found.setdefault(f"{latency_ms:>4} ms  {name}", []).append((trace, plain))
    print(f"{'':22}{'tokens/s':>16}{'of plain':>16}{'busy':>8}")
    for name, pairs in found.items():
        rates = [statistics.median(one.rate(steady) for one, _ in pairs) for steady in (True, False)]
        shares = [statistics.median(x.rate(steady) / y.rate(steady) for x, y in pairs) for steady in (True, False)]
        busy = statistics.median(one.busy() for one, _ in pairs)
        print(f"{name:22}{rates[0]:>8.0f} ({rates[1]:>5.0f}){shares[0]:>9.2f} ({shares[1]:.2f}){busy:>8.2f}")
