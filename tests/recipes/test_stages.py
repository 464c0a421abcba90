"""Recipes of several commands: the pipeline and the comparison of distillation. The commands are recorded, not run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recipes import stages
from recipes.distill import compare
from recipes.distill.recipe import TEACHER
from recipes.pipeline import __main__ as pipeline
from recipes.quickstart.recipe import START
from tests.recipes.test_settings import config_of
from trainer.recipe import recipe_overrides
from verl_lite.config import SFTConfig, load_schema
from verl_lite.config.checks import section_problems

Calls = list[tuple[str, ...]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Calls:
    monkeypatch.setenv("VERL_LITE_CACHE", str(tmp_path / "cache"))
    found: Calls = []
    for module in (stages, compare):
        monkeypatch.setattr(module, "call", lambda *words: found.append(words))
    return found


def test_each_stage_starts_from_the_last_and_finished_stages_are_left_out(
    calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished: dict[str, int] = {}
    monkeypatch.setattr(stages, "is_finished", lambda run, steps: finished.get(run.name) == steps)
    pipeline.main(tmp_path)
    commands = [words[0] for words in calls]
    assert commands == ["trainer.main_sft", *["trainer.main_ppo", "trainer.export"] * 2]
    assert (
        f"model.path={tmp_path}/1_supervised/hf" in calls[1] and f"model.path={tmp_path}/2_distillation/hf" in calls[3]
    )
    assert all("trainer.resume_mode=auto" in words for words in calls if words[0] != "trainer.export")
    calls.clear()
    (tmp_path / "1_supervised" / "hf").mkdir(parents=True)
    finished["2_distillation"] = pipeline.DISTILLATION_STEPS
    pipeline.main(tmp_path)
    assert [words[0] for words in calls] == ["trainer.export", "trainer.main_ppo", "trainer.export"]


def test_the_commands_are_accepted(calls: Calls, tmp_path: Path) -> None:
    pipeline.main(tmp_path)
    for way in compare.WAYS:
        compare.train(tmp_path, way, seed=2)
    for folder in (word.partition("=")[2] for words in calls for word in words if word.startswith("model.path=")):
        Path(folder).mkdir(parents=True, exist_ok=True)
    (TEACHER.folder / "model").mkdir(parents=True)
    for split in ("train", "test"):
        file = START.folder / "data" / f"{split}.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    kinds = {words[0] for words in calls}
    assert {"trainer.main_sft", "trainer.main_ppo", "trainer.main_generate"} < kinds
    for command, *words in calls:
        if command == "trainer.main_sft":
            config = load_schema(words, SFTConfig, recipe_loader=recipe_overrides).config
            assert list(section_problems(config)) == []
        elif command == "trainer.main_ppo":
            config_of(*words)
    trained = [config_of(*words) for command, *words in calls[5:] if command == "trainer.main_ppo"]
    active = [(each.distillation.is_active, each.distillation.replaces_rewards) for each in trained]
    assert active == [(False, False), (False, False), (True, True), (True, False)]


def test_a_stopped_command_ends_the_script_with_its_status(capfd: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        stages.call("json.tool", "--unknown")
    assert ended.value.code == 2 and "python -m json.tool --unknown" in capfd.readouterr().out


def test_a_run_is_finished_with_the_checkpoint_of_its_last_step(tmp_path: Path) -> None:
    (tmp_path / "run" / "global_step_2").mkdir(parents=True)
    assert stages.is_finished(tmp_path / "run", 2)
    assert not stages.is_finished(tmp_path / "run", 3) and not stages.is_finished(tmp_path / "none", 2)


def test_means_over_tasks_and_seeds(tmp_path: Path) -> None:
    """Seeds 0.4, 0.5 and 0.6: standard deviation 0.1, interval 4.303 x 0.1 / sqrt(3)."""
    mean, width = compare.interval([0.4, 0.5, 0.6])
    assert mean == pytest.approx(0.5) and width == pytest.approx(0.24844, abs=1e-5)
    rows = [
        {"step": step, "data": {"val-core/a/reward/mean@1": score, "val-core/b/reward/mean@1": 0.0, "x": 1.0}}
        for step, score in ((0, 0.2), (10, 0.6))
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert compare.accuracy(tmp_path) == [(0, pytest.approx(0.1)), (10, pytest.approx(0.3))]
