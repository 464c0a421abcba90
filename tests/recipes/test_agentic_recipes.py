"""The agentic recipes: their tokenizer loses nothing, their player plays right, their settings fit their episodes; an
untrained model plays and is trained for two steps."""

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
from trainer.launch.ppo_job import run_ppo
from trainer.observe.tracking import read_metrics
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


# ----------------------------------------------------------------------------------------------------------- whole runs

SMALL = [
    "trainer.backend=inline", "trainer.device=cpu", "trainer.logger=[jsonl]", "trainer.save_freq=0", "rollout.name=hf",
    "trainer.total_training_steps=2", "trainer.test_freq=2", "trainer.val_before_train=false",
    "rollout.val_kwargs.greedy_too=false", "agentic.env_pool.num_workers=0", "agentic.rollout_batch_size=4",
    "agentic.train_env_manager.num_env_groups=2", "agentic.train_env_manager.group_size=2",
    "agentic.val_env_manager.num_env_groups=4", "agentic.val_batch_size=4",
]  # fmt: skip
LAKES = ["agentic.train_env_manager.num_groups_partition=[1,1]", "agentic.val_env_manager.num_groups_partition=[2,2]"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "options", "tags"),
    [("agentic_frozen_lake", LAKES, ["lake_4x4", "lake_unseen"]), ("agentic_sokoban", [], ["sokoban_unseen"])],
)
def test_two_steps_of_a_recipe(recipe: str, options: list[str], tags: list[str], tmp_path: Path) -> None:
    write_model(tmp_path / "model", seed=1, layers=1, hidden=32)
    run_dir = tmp_path / "run"
    places = [f"recipe={recipe}", f"model.path={tmp_path / 'model'}", f"trainer.default_local_dir={run_dir}"]
    assert run_ppo([*places, *SMALL, *options]) == 0
    steps = read_metrics(run_dir / "metrics.jsonl")
    assert {1, 2} <= set(steps)
    assert steps[1]["env/error_rate"] == 0 and steps[1]["env/num_actions"] == 10  # nonsense, until the turns are over
    assert steps[1]["env/action_is_valid"] < 1
    for tag in tags:
        assert 0 <= steps[2][f"val/env/{tag}/success"] <= 1
