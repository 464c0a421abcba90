"""Prompts and answers that the policy cannot read are refused before anything heavy starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fuzz.cases import good_row
from tests.tiny_model import tiny_qwen2, tiny_tokenizer
from trainer.build import check_context, check_vocabulary
from trainer.data.prompts import PromptDataset
from verl_lite.config import DataConfig, ModelConfig, PPOConfig
from verl_lite.errors import UserError


def test_more_tokens_than_positions_are_refused_with_the_sum(tmp_path: Path) -> None:
    model = ModelConfig(path=tiny_qwen2(tmp_path, max_positions=64))
    check_context(PPOConfig(data=DataConfig(max_prompt_length=32, max_response_length=32), model=model))
    with pytest.raises(UserError, match="data.max_prompt_length=33 .*=32 = 65 tokens are more than the 64 positions"):
        check_context(PPOConfig(data=DataConfig(max_prompt_length=33, max_response_length=32), model=model))


def test_a_token_without_an_embedding_is_refused(tmp_path: Path) -> None:
    config = PPOConfig(model=ModelConfig(path=tiny_qwen2(tmp_path / "model", vocab=64)))
    row = good_row(1)
    for text, is_known in (("1+1", True), ("|", False)):  # the bar is the last but two of 97 characters
        row["prompt"] = [{"role": "user", "content": text}]
        (tmp_path / "d.jsonl").write_text(json.dumps(row))
        data = PromptDataset(str(tmp_path / "d.jsonl"), tiny_tokenizer(120), config.data, split="train")
        if is_known:
            check_vocabulary(config, [data])
            continue
        with pytest.raises(UserError, match="data.train_files: .* token .*knows the tokens 0 to 63.*tokenizer_path"):
            check_vocabulary(config, [data])
