"""The reward pool: results by key from sync, async, batched and remote rewards; what a failure costs the others."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.reward_server import Answer, reward_server
from tests.workers.processes import gone
from tests.workers.rewards.conftest import ASYNC, LISTS, MakePool, failed, items, score
from verl_lite.config import RemoteRewardConfig
from verl_lite.rewards import RewardItem
from workers.pool import process_pool
from workers.rewards import reward_pool
from workers.rewards.reward_pool import RateLimit, RewardError


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_results_come_by_key_and_in_the_order_asked(make_pool: MakePool, num_workers: int) -> None:
    pool = make_pool(num_workers=num_workers)
    pool.submit(items("a", "bb", "ccc"))
    pool.submit([RewardItem(("other", 1), "any", "dddd", "")])
    with pytest.raises(ValueError, match="already submitted"):
        pool.submit(items("a"))
    results = pool.collect([("other", 1), 2, 0, 1])
    assert list(results) == [("other", 1), 2, 0, 1]
    assert [result.extra["length"] for result in results.values()] == [4, 3, 1, 2]
    assert all(result.score == 1.0 and not result.failed and result.error is None for result in results.values())
    assert score(pool, "b")[0].score == 1.0, "the key is free again"


def test_a_log_that_is_deleted_is_begun_anew(make_pool: MakePool, tmp_path: Path) -> None:
    code = "def compute_score(solution_str, **given): print(solution_str); return 1.0"
    pool, log = make_pool(code), tmp_path / "logs"
    for answer in ("first", "second"):
        assert failed(score(pool, answer)) == []
        deadline = time.monotonic() + 60
        while not any(answer in path.read_text() for path in log.glob("reward-*.log")):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        shutil.rmtree(log)


def test_a_temporary_folder_that_is_removed_is_created_again(
    make_pool: MakePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Machines remove old entries of /tmp under a run of many days."""
    base = tmp_path / "of the run" / "tmp"
    base.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(base))
    code = "import os\ndef compute_score(solution_str, **given):\n"
    code += "    if solution_str == 'exit': os._exit(1)\n    return 1.0"
    pool = make_pool(code)
    assert failed(score(pool, "fine")) == []
    shutil.rmtree(base.parent)
    assert failed(score(pool, "exit", "fine")) == [0]
    assert failed(score(pool, "fine")) == []


