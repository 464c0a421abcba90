"""A flow network of a few hundred weights, batches of paths on it, and what runs on each rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.workers.engine_cases import CPU, rank_and_world
from verl_lite.config import WrapPolicyConfig
from verl_lite.config.flow_grpo import FlowGRPOConfig
from verl_lite.metrics import Metric
from verl_lite.protocol import DataProto
from verl_lite.seqlen_balance import BatchPlan, plan_batch
from workers.diffusion.sde_policy import REFERENCE, sde_policy
from workers.engine.fsdp import FSDPEngine
from workers.losses import actor_loss

NETWORK = "tests.workers.diffusion.sde_cases:TinyField"
STEPS, LEVEL = 3, 0.7
PROMPTS = ("one", "two", "three")


class TinyBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class TinyField(nn.Module):
    """Latents of 2 x 2 x 2; the condition is the length of the prompt."""

    latent_shape = (2, 2, 2)
    _no_split_modules = ("TinyBlock",)

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.block, self.outer = nn.Linear(10, 16), TinyBlock(), nn.Linear(16, 8)

    @classmethod
    def from_pretrained(cls, folder: str) -> TinyField:
        network = cls()
        network.load_state_dict(torch.load(Path(folder) / "weights.pt"))
        return network

    def save_pretrained(self, folder: str) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        torch.save(self.state_dict(), Path(folder) / "weights.pt")

    def encode(self, prompts: Sequence[str]) -> torch.Tensor:
        return torch.tensor([[float(len(prompt))] for prompt in prompts])

    def forward(self, latents: torch.Tensor, sigma: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        x = torch.cat([latents.flatten(1), sigma[:, None].to(latents), condition.to(latents)], dim=1)
        return self.outer(self.block(self.inner(x))).view_as(latents)

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(latents.mean(1, keepdim=True)).expand(-1, 3, -1, -1).unsqueeze(1)


def write_field(folder: Path) -> str:
    torch.manual_seed(0)
    TinyField().save_pretrained(str(folder))
    return str(folder)


def config_of(path: str, **model: Any) -> FlowGRPOConfig:
    """lr and eps: large, so that an update by Adam is no division of rounding errors by rounding errors."""
    config = FlowGRPOConfig()
    config.model.path, config.model.network = path, NETWORK
    for name, value in model.items():
        setattr(config.model, name, value)
    config.sampler.num_train_steps, config.sampler.noise_level = STEPS, LEVEL
    config.actor.optim.lr, config.actor.optim.eps = 1e-2, 1e-3
    config.actor.fsdp_config.wrap_policy = WrapPolicyConfig(min_num_params=0)
    return config


def engine_of(config: FlowGRPOConfig) -> FSDPEngine:
    return FSDPEngine(
        sde_policy(config), config.actor.fsdp_config, config.actor.optim, device=CPU, total_training_steps=10, seed=0
    )


def network_weights(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    """As `FlowActorWorker.export` writes them."""
    return {name: value.clone() for name, value in engine.full_params() if not name.startswith(REFERENCE)}


def seeds_of(rows: int) -> DataProto:
    return DataProto.from_dict(
        tensors={"first_seed": torch.arange(rows), "path_seed": torch.arange(rows) + 100},
        non_tensors={"prompt": np.array([PROMPTS[row % 3] for row in range(rows)], dtype=object)},
    )


def planned(data: DataProto, micro_batch_size: int | None = None, mini_batch_size: int | None = None) -> DataProto:
    """This rank's part of the planned batch, as the dispatch would send it."""
    rank, world = rank_and_world()
    return plan_of(data, world, micro_batch_size, mini_batch_size).apply(data).chunk(world)[rank]


def plan_of(
    data: DataProto, world: int = 1, micro_batch_size: int | None = None, mini_batch_size: int | None = None
) -> BatchPlan:
    ones = np.ones(len(data), dtype=np.int64)
    mask = data.batch.get("response_mask", torch.ones(len(data), STEPS))
    return plan_batch(
        ones,
        world_size=world,
        mini_batch_size=mini_batch_size,
        micro_batch_size=micro_batch_size,
        num_tokens=mask.sum(1).long().numpy(),
    )


def inferred(
    engine: FSDPEngine, data: DataProto, micro_batch_size: int | None = None, **arguments: Any
) -> dict[str, torch.Tensor]:
    """The engine's outputs in the order of the rows, by one rank."""
    plan = plan_of(data, 1, micro_batch_size)
    outputs = engine.infer(plan.apply(data), **arguments)
    restored = plan.restore(DataProto.from_dict(outputs))
    return {name: restored.batch[name] for name in outputs}


def paths_of(path: str, rows: int) -> DataProto:
    """Sampled paths with random advantages, one row failed; the same on every rank."""
    torch.manual_seed(1)
    data = seeds_of(rows)
    policy = engine_of(config_of(path)).policy
    inputs, _ = policy.prepare_inputs(data, CPU)
    with torch.no_grad():
        outputs = policy(inputs, steps=STEPS, noise_level=LEVEL)
    mask = torch.ones(rows, STEPS, dtype=torch.long)
    mask[1] = 0
    return data | DataProto.from_dict(
        {
            "latents": outputs["latents"],
            "old_log_probs": outputs["log_probs"],
            "response_mask": mask,
            "advantages": torch.randn(rows, 1).expand(rows, STEPS).contiguous(),
        }
    )


def train(engine: FSDPEngine, config: FlowGRPOConfig, data: DataProto) -> dict[str, Metric]:
    """One call with the actor's loss."""
    arguments: dict[str, Any] = {"steps": STEPS, "noise_level": LEVEL, "with_kl": config.actor.use_kl_loss}
    return engine.train(data, lambda part, outputs: actor_loss(part, outputs, config.actor), **arguments)


def update(path: str, rows: int, micro_batch_size: int | None, steps: int = 2, **options: Any) -> dict[str, Any]:
    """Weights and metrics after `steps` calls of train with two mini-batches each. options: of actor, by name."""
    model = {name: options.pop(name) for name in ("lora_rank",) if name in options}
    config = config_of(path, **model)
    for name, value in options.items():
        setattr(config.actor, name, value)
    data = paths_of(path, rows)
    engine = engine_of(config)
    for _ in range(steps):
        found = train(engine, config, planned(data, micro_batch_size, mini_batch_size=rows // 2))
    weights = {name: value.numpy() for name, value in network_weights(engine).items()}
    return {"weights": weights, "metrics": {name: metric.value for name, metric in found.items()}}
