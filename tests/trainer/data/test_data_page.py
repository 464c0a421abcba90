"""trainer/DATA.md stays true: its row is a row, its settings load and do what they say, its classes run."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.prompt_rows import contents, load, make_row, truths, write
from trainer.data.order import MixtureBatches, build_order
from trainer.data.row_formats import EXAMPLE_ROW, PromptRow
from trainer.data.sources import SPLITS
from trainer.data.tokens import CACHED_FROM
from verl_lite.config import PPOConfig, load_config
from verl_lite.protocol import DataProto
from verl_lite.rewards import default_compute_score

PAGE = (Path(__file__).parents[3] / "trainer" / "DATA.md").read_text()
USER, ANSWER = {"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


def config_of(*settings: str) -> PPOConfig:
    return load_config(["model.path=m", *settings]).config


def options(*settings: str) -> dict[str, Any]:
    """The data options that settings change, for `load`."""
    found, default = config_of(*settings).data, PPOConfig().data
    return {name: value for name, value in vars(found).items() if value != getattr(default, name)}


def test_the_row_is_a_row_in_which_every_column_is_read(tmp_path: Path) -> None:
    row = json.loads(blocks("json")[0])
    assert row["prompt"] == EXAMPLE_ROW["prompt"]
    data = load(write(tmp_path / "d.jsonl", [row]), max_prompt_length=64, answers=4)
    assert data.row(0) == row and set(row) == set(PromptRow.__annotations__)
    assert data[0].batch["answers_per_prompt"].tolist() == [8]


def test_splits_and_bounds_are_those_of_the_page() -> None:
    sentence = re.search(r"Without an @.*?splits\.", PAGE, flags=re.DOTALL)
    assert sentence is not None
    named = re.findall(r"`(\w+)`", sentence[0])
    assert named == [*SPLITS["train"], *SPLITS["val"][:6]]
    assert f"The tokens of {CACHED_FROM:,} or more prompts" in PAGE


def test_the_class_of_rows_runs(tmp_path: Path) -> None:
    source = next(block for block in blocks("python") if "class Sums" in block)
    (tmp_path / "my_rows.py").write_text(source)
    settings = re.search(r"`(data\.custom_cls\.path=\S+ data\.custom_cls\.name=\S+)`", PAGE)
    assert settings is not None
    given = options(*settings[1].replace("my_rows.py", str(tmp_path / "my_rows.py")).split())
    data = load(["3"], **given)
    assert (contents(data), truths(data)) == (["0+0=", "1+1=", "2+2="], ["0", "2", "4"])


SCHEMAS = {
    "question, answer": [{"question": "1", "answer": "2"}],
    "problem, solution, level": [{"problem": "1", "solution": "2", "level": 3}],
    "prompt, completion": [{"prompt": "1", "completion": "2"}, {"prompt": [USER], "completion": [ANSWER]}],
    "messages": [{"messages": [USER, ANSWER]}, {"messages": [USER], "ground_truth": "2"}],
    "both of the first two": [{"question": "1", "answer": "2"}, {"problem": "1", "solution": "2"}],
    "a column `n` that means something else": [make_row("1", n="four", reward_model={"ground_truth": "2"})],
}


@pytest.mark.parametrize("schema", SCHEMAS)
def test_the_settings_for_other_schemas_read_them(tmp_path: Path, schema: str) -> None:
    row = re.search(rf"^\| {re.escape(schema)} \| `(.*)` \|$", PAGE, flags=re.MULTILINE)
    assert row is not None, f"no line for {schema}"
    (setting,) = shlex.split(row[1])
    rows = [{"data_source": "a", **row} for row in SCHEMAS[schema]]
    data = load(write(tmp_path / "d.jsonl", rows), **options(setting))
    assert (contents(data), truths(data)) == (["1"] * len(rows), ["2"] * len(rows))
    if "level" in schema:
        assert data.row(0)["extra_info"] == {"level": 3}


def test_the_gsm8k_command_reads_its_rows_and_the_reward_takes_their_truth(tmp_path: Path) -> None:
    command = re.search(r"    python -m trainer\.main_ppo (model.*?)\n\n", PAGE, flags=re.DOTALL)
    assert command is not None
    given = options(*shlex.split(command[1].replace("\\\n", " ")))
    assert given.pop("train_files") == given.pop("val_files") == ["openai/gsm8k:main"]
    rows = [{"question": "What is 1000 + 72?", "answer": "1000 + 72 = <<1000+72=1072>>1,072\n#### 1,072"}]
    data = load(write(tmp_path / "d.jsonl", rows), max_prompt_length=256, data_source="openai/gsm8k", **given)
    assert contents(data) == ["What is 1000 + 72? Let us think step by step and put the answer after ####."]
    assert truths(data) == ["1,072"]
    score = default_compute_score("openai/gsm8k", "so #### 1072", "1,072")
    assert (score["score"] if isinstance(score, dict) else score) == 1.0


def test_the_mixture_of_the_page_has_the_shares_it_says(tmp_path: Path) -> None:
    setting = re.search(r"    (data\.sources='.*')\n", PAGE)
    assert setting is not None
    config = config_of(*shlex.split(setting[1]), "data.train_batch_size=64")
    rows = [make_row("1", data_source=name) for name in ("openai/gsm8k", "math") for _ in range(100)]
    data = load(write(tmp_path / "d.jsonl", rows), sources=config.data.sources, answers=8)
    order = build_order(data, config)
    assert isinstance(order, MixtureBatches) and order.rows == 256
    counts = [sum(place < 100 for place in batch) for batch in order]
    assert set(counts) == {44, 45} and sum(counts) == 179  # 0.7 of 256 is 179.2
    assert data.__getitems__([0, 100]).batch["answers_per_prompt"].tolist() == [8, 16]


def scored(*scores: float) -> DataProto:
    return DataProto.from_dict(tensors={"token_level_scores": torch.tensor([[0.0, score] for score in scores])})


def test_the_curriculum_rises_when_answers_are_right_and_is_resumed(tmp_path: Path) -> None:
    (tmp_path / "my_order.py").write_text(next(block for block in blocks("python") if "EasyFirst" in block))
    found = re.search(r"`(data\.sampler\.class_path=\S+ data\.sampler\.class_name=\S+)`", PAGE)
    assert found is not None
    config = config_of(*found[1].replace("my_order.py", str(tmp_path / "my_order.py")).split())
    config.data.train_batch_size = 8
    rows = [make_row(str(place), extra_info={"level": place // 5}) for place in range(15)]
    data = load(write(tmp_path / "d.jsonl", rows))
    order = build_order(data, config)
    batches = iter(order)
    assert max(next(batches)) < 5
    assert order.update(scored(1, 1, 0, 1)) == {"sampler/level": 0.0}  # 75% are not enough
    assert max(next(batches)) < 5
    assert order.update(scored(1, 1, 1, 1, 1, 0)) == {"sampler/level": 1.0}
    state = order.state_dict()
    assert list(batches) == []
    second = list(order)
    assert 5 <= max(max(batch) for batch in second) < 10
    resumed = build_order(data, config)
    resumed.load_state_dict(state)
    assert list(resumed) == [] and list(resumed) == second  # the first epoch was done
