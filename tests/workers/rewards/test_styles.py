"""Async, batched and remote rewards in supervised processes: concurrency, limits, what a failure costs the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.reward_server import Answer, reward_server
from verl_lite.config import CustomRewardConfig, RemoteRewardConfig, RewardConfig
from verl_lite.rewards import RewardItem, RewardResult
from workers.rewards import pool as reward_pool
from workers.rewards.pool import RateLimit, RewardPool

ASYNC = """
import asyncio, ctypes, os, sys, time

running = most = 0
crowd = asyncio.Event()

async def hang_in_a_task():
    await asyncio.gather(block(), asyncio.sleep(100))

async def block():
    await asyncio.sleep(0.05)
    while True: pass

async def stubborn():
    while True:
        try: await asyncio.sleep(100)
        except BaseException: pass

async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    global running, most
    what, _, argument = solution_str.partition(" ")
    running += 1
    most = max(most, running)
    try:
        if what == "crowd":
            if running == int(argument): crowd.set()
            await crowd.wait()
        await asyncio.sleep(0.02)
        if what == "hang": await asyncio.Event().wait()
        if what == "block": await block()
        if what == "task": await hang_in_a_task()
        if what == "stubborn": await stubborn()
        if what == "segfault": ctypes.string_at(0)
        if what == "exit": os._exit(3)
        if what == "sys.exit": sys.exit(4)
        if what == "fork": os.fork()
        if what == "raise": raise KeyError("no such thing")
        if what == "none": return None
        if what == "cancel": raise asyncio.CancelledError()
        if what == "sleep": await asyncio.sleep(float(argument))
        return {"score": 1.0, "pid": os.getpid(), "most": most}
    finally:
        running -= 1
"""

LISTS = """
import ctypes, os, time

def compute_score(data_sources, solution_strs, ground_truths, extra_infos):
    if "hang" in solution_strs:
        while True: pass
    if "segfault" in solution_strs: ctypes.string_at(0)
    if "exit" in solution_strs: os._exit(3)
    if "raise" in solution_strs: raise KeyError("no such thing")
    if "short" in solution_strs: return [1.0]
    time.sleep(0.02)
    return [None if text == "none" else {"score": 1.0, "calls": len(solution_strs)} for text in solution_strs]
