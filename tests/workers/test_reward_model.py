"""The reward model's scores are those of transformers' own forward on each row alone, however rows are packed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    PreTrainedModel,
    Qwen2ForSequenceClassification,
)

from tests.tiny_model import tiny_qwen2, tiny_reward_model, tiny_tokenizer
from tests.workers.conftest import OnRanks
from tests.workers.engine_cases import CPU, PROMPT, RESPONSE, Batch, Case, planned, ragged_batch
from verl_lite.config import NetworkConfig, PPOConfig
from verl_lite.errors import UserError
from verl_lite.protocol import DataProto
from workers.engine.fsdp import FSDPEngine
from workers.policy.loading import token_network
from workers.policy.sequence_score import scored_rows, sequence_score
from workers.reward_model import RewardModelWorker

ROWS = 11


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_reward_model(tmp_path_factory.mktemp("reward"))


def batch() -> DataProto:
    """Ragged rows of which three share each prompt; answers of one token and of full length, two that end with the
    model's pad token as a stop token, one that is nothing else, and two rows without weight."""
    data = ragged_batch(Batch(rows=ROWS, shared_prompts=3, failed_rows=(4, 9)))
    tensors = data.batch
    lengths = {0: RESPONSE, 1: 1, 2: 5, 3: 4, 5: 1}
    for row, length in lengths.items():
        tensors["responses"][row] = torch.arange(RESPONSE) % 40 + 5 + row
        real = torch.arange(RESPONSE) < length
        tensors["responses"][row] *= real
        tensors["attention_mask"][row, PROMPT:] = real.long()
        tensors["response_mask"][row] = real.long()
    tensors["responses"][2, 3:5] = 0  # real tokens, as the attention mask says
    tensors["responses"][3, 1] = 0  # one in the middle does not end the answer
    tensors["responses"][5, 0] = 0
    tensors["response_mask"][0, 2:4] = 0  # tokens that are not the policy's are read all the same
    tensors["input_ids"][:, PROMPT:] = tensors["responses"]
    tensors["position_ids"] = (tensors["attention_mask"].cumsum(1) - 1).clamp(min=0)
    return data


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


def worker_scores(path: str, data: DataProto, case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """This rank's scores, and of the whole plan order and is_padding."""
    config = PPOConfig()
    config.trainer.device = "cpu"
    config.reward_model.model = NetworkConfig(path=path, use_remove_padding=case.packed)
    worker = RewardModelWorker(config)
    worker.init_model()
    mine, plan = planned(data, case)
    return worker.compute_rm_score(mine).batch["rm_scores"].numpy(), plan.order, plan.is_padding


def in_order(parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> torch.Tensor:
    """The scores of all ranks in the order of the rows; padding places have none."""
    found = np.concatenate([part[0] for part in parts])
    _, order, is_padding = parts[0]
    assert not found[is_padding].any()
    scores = np.zeros(order.max() + 1, dtype=np.float32)
    scores[order[~is_padding]] = found[~is_padding]
    return torch.from_numpy(scores)


CASES = [
    Case(),
    Case(max_token_len=20),
    Case(micro_batch_size=2),
    Case(packed=False),
    Case(packed=False, max_token_len=40),
]


@pytest.mark.parametrize("case", CASES)
def test_scores_equal_transformers_row_by_row(path: str, case: Case) -> None:
    data = batch()
    expected = plain_scores(path, data)
    assert expected.abs().max() > 0.5 and len(expected[expected != 0].unique()) >= 8
    scores = in_order([worker_scores(path, data, case)])
    assert (scores - expected).abs().max() < 1e-5
    assert scores[[4, 9]].tolist() == [0, 0], "a row with an empty response_mask has no score"


def test_two_ranks_give_the_same_scores(path: str, two_ranks: OnRanks) -> None:
    data = batch()
    for case in (Case(max_token_len=25), Case(packed=False), Case(min_num_params=10**9)):
        scores = in_order(two_ranks(worker_scores, path, data, case))
        assert (scores - plain_scores(path, data)).abs().max() < 1e-5
    one = data[:1]  # fewer rows than ranks
    scores = in_order(two_ranks(worker_scores, path, one, Case()))
    assert (scores - plain_scores(path, one)).abs().max() < 1e-5


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
    with pytest.raises(UserError, match=r"reward_model\.model\.path=.* token 64, and the model knows 64 tokens"):
        worker_scores(path, data, Case())


# --- what is not a reward model -----------------------------------------------------------------------------------


def build(path: str) -> FSDPEngine:
    return FSDPEngine(
        token_network(NetworkConfig(path=path), sequence_score), PPOConfig().reward_model.fsdp_config, None, device=CPU,
        total_training_steps=0, seed=0, forward_only=True,
    )  # fmt: skip


def test_a_causal_language_model_is_refused_instead_of_given_a_random_head(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"reward_model\.model\.path=.*Qwen2ForCausalLM, which has no trained head"):
        build(tiny_qwen2(tmp_path / "lm"))


@pytest.mark.parametrize("labels", [2, 3])
def test_several_labels_are_refused(tmp_path: Path, labels: int) -> None:
    with pytest.raises(UserError, match=rf"reward_model\.model\.path=.* has {labels} labels"):
        build(tiny_reward_model(tmp_path, labels=labels))


def test_a_checkpoint_that_lost_its_head_is_refused(tmp_path: Path) -> None:
    """Its config promises a head; only loading finds out."""
    model = Qwen2ForSequenceClassification.from_pretrained(tiny_reward_model(tmp_path / "whole"))
    save_without(model, "score.weight", tmp_path / "headless")
    with pytest.raises(UserError, match=r"reward_model\.model\.path=.*score\.weight.*trained to score"):
        build(str(tmp_path / "headless"))


def save_without(model: PreTrainedModel, name: str, folder: Path) -> None:
    weights = {key: value for key, value in model.state_dict().items() if key != name}
    model.save_pretrained(folder, state_dict=weights)
    tiny_tokenizer().save_pretrained(folder)


def test_an_encoder_is_refused(tmp_path: Path) -> None:
    config = BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, num_labels=1
    )
    BertForSequenceClassification(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="BertForSequenceClassification does not score by a linear layer on its last"):
        build(str(tmp_path))
