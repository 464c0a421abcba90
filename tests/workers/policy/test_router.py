"""Routers of mixtures of experts: what they choose is seen in every family, and the loss that balances their load."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny_experts import tiny_experts
from tests.tiny_model import tiny_qwen2
from tests.workers.engine_cases import (
    PROMPT,
    TEMPERATURE,
    Batch,
    Case,
    build_engine,
    gradient_of,
    ragged_batch,
    relative_error,
)
from tests.workers.ranks import Ranks
from verl_lite.config import ActorConfig, ModelConfig
from verl_lite.errors import UserError
from verl_lite.metrics import Metric
from verl_lite.protocol import DataProto
from workers.losses import actor_loss
from workers.policy.causal_lm import causal_lm
from workers.policy.router import Routers, Routes, check_routers, load_balancing_loss

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_moe": {},
    "qwen3_moe": {"norm_topk_prob": True},
    "mixtral": {"router_jitter_noise": 0.1},
    "olmoe": {},
    "gpt_oss": {},
    "deepseek_v2": {"first_k_dense_replace": 1, "q_lora_rank": 16},
    "deepseek_v3": {"first_k_dense_replace": 0, "head_dim": 64, "n_group": 4, "topk_group": 2},
    "glm4_moe": {"first_k_dense_replace": 0},
    "minimax_m2": {},
    "granitemoe": {},
    "hunyuan_v1_moe": {},
}
"""One of each way to score, to weigh and to name."""
COEFFICIENT = 0.3
CASES = [
    Case(),
    Case(micro_batch_size=1),
    Case(max_token_len=33, row_order_seed=1),
    Case(packed=False, micro_batch_size=2, row_order_seed=2),
    Case(checkpointing=True, max_token_len=40),
    Case(max_token_len=20, reshard_after_forward=False, checkpointing=True),
]
BATCH = Batch(rows=8, shared_prompts=4, failed_rows=(2, 5))


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_experts(tmp_path_factory.mktemp("experts"))


def watch_experts(model: torch.nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What the experts of each layer will be called with beside the hidden states, in its order of arguments."""
    given: list[tuple[torch.Tensor, torch.Tensor]] = []
    for module in model.modules():
        if type(module).__name__.endswith("Experts"):
            module.register_forward_pre_hook(lambda _, arguments: given.append(arguments[1:3]))
    return given


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_seen_is_what_the_experts_get(family: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_experts(tmp_path, family, **FAMILIES[family]))
    given, routers = watch_experts(model), Routers(model)
    with routers.watched() as routes, torch.no_grad():
        model(torch.randint(3, 60, (2, 9)))
    assert len(routes) == len(given) > 0
    for layer, (indices, _) in zip(routes, given, strict=True):
        assert torch.equal(layer.experts, indices.view(layer.experts.shape)) and layer.scores.shape == (18, 8)


class Inputs(SimpleNamespace):
    """The part of `ModelInputs` that the loss reads, without sequence parallelism."""

    def __init__(self, token_index: torch.Tensor) -> None:
        super().__init__(token_index=token_index, total=lambda values: values)


def test_the_loss_by_hand() -> None:
    """Two sequences of one layer with four experts, of which each token takes two."""
    scores = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4], [2.0, 2.0, 0.0, 0.0]])
    chosen = torch.tensor([[0, 1], [3, 2], [0, 1]])
    inputs = Inputs(torch.tensor([[-1, 0, 1], [2, -1, -1], [-1, -1, -1]]))
    # even: f = 1 and P = 1/4 for each; the other sequence: f = 2 and P = 1/2 for two experts
    found = load_balancing_loss([Routes(scores, False, chosen)] * 2, inputs)
    torch.testing.assert_close(found, torch.tensor([1.0, 2.0, 0.0]))
    logits = load_balancing_loss([Routes((scores[:2] * 3).log(), True, chosen[:2])], Inputs(inputs.token_index[:1]))
    torch.testing.assert_close(logits, torch.tensor([1.0]))


