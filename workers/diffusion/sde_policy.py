"""A flow-matching model as a policy: its denoising steps are actions with log-probabilities (`verl_lite.flow_sde`).

As the engine's network it takes rows with a prompt and does one of two things. Sampling: from each row's seeds to
frames, with the path and the log-probability of each of its T steps. Judging: the log-probabilities (b, T) of stored
paths under the weights of now, with gradient, and in closed form their KL to the model that training began with. From
there on a path is what an answer of T tokens is: the same losses, metrics, optimizer steps and checkpoints
(`workers.losses`, `workers.update`, `workers.engine`) with response_mask 1 on all steps.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from verl_lite.config.flow_grpo import FlowGRPOConfig, FlowModelConfig
from verl_lite.errors import UserError
from verl_lite.flow_match import flow_sigmas
from verl_lite.flow_sde import step_kl, step_log_prob, step_mean, step_std
from verl_lite.protocol import DataProto
from verl_lite.registry import Registry
from verl_lite.single_controller.decorator import Dispatch, register
from workers.diffusion.lora import add_adapter
from workers.diffusion.reward_policy import noise_of
from workers.engine.network import BuildArguments, EngineNetwork, NetworkBuilder, blocks_named
from workers.losses import actor_loss
from workers.policy.adapter import adapter_off
from workers.training_worker import TrainingWorker

if TYPE_CHECKING:
    from peft import LoraConfig


REFERENCE = "reference."
"""Before the names of the frozen copy that a KL compares with."""


class FlowNetwork(Protocol):
    """What `model.network` names: an nn.Module with a classmethod from_pretrained(folder).

    latent_shape: of one sample. Linear layers may get an adapter; modules of the classes in _no_split_modules, if there
    is such a list, are sharded one by one.
    """

    latent_shape: tuple[int, ...]

    def encode(self, prompts: Sequence[str]) -> torch.Tensor:
        """Conditions (n, ...) on the CPU or the network's device. No gradient goes through it."""

    def __call__(self, latents: torch.Tensor, sigma: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        """Velocity x_1 - x_0 towards noise: latents (n, *latent_shape) in the compute dtype, sigma (n,) fp32."""

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Frames (n, F, 3, H, W) in [0, 1] of latents; an image has F = 1."""


class SDEPolicy(EngineNetwork):
    """The policy. reference: the model that the KL compares with, where that is not the model without its adapter."""

    prefix = "model."

    def __init__(
        self, model: nn.Module, config: FlowGRPOConfig, compute_dtype: torch.dtype, adapter: LoraConfig | None = None
    ) -> None:
        super().__init__()
        self.adapter = adapter
        self.model: Any = model
        self.compute_dtype, self.shift = compute_dtype, config.sampler.shift
        self.reference: Any = None
        if config.actor.use_kl_loss and adapter is None:
            self.reference = copy.deepcopy(model).requires_grad_(False)

    def blocks(self) -> list[nn.Module]:
        """Modules of the classes that the network declares as not to be split."""
        return blocks_named(self, set(getattr(self.model, "_no_split_modules", None) or ()))

    def prepare_inputs(self, micro_batch: DataProto, device: torch.device) -> tuple[DataProto, bool]:
        """The micro-batch itself: prompt, first_seed, path_seed; latents (b, T + 1, *latent_shape) fp32 and
        response_mask where stored paths are to be judged."""
        batch = micro_batch.batch
        return micro_batch, "latents" not in batch.keys() or bool(batch["response_mask"].any())

    def save_assets(self, path: str) -> None:
        """Nothing: `FlowActorWorker.export` writes what others read."""

    def forward(self, rows: DataProto, *, steps: int, noise_level: float, with_kl: bool = False) -> dict[str, Any]:
        """Outputs by name: see `sample` and `judge`, one of which is done. steps: T."""
        sigmas = flow_sigmas(steps, self.shift)
        with torch.no_grad():
            condition = self.model.encode([str(prompt) for prompt in rows.non_tensor_batch["prompt"]])
        condition = condition.to(next(self.model.parameters()).device)
        if "latents" not in rows.batch.keys():
            return self.sample(rows, condition, sigmas, noise_level)
        return self.judge(rows.batch["latents"], condition, sigmas, noise_level, with_kl)

    @torch.no_grad()
    def sample(
        self, rows: DataProto, condition: torch.Tensor, sigmas: list[float], noise_level: float
    ) -> dict[str, torch.Tensor]:
        """frames (b, F, 3, H, W); with noise also latents (b, T + 1, *latent_shape) and log_probs (b, T).

        Noise comes from each row's own seeds, on the CPU: it depends on neither ranks nor micro-batches nor device.
        """
        shape, device = tuple(self.model.latent_shape), condition.device
        x = noise_of(rows.batch["first_seed"].tolist(), shape, device)
        noise = noise_of(rows.batch["path_seed"].tolist(), (len(sigmas) - 1, *shape), device)
        path, log_probs = [x], []
        for step, (sigma, sigma_next) in enumerate(pairwise(sigmas)):
            velocity = self.model(x.to(self.compute_dtype), x.new_full((len(x),), sigma), condition).float()
            mean = step_mean(x, velocity, sigma, sigma_next, noise_level)
            std = step_std(sigma, sigma_next, noise_level)
            x = mean + std * noise[:, step]
            path.append(x)
            if noise_level > 0:
                log_probs.append(step_log_prob(x, mean, std))
        frames = {"frames": self.model.decode(x.to(self.compute_dtype)).float()}
        if not log_probs:
            return frames
        return frames | {"latents": torch.stack(path, dim=1), "log_probs": torch.stack(log_probs, dim=1)}

    def judge(
        self, latents: torch.Tensor, condition: torch.Tensor, sigmas: list[float], noise_level: float, with_kl: bool
    ) -> dict[str, torch.Tensor]:
        """log_probs (b, T) of stored paths, with gradient; with_kl: also kl (b, T) to the reference, with gradient."""
        stds, others = [step_std(*pair, noise_level) for pair in pairwise(sigmas)], []
        if with_kl:
            other = self.model if self.reference is None else self.reference
            with torch.no_grad(), adapter_off(self.model) if other is self.model else nullcontext():
                others = self._means(other, latents, condition, sigmas, noise_level)
        own = self._means(self.model, latents, condition, sigmas, noise_level)
        log_probs = [step_log_prob(latents[:, t + 1], own[t], std) for t, std in enumerate(stds)]
        outputs = {"log_probs": torch.stack(log_probs, dim=1)}
        if with_kl:
            outputs["kl"] = torch.stack([step_kl(own[t], others[t], std) for t, std in enumerate(stds)], dim=1)
        return outputs

    def _means(
        self, model: Any, latents: torch.Tensor, condition: torch.Tensor, sigmas: list[float], noise_level: float
    ) -> list[torch.Tensor]:
        """Means (b, *latent_shape) of the T steps from the stored latents, by one call of the network: none of them
        has another one's state as its input."""
        count, steps = len(latents), len(sigmas) - 1
        inputs = latents[:, :-1].flatten(0, 1).to(self.compute_dtype)
        sigma_of_rows = torch.tensor(sigmas[:-1], device=latents.device).repeat(count)
        found = model(inputs, sigma_of_rows, condition.repeat_interleave(steps, dim=0)).float()
        velocities = found.unflatten(0, (count, steps)).unbind(1)
        return [step_mean(latents[:, t], velocities[t], *pair, noise_level) for t, pair in enumerate(pairwise(sigmas))]


def sde_policy(config: FlowGRPOConfig) -> NetworkBuilder:
    """The engine's network: `model.network` from `model.path`, with an adapter where model.lora_rank asks for one.

    Raises UserError as `load_network` and `add_adapter` do.
    """

    def build(arguments: BuildArguments) -> SDEPolicy:
        model = load_network(config.model)
        if not config.model.lora_rank:
            return SDEPolicy(model.to(arguments.dtype), config, arguments.compute_dtype)
        adapter = add_adapter(model.to(arguments.compute_dtype), config.model)
        return SDEPolicy(model, config, arguments.compute_dtype, adapter)

    return build


def load_network(options: FlowModelConfig) -> nn.Module:
    """The `FlowNetwork` that model.network names, read from model.path.

    Raises UserError if there is no such class or folder, or the class has not what `FlowNetwork` asks for.
    """
    name = f"model.network={options.network!r}"
    try:
        found: Any = Registry[Any]("network").get_fn(str(options.network))
    except ValueError as error:
        raise UserError(f"{name}: {error}") from None
    missing = [part for part in ("from_pretrained", "latent_shape", "encode", "decode") if not hasattr(found, part)]
    if missing or not Path(str(options.path)).is_dir():
        raise UserError(
            f"{name}, model.path={options.path!r}: expected a folder and a class with latent_shape, encode, decode, "
            f"forward(latents, sigma, condition) and from_pretrained(folder); missing: {missing or 'the folder'}"
        )
    network = found.from_pretrained(options.path)
    assert isinstance(network, nn.Module)
    return network


class FlowActorWorker(TrainingWorker):
    """One rank of the policy. The engine that learns is the one that samples, so nothing is ever out of date."""

    config: FlowGRPOConfig

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Builds the engine."""
        self.build_engine(sde_policy(self.config), self.config.actor.fsdp_config, self.config.actor.optim)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def generate(self, data: DataProto) -> DataProto:
        """One sample for each row of a planned batch: frames (B, F, 3, H, W) in [0, 1] and, with noise on the way,
        latents (B, T + 1, ...) and old_log_probs (B, T).

        Reads prompt, first_seed, path_seed; meta_info steps and noise_level.
        """
        self.phases.enter(self.engine)
        outputs = self.engine.infer(data, steps=data.meta_info["steps"], noise_level=data.meta_info["noise_level"])
        if "log_probs" in outputs:
            outputs["old_log_probs"] = outputs.pop("log_probs")
        return DataProto.from_dict(tensors=outputs)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def update_actor(self, data: DataProto) -> DataProto:
        """Trains on a planned batch of paths, one optimizer step per mini-batch. Gives actor/* metrics in meta_info.

        Reads what `generate` read and latents, response_mask, advantages; old_log_probs where there are several
        optimizer steps.
        """
        self.phases.enter(self.engine)
        sampler, actor = self.config.sampler, self.config.actor
        metrics = self.engine.train(
            data,
            lambda part, outputs: actor_loss(part, outputs, actor),
            steps=sampler.num_train_steps,
            noise_level=sampler.noise_level,
            with_kl=actor.use_kl_loss,
        )
        return DataProto(meta_info={"metrics": {f"actor/{name}": metric for name, metric in metrics.items()}})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def export(self, path: str) -> None:
        """Writes the network of now, an adapter merged into it, by its own save_pretrained into the folder `path`."""
        weights = {n: value.cpu() for n, value in self.engine.full_params() if not n.startswith(REFERENCE)}
        if dist.get_rank() == 0:
            network = load_network(self.config.model)
            network.load_state_dict(weights)
            network.save_pretrained(path)  # type: ignore[operator]
        dist.barrier()
