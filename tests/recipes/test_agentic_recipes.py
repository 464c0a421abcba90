"""The agentic recipes: their tokenizer loses nothing, their player plays right, their settings fit their episodes."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from recipes.agentic_frozen_lake.data import (
    WORDS,
    best_moves,
    clumsy,
    lake_player,
    play,
    write_demonstrations,
    write_model,
)
from recipes.agentic_sokoban.worlds import room_player
from recipes.embedded import byte_tokenizer
from trainer.recipe import recipe_overrides
from verl_lite.config import PPOConfig, load_config
from verl_lite.envs import env_templates
from verl_lite.envs.grid import GridEnv

RECIPES = ("agentic_frozen_lake", "agentic_sokoban")
PLAYERS: dict[str, Callable[[random.Random], Callable[[GridEnv], Callable[[], int]]]] = {
    "agentic_frozen_lake": lake_player,
    "agentic_sokoban": room_player,
}


def worlds(recipe: str) -> ModuleType:
    return importlib.import_module(f"recipes.{recipe}.worlds")


def settings(recipe: str, *arguments: str) -> PPOConfig:
    return load_config([f"recipe={recipe}", *arguments], recipe_loader=recipe_overrides).config


# --------------------------------------------------------------------------------------------------- model, notation


def test_a_turn_has_few_tokens_and_no_text_is_lost(tmp_path: Path) -> None:
    write_model(tmp_path, seed=1, layers=1, hidden=32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("P_O_\n_O√G", "Grüße, 世界!\n\t", "Leftover <answer", "".join(map(chr, range(128))), *WORDS):
        tokens = tokenizer(text)["input_ids"]
        assert tokenizer.decode(tokens) == text
        assert tokens == byte_tokenizer(WORDS)(text)["input_ids"]
    chat = [{"role": "user", "content": "P_\n_G"}, {"role": "assistant", "content": "<answer>Right</answer>"}]
    text = "<|user|>P_\n_G<|assistant|><answer>Right</answer><|im_end|>"
    assert tokenizer.apply_chat_template(chat, tokenize=False) == text
    assert len(tokenizer(text)["input_ids"]) == 1 + 5 + 1 + 4
    said = tokenizer("<answer>Right</answer><|im_end|>")["input_ids"]
    assert tokenizer.decode(said, skip_special_tokens=True) == "<answer>Right</answer>"  # words are not special tokens


# ----------------------------------------------------------------------------------------------------- demonstrations


def test_the_best_moves_by_hand() -> None:
    left, down, right, up = range(4)
    assert best_moves(["P_", "_G"]) == [down, right]
    assert best_moves(["PO", "_G"]) == [down]
    assert best_moves(["_O_", "POG", "___"]) == [down]
    assert best_moves(["G_P"]) == [left]
    assert best_moves(["PO", "OG"]) == [left, down, right, up]  # no way


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_player_reaches_the_end_when_its_hand_does_not_slip(recipe: str) -> None:
    rng = random.Random(0)
    template = next(iter(env_templates(worlds(recipe).CUSTOM_ENVS).values()))
    env = template.make()
    assert isinstance(env, GridEnv)
    careful, careless = (clumsy(env, PLAYERS[recipe](rng)(env), rng, share) for share in (0.0, 1.0))
    for seed in range(20):
        chat = play(template, env, careful, seed)
        assert env._succeeded() and len(chat) <= 2 * template.max_steps
        assert [message["role"] for message in chat[:3]] == ["user", "assistant", "user"]
    ended = []
    for seed in range(40):
        play(template, env, careless, seed)
        ended.append(env._succeeded())
    assert sum(ended) < 20


@pytest.mark.parametrize("recipe", RECIPES)
def test_conversations_fit_the_lengths_and_episodes_never_outgrow_them(recipe: str, tmp_path: Path) -> None:
    """The longest possible episode: every turn cut off at its limit, none of them closed."""
    config, tokenizer, made = settings(recipe), byte_tokenizer(WORDS), worlds(recipe)
    templates = env_templates(made.CUSTOM_ENVS)
    rng = random.Random(0)
    for name in ("one", "two"):
        rng, file = random.Random(5), tmp_path / f"{name}.parquet"
        write_demonstrations(
            file, dict([*templates.items()][:1]), PLAYERS[recipe](rng), rng, number=20, random_share=0.5
        )
    assert (tmp_path / "one.parquet").read_bytes() == (tmp_path / "two.parquet").read_bytes()
    for row in pq.read_table(tmp_path / "one.parquet").to_pylist():
        text = tokenizer.apply_chat_template(row["messages"], tokenize=False)
        assert len(tokenizer(text)["input_ids"]) <= made.PROMPT_TOKENS + made.CONVERSATION_TOKENS
        for message in row["messages"]:
            if message["role"] == "assistant":
                assert len(tokenizer(message["content"])["input_ids"]) + 1 == made.TURN_TOKENS
    for template in templates.values():
        observation, _ = template.make().reset(0)
        question = len(tokenizer(f"<|user|>{observation}<|assistant|>")["input_ids"])
        assert question <= config.data.max_prompt_length
        turns = template.max_steps * (made.TURN_TOKENS + 1) + (template.max_steps - 1) * question
        assert turns <= config.data.max_response_length
