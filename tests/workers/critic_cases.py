"""The critic's engine and its losses for the tests of values: what runs on each rank. Cases are those of
`engine_cases`."""

from __future__ import annotations

from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForTokenClassification

from tests.workers.engine_cases import CPU, RESPONSE, Batch, Case, planned, ragged_batch
from verl_lite.config import ActorConfig, CriticConfig, CriticOptimConfig, FSDPConfig, NetworkConfig, WrapPolicyConfig
from verl_lite.metrics import Metric
from verl_lite.protocol import DataProto
from workers.engine.fsdp import FSDPEngine
from workers.losses import critic_loss
from workers.policy.loading import token_network
from workers.policy.value_head import value_head

CLIP = 0.5


def write_critic(language_model: str, folder: Path) -> str:
    """A saved value network whose head is random, so that values are far from 0 and the backbone has gradients."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        network = AutoModelForTokenClassification.from_pretrained(language_model, num_labels=1)
        network.score.bias.data.fill_(0.3)
    network.save_pretrained(folder)
    return str(folder)


def critic_batch(batch: Batch) -> DataProto:
    """`ragged_batch` with values of before the update and returns."""
    data = ragged_batch(batch)
    generator = np.random.default_rng(batch.seed + 100)
    for name in ("values", "returns"):
        data.batch[name] = torch.from_numpy(generator.standard_normal((batch.rows, RESPONSE)).astype(np.float32))
    return data


def by_micro_batch(data: DataProto, outputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, Metric]]:
    """Wrong on purpose: the value loss divided by the tokens of the micro-batch at hand."""
    mask = data.batch["response_mask"]
    square = (outputs["values"] - data.batch["returns"]).square()
    return 0.5 * (square * mask).sum() / mask.sum().clamp(min=1), {}


def loss_named(name: str) -> Any:
    """A value loss by its aggregation mode, or `by_micro_batch`."""
    if name == "by_micro_batch":
        return by_micro_batch
    return partial(critic_loss, critic=CriticConfig(cliprange_value=CLIP, loss_agg_mode=name), actor=ActorConfig())


def build_critic(path: str, case: Case, lr: float = 1e-3, schedule: str = "cosine") -> FSDPEngine:
    return FSDPEngine(
        token_network(
            NetworkConfig(path=path, use_remove_padding=case.packed, enable_gradient_checkpointing=case.checkpointing),
            value_head,
        ),
        FSDPConfig(
            fsdp_size=case.fsdp_size,
            reshard_after_forward=case.reshard_after_forward,
            wrap_policy=WrapPolicyConfig(min_num_params=case.min_num_params),
        ),
        CriticOptimConfig(lr=lr, eps=1e-3, lr_warmup_steps=3, lr_scheduler_type=schedule),
        device=CPU,
        total_training_steps=10,
        seed=0,
    )


@cache
def _critic_of(path: str, *how: Any) -> FSDPEngine:
    packed, checkpointing, min_num_params, fsdp_size, reshard = how
    return build_critic(path, Case(packed, checkpointing, None, None, min_num_params, fsdp_size, reshard))


def _critic(path: str, case: Case) -> FSDPEngine:
    """One engine for all cases that differ in the plan only."""
    how = (case.packed, case.checkpointing, case.min_num_params, case.fsdp_size, case.reshard_after_forward)
    return _critic_of(path, *how)


def value_gradient(path: str, batch: Batch, case: Case, loss: str) -> dict[str, np.ndarray]:
    """The whole gradient of one optimizer step, by parameter; the parameters stay as they are."""
    engine = _critic(path, case)
    data, _ = planned(critic_batch(batch), case)
    captured: dict[str, np.ndarray] = {}

    def capture(lr: float) -> dict[str, Metric]:
        captured.update({name: value.grad.full_tensor().numpy() for name, value in engine.parameters.items()})
        engine.optimizer.zero_grad()
        return {}

    engine.optimizer.step = capture
    engine.train(data, loss_named(loss), epochs=1)
    return captured


def value_gradients(path: str, batch: Batch, cases: list[Case], loss: str) -> list[dict[str, np.ndarray]]:
    return [value_gradient(path, batch, case, loss) for case in cases]


def values_of(path: str, batch: Batch, case: Case) -> np.ndarray:
    """This rank's values in planned order."""
    data, _ = planned(critic_batch(batch), case)
    return _critic(path, case).infer(data)["values"].numpy()


def trained_critic(path: str, batch: Batch, case: Case, steps: int, save: str = "", load: str = "") -> dict[str, Any]:
    """Parameters and metrics after some training steps of two mini-batches each; loads first and saves last where
    asked to."""
    engine = build_critic(path, case)
    if load:
        engine.load(load)
    data, _ = planned(critic_batch(batch), case, mini_batch_size=4)
    metrics = [engine.train(data, loss_named("token-mean"), epochs=1) for _ in range(steps)]
    if save:
        engine.save(save)
    parameters = {name: tensor.clone().numpy() for name, tensor in engine.full_params(bucket_bytes=40_000)}
    return {"parameters": parameters, "metrics": [{k: asdict(v) for k, v in m.items()} for m in metrics]}
