"""Every family beyond the plain policy: adapters, critics, reward models, and what is exported of them; those that need
care are not left to `make test-long`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from tests.tiny_model import tiny_tokenizer
from tests.workers.critic_cases import critic_batch, value_loss
from tests.workers.engine_cases import TEMPERATURE, Batch, Case, build_engine, in_order, loss_fn, planned, ragged_batch
from tests.workers.invariance import CRITIC, POLICY, Network, single_rows
from tests.workers.model_families import DELTA_RULE, FAMILIES, VOCAB, give_kernels, tiny_config, tiny_network
from verl_lite.config import OptimConfig
from verl_lite.errors import UserError
from verl_lite.protocol import DataProto
from workers.engine.fsdp import FSDPEngine
from workers.engine.network import blocks_named
from workers.policy.export import export
from workers.policy.sequence_score import new_sequence_score, scored_rows, sequence_score
from workers.policy.value_head import value_head
from workers.supervised.reward_model import pair_loss

QUICK = ("falcon_h1", "mamba", "zamba2", "bloom", "deepseek_v32")
QUICK_HEADS = ("gemma2", "qwen3_next", "zamba2", "bloom", "mamba", "qwen3_5_moe_text", "deepseek_v32")


def families(quick: tuple[str, ...]) -> Any:
    """One case for each family, of which those are part of `make test`."""
    return pytest.mark.parametrize(
        "family", [pytest.param(name, marks=() if name in quick else pytest.mark.long) for name in FAMILIES]
    )


BATCH = Batch(rows=6, shared_prompts=3)
OPTIM = OptimConfig(lr=1e-3)
REFUSED = {
    ("gpt2", 2): "c_attn is not a torch.nn.Linear",
    ("deepseek_v32", 0): "selects tokens and gets no gradient from the policy",
}
"""By family and rank of the adapter."""
ARGUMENTS: dict[str, Any] = {"temperature": TEMPERATURE, "calculate_entropy": True}


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


def loaded(auto_class: Any, folder: object) -> Any:
    """What transformers loads; where it has only the decoder, this and a product with the saved head."""
    network = auto_class.from_pretrained(folder, attn_implementation="eager").eval()
    if not hasattr(transformers, type(network).__name__):

        def forward(ids: torch.Tensor) -> SimpleNamespace:
            logits = F.linear(network.base_model(ids).last_hidden_state, network.score.weight, network.score.bias)
            return SimpleNamespace(logits=logits if auto_class is AutoModelForTokenClassification else logits[:, -1])

        network.forward = forward
    return network


@torch.no_grad()
def by_transformers(auto_class: Any, folder: object, network: Network, data: DataProto) -> torch.Tensor:
    """Log-probs or values of the batch's answers (b, R), one row at a time."""
    outputs = single_rows(loaded(auto_class, folder), network, data)
    return outputs["values" if network is CRITIC else "log_probs"]


def by_engine(engine: FSDPEngine, data: DataProto, name: str, **arguments: Any) -> torch.Tensor:
    """An output in the batch's order."""
    part, plan = planned(data, Case())
    return torch.from_numpy(in_order(engine.infer(part, **arguments)[name].numpy(), plan))


def elsewhere(auto_class: Any, family: str) -> bool:
    """Whether transformers by itself has a network of the kind, whatever this process has made known to it."""
    return tiny_config(family).model_type in auto_class._model_mapping._model_mapping


def exported(engine: FSDPEngine, folder: Path) -> Path:
    """The folder of Hugging Face that a checkpoint of it becomes."""
    engine.save(str(folder / "saved"))
    export(str(folder / "saved"), str(folder / "hf"))
    return folder / "hf"


@pytest.mark.slow
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
    whole = ragged_batch(BATCH)
    before = by_engine(engine, whole, "log_probs", **ARGUMENTS)
    expected = by_transformers(AutoModelForCausalLM, path, POLICY, whole)
    torch.testing.assert_close(before, expected, rtol=0, atol=2e-5)
    data, _ = planned(whole, Case())
    for _ in range(3):  # an adapter's second matrix leaves 0 with the first step
        engine.train(data, loss_fn, **ARGUMENTS)
    trained = by_engine(engine, whole, "log_probs", **ARGUMENTS)
    assert (trained - before).abs().max() > 1e-4
    found = by_transformers(AutoModelForCausalLM, exported(engine, tmp_path), POLICY, whole)
    torch.testing.assert_close(found, trained, rtol=0, atol=5e-5)


