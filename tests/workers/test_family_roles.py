"""Every family beyond the plain policy: adapters, critics, reward models, and what is exported of them; those that need
care are not left to `make test-long`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification

from tests.tiny_model import tiny_tokenizer
from tests.workers.critic_cases import critic_batch, value_loss
from tests.workers.engine_cases import PROMPT, Batch, Case, build_engine, loss_fn, planned, ragged_batch
from tests.workers.model_families import FAMILIES, VOCAB, tiny_config, tiny_network
from trainer.supervised.reward_training import pair_loss
from verl_lite.config import OptimConfig
from verl_lite.errors import UserError
from workers.engine.checkpoint import export
from workers.engine.network import blocks_named
from workers.policy.sequence_score import new_sequence_score, scored_rows, sequence_score
from workers.policy.value_head import value_head

QUICK = ("falcon_h1", "mamba", "zamba2", "bloom", "deepseek_v32")
QUICK_HEADS = ("gemma2", "qwen3_next", "zamba2", "bloom", "mamba")


def families(quick: tuple[str, ...]) -> Any:
    """One case for each family, of which those are part of `make test`."""
    return pytest.mark.parametrize(
        "family", [pytest.param(name, marks=() if name in quick else pytest.mark.long) for name in FAMILIES]
    )


BATCH = Batch(rows=6, shared_prompts=3)
OPTIM = OptimConfig(lr=1e-3)
REFUSED = {
    ("gpt2", 2): "c_attn is no torch.nn.Linear",
    ("deepseek_v32", 0): "chooses tokens, and no gradient of the policy reaches it",
}
"""By family and rank of the adapter."""
ARGUMENTS: dict[str, Any] = {"temperature": 1.0, "calculate_entropy": True}


@pytest.fixture(autouse=True)
def process_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def saved(family: str, folder: Path) -> str:
    """The family's tiny network and a tokenizer as a folder."""
    tiny_network(family).save_pretrained(folder)
    tiny_tokenizer(VOCAB).save_pretrained(folder)
    return str(folder)


def log_probs(network: Any) -> torch.Tensor:
    """Of the batch's answers, by transformers' own forward of one row at a time (b, R)."""
    columns, rows = ragged_batch(BATCH).batch, []
    network.set_attn_implementation("eager")
    for row in range(BATCH.rows):
        real = columns["attention_mask"][row].bool()
        ids = columns["input_ids"][row][real]
        with torch.no_grad():
            logits = network(ids.unsqueeze(0), use_cache=False).logits[0]
        at_width = torch.zeros(columns["input_ids"].shape[1])
        at_width[real.nonzero()[1:, 0]] = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
        rows.append(at_width[PROMPT:])
    return torch.stack(rows) * columns["response_mask"]


def of_engine(engine: Any) -> torch.Tensor:
    """The same by the engine, in the batch's order."""
    data, plan = planned(ragged_batch(BATCH), Case())
    found = engine.infer(data, temperature=1.0, calculate_entropy=False)["log_probs"]
    rows = torch.zeros(BATCH.rows, found.shape[1])
    rows[plan.order[~plan.is_padding]] = found[~plan.is_padding]
    return rows


@pytest.mark.parametrize("lora_rank", [0, 2], ids=["all weights", "adapter"])
@families(QUICK)
def test_what_was_trained_and_exported_is_what_is_loaded(family: str, lora_rank: int, tmp_path: Path) -> None:
    path = saved(family, tmp_path / "base")
    model = {"lora_rank": lora_rank, "lora_alpha": 4, "target_modules": ["all-linear"]} if lora_rank else {}
    if refusal := REFUSED.get((family, lora_rank)):
        with pytest.raises(UserError, match=refusal):
            build_engine(path, Case(), OPTIM, model=model)
        return
    engine = build_engine(path, Case(), OPTIM, model=model)
    before = of_engine(engine)
    torch.testing.assert_close(before, log_probs(AutoModelForCausalLM.from_pretrained(path)), rtol=0, atol=2e-5)
    data, _ = planned(ragged_batch(BATCH), Case())
    for _ in range(3):  # an adapter's second matrix leaves 0 with the first step
        engine.train(data, loss_fn, epochs=1, **ARGUMENTS)
    trained = of_engine(engine)
    assert (trained - before).abs().max() > 1e-4
    engine.save(str(tmp_path / "saved"))
    export(str(tmp_path / "saved"), str(tmp_path / "hf"))
    torch.testing.assert_close(
        log_probs(AutoModelForCausalLM.from_pretrained(tmp_path / "hf")), trained, rtol=0, atol=5e-5
    )


