"""What a reward function can do to the machine: flood it with output, fill its memory, leave processes behind."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.workers.rewards.test_pool import gone
from verl_lite.config import CustomRewardConfig, RewardConfig
from verl_lite.rewards import RewardItem, RewardResult
from workers.pool import process
from workers.rewards.pool import RewardError, RewardPool

pytestmark = pytest.mark.slow

CUSTOM = """
import ctypes, os, re, subprocess, sys, threading, time

held = []
MIB = 1 << 20

def rss():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE") / MIB

def child(argument, **options):
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], **options)
    open(argument, "w").write(str(process.pid))

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    what, _, argument = solution_str.partition(" ")
    if what == "print":
        for _ in range(1024): print("x" * MIB)
    if what == "print and exit":
        for _ in range(10): print("y" * 700)
        os._exit(1)
    if what == "print at once": print("x" * (1 << 30))
    if what == "stdout":
        for _ in range(1024): os.write(1, b"x" * MIB)
    if what == "stderr":
        for _ in range(1024): os.write(2, b"x" * MIB)
        os.write(2, b"the end")
        os._exit(1)
    if what == "regex": re.match("(a+)+$", "a" * 60 + "b")
    if what == "sleep": time.sleep(1000)
    if what == "deaf":
        while True:
            try: time.sleep(1000)
            except BaseException: pass
    if what == "interrupt": raise KeyboardInterrupt
    if what == "segfault": ctypes.string_at(0)
    if what == "input": input()
    if what == "close": os.closerange(3, 1000)
    if what == "thread":
        threading.Thread(target=os._exit, args=(7,)).start()
        time.sleep(1000)
    if what == "slow": time.sleep(0.03)
    if what == "leave far": child(argument, start_new_session=True)
    if what == "hang with child":
        child(argument, start_new_session=True)
        time.sleep(1000)
    if what == "leak": held.append(b"x" * (20 * MIB))
    if what == "swell":
        for _ in range(200):
            held.append(b"x" * (20 * MIB))
            time.sleep(0.05)
    return {"score": 1.0, "rss": rss(), "pid": os.getpid()}
