"""What rewards cost: the processes that they run in, and each kind of reward, against a plain call in one run.

First, a function that compares two strings, called for 1,000 answers in this process and through the pool, queued at
once or in groups of 8 as they finish in a rollout; rounds of all ways take turns, printed is the best of each. Then
every kind of reward, each called in this process (the judge for 64 answers at a time): processor time and time by the
clock for 1,000 rewards, where the processes of the sandbox count and the judge's server does not, and the ratio of the
processor time to a plain call. Options: --rounds N, --answers N of the kinds that wait.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.bench.reward_kinds import rule_cases
from tests.bench.reward_waits import code_cases, cost, gym_case, judge_case
from verl_lite.config import RewardConfig
from verl_lite.rewards import RewardItem, load_scorer
from verl_lite.rewards.scoring import SampleScorer
from workers.rewards.pool import RewardPool

REWARDS = 1000
FUNCTION = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str.strip() == ground_truth)
"""


def answers(name: object) -> list[RewardItem]:
    """Answers of about 100 characters, with keys of their own."""
    texts = (f"The answer is {number}. ".ljust(100, ".") for number in range(REWARDS))
    return [RewardItem((name, number), "sums", text, "12", {"index": number}) for number, text in enumerate(texts)]


def by_pool(pool: RewardPool, group: int) -> Callable[[list[RewardItem]], None]:
    """Sends answers in groups and waits for all."""

    def run(items: list[RewardItem]) -> None:
        for start in range(0, len(items), group):
            pool.submit(items[start : start + group])
        pool.collect(item.key for item in items)

    return run


def main(argv: list[str]) -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench rewards", description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--answers", type=int, default=200)
    options = parser.parse_args(argv)
    config = RewardConfig()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "reward.py"
        path.write_text(FUNCTION)
        config.custom_reward_function.path = str(path)
        config.custom_reward_function.name = "compute_score"
        _measure_pool(config, options.rounds)
        namespace: dict[str, Any] = {}
        exec(FUNCTION, namespace)
        _measure_kinds(namespace["compute_score"], options.rounds, options.answers)
    return 0


def _measure_pool(config: RewardConfig, rounds: int) -> None:
    scorer = load_scorer(config)
    assert isinstance(scorer, SampleScorer)
    pools = [RewardPool(config, processes) for processes in (1, 2)]
    ways: dict[str, Callable[[list[RewardItem]], object]] = {"called in this process": scorer.score_all}
    for processes, pool in enumerate(pools, start=1):
        for group in (REWARDS, 8):
            ways[f"{processes} processes, groups of {group}"] = by_pool(pool, group)
    best = dict.fromkeys(ways, float("inf"))
    for number in range(rounds + 1):  # the first round starts the processes
        for name, way in ways.items():
            items = answers((name, number))
            started = time.perf_counter()
            way(items)
            if number:
                best[name] = min(best[name], time.perf_counter() - started)
    for pool in pools:
        pool.close()
    plain = best["called in this process"]
    for name, seconds in best.items():
        print(f"{name:32s} {seconds / REWARDS * 1e6:7.1f} us a reward   ratio {seconds / plain:.2f}")


def _measure_kinds(compare: Callable[..., float], rounds: int, waiting: int) -> None:
    cases = [(case.name, case.config, case.items, case.right) for case in rule_cases()]
    cases.append(("reasoning_gym", *gym_case(REWARDS), REWARDS // 2))
    cases += [(name, *case, waiting // 2) for name, case in code_cases(waiting).items()]
    plain = _plain_call(compare, rounds)
    print(f"\n{'ms for 1,000 rewards':32s} {'cpu':>10s} {'wall':>10s} {'ratio of cpu':>13s}")
    print(f"{'a plain call':32s} {plain * 1e6:10.2f} {plain * 1e6:10.2f} {1:13.0f}")
    with judge_case(waiting) as judge:
        for name, config, items, right in (*cases, ("judge", *judge, waiting // 2)):
            found = cost(load_scorer(config), items, right)
            print(f"{name:32s} {found.cpu_s * 1e6:10.1f} {found.wall_s * 1e6:10.1f} {found.cpu_s / plain:13.0f}")


def _plain_call(compare: Callable[..., float], rounds: int) -> float:
    """Processor seconds of one call, without a scorer; the best of the rounds."""
    items, best = answers("plain"), float("inf")
    for _ in range(rounds):
        started = time.process_time()
        for item in items:
            compare(item.data_source, item.solution_str, item.ground_truth)
        best = min(best, time.process_time() - started)
    return best / len(items)
