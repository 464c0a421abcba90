"""The reward model's scores are those of transformers' own forward on each row alone, however rows are packed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    Qwen2ForSequenceClassification,
)

from tests.tiny_model import tiny_qwen2, tiny_reward_model
from tests.workers.engine_cases import CPU, PROMPT, RESPONSE, Batch, Case, in_order, parts_of, planned, ragged_batch
from tests.workers.ranks import Ranks
from verl_lite.config import NetworkConfig, PPOConfig
from verl_lite.errors import UserError
from verl_lite.protocol import DataProto
from workers.engine.fsdp import FSDPEngine
from workers.policy.loading import token_network
from workers.policy.sequence_score import scored_rows, sequence_score
from workers.roles.frozen_models import RewardModelWorker

ROWS = 11


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_reward_model(tmp_path_factory.mktemp("reward"))


def batch() -> DataProto:
    """Ragged rows of which three share each prompt; answers of one token and of full length, two that end with the
    model's pad token as a stop token, one that is nothing else, and two rows without weight."""
    tensors = ragged_batch(Batch(rows=ROWS, shared_prompts=3, failed_rows=(4, 9))).batch
    for row, length in {0: RESPONSE, 1: 1, 2: 5, 3: 4, 5: 1}.items():
        real = (torch.arange(RESPONSE) < length).long()
        tensors["responses"][row] = (torch.arange(RESPONSE) % 40 + 5 + row) * real
        tensors["attention_mask"][row, PROMPT:] = tensors["response_mask"][row] = real
    # real tokens, as the attention mask says; one in the middle does not end the answer
    tensors["responses"][2, 3:5] = tensors["responses"][3, 1] = tensors["responses"][5, 0] = 0
    tensors["response_mask"][0, 2:4] = 0  # tokens that are not the policy's are read all the same
    tensors["input_ids"][:, PROMPT:] = tensors["responses"]
    tensors["position_ids"] = (tensors["attention_mask"].cumsum(1) - 1).clamp(min=0)
    return DataProto.from_dict(dict(tensors))


def plain_scores(path: str, data: DataProto) -> torch.Tensor:
    """(B,) by transformers' forward, in fp64, one row without padding at a time; 0 where response_mask is empty."""
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float64).eval()
    scores = torch.zeros(len(data), dtype=torch.float64)
    for row in range(len(data)):
        if data.batch["response_mask"][row].any():
            ids = data.batch["input_ids"][row][data.batch["attention_mask"][row].bool()]
            with torch.no_grad():
                scores[row] = model(input_ids=ids[None]).logits[0, 0]
    return scores


def worker_scores(path: str, data: DataProto, case: Case) -> np.ndarray:
    """This rank's scores, in planned order."""
    config = PPOConfig()
    config.trainer.device = "cpu"
    config.reward_model.model = NetworkConfig(path=path, use_remove_padding=case.packed)
    config.reward_model.ulysses_sequence_parallel_size = case.sequence_parallel
    worker = RewardModelWorker(config)
    worker.init_model()
    return worker.compute_rm_score(planned(data, case)[0]).batch["rm_scores"].numpy()


@pytest.mark.parametrize(
    ("world", "case"),
    [
        (1, Case()),
        (1, Case(max_token_len=20)),
        (1, Case(micro_batch_size=2)),
        (1, Case(packed=False)),
        (1, Case(packed=False, max_token_len=40)),
        (2, Case(max_token_len=25)),
        (2, Case(packed=False)),
        (2, Case(min_num_params=10**9)),
    ],
)
def test_scores_equal_transformers_row_by_row(path: str, ranks: Ranks, world: int, case: Case) -> None:
    for data in (batch(), batch()[:1]):  # at last fewer rows than ranks
        expected = plain_scores(path, data).numpy()
        found = np.concatenate(ranks.run(worker_scores, path, data, case, size=world))
        assert np.abs(in_order(found, parts_of(data, case, world)[1]) - expected).max() < 1e-5
    assert np.abs(plain_scores(path, batch())).max() > 0.5


def test_scored_rows_read_the_last_token_that_is_not_padding() -> None:
    columns = {
        "input_ids": torch.tensor([[7, 8, 5, 6, 0], [7, 8, 5, 0, 0], [7, 8, 0, 0, 0], [7, 8, 5, 6, 9]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]),
        "position_ids": torch.arange(5).expand(4, 5),
        "response_mask": torch.tensor([[1, 1, 0], [1, 1, 0], [1, 0, 0], [0, 0, 0]]),
    }
    columns["responses"] = columns["input_ids"][:, 2:]
    rows = scored_rows(columns, pad_token_id=0)
    # answers 5 6 | 5 0 (the 0 was sampled) | 0 | one without weight: read at 6, at 5, at the prompt's 8, nowhere
    assert rows["response_mask"].tolist() == [[0, 0, 1, 0], [0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
    assert rows["input_ids"].tolist() == [[*ids, 0] for ids in columns["input_ids"].tolist()]
    assert {tuple(rows[name].shape) for name in ("input_ids", "attention_mask", "position_ids")} == {(4, 6)}
    without = scored_rows(columns, pad_token_id=None)
    assert without["response_mask"].tolist() == [[0, 0, 1, 0], [0, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]]


def test_a_token_that_the_model_does_not_know_is_an_error(path: str) -> None:
    data = batch()
    data.batch["input_ids"][0, -1] = 64
    with pytest.raises(UserError, match=r"reward_model\.model\.path=.* token 64, .* vocabulary has 64 tokens"):
        worker_scores(path, data, Case())


# --- what is not a reward model -----------------------------------------------------------------------------------


def language_model(folder: Path) -> None:
    tiny_qwen2(folder)


def of_two_labels(folder: Path) -> None:
    tiny_reward_model(folder, labels=2)


def without_head(folder: Path) -> None:
    """Its config promises a head; only loading finds out."""
    model = Qwen2ForSequenceClassification.from_pretrained(tiny_reward_model(folder))
    weights = {name: value for name, value in model.state_dict().items() if name != "score.weight"}
    model.save_pretrained(folder, state_dict=weights)


def encoder(folder: Path) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_labels": 1}
    BertForSequenceClassification(BertConfig(**sizes, intermediate_size=32)).save_pretrained(folder)


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (language_model, "Qwen2ForCausalLM, which has no trained head"),
        (of_two_labels, " has 2 labels"),
        (without_head, r"score\.weight.*trained to score"),
        (encoder, "BertForSequenceClassification does not score by a linear layer on its last"),
    ],
)
def test_what_is_no_reward_model_is_refused(write: Callable[[Path], None], said: str, tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(UserError, match=rf"reward_model\.model\.path.*{said}"):
        FSDPEngine(
            token_network(NetworkConfig(path=str(tmp_path)), sequence_score),
            PPOConfig().reward_model.fsdp_config,
            None,
            device=CPU,
            total_training_steps=0,
            seed=0,
        )
