"""The embedded default: its tokenizer loses nothing, its data are right and disjoint, its cache is made once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.embedded import byte_tokenizer
from recipes.quickstart import data, recipe
from verl_lite.config import PPOConfig, load_config
from verl_lite.rewards import default_compute_score

SPLITS = ("test", "train", "demonstrations")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    data.write_data(folder, seed=3)
    return folder


@pytest.fixture(scope="module")
def rows(folder: Path) -> dict[str, list[dict[str, Any]]]:
    return {split: pq.read_table(folder / f"{split}.parquet").to_pylist() for split in SPLITS}


def settings() -> PPOConfig:
    return load_config([], recipe_loader=lambda name: recipe.overrides()).config


# -------------------------------------------------------------------------------------------------------------- model


def test_the_model_is_a_hugging_face_folder_with_the_same_bytes_each_time(tmp_path: Path) -> None:
    for name in ("one", "two"):
        recipe.START.write_random_model(tmp_path / name)
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes(), file.name
    network = AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    assert 1e6 < sum(parameter.numel() for parameter in network.parameters()) < 2e6
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "one")
    assert tokenizer("reverse crane")["input_ids"] == byte_tokenizer()("reverse crane")["input_ids"]
    chat = [{"role": "user", "content": "1+2="}, {"role": "assistant", "content": "3"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<|user|>1+2=<|assistant|>3<|im_end|>"


# --------------------------------------------------------------------------------------------------------------- data


def test_no_question_stands_twice(rows: dict[str, list[dict[str, Any]]]) -> None:
    questions = [row["prompt"][0]["content"] for split in ("test", "train") for row in rows[split]]
    questions += [row["messages"][0]["content"] for row in rows["demonstrations"]]
    assert len(questions) == len(set(questions)) == data.TEST_ROWS + data.TRAIN_ROWS + data.DEMONSTRATIONS


def test_answers_are_right_and_rewarded(rows: dict[str, list[dict[str, Any]]]) -> None:
    counts: dict[str, int] = {}
    for row in rows["test"]:
        question, answer = row["prompt"][0]["content"], row["reward_model"]["ground_truth"]
        counts[row["data_source"]] = counts.get(row["data_source"], 0) + 1
        if row["data_source"] == "verl_lite/sort":
            assert answer == "".join(sorted(question.removeprefix("sort ")))
        elif row["data_source"] == "verl_lite/add":
            left, right = question.removesuffix("=").split("+")
            assert answer == str(int(left) + int(right))
            assert all(int(a) + int(b) <= 9 for a, b in zip(left, right, strict=True))
        else:
            assert answer == question.removeprefix("reverse ")[::-1]
        score = {"data_source": row["data_source"], "ground_truth": answer, "extra_info": row["extra_info"]}
        assert number(default_compute_score(solution_str=answer, **score)) == 1
        assert number(default_compute_score(solution_str=answer[:-1] + "?", **score)) < 1
    assert set(counts) == {"verl_lite/sort", "verl_lite/add", "reasoning_gym/spell_backward"}
    assert max(counts.values()) - min(counts.values()) <= 1


def number(score: Any) -> float:
    return float(score["score"] if isinstance(score, dict) else score)


def test_questions_and_answers_fit_the_lengths_of_the_recipe(rows: dict[str, list[dict[str, Any]]]) -> None:
    config = settings()
    tokenizer: Any = byte_tokenizer()
    for row in rows["test"] + rows["train"]:
        prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True)["input_ids"]
        answer = tokenizer(row["reward_model"]["ground_truth"])["input_ids"]
        assert len(prompt) <= config.data.max_prompt_length
        assert len(answer) + 1 <= config.data.max_response_length  # and the end-of-turn token


def test_the_same_seed_gives_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    data.write_data(tmp_path, seed=3)
    for split in SPLITS:
        assert (tmp_path / f"{split}.parquet").read_bytes() == (folder / f"{split}.parquet").read_bytes()
