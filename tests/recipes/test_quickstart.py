"""The embedded default: its model is small and the same each time, its questions are what their names say."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.embedded import byte_tokenizer
from recipes.quickstart import data, recipe


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


def test_questions_are_what_their_names_say_and_as_many_of_each() -> None:
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
