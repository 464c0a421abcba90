"""Training of a reward model: what is a pair, what the loss is, what it does not depend on, and what a run leaves."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.tiny_model import tiny_qwen2, tiny_reward_model, tiny_tokenizer
from tests.trainer.prompt_rows import write
from tests.workers.ranks import OnRanks
from trainer import main_rm
from trainer.data.preferences import Pair, collate_pairs, encode_answer, load_pairs, read_pair
from trainer.supervised.loop import train_within
from trainer.supervised.reward_training import RewardTrainingJob
from verl_lite.config import (
    NetworkConfig,
    OptimConfig,
    PreferenceDataConfig,
    RewardLossConfig,
    RewardTrainingConfig,
    SFTTrainerConfig,
)
from verl_lite.errors import UserError
from verl_lite.metrics import combine, values
from verl_lite.protocol import DataProto
from verl_lite.seqlen_balance import plan_batch
from workers.supervised.reward_model import RewardTrainingWorker, pair_loss
from workers.supervised.worker import SupervisedWorker

QUESTION = {"role": "user", "content": "1+1="}
SYSTEM = {"role": "system", "content": "add"}


def says(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_qwen2(tmp_path_factory.mktemp("model") / "tiny", hidden=32, layers=1, heads=1)


def test_a_micro_batch_divides_by_the_pairs_of_the_whole_step_and_padding_counts_for_nothing() -> None:
    # two pairs and a padding pair; the score of a text stands in one column
    scores = torch.tensor([[0.0, 2.0], [1.0, 0.0], [0.0, 0.0], [0.0, 3.0], [0.0, 9.0], [9.0, 0.0]])
    mask = (scores != 0).long()
    mask[2, 0] = 1  # a score may be 0
    mask[4:] = 0
    margin = torch.zeros(6)
    data = DataProto.from_dict({"response_mask": mask, "margin": margin}, meta_info={"num_tokens": 5})
    loss, metrics = pair_loss(data, {"scores": scores}, center_coefficient=0.0)
    losses = [math.log(1 + math.exp(-1)), math.log(1 + math.exp(3))]
    assert loss.item() == pytest.approx(sum(losses) / 5)  # three more pairs are elsewhere
    assert values(metrics) == pytest.approx({"loss": sum(losses) / 2, "accuracy": 0.5, "margin": (1 - 3) / 2})
    data.batch["margin"] = torch.tensor([3.0, 3.0, -1.0, -1.0, 9.0, 9.0])  # -log sigmoid(2 - 1 - 3), and (0 - 3 + 1)
    wanted = [math.log(1 + math.exp(2)), math.log(1 + math.exp(2))]
    assert pair_loss(data, {"scores": scores}, 0.0)[0].item() == pytest.approx(sum(wanted) / 5)


@pytest.mark.parametrize(
    ("row", "question"),
    [
        ({"prompt": "1+1=", "chosen": "2", "rejected": "3"}, [QUESTION]),
        ({"prompt": [SYSTEM, QUESTION], "chosen": "2", "rejected": "3"}, [SYSTEM, QUESTION]),
        ({"prompt": [QUESTION], "chosen": [says("2")], "rejected": [says("3")]}, [QUESTION]),  # TRL, explicit prompt
        ({"chosen": [QUESTION, says("2")], "rejected": [QUESTION, says("3")]}, [QUESTION]),  # TRL, implicit prompt
        (  # as in ultrafeedback: the prompt as text, and the whole chats
            {"prompt": "1+1=", "chosen": [QUESTION, says("2")], "rejected": [QUESTION, says("3")]},
            [QUESTION],
        ),
    ],
)
def test_each_form_of_a_pair_gives_the_same_chats(row: dict[str, Any], question: list[dict[str, str]]) -> None:
    assert read_pair(row, PreferenceDataConfig(), "row 0") == ([*question, says("2")], [*question, says("3")])


def test_an_answer_has_the_tokens_that_a_policy_samples() -> None:
    tokenizer = tiny_tokenizer()
    example = encode_answer([QUESTION, says("2")], tokenizer, "end_of_turn", "row 0")
    asked = tokenizer.apply_chat_template([QUESTION], add_generation_prompt=True)["input_ids"]
    assert example.prompt == asked
    assert tokenizer.decode(example.response) == "2<|im_end|>"
    whole = encode_answer([QUESTION, says("2")], tokenizer, "end_of_text", "row 0")
    assert tokenizer.decode(whole.response) == "2<|im_end|>\n", "the template writes a newline behind each turn"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "1", "response": "2"}, r"no column 'chosen' \(data.chosen_key\); columns found: prompt, response"),
        ({"prompt": "1", "chosen": "2"}, "no column 'rejected'"),
        (
            {"prompt": "1", "chosen": "2", "rejected": None},
            r"no value in column 'rejected' .*; columns found: prompt, chosen \(without a value in this row: rejected",
        ),
        (
            {"prompt": "1", "chosen": '[{"role": "assistant", "content": "2"}]', "rejected": "3"},
            "column 'chosen': found .* not messages written as text",
        ),
        ({"chosen": "2", "rejected": "3"}, r"there is no column 'prompt' \(data.prompt_key\)"),
        ({"prompt": "1", "chosen": [QUESTION], "rejected": [QUESTION]}, "its last message is of role 'user'"),
        ({"prompt": "1", "chosen": 2, "rejected": 3}, "column 'chosen': found 2, expected a list"),
        (
            {"prompt": "1", "chosen": "2", "rejected": "3", "margin": "1"},
            "column 'margin': found '1', expected a finite",
        ),
        ({"prompt": "1", "chosen": "2", "rejected": "2"}, "both answers have the same tokens"),
        ({"prompt": "1", "chosen": "2" * 200, "rejected": "2"}, "answer .* 2.. tokens, more than data.max_length=64"),
    ],
)
def test_a_wrong_row_is_named(row: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "pairs.parquet", [row])
    with pytest.raises(UserError, match=f"data.train_files: row 0 of {path}.*{message}"):
        load_pairs([path], tiny_tokenizer(), PreferenceDataConfig(max_length=64), option="data.train_files")


def test_a_pair_without_a_margin_has_the_margin_0(tmp_path: Path) -> None:
    """In parquet, it has a null."""
    row = {"data": {"prompt": "1"}, "chosen": "2", "rejected": "3"}
    options = PreferenceDataConfig(prompt_key="data.prompt")
    for name in ("rows.parquet", "rows.jsonl"):
        file = write(tmp_path / name, [row | {"margin": 0.5}, row])
        pairs = load_pairs([file], tiny_tokenizer(), options, option="data.train_files")
        assert [pair.margin for pair in pairs] == [0.5, 0]


def test_a_long_pair_is_left_out_and_never_cut(tmp_path: Path) -> None:
    rows = [{"prompt": "1", "chosen": "2" * 200, "rejected": "2"}, {"prompt": "1", "chosen": "2", "rejected": "3"}]
    path, tokenizer = write(tmp_path / "pairs.parquet", rows), tiny_tokenizer()

    def load(truncation: str, rows: int = 64) -> list[Pair]:
        config = PreferenceDataConfig(max_length=rows, truncation=truncation)
        return load_pairs([path], tokenizer, config, option="data.train_files")

    assert len(load("drop")) == 1
    with pytest.raises(UserError, match="no pairs are left"):
        load("drop", 8)


def test_the_command_answers_wrong_settings_in_one_message(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "pairs.parquet", [{"prompt": "1", "chosen": "2", "rejected": "3"}])
    given = [f"model.path={model}", f"data.train_files={path}", f"trainer.default_local_dir={tmp_path}/rm"]
    for wrong, message in {
        "data.train_files=null": "data.train_files and model.path: give",
        "loss.center_rewards_coefficient=-1": "loss.center_rewards_coefficient=-1.0: a finite number, at least 0",
        "data.score_at=middle": "data.score_at=middle is not known; known: end_of_text, end_of_turn",
        "data.truncation=right": "data.truncation=right is not known; known: drop, error",
        "data.train_max_samples=0": "data.train_max_samples=0: -1 (all) or at least 1 is expected",
        "data.max_token_len_per_gpu=20": "data.max_token_len_per_gpu=20: the longest row has ",
        "loss.center_reward_coefficient=1": "did you mean loss.center_rewards_coefficient",
    }.items():
        assert main_rm.main([*given, wrong]) == 2
        assert message in capsys.readouterr().err
    tiny_reward_model(tmp_path / "two_labels", labels=2)
    assert main_rm.main([*given, f"model.path={tmp_path}/two_labels", "trainer.device=cpu"]) == 2
    assert "a sequence-classification model with 2 labels" in capsys.readouterr().err


def pairs_of(number: int) -> list[dict[str, str]]:
    """Digits, of which the larger one is the better answer."""
    rng = np.random.default_rng(0)
    drawn = [sorted(rng.choice(10, 2, replace=False)) for _ in range(number)]
    return [{"prompt": "larger" * (row % 3), "chosen": str(b), "rejected": str(a)} for row, (a, b) in enumerate(drawn)]


def config_of(model: str, folder: Path, **data: Any) -> RewardTrainingConfig:
    train, val = (write(folder / f"{name}.parquet", rows) for name, rows in (("t", pairs_of(96)), ("v", pairs_of(20))))
    return RewardTrainingConfig(
        data=PreferenceDataConfig(train_files=[train], val_files=[val], train_batch_size=20, **data),
        model=NetworkConfig(path=model, enable_gradient_checkpointing=False),
        optim=OptimConfig(lr=5e-3),
        loss=RewardLossConfig(center_rewards_coefficient=0.01),
        trainer=SFTTrainerConfig(
            total_epochs=5, default_local_dir=str(folder / "rm"), device="cpu", logger=["jsonl"], val_before_train=False
        ),
    )


def test_a_run_learns_and_leaves_what_transformers_reads_as_it_was_measured(model: str, tmp_path: Path) -> None:
    config = config_of(model, tmp_path)
    folder, result = train_within(RewardTrainingJob, config, lambda line: None)
    log = [json.loads(line)["data"] for line in (tmp_path / "rm" / "metrics.jsonl").read_text().splitlines()]
    assert log[0]["train/loss"] == pytest.approx(math.log(2)), "a head of zeros prefers nothing"
    assert result.after["val/accuracy"] > 0.8 and log[-2]["val/margin"] == result.after["val/margin"] > 0.5

    network = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    losses, margins = [], []
    for row in pairs_of(20):
        scores = []
        for answer in (row["chosen"], row["rejected"]):
            chat = [{"role": "user", "content": row["prompt"]}]
            text = (
                tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) + f"{answer}<|im_end|>"
            )
            with torch.no_grad():
                scores.append(network(**tokenizer(text, return_tensors="pt")).logits.item())
        margins.append(scores[0] - scores[1])
        losses.append(math.log(1 + math.exp(-margins[-1])) + 0.01 * sum(scores) ** 2)
    assert result.after["val/loss"] == pytest.approx(np.mean(losses), rel=1e-4)
    assert result.after["val/margin"] == pytest.approx(np.mean(margins), rel=1e-4)
    assert result.after["val/accuracy"] == np.mean(np.array(margins) > 0)
    again = config_of(str(folder), tmp_path)
    again.trainer.total_training_steps, again.trainer.default_local_dir = 1, str(tmp_path / "again")
    _, more = train_within(RewardTrainingJob, again, lambda line: None)
    assert more.loss < 0.6, "training goes on from a reward model"


def learnt(model: str, budget: int, packed: bool, world: int) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    """`three_steps` of a reward model."""
    config = RewardTrainingConfig(
        model=NetworkConfig(path=model, enable_gradient_checkpointing=False, use_remove_padding=packed),
        optim=OptimConfig(lr=1e-2, eps=1e-2),
        loss=RewardLossConfig(center_rewards_coefficient=0.01),
        trainer=SFTTrainerConfig(device="cpu"),
    )
    return three_steps(RewardTrainingWorker(config, 3), budget, world)


def three_steps(
    worker: SupervisedWorker, budget: int, world: int
) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    """Metrics of three steps of 7 pairs, and the weights after them, of this rank's part of a plan for `world`."""
    rank, tokenizer, keys = torch.distributed.get_rank() if world > 1 else 0, tiny_tokenizer(), PreferenceDataConfig()
    worker.init_model()
    pairs = [
        Pair(*(encode_answer(chat, tokenizer, "end_of_turn", "row") for chat in read_pair(row, keys, "row")))
        for row in pairs_of(21)
    ]
    logged = []
    for step in range(3):
        rows = pairs[7 * step : 7 * step + 7]
        plan = plan_batch(
            [len(row) for row in rows], world_size=world, mini_batch_size=None, max_token_len=budget, num_tokens=[1] * 7
        )
        data = plan.apply(collate_pairs(rows, pad_token_id=0)).chunk(world)[rank]
        found = worker.train(data).meta_info["metrics"]
        logged.append({name: value for name, value in found.items() if not name.startswith("perf/")})  # memory
    return logged, {name: tensor.clone().numpy() for name, tensor in worker.engine.full_params()}


