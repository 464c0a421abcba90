"""What a reward function can do to the machine: flood it with output, fill its memory, leave processes behind."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import psutil
import pytest

from tests.workers.processes import gone
from tests.workers.rewards.conftest import MakePool, failed, items, score
from verl_lite.single_controller.ray_cluster import BATCH_SYSTEM_SIGNALS
from workers.pool import process

pytestmark = pytest.mark.slow


def test_a_flood_of_output_costs_neither_disk_nor_memory_nor_the_sample(
    make_pool: MakePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "PRINTED_BYTES_MAX", 1 << 20)
    before = psutil.Process().memory_info().rss
    results = score(make_pool(), "print", "print at once", "stdout", "fine", "stderr", "stderr", "stderr", "fine")
    assert failed(results) == [4, 5, 6]
    assert (results[4].error or "").endswith("xthe end") and len(results[4].error or "") < 5000
    text = (tmp_path / "logs" / "reward-0.log").read_text()
    assert len(text) < 5 << 20 and "dropped" in text and "exit code 1" in text
    assert psutil.Process().memory_info().rss - before < 50 << 20


@pytest.mark.parametrize(
    ("how", "where"), [("sleep|1000", "mine.py"), ("regex", "re/__init__.py"), ("deaf", "mine.py")]
)
def test_a_hang_of_any_kind_ends_at_the_deadline_and_says_where_it_was(
    make_pool: MakePool, how: str, where: str
) -> None:
    results = score(make_pool(timeout_s=1.0), "fine", how, "fine")
    assert [result.timed_out for result in results] == [False, True, False]
    assert where in (results[1].error or "") and "compute_score" in (results[1].error or "")


def test_only_the_culprit_of_a_death_fails(make_pool: MakePool) -> None:
    reasons = {
        3: ("interrupt", "KeyboardInterrupt"),
        6: ("input", "EOFError"),
        9: ("close", "exit code 1"),
        12: ("thread", "code 7"),
        15: ("segfault", "SIGSEGV(.*\n)+.*string_at(.*\n)+.*mine.py"),
    }
    answers = ["fine"] * 20
    for place, (how, _) in reasons.items():
        answers[place] = how
    results = score(make_pool(), *answers)
    assert failed(results) == [*reasons]
    for place, (how, reason) in reasons.items():
        assert re.search(reason, results[place].error or "") and not results[place].timed_out, how


def test_forks_harm_nobody(make_pool: MakePool) -> None:
    """The other one of a fork ends with its call, and never answers."""
    pool = make_pool()
    results = score(pool, *["fork", "fine"] * 5)
    assert failed(results) == [] and len({result.extra["pid"] for result in results}) == 1
    assert pool.processes_replaced() == 0
    left = psutil.Process(int(results[0].extra["pid"])).children()
    assert all(gone(child.pid) for child in left)


def test_a_process_that_is_killed_from_outside_costs_nobody_a_score(make_pool: MakePool) -> None:
    """kill -9 of a process that has just given a result, in the middle of its next ones."""
    pool = make_pool(num_workers=2)
    pool.submit(items(*["sleep|0.03"] * 100))
    for index in range(0, 60, 20):
        pid = int(pool.collect([index])[index].extra["pid"])
        if not gone(pid, 0.0):
            psutil.Process(pid).kill()
    results = pool.collect(set(range(100)) - {0, 20, 40}).values()
    assert failed(list(results)) == [] and pool.processes_replaced() >= 2


def test_what_a_reward_left_running_ends_with_its_process(make_pool: MakePool, tmp_path: Path) -> None:
    results = score(make_pool(timeout_s=1.0), f"leave|{tmp_path / 'left'}", f"hang with child|{tmp_path / 'hung'}")
    assert failed(results) == [1] and results[1].timed_out
    assert all(gone(int((tmp_path / name).read_text())) for name in ("left", "hung"))


def test_a_reward_can_end_what_it_starts_also_where_ray_hears_no_signals(make_pool: MakePool) -> None:
    """Ray's processes, one of which holds the pool, are started with SIGTERM blocked, and that is inherited."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, BATCH_SYSTEM_SIGNALS)
    try:
        [result] = score(make_pool(), "terminate")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert result.score == signal.SIGTERM, result.error


def test_a_limit_of_memory_in_the_rewards_own_file_fails_the_sample_that_asks_for_more(make_pool: MakePool) -> None:
    code = "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
    code += "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
    code += "    return len(solution_str * 2_000_000_000)\n"
    results = score(make_pool(code), "", "x", "")
    assert failed(results) == [1], results[0].error
    assert "MemoryError" in (results[1].error or "")


def test_a_process_that_ends_by_itself_leaves_nothing_open(make_pool: MakePool) -> None:
    """Replaced processes: no growth of open files or threads in the pool's process."""
    pool = make_pool()
    score(pool, "close", "fine")
    files, threads = len(os.listdir("/proc/self/fd")), psutil.Process().num_threads()
    score(pool, *["close"] * 3, "fine")
    assert len(os.listdir("/proc/self/fd")) < files + 3 and psutil.Process().num_threads() < threads + 2
    assert pool.processes_replaced() == 4
