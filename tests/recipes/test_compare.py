"""The comparison: intervals by hand, what may be said of them, runs that are kept, fail or were interrupted."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from recipes import common_task, compare, comparison_report
from recipes.compare import ALGORITHMS, Run, read_points, results_of
from recipes.comparison_report import BEGIN, END, Interval, Point, RunResult, intervals, markdown
from trainer.recipe import recipe_overrides
from verl_lite.config import load_config

VALIDATION = {"val-core/a/acc/mean@1": 0.5, "val-core/b/acc/mean@1": 0.75, "val-aux/a/greedy/acc/mean@1": 0.8}


def run_of(name: str, folder: Path, seed: int = 1) -> Run:
    return Run({algorithm.name: algorithm for algorithm in ALGORITHMS}[name], seed, 4, folder / name / f"seed-{seed}")


def outcome(name: str, seed: int, *sampled: float) -> RunResult:
    points = [Point(512.0 * step, value, value + 0.1) for step, value in enumerate((0.3, *sampled))]
    return RunResult(name, seed, 50.0 + seed, points)


# -------------------------------------------------------------------------------------------------------- statistics


def test_an_interval_by_hand() -> None:
    # deviations from the group means: -1, 1 and -2, 0, 2: squares 10, of 1 + 2 degrees of freedom; t is 3.182
    runs = [RunResult("a", seed, value, []) for seed, value in enumerate((4.0, 6.0))]
    runs += [RunResult("b", seed, value, []) for seed, value in enumerate((1.0, 3.0, 5.0))]
    found = intervals(runs, lambda run: run.cpu_s)
    assert list(found) == ["a", "b"] and found["a"].mean == 5
    assert (
        found["a"].half == pytest.approx(3.182 * (10 / 3 / 2) ** 0.5, rel=3e-3) and str(found["a"]) == "5.000 ± 4.104"
    )
    alone = intervals([runs[0], runs[2]], lambda run: run.cpu_s)
    assert str(alone["a"]) == "4.000", "no spread is known"
    assert Interval(0.6, 0.04).is_above(Interval(0.5, 0.05)) and not Interval(0.6, 0.05).is_above(Interval(0.5, 0.06))
    assert not alone["a"].is_above(alone["b"])


def test_the_table_says_who_is_better_and_of_whom_nothing_is_known() -> None:
    outcomes = [outcome("grpo", 1, 0.50, 0.60), outcome("grpo", 2, 0.50, 0.62)]
    outcomes += [outcome("rloo", 1, 0.50, 0.61), outcome("rloo", 2, 0.50, 0.63)]
    outcomes += [outcome("remax", 1, 0.40, 0.40), outcome("remax", 2, 0.42, 0.42)]
    text = markdown(outcomes, ["grpo", "rloo", "remax", "dapo"], ["dapo, seed 1: ended with status 1: no luck"])
    rows = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| ")]
    assert rows == ["| algorithm", "| rloo", "| grpo", "| remax"]  # best first
    assert "| rloo | 0.620 ± 0.032 | 0.720 ± 0.032 |" in text
    # t of 3 is 3.182, the common deviation 0.0141, over the root of 2
    assert "do not touch: rloo is above remax; grpo is above remax. Of all other" in " ".join(text.split())
    assert "Not measured: dapo." in text and "Failed: dapo, seed 1: ended with status 1: no luck" in text
    assert "no pair can be told apart" in markdown(outcomes[:4], ["grpo", "rloo"])


def test_table_and_picture_are_put_where_the_page_shows_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison_report, "HERE", tmp_path)
    page = tmp_path / "COMPARISON.md"
    page.write_text(f"before\n{BEGIN}\nformer\n{END}\nafter")
    outcomes = [outcome(name, seed, 0.5, 0.6 + seed / 100) for name in ("grpo", "rloo", "dapo") for seed in (1, 2)]
    comparison_report.report(outcomes, ["grpo", "rloo", "dapo"], [], tmp_path / "to", write=True)
    text = page.read_text()
    assert (
        text.startswith(f"before\n{BEGIN}\n\n| algorithm") and text.endswith(f"{END}\nafter") and "former" not in text
    )
    assert (tmp_path / "comparison.png").exists() and (tmp_path / "to" / "comparison.png").exists()
    page.write_text("no marks")
    with pytest.raises(ValueError, match=r"expected .* once, found 0"):
        comparison_report.put_between_marks(page, "text")


# -------------------------------------------------------------------------------------------------------------- runs


@pytest.mark.parametrize("name", [algorithm.name for algorithm in ALGORITHMS])
def test_every_algorithm_has_the_same_budget(name: str, tmp_path: Path) -> None:
    run = run_of(name, tmp_path)
    config = load_config(run.arguments, recipe_loader=recipe_overrides).config
    answers = config.rollout.n + run.algorithm.baselines
    assert config.data.train_batch_size * answers == common_task.SAMPLES
    assert config.data.train_batch_size == common_task.MINI_BATCHES * config.actor.ppo_mini_batch_size
    assert (config.actor.optim.lr, config.trainer.total_training_steps, config.trainer.test_freq) == (2e-4, 4, 1)
    if config.algorithm.adv_estimator == "gae":
        assert config.critic.ppo_mini_batch_size == config.actor.ppo_mini_batch_size


def test_a_fingerprint_knows_the_settings_and_not_the_place(tmp_path: Path) -> None:
    one, elsewhere = run_of("grpo", tmp_path / "a").fingerprint(), run_of("grpo", tmp_path / "b").fingerprint()
    assert one == elsewhere
    assert len({one, run_of("rloo", tmp_path).fingerprint(), run_of("grpo", tmp_path, seed=2).fingerprint()}) == 3


def test_samples_that_dynamic_sampling_asked_for_count_too(tmp_path: Path) -> None:
    rows = [
        {"step": 0, "data": VALIDATION},
        {"step": 1, "data": {"groups/generated": 100.0}},
        {"step": 2, "data": {"groups/generated": 64.0, **VALIDATION}},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_points(tmp_path / "metrics.jsonl", answers=8) == [
        Point(0.0, 0.625, 0.8),
        Point(8 * 164.0, 0.625, 0.8),
    ]


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What stands in for the training, by algorithm: Python code, run in the run's folder."""
    metrics = f"open('metrics.jsonl', 'w').write({json.dumps({'step': 0, 'data': VALIDATION}) + chr(10)!r})"
    codes = {"grpo": metrics, "rloo": metrics, "remax": "raise SystemExit('out of luck')"}

    def start(run: Run) -> subprocess.Popen[bytes]:
        folder = run.folder / "run"
        folder.mkdir(parents=True, exist_ok=True)
        with (run.folder / "output.log").open("wb") as log:
            command = [sys.executable, "-c", codes[run.algorithm.name]]
            return subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)

    monkeypatch.setattr(compare, "start", start)
    monkeypatch.setattr(Run, "fingerprint", lambda run: f"{run.algorithm.name}-{codes[run.algorithm.name]}")
    return codes


