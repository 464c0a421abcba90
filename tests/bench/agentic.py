"""What environments cost the rollout engine: episodes of four turns in 64 environments whose step takes 0, 50, 200 ms.

Three schedules take turns, over the Hugging Face engine with 64 slots and a random model of 1.1M parameters whose turns
have geometric lengths (32 tokens in the mean, 96 at most):

    continuous   `EpisodeRunner`: a finished turn steps its environment while other sequences decode
    lock step    all environments step, then all turns are generated
    plain        the same prompts and as many tokens, all known from the start: no environment, nothing to wait for

An engine that keeps the beginning of a conversation (`workers/rollout/kept_slots.py`) gains from the episodes' order;
plain generation, where hundreds of prompts wait for each slot, hardly does. So a share above 1 is possible.

Printed for each: tokens a second against plain's (the goal: at least 0.9 for continuous at 50 ms), the share of the
time that the engine works, and how many sequences it works on. Up to the beginning of the last episode (for plain: of
the last turn), and in brackets over all, with the end when ever fewer episodes are left. Options: --rounds N.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from typing import Any

SLOTS = ENVIRONMENTS = 64
EPISODES_EACH = 2
TURN_TOKENS = 96
MODEL_LENGTH = 640
LATENCIES_MS = (0, 50, 200)


@dataclass
class Trace:
    """What an engine did. marks: (seconds, tokens, seconds of work, sum of sequences, steps) after each step."""

    marks: list[tuple[float, int, float, int, int]] = field(default_factory=list)
    requests: list[tuple[tuple[int, ...], int]] = field(default_factory=list)
    steady: int = -1

    def rate(self, steady: bool) -> float:
        seconds, tokens, *_ = self.marks[self.steady if steady else -1]
        return tokens / seconds

    def busy(self) -> float:
        seconds, _, busy_s, *_ = self.marks[self.steady]
        return busy_s / seconds

    def sequences(self) -> float:
        *_, sequences, steps = self.marks[self.steady]
        return sequences / steps


class Recorder:
    """An engine that notes what it does."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.trace = engine, Trace()
        self.prompts: dict[str, tuple[int, ...]] = {}
        self.started, self.busy_s, self.tokens, self.sequences, self.steps = time.perf_counter(), 0.0, 0, 0, 0

    def submit(self, request: Any) -> None:
        self.prompts[request.request_id] = request.prompt_ids
        self.engine.submit(request)

    def abort(self, ids: Any) -> Any:
        return self.engine.abort(ids)

    @property
    def unfinished(self) -> int:
        return self.engine.unfinished

    def step(self) -> list[Any]:
        before, started = len(self.engine._running), time.perf_counter()
        completions = self.engine.step()
        now, running = time.perf_counter(), len(self.engine._running) + len(completions)
        self.busy_s += now - started
        self.tokens += running
        self.sequences += running
        self.steps += bool(running or before)
        for completion in completions:
            self.trace.requests.append((self.prompts.pop(completion.request_id), len(completion.token_ids)))
        self.trace.marks.append((now - self.started, self.tokens, self.busy_s, self.sequences, self.steps))
        return completions


