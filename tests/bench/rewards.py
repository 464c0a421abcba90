"""What rewards cost: the processes that they run in, and each kind of reward, against a plain call in one run.

First, a function that compares two strings, called for 1,000 answers in this process and through the pool, queued at
once or in groups of 8 as they finish in a rollout; the ways take turns, printed is the best of each. Then every kind of
reward, called in this process (the judge for 64 answers at a time): processor time and time by the clock for 1,000
rewards, the processes of the sandbox included and the judge's server not, and the ratio of the processor time to a
plain call. Half of the answers are right, and every reward has to find them. Options: --rounds N, --answers N of the
kinds that wait for another process.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.bench.frame import best_ms, options
from verl_lite.config import RewardConfig
from verl_lite.rewards import RewardItem, load_scorer
from workers.rewards.reward_pool import RewardPool

REWARDS = 1000
AT_ONCE = 64
REASONING = ("Since 3 x + 4 = 16, we have 3 x = 12, which means that x is 4. Let me check this again. " * 11)[:960]
FUNCTION = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str.strip() == ground_truth)
"""
SERVER = """
from tests.reward_server import Answer, RewardServer
def judge(number, body):
    right = "right" in body["messages"][0]["content"].partition("<answer>")[2]
    message = {"role": "assistant", "content": f"Score: {10 * right}"}
    return Answer({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})
server = RewardServer(judge)
print(server.url, flush=True)
server._server.serve_forever()
"""


@dataclass(frozen=True)
class Case:
    """A reward and answers to it, half of them right."""

    name: str
    config: RewardConfig
    items: list[RewardItem]


RULES: dict[str, tuple[Callable[[int], str], Callable[[int], Any], dict[str, Any]]] = {
    "exact_match": (str, str, {}),
    "gsm8k": (lambda n: f"{REASONING}\n#### {n}", str, {}),
    "math_dapo": (lambda n: f"{REASONING}\nAnswer: ${n}$", str, {}),
    "math_verify": (lambda n: rf"{REASONING} \boxed{{\frac{{{n}}}{{7}}}}", lambda n: rf"\frac{{{n}}}{{7}}", {}),
    "exact_answer": (lambda n: f"{REASONING}\n<answer>The {n}.</answer>", str, {}),
    "multiple_choice": (lambda n: f"{REASONING}\nThe answer is ({'ABCD'[n % 4]}).", lambda n: n % 4, {}),
    "regex": (lambda n: f"{REASONING}\nx = {n}", str, {"pattern": r"x = (\d+)", "group": 1}),
}
"""The answer that gives a number, and the truth that this number is. A wrong answer gives the next number."""


def rule_cases(count: int = REWARDS) -> list[Case]:
    """Every reward that is a rule, reasoning-gym, and two rules together; every second answer is wrong."""

    def case(name: str, functions: dict[str, Any], answers: list[str], truth: Callable[[int], Any] = str) -> Case:
        items = [RewardItem(n, "bench", text, truth(n), {"index": n}) for n, text in enumerate(answers)]
        return Case(name, RewardConfig(functions=functions), items)

    thoughts = [f"<think>{REASONING}\n{'' if n % 2 else '</think>'}<answer>Answer: {n}</answer>" for n in range(count)]
    both = {"accuracy": {"reward": "math_dapo"}, "format": {"reward": "format", "weight": 0.1}}
    gym = []
    for n in range(count):
        entry = json.dumps({"question": f"{n} + 1 =", "answer": str(n + 1), "metadata": {}})
        text = "nothing" if n % 2 else str(n + 1)
        gym.append(RewardItem(n, "reasoning_gym/chain_sum", text, "", {"entry": entry, "full_marks_only": True}))
    return [
        *(
            case(name, {name: {"reward": name, "kwargs": kwargs}}, [answer(n + n % 2) for n in range(count)], truth)
            for name, (answer, truth, kwargs) in RULES.items()
        ),
        case("format", {"format": {"reward": "format"}}, thoughts),
        case("math_dapo + format", both, [f"{text[:-9]}\n</answer>" for text in thoughts], lambda n: str(n - n % 2)),
        Case("reasoning_gym", RewardConfig(), gym),
    ]


def code_cases(count: int) -> list[Case]:
    """Programs with three tests each: as scripts, as functions, as asserts."""
    pairs = [(1, 2), (30, 40), (-5, 5)]
    script = {"inputs": [f"{a} {b}\n" for a, b in pairs], "outputs": [str(a + b) for a, b in pairs]}
    function = {"inputs": [list(pair) for pair in pairs], "outputs": [a + b for a, b in pairs], "fn_name": "add"}
    asserts = [f"assert add({a}, {b}) == {a + b}" for a, b in pairs]
    read, add = "a, b = map(int, input().split())\nprint(a {} b)", "def add(a, b):\n    return a {} b"
    config = RewardConfig(functions={"code": {"reward": "code"}})
    cases = []
    for name, program, truth in (("inputs", read, script), ("calls", add, function), ("asserts", add, asserts)):
        texts = [f"```python\n{program.format('*' if n % 2 else '+')}\n```" for n in range(count)]
        items = [RewardItem(n, "bench", text, truth) for n, text in enumerate(texts)]
        cases.append(Case(f"code: 3 {name}", config, items))
    return cases