"""


@pytest.fixture
def make_pool(tmp_path: Path) -> Iterator[Callable[..., RewardPool]]:
    file = tmp_path / "custom.py"
    file.write_text(CUSTOM.replace('partition(" ")', 'partition("|")'))
    pools = []

    def make(num_workers: int = 1, timeout_s: float = 60.0, **options: Any) -> RewardPool:
        config = RewardConfig(CustomRewardConfig(path=str(file)), timeout_s=timeout_s, **options)
        pools.append(RewardPool(config, num_workers, log_dir=str(tmp_path / "logs")))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def score(pool: RewardPool, *answers: str) -> list[RewardResult]:
    pool.submit([RewardItem(index, "any", answer, "") for index, answer in enumerate(answers)])
    return list(pool.collect(range(len(answers))).values())


# ------------------------------------------------------------------------------------------------------------- output


def test_a_gigabyte_of_output_costs_neither_disk_nor_the_sample(make_pool: Callable, tmp_path: Path) -> None:
    before = psutil.Process().memory_info().rss
    results = score(make_pool(), "print", "print at once", "stdout", "fine")
    assert [result.score for result in results] == [1.0] * 4
    assert (tmp_path / "logs" / "reward-0.log").stat().st_size < 12 << 20
    assert psutil.Process().memory_info().rss - before < 200 << 20


def test_a_gigabyte_of_stderr_below_python_goes_through_a_pipe_of_which_the_end_is_kept(make_pool: Callable) -> None:
    before = psutil.Process().memory_info().rss
    [result] = score(make_pool(), "stderr")
    assert result.failed and (result.error or "").endswith("xthe end") and len(result.error or "") < 5000
    assert psutil.Process().memory_info().rss - before < 200 << 20


def test_processes_that_replace_one_another_do_not_fill_the_disk_either(
    make_pool: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "PRINTED_BYTES_MAX", 1000)
    score(make_pool(), *["print and exit"] * 5, "fine")
    text = (tmp_path / "logs" / "reward-0.log").read_text()
    assert len(text) < 3000 and "dropped" in text and "exit code 1" in text


# ------------------------------------------------------------------------------------------------------------ hanging


@pytest.mark.parametrize(("how", "where"), [("sleep", "custom.py"), ("regex", "re/__init__.py"), ("deaf", "custom.py")])
def test_a_hang_of_any_kind_ends_at_the_deadline_and_says_where_it_was(
    make_pool: Callable, how: str, where: str
) -> None:
    results = score(make_pool(timeout_s=1.0), "fine", how, "fine")
    assert [result.timed_out for result in results] == [False, True, False]
    assert where in (results[1].error or "") and "compute_score" in (results[1].error or "")


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("interrupt", "KeyboardInterrupt"),
        ("input", "EOFError"),
        ("close", "exit code 1"),
        ("thread", "code 7"),
        ("segfault", "SIGSEGV(.*\n)+.*custom.py"),
    ],
)
def test_only_the_culprit_of_a_death_fails(make_pool: Callable, how: str, reason: str) -> None:
    answers = ["fine"] * 20
    answers[5] = answers[12] = how
    results = score(make_pool(), *answers)
    assert [index for index, result in enumerate(results) if result.failed] == [5, 12]
    assert re.search(reason, results[5].error or "") and not results[5].timed_out


def test_a_process_that_is_killed_from_outside_costs_nobody_a_score(make_pool: Callable) -> None:
    """kill -9 of a process that has just given a result, in the middle of its next ones."""
    pool = make_pool(num_workers=2)
    pool.submit([RewardItem(index, "any", "slow", "") for index in range(200)])
    for index in range(0, 120, 40):
        pid = int(pool.collect([index])[index].extra["pid"])
        if not gone(pid, 0.0):
            psutil.Process(pid).kill()
    results = pool.collect(set(range(200)) - {0, 40, 80}).values()
    assert not any(result.failed for result in results) and pool.processes_replaced() >= 2


def test_what_a_reward_left_running_ends_with_its_process(make_pool: Callable, tmp_path: Path) -> None:
    pool = make_pool(timeout_s=1.0)
    left, hung = score(pool, f"leave far|{tmp_path / 'left'}", f"hang with child|{tmp_path / 'hung'}")
    assert not left.failed and hung.timed_out
    assert all(gone(int((tmp_path / name).read_text())) for name in ("left", "hung"))


def test_a_process_that_reads_nothing_does_not_hold_up_the_pool(make_pool: Callable) -> None:
    """Samples much larger than a socket's buffer, for a process that hangs in the first of them."""
    pool = make_pool(num_workers=2, timeout_s=1.5)
    large = "x" * (1 << 20)
    results = score(pool, "sleep", *[f"fine|{large}"] * 40)
    assert [index for index, result in enumerate(results) if result.failed] == [0] and results[0].timed_out


# ------------------------------------------------------------------------------------------------------------- memory


def test_a_leak_is_a_new_process_now_and_then_and_no_lost_sample(make_pool: Callable, tmp_path: Path) -> None:
    pool = make_pool(max_memory_mb=200)
    results = score(pool, *["leak"] * 30)
    assert not any(result.failed for result in results)
    assert max(result.extra["rss"] for result in results) < 200 + 20 + 10, "looked at after each sample"
    assert pool.processes_replaced() >= 2
    assert len({result.extra["pid"] for result in results}) >= 3
    assert "held 2" in (tmp_path / "logs" / "reward-0.log").read_text()


def test_a_call_that_swells_without_end_is_killed_and_fails(make_pool: Callable) -> None:
    results = score(make_pool(max_memory_mb=200), "fine", "swell", "fine")
    assert [result.failed for result in results] == [False, True, False]
    error = results[1].error or ""
    assert "more than 2 times reward.max_memory_mb=200" in error and not results[1].timed_out


def test_a_limit_below_what_the_process_needs_anyway_is_an_error(make_pool: Callable) -> None:
    pool = make_pool(max_memory_mb=1)
    with pytest.raises(RewardError, match=r"held \d+ MiB before its first call, more than reward.max_memory_mb=1"):
        score(pool, "fine")


def test_a_process_that_ends_by_itself_leaves_nothing_open(make_pool: Callable) -> None:
    """Eight replaced processes: no growth of open files or threads in the pool's process."""
    pool = make_pool()
    score(pool, "close", "fine")
    files, threads = len(os.listdir("/proc/self/fd")), psutil.Process().num_threads()
    score(pool, *["close"] * 8, "fine")
    assert len(os.listdir("/proc/self/fd")) < files + 5 and psutil.Process().num_threads() < threads + 4
    assert pool.processes_replaced() == 9