class LockStep:
    """A pool that holds calls back until the engine has nothing left to generate, and answers all of them at once."""

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
        calls, self.calls, replies = self.calls, [], []
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
        from workers.rollout.hf_engine import HFEngine

        torch.set_num_threads(1)
        path = tiny_qwen2(folder, hidden=128, layers=4, heads=4, max_positions=MODEL_LENGTH, initializer_range=0.02)
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.engine = HFEngine(
            path,
            RolloutConfig(name="hf", max_num_seqs=SLOTS, kv_cache_memory_mb=1024),
            max_model_len=MODEL_LENGTH,
            device=torch.device("cpu"),
            dtype=torch.float32,
            seed=0,
            override_config={},
            trust_remote_code=False,
        )
        weights = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
        self.engine.load_weights(weights.items(), 0)

    def episodes(self, latency_ms: int, *, lock_step: bool) -> Trace:
        from verl_lite.config import EnvPoolConfig
        from verl_lite.envs import EnvTemplate
        from workers.envs.pool import EnvPool
        from workers.rollout.base import SamplingParams
        from workers.rollout.episodes import EpisodeRunner, EpisodeSpec, TokenLimits

        config = {"seconds": latency_ms / 1000}
        template = EnvTemplate(
            "slow", "tests.bench.agentic_env:Slow", env_config=config, max_tokens_per_step=TURN_TOKENS
        )
        pool: Any = EnvPool(EnvPoolConfig(num_workers=1, threads=ENVIRONMENTS), {"slow": template})
        pool.dry_run(["slow"])
        recorder = Recorder(self.engine)
        runner = EpisodeRunner(
            recorder,  # type: ignore[arg-type]
            LockStep(pool, recorder) if lock_step else pool,
            self.tokenizer,
            {"slow": template},
            TokenLimits(MODEL_LENGTH, MODEL_LENGTH, MODEL_LENGTH),
            seed=0,
            stop_token_ids=(0,),
            max_live=ENVIRONMENTS,
        )
        specs = [
            EpisodeSpec(str(n), str(n), "slow", n % ENVIRONMENTS, n, n // ENVIRONMENTS, n, 1, 0)
            for n in range(ENVIRONMENTS * EPISODES_EACH)
        ]
        runner.begin(specs, SamplingParams(1.0, 1.0, -1, TURN_TOKENS))
        recorder.started = time.perf_counter()
        while runner.unfinished(0):
            runner.advance(1.0)
            if recorder.trace.steady < 0 and not runner._queue:
                recorder.trace.steady = max(0, len(recorder.trace.marks) - 1)
        pool.close()
        return recorder.trace

    def plain(self, requests: list[tuple[tuple[int, ...], int]]) -> Trace:
        from workers.rollout.base import Request, SamplingParams

        recorder = Recorder(self.engine)
        recorder.started = time.perf_counter()
        for number, (prompt, tokens) in enumerate(requests):
            sampling = SamplingParams(1.0, 1.0, -1, tokens, seed=number, ignore_eos=True)
            recorder.submit(Request(str(number), prompt, sampling))
        while recorder.unfinished:
            recorder.step()
            if recorder.trace.steady < 0 and not self.engine._waiting:
                recorder.trace.steady = len(recorder.trace.marks) - 1
        return recorder.trace


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench agentic", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--latencies-ms", type=int, nargs="+", default=list(LATENCIES_MS))
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(folder)
        requests = bench.episodes(0, lock_step=False).requests  # warms up, too
        print(
            f"{ENVIRONMENTS} environments, {SLOTS} slots, {len(requests)} turns, "
            f"{sum(tokens for _, tokens in requests)} tokens; (the end included)"
        )
        print(f"{'':22}{'tokens/s':>16}{'of plain':>16}{'busy':>8}{'sequences':>11}", flush=True)
        found: dict[str, list[tuple[Trace, Trace]]] = {}
        for number in range(options.rounds):
            plain = bench.plain(requests)
            found.setdefault(f"{'':7}  plain", []).append((plain, plain))
            for latency_ms in options.latencies_ms:
                for name, lock_step in (("continuous", False), ("lock step", True)):
                    trace = bench.episodes(latency_ms, lock_step=lock_step)
                    found.setdefault(f"{latency_ms:>4} ms  {name}", []).append((trace, plain))
            print(f"round {number + 1} of {options.rounds}" if number + 1 < options.rounds else "medians")
            for name, pairs in found.items():
                _print(name, pairs if number + 1 == options.rounds else pairs[-1:])


def _print(name: str, pairs: list[tuple[Trace, Trace]]) -> None:
    """pairs: traces with that of plain in their round."""
    rates = [statistics.median(one.rate(steady) for one, _ in pairs) for steady in (True, False)]
    shares = [
        statistics.median(one.rate(steady) / plain.rate(steady) for one, plain in pairs) for steady in (True, False)
    ]
    busy = statistics.median(one.busy() for one, _ in pairs)
    sequences = statistics.median(one.sequences() for one, _ in pairs)
    row = (
        f"{name:22}{rates[0]:>8.0f} ({rates[1]:>5.0f}){shares[0]:>9.2f} ({shares[1]:.2f}){busy:>8.2f}{sequences:>11.1f}"
    )
    print(row, flush=True)
