"""Forward, losses and sampler on tensors without data, as they run on a GPU: all that is made is made on the device of
the arguments, and the host asks for no number. On such tensors either is an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from tests.workers.engine_cases import Batch, ragged_batch
from verl_lite.config import ActorConfig, CriticConfig, PolicyLossConfig
from verl_lite.core_algos import POLICY_LOSS_REGISTRY, get_policy_loss
from verl_lite.protocol import DataProto
from workers.engine import packed_attention
from workers.engine.packed_attention import PACKED_ATTENTION
from workers.engine.packing import pack
from workers.engines.sampling import Truncation, sample
from workers.losses import actor_loss, critic_loss
from workers.policy import causal_lm, output_layer
from workers.policy.causal_lm import CausalLMPolicy

ROWS, WIDTH = 6, 10
META = torch.device("meta")


def drawn(*names: str, **options: Any) -> dict[str, torch.Tensor]:
    return {name: torch.randn(ROWS, WIDTH, device=META, **options) for name in names}


def batch(**columns: torch.Tensor) -> DataProto:
    columns["response_mask"] = torch.ones(ROWS, WIDTH, dtype=torch.long, device=META)
    totals = {"num_tokens": ROWS * WIDTH, "num_sequences": ROWS}
    return DataProto.from_dict(columns, meta_info=totals)


def learn(loss: torch.Tensor, outputs: dict[str, torch.Tensor]) -> None:
    loss.backward()
    assert loss.device == META and any(value.grad is not None for value in outputs.values())


@pytest.mark.parametrize("mode", sorted(POLICY_LOSS_REGISTRY))
def test_policy_losses(mode: str) -> None:
    columns = drawn("advantages", "old_log_probs", "rollout_log_probs", "ref_log_prob")
    optional = {"selected": torch.ones(ROWS, WIDTH).bool().to(META), "scores": torch.randn(ROWS, device=META)}
    columns |= {name: value for name, value in optional.items() if name in get_policy_loss(mode).columns}
    outputs = drawn("log_probs", "entropys", requires_grad=True)
    outputs["router_aux_loss"] = torch.rand(ROWS, device=META, requires_grad=True)
    outputs["router_replay"] = torch.ones(ROWS, 2, device=META)
    options = PolicyLossConfig(loss_mode=mode, dro_beta=0.5)
    config = ActorConfig(use_kl_loss=True, entropy_coeff=0.01, router_aux_loss_coef=0.01, policy_loss=options)
    learn(actor_loss(batch(**columns), outputs, config)[0], outputs)


def test_the_critics_loss() -> None:
    outputs = drawn("values", requires_grad=True)
    learn(critic_loss(batch(**drawn("values", "returns")), outputs, CriticConfig(), ActorConfig())[0], outputs)


def test_forward_and_backward_through_the_kernels_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a bf16 model with grouped heads, prompts shared."""
    monkeypatch.setattr(packed_attention, "_sdpa_runs", packed_attention._varlen_attention)  # what CUDA takes
    monkeypatch.setattr(packed_attention, "_flash_attn_varlen", lambda: None)
    monkeypatch.setattr(output_layer, "has_wide_products", lambda device: True)
    monkeypatch.setattr(output_layer, "KEPT_LOGITS_BYTES", 0)
    monkeypatch.setattr(causal_lm, "logit_transform", lambda model: output_layer.PLAIN_LOGITS)  # needs real numbers
    packed = pack(ragged_batch(Batch(rows=ROWS, shared_prompts=3)).batch)
    assert packed.sequences is not None and packed.sequences.expand is not None
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}
    with META:
        model = AutoModelForCausalLM.from_config(
            Qwen2Config(hidden_size=256, **sizes), dtype=torch.bfloat16, attn_implementation=PACKED_ATTENTION
        )
    outputs = CausalLMPolicy(model, 16)(packed.to(META), 0.7, True)
    assert all(value.device == META and value.dtype == torch.float32 for value in outputs.values())
    torch.stack([value.sum() for value in outputs.values()]).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_sampler() -> None:
    whole, part = torch.ones(ROWS, dtype=torch.long, device=META), torch.rand(ROWS, device=META)
    options = {"temperature": part, "seeds": whole, "positions": whole, "truncation": Truncation(whole, part, part)}
    found = sample(torch.randn(ROWS, 32, device=META), **options, num_candidates=4)
    assert [each.device for each in found] == [META] * 3


@pytest.mark.parametrize(
    "mistake",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: bool(x.any()),
        lambda x: x + torch.ones(4),
    ],
    ids=["item", "tolist", "bool index", "nonzero", "bool", "tensor of the host"],
)
def test_each_mistake_is_an_error(mistake: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        mistake(torch.randn(4, device=META))
