"""The critic's engine and its loss for the tests of values: what runs on each rank. Cases are those of
`engine_cases`."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForTokenClassification

from tests.workers.engine_cases import RESPONSE, Batch, Case, build_engine, ragged_batch
from verl_lite.config import ActorConfig, CriticConfig, CriticOptimConfig
from verl_lite.protocol import DataProto
from workers.engine.fsdp import FSDPEngine
from workers.losses import critic_loss
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


def build_critic(path: str, case: Case) -> FSDPEngine:
    optim = CriticOptimConfig(lr=1e-3, eps=1e-3, lr_warmup_steps=3, lr_scheduler_type="cosine")
    return build_engine(path, case, optim, value_head)
