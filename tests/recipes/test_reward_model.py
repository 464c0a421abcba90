"""The recipe of reward models: its pairs, its settings, and its run from a random start."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recipes.quickstart import recipe as quickstart
from recipes.quickstart.data import add_questions, sort_questions
from recipes.reward_model import pairs, recipe
from trainer.launch.ppo_job import run_ppo

# -------------------------------------------------------------------------------------------------------------- pairs


def write_questions(folder: Path, rows: int) -> None:
    """The quickstart's files, smaller."""
    folder.mkdir(parents=True)
    for split, seed in (("train", 1), ("test", 2)):
        rng = random.Random(seed)
        questions = [next(source(rng)) for _ in range(rows // 2) for source in (sort_questions, add_questions)]
        table = pa.Table.from_pylist([question.row(split, index) for index, question in enumerate(questions)])
        pq.write_table(table, folder / f"{split}.parquet")


def truths(folder: Path, split: str) -> dict[str, str]:
    rows = pq.read_table(folder / f"{split}.parquet").to_pylist()
    return {row["prompt"][0]["content"]: row["reward_model"]["ground_truth"] for row in rows}


def test_the_better_answer_has_more_right_characters_but_for_one_label_in_ten(tmp_path: Path) -> None:
    write_questions(tmp_path / "data", 400)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        pairs.write_pairs(tmp_path / "data", tmp_path / name, seed=3)
    for file, split, wrong in (("pairs", "train", 0.1), ("held_out_pairs", "test", 0.0)):
        path = tmp_path / "one" / f"{file}.parquet"
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()
        rows, answers = pq.read_table(path).to_pylist(), truths(tmp_path / "data", split)
        assert set(rows[0]) == {"prompt", "chosen", "rejected"} and len(rows) >= 2 * len(answers)
        worse = 0
        for row in rows:
            truth = answers[row["prompt"]]
            better, other = (sum(map(str.__eq__, row[key], truth)) for key in ("chosen", "rejected"))
            assert better != other and len(row["chosen"]) == len(row["rejected"]) == len(truth)
            worse += better < other
        assert worse / len(rows) == pytest.approx(wrong, abs=0.04 if wrong else 0)


# ----------------------------------------------------------------------------------------------------------- settings


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Both caches, empty; gives the recipe's folder."""
    monkeypatch.setenv("VERL_LITE_CACHE", str(tmp_path / "cache"))
    return recipe.made().folder


@pytest.mark.slow
def test_it_trains_a_reward_model_and_two_steps_by_it(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The quickstart without its warm start; a reward model of two steps."""
    write_questions(quickstart.START.folder / "data", 64)
    quickstart.START.write_random_model(quickstart.START.folder / "model")
    monkeypatch.setattr(recipe, "EPOCHS", 1)
    cache = recipe.made().folder  # of a reward model that learns for one epoch
    run = tmp_path / "run"
    arguments = (
        "recipe=reward_model data.train_batch_size=8 actor.ppo_mini_batch_size=8 rollout.n=2 rollout.name=hf "
        "trainer.backend=inline trainer.n_gpus_per_node=1 trainer.device=cpu trainer.total_training_steps=2 "
        "trainer.save_freq=0 trainer.logger=jsonl data.val_max_samples=8 reward.num_workers=0 "
        f"trainer.default_local_dir={run}"
    )
    assert run_ppo(arguments.split()) == 0
    assert (cache / "model" / "model.safetensors").is_file()
    steps = [json.loads(line)["data"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    for step in (step for step in steps if "actor/pg_loss" in step):
        assert step["critic/score/mean"] == pytest.approx(step["reward/model/mean"])
        assert 0 <= step["reward/truth/mean"] <= 1 and "actor/kl_loss" in step
    assert any(name.startswith("val-aux/") and name.endswith("/model/mean@1") for name in steps[0])
