"""Data that recipes make by rule: the same each time, new where they test, short enough for the settings, scored."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from recipes.embedded import byte_tokenizer
from recipes.gsm8k import recipe as gsm8k
from recipes.quickstart import data
from recipes.quickstart import recipe as quickstart
from recipes.reasoning_gym import recipe as reasoning_gym
from trainer.recipe import recipe_overrides
from verl_lite.config import load_config
from verl_lite.rewards import default_compute_score

STARTS = {"quickstart": quickstart.START, "gsm8k": gsm8k.START, "reasoning_gym": reasoning_gym.START}
SMALL = {"TEST_ROWS": 30, "TRAIN_ROWS": 60, "DEMONSTRATIONS": 90, "POOL": 60}


@pytest.fixture(scope="module", params=STARTS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A recipe, and the folder of its data, smaller and made twice."""
    folder, module = tmp_path_factory.mktemp("data"), STARTS[request.param].data
    with pytest.MonkeyPatch.context() as patch:
        for name in SMALL.keys() & vars(module).keys():
            patch.setattr(module, name, SMALL[name])
        for time in ("first", "again"):
            module.write_data(folder / time, seed=3)
    return request.param, folder


def rows(folder: Path, split: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pq.read_table(folder / "first" / f"{split}.parquet").to_pylist()
    return found


def test_the_same_seed_gives_the_same_bytes(made: tuple[str, Path]) -> None:
    files = sorted((made[1] / "first").iterdir())
    assert [file.stem for file in files] == ["demonstrations", "test", "train"]
    assert all(file.read_bytes() == (made[1] / "again" / file.name).read_bytes() for file in files)


def test_what_is_tested_is_asked_nowhere_else(made: tuple[str, Path]) -> None:
    name, folder = made
    tested, trained = ([row["prompt"][0]["content"] for row in rows(folder, split)] for split in ("test", "train"))
    shown = [row["messages"][0]["content"] for row in rows(folder, "demonstrations")]
    if name == "reasoning_gym":  # whose teacher shows what is trained on
        assert set(shown) <= set(trained)
        shown = []
    else:
        assert (len(tested), len(trained), len(shown)) == (30, 60, 90)
    questions = [*tested, *trained, *shown]
    assert tested and len(questions) == len(set(questions))


def test_answers_are_right_and_all_fits_the_settings(made: tuple[str, Path]) -> None:
    name, folder = made
    tokenizer: Any = byte_tokenizer(STARTS[name].words)
    limits = load_config([f"recipe={name}"], recipe_loader=recipe_overrides).config.data
    for row in rows(folder, "test") + rows(folder, "train"):
        truth, extra = row["reward_model"]["ground_truth"], row["extra_info"]
        answer = extra.get("answer") or truth  # a whole solution, or what is right alone
        prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True)["input_ids"]
        tokens = tokenizer(answer)["input_ids"]
        assert len(prompt) <= limits.max_prompt_length and len(tokens) + 1 <= limits.max_response_length
        assert tokenizer.decode(tokens) == answer
        scored = [default_compute_score(row["data_source"], x, truth, extra) for x in (answer, answer[:-1] + "?", "")]
        right, wrong, nothing = (score["score"] if isinstance(score, dict) else score for score in scored)
        assert right == 1 > wrong and nothing == 0, (row["prompt"], scored)
    for row in rows(folder, "demonstrations"):
        assert len(tokenizer(row["messages"][1]["content"])["input_ids"]) + 1 <= limits.max_response_length


def test_the_quickstarts_questions_are_what_their_names_say_and_as_many_of_each() -> None:
    rng = random.Random(1)
    sources = [generate(rng) for generate in (data.sort_questions, data.add_questions, data.word_questions)]
    drawn = data.draw(sources, 300, rng, data.EQUAL_PARTS)
    for question in drawn:
        asked, answer = question.prompt, question.answer
        if question.data_source == "verl_lite/sort":
            assert answer == "".join(sorted(asked.removeprefix("sort ")))
        elif question.data_source == "verl_lite/add":
            left, right = asked.removesuffix("=").split("+")
            assert answer == str(int(left) + int(right))
            assert all(int(a) + int(b) <= 9 for a, b in zip(left, right, strict=True))
        else:
            assert answer == asked.removeprefix("reverse ")[::-1]
    assert list(Counter(question.data_source for question in drawn).values()) == [100] * 3
