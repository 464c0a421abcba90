"""The kinds of rewards that wait for another process: programs in the sandbox, a judge's server on this machine.

Half of the answers are right. The judge's server is a process of its own and answers at once, so that what is measured
is what asking costs.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil

from verl_lite.config import RewardConfig
from verl_lite.rewards import RewardItem
from verl_lite.rewards.scoring import Scorer

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
SUM = "```python\n{}\n```"
AT_ONCE = 64


@dataclass(frozen=True)
class Cost:
    """Of one answer, in seconds: processor time of this process and those that it started, and by the clock."""

    cpu_s: float
    wall_s: float


def cost(scorer: Scorer, items: Sequence[RewardItem], right: int) -> Cost:
    """What scoring costs once the first two are scored. Checks that the right answers are found."""
    _score(scorer, items[:2])
    cpu, wall = _cpu_seconds(), time.perf_counter()
    results = _score(scorer, items)
    wall_s, cpu_s = time.perf_counter() - wall, _cpu_seconds() - cpu
    found = sum(result.extra.get("acc", result.score) > 0 for result in results)
    assert not any(result.failed for result in results) and found == right, (found, right)
    return Cost(cpu_s / len(items), wall_s / len(items))


def code_cases(answers: int) -> dict[str, tuple[RewardConfig, list[RewardItem]]]:
    """Programs with three tests each: as scripts, as functions, as asserts."""
    pairs = [(1, 2), (30, 40), (-5, 5)]
    script = {"inputs": [f"{a} {b}\n" for a, b in pairs], "outputs": [str(a + b) for a, b in pairs]}
    function = {"inputs": [list(pair) for pair in pairs], "outputs": [a + b for a, b in pairs], "fn_name": "add"}
    asserts = [f"assert add({a}, {b}) == {a + b}" for a, b in pairs]
    programs = ["a, b = map(int, input().split())\nprint(a {} b)", "def add(a, b):\n    return a {} b"]
    return {
        "code: 3 inputs and outputs": _case(programs[0], script, answers),
        "code: 3 calls": _case(programs[1], function, answers),
        "code: 3 asserts": _case(programs[1], asserts, answers),
    }


def _case(program: str, truth: Any, answers: int) -> tuple[RewardConfig, list[RewardItem]]:
    texts = [SUM.format(program.format("*" if number % 2 else "+")) for number in range(answers)]
    items = [RewardItem(number, "bench", text, truth) for number, text in enumerate(texts)]
    return RewardConfig(functions={"code": {"reward": "code"}}), items


def gym_case(answers: int) -> tuple[RewardConfig, list[RewardItem]]:
    """Sums of reasoning-gym, scored by its own scorer."""
    items = []
    for number in range(answers):
        entry = json.dumps({"question": f"{number} + 1 =", "answer": str(number + 1), "metadata": {}})
        text = "nothing" if number % 2 else str(number + 1)
        items.append(RewardItem(number, "reasoning_gym/chain_sum", text, "", {"entry": entry, "full_marks_only": True}))
    return RewardConfig(), items


@contextmanager
def judge_case(answers: int) -> Iterator[tuple[RewardConfig, list[RewardItem]]]:
    """A judge whose server runs during the block."""
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True, cwd=os.getcwd())
    try:
        assert server.stdout is not None
        url = server.stdout.readline().strip().replace("/score", "/v1")
        kwargs = {"base_url": url, "model": "judge"}
        prompt = [{"role": "user", "content": "Is it?"}]
        texts = ["wrong" if number % 2 else "right" for number in range(answers)]
        items = [RewardItem(number, "bench", text, "", None, prompt) for number, text in enumerate(texts)]
        yield RewardConfig(functions={"judge": {"reward": "judge", "kwargs": kwargs}}), items
    finally:
        server.kill()
        server.wait()


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
