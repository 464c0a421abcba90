"""The recipe of supervised fine-tuning: its settings, its pairs, and its first steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipes.quickstart import data
from recipes.sft import recipe
from recipes.sft.pairs import pairs_of
from trainer import main_sft
from trainer.recipe import recipe_overrides
from verl_lite.config import SFTConfig, load_schema
from verl_lite.config.checks import section_problems


def test_a_question_with_right_and_wrong_answers_gives_a_pair() -> None:
    one, two, three = ([{"role": "user", "content": text}] for text in ("1+1=", "2+2=", "3+3="))
    answers = [(one, "3", "2"), (one, "2", "2"), (one, "1", "2"), (one, "3", "2"), (two, "4", "4"), (three, "7", "6")]
    answers += [(two, "", "4")]
    rows = [{"prompt": prompt, "output": output, "gts": truth} for prompt, output, truth in answers]
    assert pairs_of(rows) == [{"prompt": one, "chosen": "2", "rejected": "3"}]


@pytest.mark.parametrize("loss", ["sft", "dpo"])
def test_its_settings_are_sound_for_both_losses(loss: str) -> None:
    config = load_schema(["recipe=sft", f"loss={loss}"], SFTConfig, recipe_loader=recipe_overrides).config
    assert list(section_problems(config)) == [] and config.data.max_length == 32
    script = Path(recipe.__file__).with_name("run.sh").read_text()
    assert "trainer.main_sft recipe=sft loss=dpo" in script


@pytest.mark.slow
def test_it_trains_on_generated_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, number in (("DEMONSTRATIONS", 64), ("TRAIN_ROWS", 16), ("TEST_ROWS", 16)):
        monkeypatch.setattr(data, name, number)
    monkeypatch.setenv("VERL_LITE_CACHE", str(tmp_path))
    words = ["recipe=sft", "trainer.total_training_steps=2", "trainer.device=cpu", "trainer.log_freq=1"]
    assert main_sft.main([*words, f"trainer.default_local_dir={tmp_path / 'run'}"]) == 0
    steps = [json.loads(line)["data"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert steps[-1]["val/loss"] < steps[0]["val/loss"]