def test_a_log_that_cannot_be_written_costs_no_score(make_pool: MakePool, tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("no folder")
    code = "def compute_score(solution_str, **given): print('x' * 100_000); return 1.0"
    assert failed(score(make_pool(code), "a", "b")) == []


def test_a_machine_without_processes_left_is_named(make_pool: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more(*given: object, **options: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(process_pool, "Process", no_more)
    with pytest.raises(RewardError, match="on this machine: .*Resource temporarily unavailable"):
        score(make_pool(), "a")


def test_a_hanging_sample_does_not_hold_up_those_in_other_processes(make_pool: MakePool) -> None:
    pool, large = make_pool(num_workers=2, timeout_s=100.0), "x" * (1 << 20)
    pool.submit(items("sleep|1000", *[large] * 20))
    assert len(pool.collect(range(1, 21))) == 20


@pytest.mark.parametrize(
    ("code", "reason"),
    [("1 / 0", "ZeroDivisionError"), ("import os; os._exit(5)", "exit code 5"), ("x = 1", "it defines: no function")],
)
def test_a_reward_file_that_does_not_load_ends_the_wait(make_pool: MakePool, code: str, reason: str) -> None:
    pool = make_pool(code)
    with pytest.raises(RewardError, match=reason) as caught:
        score(pool, "a")
    with pytest.raises(RewardError, match=reason):
        score(pool, "a")
    message = str(caught.value)
    assert "  File " not in message, "the place in the user's file is named in one line"
    assert ("mine.py, line 1: `1 / 0`" in message) == (reason == "ZeroDivisionError")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_dry_run_scores_rows_or_stops_with_traceback_and_row(make_pool: MakePool, num_workers: int) -> None:
    def row(source: str, truth: Any) -> dict[str, Any]:
        return {"data_source": source, "reward_model": {"ground_truth": truth}, "extra_info": {"index": 7}}

    by_source = make_pool(None, num_workers)
    by_source.dry_run([row("verl_lite/sort", "12"), row("openai/gsm8k", "3")])
    with pytest.raises(RewardError) as caught:
        make_pool(num_workers=num_workers).dry_run([row("mine", "fine"), row("mine", "raise")])
    assert "no such thing" in str(caught.value) and "scoring.py" not in str(caught.value)
    assert '"index": 7' in str(caught.value)


def test_rewards_registered_by_a_module_are_known_in_the_processes(
    make_pool: MakePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_rewards.py").write_text(
        "from verl_lite.rewards import register_reward\n"
        "@register_reward('mine/*')\ndef score(solution_str, **rest): return len(solution_str)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    pool = make_pool(None, modules=["my_rewards"])
    pool.submit(items("four", source="mine/x"))
    assert pool.collect([0])[0].score == 4.0


def test_close_ends_busy_processes_and_those_who_wait(make_pool: MakePool) -> None:
    pool = make_pool(timeout_s=100.0)
    pid = int(score(pool, "fine")[0].extra["pid"])
    threading.Timer(0.2, pool.close).start()
    with pytest.raises(RewardError, match="closed"):
        score(pool, "sleep|1000")
    assert gone(pid)


def test_an_idle_pool_uses_no_processor_time(make_pool: MakePool) -> None:
    pool = make_pool(num_workers=2, timeout_s=5.0)
    pool.submit(items("fine", "sleep|1.0"))
    pool.collect([0])
    before = time.process_time()
    pool.collect([1])
    time.sleep(0.3)
    assert time.process_time() - before < 0.1


# ------------------------------------------------------------------------------------------------------------- async


def test_no_more_than_max_concurrent_are_under_way(make_pool: MakePool) -> None:
    results = score(make_pool(ASYNC, max_concurrent=5), *["sleep|0.05"] * 40)
    assert max(result.extra["most"] for result in results) == 5


@pytest.mark.parametrize("num_workers", [0, 1])
def test_cancelled_samples_cost_nothing_and_their_keys_are_free(make_pool: MakePool, num_workers: int) -> None:
    """An abort that waits for a slow judge would hang here: one sample is being scored, the others are queued."""
    pool = make_pool(num_workers=num_workers, timeout_s=100.0)
    slow = "sleep|1000" if num_workers else "fine"
    score(pool, "fine")
    pool.submit(items(slow, *[slow] * 20))
    pool.cancel(range(21))
    assert pool.ready(range(21)) == set()
    if num_workers:
        return  # the process is busy until its deadline
    pool.submit(items("fine"))
    assert len(pool.collect([0])) == 1


def test_a_queued_sample_that_is_cancelled_is_not_scored(make_pool: MakePool, tmp_path: Path) -> None:
    pool = make_pool(timeout_s=100.0)
    pool.submit(items("sleep|0.5", f"leave|{tmp_path / 'scored'}", "fine"))
    pool.cancel([0, 1])
    assert not pool.collect([2])[2].failed and not (tmp_path / "scored").exists()
    pool.submit([replace(items("fine")[0], key=1)])  # the key is free again
    assert not pool.collect([1])[1].failed and pool.ready([0]) == set()


def test_a_hanging_call_is_cancelled_and_nobody_is_killed(make_pool: MakePool) -> None:
    pool = make_pool(ASYNC, timeout_s=1.5)
    results = score(pool, "fine", *["hang"] * 5, *["fine"] * 20)
    assert failed(results) == [1, 2, 3, 4, 5]
    assert all(result.timed_out and "was cancelled" in (result.error or "") for result in results[1:6])
    assert score(pool, "fine")[0].extra["pid"] == results[0].extra["pid"] and pool.processes_replaced() == 0


@pytest.mark.slow
def test_a_call_that_blocks_the_loop_is_killed_and_the_others_are_scored(make_pool: MakePool) -> None:
    results = score(make_pool(ASYNC, timeout_s=2.0), *["fine"] * 3, "task", *["sleep|0.3"] * 10)
    assert failed(results) == [3] and results[3].timed_out
    error = results[3].error or ""
    assert "its process was replaced" in error and "in block" in error, "the stack says where it hung"


def test_only_the_culprit_fails_and_forks_harm_nobody(make_pool: MakePool) -> None:
    answers = ["fine"] * 30
    answers[7], answers[14], answers[21] = "sys.exit", "fork", "cancel"
    results = score(make_pool(ASYNC), *answers)
    assert failed(results) == [7, 21]
    assert "SystemExit: 4" in (results[7].error or "") and "CancelledError" in (results[21].error or "")


# ----------------------------------------------------------------------------------------------------------- batched


def test_lists_are_no_longer_than_asked_and_longer_than_one(make_pool: MakePool) -> None:
    pool = make_pool(LISTS, batch_size=8)
    lengths = [result.extra["calls"] for result in score(pool, *["fine"] * 50)]
    assert max(lengths) == 8 and sum(1 / length for length in lengths) == pytest.approx(7)


def test_a_list_has_no_cancelled_samples(make_pool: MakePool) -> None:
    """Cancelled while the process starts, so that all four wait together."""
    pool = make_pool(LISTS, batch_size=4)
    pool.submit(items("fine", "exit", "fine", "fine"))
    pool.cancel([1])
    results = pool.collect([0, 2, 3])
    assert [result.extra["calls"] for result in results.values()] == [3, 3, 3]
    assert pool.processes_replaced() == 0


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        pytest.param("hang", "reward.timeout_s=1 seconds", marks=pytest.mark.slow),
        ("exit", "exit code 3"),
        ("raise", "no such thing"),
    ],
)
def test_only_the_culprit_of_a_list_fails(make_pool: MakePool, what: str, reason: str) -> None:
    answers = ["fine"] * 20
    answers[7] = what
    results = score(make_pool(LISTS, batch_size=10, timeout_s=1.0), *answers)
    assert failed(results) == [7]
    assert reason in (results[7].error or "") and results[7].timed_out == (what == "hang")


def test_a_wrong_number_of_results_costs_nobody_his_score_who_is_scored_alone(make_pool: MakePool) -> None:
    pool = make_pool(LISTS, batch_size=10)
    results = score(pool, *["fine"] * 5, "short", *["fine"] * 4)
    assert failed(results) == [] and {result.extra["calls"] for result in results if result.extra} == {1}
    assert pool.processes_replaced() == 0


# ------------------------------------------------------------------------------------------------------------ remote


@pytest.mark.slow
def test_a_server_scores_from_several_processes_within_limit_and_rate(make_pool: MakePool) -> None:
    with reward_server(lambda number, sample: Answer(len(sample["solution_str"]), after_s=0.1)) as server:
        remote = RemoteRewardConfig(url=server.url)
        pool = make_pool(None, 2, remote=remote, max_concurrent=4, max_rpm=1200, timeout_s=1.0)
        results = score(pool, *["a", "bb", "ccc"] * 10)
    assert not failed(results), [result.error for result in results if result.failed][0]
    assert [result.score for result in results] == [1, 2, 3] * 10, "waiting for the rate is not counted as time"
    assert 2 <= server.most_at_once <= 4
    assert server.times[-1] - server.times[0] > 24 * 0.05, "thirty requests at twenty a second"


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


def test_a_key_never_reaches_files_or_errors(make_pool: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "very-secret")
    with reward_server(lambda number, sample: Answer("no", 400)) as server:
        remote = RemoteRewardConfig(url=server.url, api_key_env="JUDGE_KEY")
        [result] = score(make_pool(None, remote=remote), "x")
    assert server.headers[0]["authorization"] == "Bearer very-secret"
    assert result.failed and "very-secret" not in (result.error or "")