@families(QUICK_HEADS)
def test_a_critic_s_values_are_those_of_transformers_or_it_is_refused(family: str, tmp_path: Path) -> None:
    path = saved(family, tmp_path / "base")
    if type(tiny_config(family)) not in AutoModelForTokenClassification._model_mapping:
        with pytest.raises(UserError, match=f"no ForTokenClassification network of the family {family}"):
            build_engine(path, Case(), OPTIM, value_head)
        return
    engine = build_engine(path, Case(), OPTIM, value_head)
    data, plan = planned(critic_batch(BATCH), Case())
    assert not engine.infer(data)["values"].any()
    for _ in range(2):
        engine.train(data, value_loss, epochs=1)
    found = engine.infer(data)["values"]
    engine.save(str(tmp_path / "saved"))
    export(str(tmp_path / "saved"), str(tmp_path / "hf"))
    network = AutoModelForTokenClassification.from_pretrained(tmp_path / "hf", attn_implementation="eager")
    columns = critic_batch(BATCH).batch
    assert found.abs().max() > 1e-4
    for place, row in enumerate(plan.order):
        real = columns["attention_mask"][row].bool()
        with torch.no_grad():
            values = network(columns["input_ids"][row][real].unsqueeze(0)).logits[0, :, 0]
        at_width = torch.zeros(columns["input_ids"].shape[1])
        at_width[real.nonzero()[1:, 0]] = values[:-1]
        expected = at_width[PROMPT:] * columns["response_mask"][row]
        torch.testing.assert_close(found[place], expected, rtol=0, atol=5e-5)


@families(QUICK_HEADS)
def test_a_reward_model_s_scores_are_those_of_transformers_or_it_is_refused(family: str, tmp_path: Path) -> None:
    path = saved(family, tmp_path / "base")
    if type(tiny_config(family)) not in AutoModelForSequenceClassification._model_mapping:
        with pytest.raises(UserError, match=f"no ForSequenceClassification network of the family {family}"):
            build_engine(path, Case(), OPTIM, new_sequence_score)
        return
    engine = build_engine(path, Case(), OptimConfig(lr=1e-2), new_sequence_score)
    data, plan = planned(ragged_batch(BATCH), Case())
    data.batch.update(scored_rows(data.batch, pad_token_id=0))
    assert not engine.infer(data)["scores"].any(), "a new head is zeros"
    for _ in range(2):  # the backbone learns from the second step on, when the head has left 0
        engine.train(data, partial(pair_loss, center_coefficient=0.1), epochs=1)
    found = engine.infer(data)["scores"].sum(1)
    engine.save(str(tmp_path / "saved"))
    export(str(tmp_path / "saved"), str(tmp_path / "hf"))
    network = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf", attn_implementation="eager")
    columns = ragged_batch(BATCH).batch
    expected = torch.zeros(BATCH.rows)
    for place, row in enumerate(plan.order):
        if columns["response_mask"][row].any():
            ids = columns["input_ids"][row][columns["attention_mask"][row].bool()]
            with torch.no_grad():
                expected[place] = network(ids.unsqueeze(0)).logits[0, 0]
    assert found.abs().max() > 0.1
    torch.testing.assert_close(found, expected, rtol=0, atol=5e-5)
    judge = build_engine(str(tmp_path / "hf"), Case(), None, sequence_score)
    torch.testing.assert_close(judge.infer(data)["scores"].sum(1), expected, rtol=0, atol=5e-5)


class Block(nn.Module):
    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.own, self.shared = nn.Linear(2, 2), shared


def test_a_block_that_holds_or_shares_another_is_not_cut() -> None:
    inner = blocks_named(tiny_network("mamba"), {"MambaBlock", "MambaMixer"})
    assert {type(block).__name__ for block in inner} == {"MambaBlock"}
    shared, alone = nn.Linear(2, 2), Block(nn.Linear(2, 2))
    network = nn.ModuleList([Block(shared), alone, Block(shared)])
    assert blocks_named(network, {"Block"}) == [alone]
