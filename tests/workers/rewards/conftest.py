"""Reward functions that do as the answer says, good and bad, and pools of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from verl_lite.config import CustomRewardConfig, RewardConfig
from verl_lite.rewards import RewardItem, RewardResult
from workers.rewards.reward_pool import RewardPool

SAMPLE = """
import ctypes, os, re, subprocess, sys, threading, time

MIB = 1 << 20

def child(path):
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], start_new_session=True)
    open(path, "w").write(str(process.pid))

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    what, _, argument = solution_str.partition("|")
    if what == "print":
        for _ in range(64): print("x" * MIB)
    if what == "print at once": print("x" * (64 * MIB))
    if what == "stdout":
        for _ in range(64): os.write(1, b"x" * MIB)
    if what == "stderr":
        for _ in range(64): os.write(2, b"x" * MIB)
        os.write(2, b"the end")
        os._exit(1)
    if what == "regex": re.match("(a+)+$", "a" * 60 + "b")
    if what == "sleep": time.sleep(float(argument))
    if what == "deaf":
        while True:
            try: time.sleep(1000)
            except BaseException: pass
    if what == "raise": raise KeyError("no such thing")
    if what == "interrupt": raise KeyboardInterrupt
    if what == "segfault": ctypes.string_at(0)
    if what == "input": input()
    if what == "close": os.closerange(3, 1 << 16)
    if what == "thread":
        threading.Thread(target=os._exit, args=(7,)).start()
        time.sleep(1000)
    if what == "fork": os.fork()
    if what == "leave": child(argument)
    if what == "terminate":
        process = subprocess.Popen(["sleep", "100"])
        process.terminate()
        return -process.wait(5)
    if what == "hang with child":
        child(argument)
        time.sleep(1000)
    return {"score": 1.0, "length": len(solution_str), "pid": os.getpid()}
"""
ASYNC = """
import asyncio, os, sys

running = most = 0

async def hang_in_a_task():
    await asyncio.gather(block(), asyncio.sleep(100))

async def block():
    await asyncio.sleep(0.05)
    while True: pass

async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    global running, most
    what, _, argument = solution_str.partition("|")
    running += 1
    most = max(most, running)
    try:
        await asyncio.sleep(0.02)
        if what == "hang": await asyncio.Event().wait()
        if what == "task": await hang_in_a_task()
        if what == "sys.exit": sys.exit(4)
        if what == "fork": os.fork()
        if what == "cancel": raise asyncio.CancelledError()
        if what == "sleep": await asyncio.sleep(float(argument))
        return {"score": 1.0, "pid": os.getpid(), "most": most}
    finally:
        running -= 1
"""
LISTS = """
import os, time

def compute_score(data_sources, solution_strs, ground_truths, extra_infos):
    if "hang" in solution_strs:
        while True: pass
    if "exit" in solution_strs: os._exit(3)
    if "raise" in solution_strs: raise KeyError("no such thing")
    if "short" in solution_strs: return [1.0]
    time.sleep(0.02)
    return [{"score": 1.0, "calls": len(solution_strs)} for text in solution_strs]
"""


class MakePool(Protocol):
    def __call__(self, code: str | None = SAMPLE, num_workers: int = 1, **options: Any) -> RewardPool: ...


@pytest.fixture
def make_pool(tmp_path: Path) -> Iterator[MakePool]:
    """Pools of the function in `code`, None = by data_source; what they print is in `tmp_path`/logs."""
    pools = []

    def make(code: str | None = SAMPLE, num_workers: int = 1, *, modules: Any = (), **options: Any) -> RewardPool:
        (tmp_path / "mine.py").write_text(code or "")
        path = None if code is None else str(tmp_path / "mine.py")
        custom = CustomRewardConfig(path=path, style="batch" if code == LISTS else "sample")
        config = RewardConfig(custom, **{"timeout_s": 60.0, **options})
        pools.append(RewardPool(config, num_workers, modules=modules, log_dir=str(tmp_path / "logs")))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def items(*answers: str, source: str = "any") -> list[RewardItem]:
    return [RewardItem(index, source, answer, "") for index, answer in enumerate(answers)]


def score(pool: RewardPool, *answers: str) -> list[RewardResult]:
    pool.submit(items(*answers))
    return list(pool.collect(range(len(answers))).values())


def failed(results: list[RewardResult]) -> list[int]:
    return [index for index, result in enumerate(results) if result.failed]