@contextmanager
def judge_case(count: int) -> Iterator[Case]:
    """A judge whose server, a process of its own that answers at once, runs during the block."""
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True, cwd=os.getcwd())
    try:
        assert server.stdout is not None
        url = server.stdout.readline().strip().replace("/score", "/v1")
        config = RewardConfig(functions={"judge": {"reward": "judge", "kwargs": {"base_url": url, "model": "judge"}}})
        texts = ["wrong" if n % 2 else "right" for n in range(count)]
        prompt = [{"role": "user", "content": "Is it?"}]
        yield Case("judge", config, [RewardItem(n, "bench", text, "", None, prompt) for n, text in enumerate(texts)])
    finally:
        server.kill()
        server.wait()


def cost(case: Case) -> tuple[float, float]:
    """Seconds of one answer, imports and the first two done before: of processors, and by the clock. Checks that the
    right half is found."""
    scorer = load_scorer(case.config)
    _score(scorer, case.items[:2])
    cpu, wall = _cpu_seconds(), time.perf_counter()
    results = _score(scorer, case.items)
    wall, cpu = time.perf_counter() - wall, _cpu_seconds() - cpu
    found = sum(result.extra.get("acc", result.score) > 0 for result in results)
    assert not any(result.failed for result in results) and found == len(case.items) // 2, (case.name, found)
    return cpu / len(case.items), wall / len(case.items)


def _score(scorer: Any, items: Sequence[RewardItem]) -> list[Any]:
    if scorer.style != "async":
        return list(scorer.score_all(items))

    async def all_at_once() -> list[Any]:
        room = asyncio.Semaphore(AT_ONCE)

        async def one(item: RewardItem) -> Any:
            async with room:
                return await scorer.score(item)

        return await asyncio.gather(*(one(item) for item in items))

    return asyncio.run(all_at_once())


def _cpu_seconds() -> float:
    """Of this process and of all below it, those that have ended included; not of a judge's server."""
    seconds = time.process_time()
    for process in psutil.Process().children(recursive=True):
        try:
            times, command = process.cpu_times(), " ".join(process.cmdline())
        except psutil.NoSuchProcess:  # counted by its parent, which has waited for it
            continue
        if "RewardServer" not in command:
            seconds += times.user + times.system + times.children_user + times.children_system
    return seconds


def measure_pool(config: RewardConfig, rounds: int) -> None:
    """Prints microseconds of a reward in this process and through the pool."""
    pools = [RewardPool(config, processes) for processes in (1, 2)]
    scorer: Any = load_scorer(config)

    def by_pool(pool: RewardPool, group: int) -> Callable[[list[RewardItem]], object]:
        def run(items: list[RewardItem]) -> None:
            for start in range(0, len(items), group):
                pool.submit(items[start : start + group])
            pool.collect(item.key for item in items)

        return run

    ways: dict[str, Callable[[list[RewardItem]], object]] = {"called in this process": scorer.score_all}
    for processes, pool in enumerate(pools, start=1):
        for group in (REWARDS, 8):
            ways[f"{processes} processes, groups of {group}"] = by_pool(pool, group)
    best = dict.fromkeys(ways, float("inf"))
    texts = [f"The answer is {n}. ".ljust(100, ".") for n in range(REWARDS)]
    for number in range(rounds + 1):  # the first round starts the processes
        for name, way in ways.items():
            items = [RewardItem((name, number, n), "sums", text, "12", {"index": n}) for n, text in enumerate(texts)]
            started = time.perf_counter()
            way(items)
            if number:
                best[name] = min(best[name], time.perf_counter() - started)
    for pool in pools:
        pool.close()
    plain = best["called in this process"]
    for name, seconds in best.items():
        print(f"{name:32s} {seconds / REWARDS * 1e6:7.1f} us a reward   ratio {seconds / plain:.2f}")


def measure_kinds(rounds: int, waiting: int) -> None:
    """Prints milliseconds for 1,000 rewards of each kind."""
    namespace: dict[str, Any] = {}
    exec(FUNCTION, namespace)
    call = namespace["compute_score"]
    [plain_ms] = best_ms(rounds, lambda: [call("sums", f"The answer is {n}.", "12") for n in range(REWARDS)])
    print(f"\n{'ms for 1,000 rewards':32s} {'cpu':>10s} {'wall':>10s} {'ratio of cpu':>13s}")
    print(f"{'a plain call':32s} {plain_ms:10.2f} {plain_ms:10.2f} {1:13.0f}")
    with judge_case(waiting) as judge:
        for case in (*rule_cases(), *code_cases(waiting), judge):
            cpu, wall = cost(case)
            print(f"{case.name:32s} {cpu * 1e6:10.1f} {wall * 1e6:10.1f} {cpu * 1e6 / plain_ms:13.0f}")


def main(argv: list[str]) -> int:
    """Measures and prints."""
    given = options("rewards", __doc__, argv, rounds=10, answers=200)
    with tempfile.TemporaryDirectory() as folder:
        (path := Path(folder) / "reward.py").write_text(FUNCTION)
        config = RewardConfig()
        config.custom_reward_function.path = str(path)
        config.custom_reward_function.name = "compute_score"
        measure_pool(config, given.rounds)
    measure_kinds(given.rounds, given.answers)
    return 0