@families(QUICK_HEADS)
def test_a_critic_s_values_are_those_of_transformers(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(family, tmp_path / "base")
    if refusal := REFUSED.get((family, 0)):
        with pytest.raises(UserError, match=refusal):
            build_engine(path, Case(), OPTIM, value_head)
        return
    engine = build_engine(path, Case(), OPTIM, value_head)
    whole = critic_batch(BATCH)
    assert not by_engine(engine, whole, "values").any()
    for _ in range(2):
        engine.train(planned(whole, Case())[0], value_loss)
    found = by_engine(engine, whole, "values")
    assert found.abs().max() > 1e-4
    folder = exported(engine, tmp_path)
    expected = by_transformers(AutoModelForTokenClassification, folder, CRITIC, whole)
    torch.testing.assert_close(found, expected, rtol=0, atol=5e-5)
    torch.testing.assert_close(by_engine(build_engine(str(folder), Case(), None, value_head), whole, "values"), found)
    is_known = elsewhere(AutoModelForTokenClassification, family)
    assert ("only this project can load" in capsys.readouterr().out) is not is_known


@families(QUICK_HEADS)
def test_a_reward_model_s_scores_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    path = saved(family, tmp_path / "base")
    if refusal := REFUSED.get((family, 0)):
        with pytest.raises(UserError, match=refusal):
            build_engine(path, Case(), OPTIM, new_sequence_score)
        return
    engine = build_engine(path, Case(), OptimConfig(lr=1e-2), new_sequence_score)
    data, plan = planned(ragged_batch(BATCH), Case())
    data.batch.update(scored_rows(data.batch, pad_token_id=0))
    data.batch["margin"] = torch.zeros(len(data))
    assert not engine.infer(data)["scores"].any(), "a new head is zeros"
    for _ in range(2):  # the backbone learns from the second step on, when the head has left 0
        engine.train(data, partial(pair_loss, center_coefficient=0.1))
    found = engine.infer(data)["scores"].sum(1)
    folder = exported(engine, tmp_path)
    network = loaded(AutoModelForSequenceClassification, folder)
    columns = ragged_batch(BATCH).batch
    expected = torch.zeros(BATCH.rows)
    for place, row in enumerate(plan.order):
        if columns["response_mask"][row].any():
            ids = columns["input_ids"][row][columns["attention_mask"][row].bool()]
            with torch.no_grad():
                expected[place] = network(ids.unsqueeze(0)).logits[0, 0]
    assert found.abs().max() > 0.1
    torch.testing.assert_close(found, expected, rtol=0, atol=5e-5)
    judge = build_engine(str(folder), Case(), None, sequence_score)
    torch.testing.assert_close(judge.infer(data)["scores"].sum(1), expected, rtol=0, atol=5e-5)


@pytest.mark.parametrize(("kind", "keeps_images"), [("qwen3_5_moe", False), ("gemma4", True)])
def test_of_a_model_with_images_the_text_is_trained(kind: str, keeps_images: bool, tmp_path: Path) -> None:
    """Where transformers has a causal network of its text, that alone; else beside the others, which stay."""
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "num_hidden_layers": 1}
    text = tiny_config(f"{kind}_text")
    whole = CONFIG_MAPPING[kind](text_config=text.to_dict(), vision_config=vision | {"num_attention_heads": 2})
    whole.vision_config.out_hidden_size = text.hidden_size
    AutoModelForImageTextToText.from_config(whole).save_pretrained(tmp_path)
    tiny_tokenizer(VOCAB).save_pretrained(tmp_path)
    data = critic_batch(BATCH)
    policy = build_engine(str(tmp_path), Case(), OPTIM)
    before = {name: value.clone() for name, value in policy.full_params()}
    policy.train(planned(data, Case())[0], loss_fn, **ARGUMENTS)
    kept = [name for name, value in policy.full_params() if torch.equal(value, before[name])]
    assert any("vision" in name for name in kept) is keeps_images
    assert not any("self_attn" in name or "experts" in name for name in kept if "vision" not in name)
    folder = exported(policy, tmp_path / "policy")
    found = by_engine(policy, data, "log_probs", **ARGUMENTS)
    torch.testing.assert_close(found, by_transformers(AutoModelForCausalLM, folder, POLICY, data), rtol=0, atol=5e-5)
    critic = build_engine(str(tmp_path), Case(), OPTIM, value_head)
    for _ in range(2):
        critic.train(planned(data, Case())[0], value_loss)
    values = by_engine(critic, data, "values")
    again = build_engine(str(exported(critic, tmp_path / "critic")), Case(), None, value_head)
    assert values.any() and torch.equal(by_engine(again, data, "values"), values)


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


def test_kernels_that_keep_to_borders_give_the_same_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under FSDP and activation checkpointing; also where training has other kernels, which do not, than inference."""
    path, case = saved("qwen3_next", tmp_path), Case(checkpointing=True, micro_batch_size=3)
    one, data = (planned(ragged_batch(Batch(rows=rows)), case)[0] for rows in (1, 7))
    expected = build_engine(path, case).train(data, loss_fn, **ARGUMENTS)["grad_norm"].value
    for late in (0, 1):
        give_kernels("qwen3_next", DELTA_RULE, monkeypatch)
        engine = build_engine(path, case)
        capsys.readouterr()
        engine.infer(one, **ARGUMENTS)
        assert "is called" not in capsys.readouterr().out, "one sequence shows nothing"
        engine.infer(data, **ARGUMENTS)
        assert "is called once" in capsys.readouterr().out
        give_kernels("qwen3_next", DELTA_RULE, monkeypatch, late)
        assert engine.train(data, loss_fn, **ARGUMENTS)["grad_norm"].value == pytest.approx(expected, rel=1e-5)
        monkeypatch.undo()