"""


@pytest.fixture
def make_pool(tmp_path: Path) -> Iterator[Callable[..., RewardPool]]:
    pools = []

    def make(code: str = ASYNC, num_workers: int = 1, timeout_s: float = 20.0, **options: Any) -> RewardPool:
        (tmp_path / "mine.py").write_text(code)
        style = "batch" if code == LISTS else "sample"
        custom = CustomRewardConfig(path=str(tmp_path / "mine.py"), style=style)
        config = RewardConfig(custom_reward_function=custom, timeout_s=timeout_s, **options)
        pools.append(RewardPool(config, num_workers))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def score(pool: RewardPool, *answers: str) -> list[RewardResult]:
    pool.submit([RewardItem(index, "any", answer, "") for index, answer in enumerate(answers)])
    return list(pool.collect(range(len(answers))).values())


def failed(results: list[RewardResult]) -> list[int]:
    return [index for index, result in enumerate(results) if result.failed]


# ------------------------------------------------------------------------------------------------------------- async


def test_no_more_than_max_concurrent_are_under_way(make_pool: Callable) -> None:
    results = score(make_pool(max_concurrent=5), *["sleep 0.05"] * 40)
    assert max(result.extra["most"] for result in results) == 5


def test_a_hanging_call_is_cancelled_and_nobody_is_killed(make_pool: Callable) -> None:
    pool = make_pool(timeout_s=1.5)
    results = score(pool, "fine", *["hang"] * 5, *["fine"] * 20)
    assert failed(results) == [1, 2, 3, 4, 5]
    assert all(result.timed_out and "was cancelled" in (result.error or "") for result in results[1:6])
    assert len({result.extra["pid"] for result in results if not result.failed}) == 1
    assert score(pool, "fine")[0].extra["pid"] == results[0].extra["pid"] and pool.processes_replaced() == 0


@pytest.mark.parametrize("how", ["block", "task"])
def test_a_call_that_blocks_the_loop_is_killed_and_the_others_are_scored(make_pool: Callable, how: str) -> None:
    pool = make_pool(timeout_s=2.0)
    results = score(pool, *["fine"] * 3, how, *["sleep 0.3"] * 10)
    assert failed(results) == [3] and results[3].timed_out
    error = results[3].error or ""
    assert "its process was replaced" in error and "in block" in error, "the stack says where it hung"


def test_a_call_that_ignores_its_cancellation_costs_no_other_sample(make_pool: Callable) -> None:
    pool = make_pool(timeout_s=1.5)
    results = score(pool, "stubborn", *["sleep 0.2"] * 10)
    assert failed(results) == [0] and results[0].timed_out
    assert failed(score(pool, "fine")) == []


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("sys.exit", "SystemExit: 4"),
        ("cancel", "CancelledError"),
    ],
)
def test_only_the_culprit_fails(make_pool: Callable, what: str, reason: str) -> None:
    answers = ["fine"] * 30
    answers[7] = answers[21] = what
    results = score(make_pool(), *answers)
    assert failed(results) == [7, 21]
    assert reason in (results[7].error or "") and not results[7].timed_out


# ----------------------------------------------------------------------------------------------------------- batched


def test_lists_are_no_longer_than_asked_and_longer_than_one(make_pool: Callable) -> None:
    pool = make_pool(LISTS, batch_size=8)
    lengths = [result.extra["calls"] for result in score(pool, *["fine"] * 50)]
    assert max(lengths) == 8 and sum(1 / length for length in lengths) == pytest.approx(7)


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        pytest.param("hang", "reward.timeout_s=1 seconds", marks=pytest.mark.slow),
        ("segfault", "SIGSEGV"),
        ("exit", "exit code 3"),
        ("raise", "no such thing"),
        ("none", "expected a finite number"),
    ],
)
def test_only_the_culprit_of_a_list_fails(make_pool: Callable, what: str, reason: str) -> None:
    answers = ["fine"] * 30
    answers[7] = answers[21] = what
    results = score(make_pool(LISTS, batch_size=10, timeout_s=1.0), *answers)
    assert failed(results) == [7, 21]
    assert reason in (results[7].error or "") and results[7].timed_out == (what == "hang")


def test_a_wrong_number_of_results_costs_nobody_his_score_who_is_scored_alone(make_pool: Callable) -> None:
    pool = make_pool(LISTS, batch_size=10)
    results = score(pool, *["fine"] * 5, "short", *["fine"] * 4)
    assert failed(results) == [] and {result.extra["calls"] for result in results if result.extra} == {1}
    assert pool.processes_replaced() == 0


# ------------------------------------------------------------------------------------------------------------ remote


def remote_pool(url: str, num_workers: int = 1, **options: Any) -> RewardPool:
    remote = RemoteRewardConfig(url=url, max_retries=options.pop("max_retries", 3))
    return RewardPool(RewardConfig(remote=remote, **options), num_workers)


def test_a_server_scores_from_several_processes_within_the_limit() -> None:
    with reward_server(lambda number, sample: Answer(len(sample["solution_str"]), after_s=0.05)) as server:
        pool = remote_pool(server.url, num_workers=2, max_concurrent=4)
        try:
            assert [result.score for result in score(pool, *["a", "bb", "ccc"] * 10)] == [1, 2, 3] * 10
            assert 2 <= server.most_at_once <= 4
        finally:
            pool.close()


def test_requests_keep_to_the_rate_and_waiting_for_it_is_not_counted_as_time() -> None:
    with reward_server(lambda number, sample: Answer()) as server:
        pool = remote_pool(server.url, num_workers=2, max_rpm=300, timeout_s=1.0)
        started = time.monotonic()
        try:
            assert failed(score(pool, *["x"] * 15)) == []
        finally:
            pool.close()
    assert server.times[-1] - started > 13 * 0.2, "fifteen requests at five a second"


def test_the_rate_limit_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(reward_pool.time, "monotonic", lambda: now[0])
    limit = RateLimit(60.0)
    begun = []
    for _ in range(3000):  # asked every 0.1 s for five minutes, by somebody who always has work
        while limit.take():
            begun.append(now[0])
        now[0] += 0.1
    assert 299 <= len(begun) <= 301
    assert all(sum(start <= time < start + 60 for time in begun) <= 61 for start in begun)
    now[0] += 3600  # an idle hour is not saved up
    assert limit.take() and not limit.take() and RateLimit(None).take()


def test_a_key_never_reaches_files_or_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "very-secret")
    with reward_server(lambda number, sample: Answer("no", 400)) as server:
        remote = RemoteRewardConfig(url=server.url, api_key_env="JUDGE_KEY")
        pool = RewardPool(RewardConfig(remote=remote), 1)
        try:
            [result] = score(pool, "x")
        finally:
            pool.close()
    assert server.headers[0]["authorization"] == "Bearer very-secret"
    assert result.failed and "very-secret" not in (result.error or "")