@pytest.mark.slow
def test_neither_micro_batches_nor_packing_nor_ranks_change_what_is_learnt(model: str, two_ranks: OnRanks) -> None:
    metrics, reference = learnt(model, 10_000, True, 1)
    start = {name: tensor.numpy() for name, tensor in AutoModelForSequenceClassification.from_pretrained(
        model, num_labels=1).named_parameters() for tensor in [tensor.detach()]}  # fmt: skip
    assert max(np.abs(reference[name] - start[name]).max() for name in start if name != "score.weight") > 1e-3
    for budget, packed in ((75, True), (10_000, False)):
        found, weights = learnt(model, budget, packed, 1)
        assert_same(weights, reference)
        assert [values(step) for step in found] == [pytest.approx(values(step), rel=1e-3) for step in metrics]
    for _, weights in (parts := two_ranks(learnt, model, 75, True, 2)):
        assert_same(weights, reference)
    together = [values(combine([rank[0][step] for rank in parts])) for step in range(3)]
    assert together == [pytest.approx(values(step), rel=1e-3) for step in metrics]


def assert_same(weights: dict[str, np.ndarray], reference: dict[str, np.ndarray]) -> None:
    assert weights.keys() == reference.keys()
    assert max(np.abs(weights[name] - reference[name]).max() for name in reference) < 1e-5