def outcomes_by_name(runs: list[Run]) -> dict[str, Any]:
    found = results_of(runs, jobs=2)
    return {each.partition(",")[0] if isinstance(each, str) else each.algorithm: each for each in found}


def test_a_run_that_fails_is_reported_and_ends_nothing(programs: dict[str, str], tmp_path: Path) -> None:
    found = outcomes_by_name([run_of(name, tmp_path) for name in ("remax", "grpo", "rloo")])
    assert found["grpo"].points == [Point(0.0, 0.625, 0.8)] and found["grpo"].cpu_s > 0
    assert "remax, seed 1: ended with status 1: out of luck" in str(found["remax"]) and "output.log" in str(
        found["remax"]
    )
    assert isinstance(found["rloo"], RunResult)


def test_what_is_finished_is_kept_until_its_settings_change(programs: dict[str, str], tmp_path: Path) -> None:
    runs = [run_of(name, tmp_path) for name in ("grpo", "rloo")]
    assert results_of(runs, jobs=0) == []  # nothing is there, and nothing is started
    before = outcomes_by_name(runs)
    assert results_of(runs, jobs=0) == [before["grpo"], before["rloo"]]  # whichever ended first
    programs["rloo"] = "raise SystemExit('ran again')"  # its settings changed with it
    after = outcomes_by_name(runs)
    assert after["grpo"] == before["grpo"]
    assert "ran again" in str(after["rloo"])
    # killed before its end: there is no result.json, and what lies there does not count
    (runs[0].folder / "result.json").unlink()
    programs["grpo"] += "; print('again')"
    outcomes_by_name(runs[:1])
    assert "again" in (runs[0].folder / "output.log").read_text()


def test_two_comparisons_do_not_write_to_one_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (tmp_path / "in_use").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert compare.main(["--to", str(tmp_path)]) == 2
    assert f"--to {tmp_path} is in use by another comparison" in capsys.readouterr().err