def plain_gradient(path: str, batch: Batch) -> dict[str, np.ndarray]:
    """By transformers, one row at a time, with its own router logits."""
    model, data = AutoModelForCausalLM.from_pretrained(path), ragged_batch(batch)
    columns, losses, counting = data.batch, [], data.batch["response_mask"].any(1)
    tokens, k = int(columns["response_mask"].sum()), model.config.num_experts_per_tok
    for row in counting.nonzero().flatten().tolist():
        real = columns["attention_mask"][row].bool()
        ids, prompt = columns["input_ids"][row][real], int(real[:PROMPT].sum())
        outputs = model(ids[None], output_router_logits=True)
        log_probs = (outputs.logits[0, prompt - 1 : -1] / TEMPERATURE).log_softmax(-1)
        taken = log_probs.gather(1, ids[prompt:, None])[:, 0]
        length = len(taken)
        mask, advantages = columns["response_mask"][row, :length], columns["advantages"][row, :length]
        losses.append(-(taken * advantages * mask).sum() / tokens)
        for logits in outputs.router_logits:
            probability = logits[:-1].float().softmax(-1)  # the last token predicts nothing
            load = torch.nn.functional.one_hot(probability.topk(k).indices, logits.shape[1]).sum(1).float()
            unevenness = (load.mean(0) * probability.mean(0)).sum() * logits.shape[1] / k
            losses.append(COEFFICIENT * unevenness / len(outputs.router_logits) / counting.sum())
    sum(losses).backward()  # type: ignore[union-attr]
    return {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}


def loss_fn(data: DataProto, outputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, Metric]]:
    return actor_loss(data, outputs, ActorConfig(router_aux_loss_coef=COEFFICIENT))


def gradients(path: str, batch: Batch, cases: list[Case]) -> list[dict[str, np.ndarray]]:
    """Of one optimizer step by the engine; runs on each rank."""
    found = []
    for case in cases:
        engine = build_engine(path, case, build_policy=causal_lm(16, with_routers=True))
        more = {"temperature": TEMPERATURE, "calculate_entropy": False, "calculate_router_aux_loss": True}
        found.append(gradient_of(engine, ragged_batch(batch), case, loss_fn, **more))
    return found


@pytest.mark.slow
def test_the_gradient_does_not_depend_on_the_cut(experts: str, ranks: Ranks) -> None:
    expected = plain_gradient(experts, BATCH)
    on_two = ranks.run(gradients, experts, BATCH, CASES[1:5], size=2)
    for found in (*gradients(experts, BATCH, CASES), *on_two[0], *on_two[1]):
        assert relative_error(found, expected) < 1e-5


def test_the_metric_is_the_mean_over_sequences() -> None:
    mask = torch.tensor([[1, 1], [1, 0]])
    data = DataProto.from_dict({"response_mask": mask, "advantages": torch.zeros(2, 2)})
    outputs = {"log_probs": torch.zeros(2, 2), "router_aux_loss": torch.tensor([1.0, 2.0])}
    loss, metrics = actor_loss(data, outputs, ActorConfig(router_aux_loss_coef=0.5))
    assert (float(loss), metrics["router_aux_loss"].value) == (0.75, 1.5)


def test_what_cannot_be_balanced_is_refused(tmp_path: Path) -> None:
    key = "actor.router_aux_loss_coef=0.1"
    dense, experts = tiny_qwen2(tmp_path / "dense"), tiny_experts(tmp_path / "experts")
    otherwise = tiny_experts(tmp_path / "otherwise", "phimoe")
    for path, told in ((dense, "Qwen2ForCausalLM has no experts"), (otherwise, "PhimoeForCausalLM: its routers")):
        with pytest.raises(UserError, match=f"{key} with model.path=.*{told}.*remove the option"):
            check_routers(ModelConfig(path=path), [key])
    check_routers(ModelConfig(path=experts), [key])
    for entry in ("output_router_logits", "router_aux_loss_coef"):
        with pytest.raises(UserError, match=f"override_config.{entry}=1.*actor.router_aux_loss_coef"):
            check_routers(ModelConfig(path=experts, override_config={entry: 1}), [])


def test_there_is_no_noise_before_routers(tmp_path: Path) -> None:
    """Mixtral's jitter is for training from scratch: a policy gradient needs the policy that sampled."""
    path = tiny_experts(tmp_path, "mixtral", router_jitter_noise=0.1)
    once, again = gradients(path, Batch(rows=3), [Case(), Case()])
    assert all(np.array_equal(again[name], value) for name, value in once.items())
