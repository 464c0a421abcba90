"""The reward pool against reward functions that do the worst: hang, die, fork, print without end, return nonsense."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from verl_lite.config import CustomRewardConfig, RewardConfig
from verl_lite.rewards import RewardItem
from workers.rewards.pool import RewardError, RewardPool

CUSTOM = """
import os, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    what, _, argument = solution_str.partition(" ")
    if what == "hang":
        while True: pass
    if what == "sleep": time.sleep(float(argument))
    if what == "raise": raise KeyError("no such thing")
    if what == "pid": return os.getpid()
    return {"score": 1.0, "length": len(solution_str)}
"""


@pytest.fixture
def make_pool(tmp_path: Path) -> Iterator[Callable[..., RewardPool]]:
    file = tmp_path / "custom.py"
    file.write_text(CUSTOM)
    pools = []

    def make(num_workers: int = 1, timeout_s: float = 1.0, path: str | None = str(file), **more: Any) -> RewardPool:
        config = RewardConfig(custom_reward_function=CustomRewardConfig(path=path), timeout_s=timeout_s)
        pools.append(RewardPool(config, num_workers, **more))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def items(*answers: str, source: str = "any", truth: Any = "") -> list[RewardItem]:
    return [RewardItem(index, source, answer, truth) for index, answer in enumerate(answers)]


def gone(pid: int, within_s: float = 5.0) -> bool:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        stat = Path(f"/proc/{pid}/stat")
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_results_come_by_key_and_in_the_order_asked(make_pool: Callable, num_workers: int) -> None:
    pool = make_pool(num_workers)
    pool.start()
    pool.submit(items("a", "bb", "ccc"))
    pool.submit([RewardItem(("other", 1), "any", "dddd", "")])
    results = pool.collect([("other", 1), 2, 0, 1])
    assert list(results) == [("other", 1), 2, 0, 1]
    assert [result.extra["length"] for result in results.values()] == [4, 3, 1, 2]
    assert all(result.score == 1.0 and not result.failed and result.error is None for result in results.values())


def test_a_hanging_sample_does_not_hold_up_those_in_other_processes(make_pool: Callable) -> None:
    pool = make_pool(2, timeout_s=100.0)
    pool.submit(items("hang", *["fine"] * 100))
    assert len(pool.collect(range(1, 101))) == 100


def test_a_key_in_flight_is_refused_and_free_again_after_collection(make_pool: Callable) -> None:
    pool = make_pool(1)
    pool.submit(items("a"))
    with pytest.raises(ValueError, match="already submitted"):
        pool.submit(items("a"))
    pool.collect([0])
    pool.submit(items("b"))
    assert pool.collect([0])[0].score == 1.0


@pytest.mark.parametrize(
    ("code", "reason"),
    [("1 / 0", "ZeroDivisionError"), ("import os; os._exit(5)", "exit code 5"), ("x = 1", "found: nothing")],
)
def test_a_reward_file_that_does_not_load_ends_the_wait(
    make_pool: Callable, tmp_path: Path, code: str, reason: str
) -> None:
    (tmp_path / "broken.py").write_text(code)
    pool = make_pool(1, path=str(tmp_path / "broken.py"))
    pool.submit(items("a"))
    with pytest.raises(RewardError, match=reason):
        pool.collect([0])
    with pytest.raises(RewardError, match=reason):
        pool.submit([RewardItem("later", "any", "a", "")])


def row(source: str, truth: Any) -> dict[str, Any]:
    return {"data_source": source, "reward_model": {"ground_truth": truth}, "extra_info": {"index": 7}}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_dry_run_scores_rows_or_stops_with_traceback_and_row(make_pool: Callable, num_workers: int) -> None:
    good = make_pool(num_workers, path=None).dry_run([row("verl_lite/sort", "12"), row("openai/gsm8k", "3")])
    assert [result.failed for result in good] == [False, False] and good[0].score == 1.0
    with pytest.raises(RewardError) as caught:
        make_pool(num_workers).dry_run([row("mine", "fine"), row("mine", "raise")])
    assert "no such thing" in str(caught.value) and '"index": 7' in str(caught.value)


def test_rewards_registered_by_a_module_are_known_in_the_processes(
    make_pool: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_rewards.py").write_text(
        "from verl_lite.rewards import register_reward\n"
        "@register_reward('mine/*')\ndef score(solution_str, **rest): return len(solution_str)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    pool = make_pool(1, path=None, modules=["my_rewards"])
    pool.submit(items("four", source="mine/x"))
    assert pool.collect([0])[0].score == 4.0


def test_close_ends_busy_processes_and_those_who_wait(make_pool: Callable) -> None:
    pool = make_pool(1, timeout_s=100.0)
    pool.submit(items("pid"))
    pid = int(pool.collect([0])[0].score)
    pool.submit(items("hang"))
    threading.Timer(0.2, pool.close).start()
    with pytest.raises(RewardError, match="closed"):
        pool.collect([0])
    assert gone(pid)


def test_an_idle_pool_uses_no_processor_time(make_pool: Callable) -> None:
    pool = make_pool(2, timeout_s=5.0)
    pool.submit(items("sleep 0.0", "sleep 1.0"))
    pool.collect([0])
    before = time.process_time()
    pool.collect([1])
    time.sleep(0.3)
    assert time.process_time() - before < 0.1
