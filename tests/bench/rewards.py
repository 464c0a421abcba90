"""What the reward processes cost: a cheap reward function called in this process, against the pool, in one run.

1,000 answers to a function that compares two strings; queued at once, or in groups of 8 as they finish in a rollout.
Rounds of all ways take turns; printed is the best of each in microseconds a reward, and the ratio to the plain call.
Options: --rounds N.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from verl_lite.config import RewardConfig
from verl_lite.rewards import RewardItem, load_scorer
from verl_lite.rewards.scorers import PlainScorer
from workers.reward_pool import RewardPool

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
    rounds = parser.parse_args(argv).rounds
    config = RewardConfig()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "reward.py"
        path.write_text(FUNCTION)
        config.custom_reward_function.path = str(path)
        config.custom_reward_function.name = "compute_score"
        scorer = load_scorer(config)
        assert isinstance(scorer, PlainScorer)
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
    return 0
