"""The critic's engine and its loss for the tests of values: what runs on each rank. Cases are those of
`engine_cases`."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForTokenClassification

from tests.workers.engine_cases import CPU, RESPONSE, Batch, Case, planned, ragged_batch
from verl_lite.config import ActorConfig, CriticConfig, CriticOptimConfig, FSDPConfig, NetworkConfig, WrapPolicyConfig
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


value_loss = partial(
    critic_loss, critic=CriticConfig(cliprange_value=CLIP, loss_agg_mode="token-mean"), actor=ActorConfig()
)


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


def values_of(path: str, batch: Batch, case: Case) -> np.ndarray:
    """This rank's values in planned order."""
    data, _ = planned(critic_batch(batch), case)
    return build_critic(path, case).infer(data)["values"].numpy()


def trained_critic(path: str, batch: Batch, case: Case, steps: int, save: str = "", load: str = "") -> dict[str, Any]:
    """Parameters and metrics after some training steps of two mini-batches each; loads first and saves last where
    asked to."""
    engine = build_critic(path, case)
    if load:
        engine.load(load)
    data, _ = planned(critic_batch(batch), case, mini_batch_size=4)
    metrics = [engine.train(data, value_loss, epochs=1) for _ in range(steps)]
    if save:
        engine.save(save)
    parameters = {name: tensor.clone().numpy() for name, tensor in engine.full_params(bucket_bytes=40_000)}
    return {"parameters": parameters, "metrics": [{k: asdict(v) for k, v in m.items()} for m in metrics]}
