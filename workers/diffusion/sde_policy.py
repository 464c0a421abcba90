"""A flow-matching model as a policy: its denoising steps are actions with log-probabilities (`verl_lite.flow_sde`).

As the engine's network it takes rows with a prompt and does one of two things. Sampling: from each row's seeds to
frames, with the path and the log-probability of each of its T steps. Judging: the log-probabilities (b, T) of stored
paths under the weights of now, with gradient, and in closed form their KL to the model that training began with. From
there on a path is what an answer of T tokens is: the same losses, the same update.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from verl_lite.config.flow_grpo import FlowGRPOConfig, FlowModelConfig
from verl_lite.errors import UserError
from verl_lite.flow_match import flow_sigmas
from verl_lite.flow_sde import step_kl, step_log_prob, step_mean, step_std
from verl_lite.protocol import DataProto
from verl_lite.registry import find_entry
from workers.diffusion.lora import add_adapter
from workers.diffusion.memory import checkpointed_step
from workers.diffusion.reward_policy import noise_of
from workers.engine.network import BuildArguments, EngineNetwork, NetworkBuilder, blocks_named
from workers.policy.adapter import adapter_off

if TYPE_CHECKING:
    from peft import LoraConfig

    from workers.engine.fsdp import FSDPEngine


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


@dataclass(frozen=True)
class FlowRows:
    """One micro-batch. latents (b, T + 1, *latent_shape) fp32 are stored paths, None = sample them from the seeds."""

    prompts: list[str]
    first_seeds: list[int]
    path_seeds: list[int]
    latents: torch.Tensor | None


class SDEPolicy(EngineNetwork):
    """The policy. reference: the model that the KL compares with, where that is not the model without its adapter."""

    prefix = "model."

    def __init__(
        self,
        model: nn.Module,
        config: FlowGRPOConfig,
        compute_dtype: torch.dtype,
        adapter: LoraConfig | None = None,
    ) -> None:
        super().__init__()
        self.adapter = adapter
        self.model: Any = model
        self.compute_dtype, self.sampler = compute_dtype, config.sampler
        self.checkpoint_steps = config.model.checkpoint_steps
        self.reference: Any = None
        if config.actor.use_kl_loss and adapter is None:
            self.reference = copy.deepcopy(model).requires_grad_(False)

    def blocks(self) -> list[nn.Module]:
        """Modules of the classes that the network declares as not to be split."""
        return blocks_named(self, set(getattr(self.model, "_no_split_modules", None) or ()))

    def arrange(self, micro_batch: DataProto, device: torch.device) -> tuple[FlowRows, bool]:
        """Reads prompt, first_seed, path_seed; latents and response_mask where paths are to be judged."""
        batch = micro_batch.batch
        latents = batch["latents"].to(device) if "latents" in batch.keys() else None
        rows = FlowRows(
            [str(prompt) for prompt in micro_batch.non_tensor_batch["prompt"]],
            batch["first_seed"].tolist(),
            batch["path_seed"].tolist(),
            latents,
        )
        return rows, latents is None or bool(batch["response_mask"].any())

    def save_assets(self, path: str) -> None:
        """Nothing: `FlowActorWorker.export` writes what others read."""

    def forward(self, rows: FlowRows, *, steps: int, noise_level: float, with_kl: bool = False) -> dict[str, Any]:
        """Outputs by name: see `sample` and `judge`, one of which is done. steps: T."""
        sigmas = flow_sigmas(steps, self.sampler.shift)
        with torch.no_grad():
            condition = self.model.encode(rows.prompts)
        if rows.latents is None:
            return self.sample(rows, condition, sigmas, noise_level)
        return self.judge(rows.latents, condition.to(rows.latents.device), sigmas, noise_level, with_kl)

    @torch.no_grad()
    def sample(
        self, rows: FlowRows, condition: torch.Tensor, sigmas: list[float], noise_level: float
    ) -> dict[str, torch.Tensor]:
        """frames (b, F, 3, H, W); with noise also latents (b, T + 1, *latent_shape) and log_probs (b, T).

        Noise comes from each row's own seeds, on the CPU: it depends on neither ranks nor micro-batches nor device.
        """
        shape, device = tuple(self.model.latent_shape), next(self.model.parameters()).device
        x = noise_of(rows.first_seeds, shape, device)
        noise = noise_of(rows.path_seeds, (len(sigmas) - 1, *shape), device)
        condition = condition.to(device)
        path, log_probs = [x], []
        for step, (sigma, sigma_next) in enumerate(pairwise(sigmas)):
            mean = step_mean(x, self.velocity(self.model, x, sigma, condition), sigma, sigma_next, noise_level)
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
        stds = [step_std(*pair, noise_level) for pair in pairwise(sigmas)]
        others = self._reference_means(latents, condition, sigmas, noise_level) if with_kl else []
        own = self._means(self.model, latents, condition, sigmas, noise_level)
        log_probs = [step_log_prob(latents[:, t + 1], own[t], std) for t, std in enumerate(stds)]
        outputs = {"log_probs": torch.stack(log_probs, dim=1)}
        if with_kl:
            outputs["kl"] = torch.stack([step_kl(own[t], others[t], std) for t, std in enumerate(stds)], dim=1)
        return outputs

    def velocity(self, model: Any, x: torch.Tensor, sigma: float, condition: torch.Tensor) -> torch.Tensor:
        """v (n, *latent_shape) fp32 at one sigma."""
        sigma_of_rows = torch.full((len(x),), sigma, device=x.device)
        return model(x.to(self.compute_dtype), sigma_of_rows, condition).float()

    @torch.no_grad()
    def _reference_means(
        self, latents: torch.Tensor, condition: torch.Tensor, sigmas: list[float], noise_level: float
    ) -> list[torch.Tensor]:
        if self.reference is not None:
            return self._means(self.reference, latents, condition, sigmas, noise_level)
        with adapter_off(self.model):
            return self._means(self.model, latents, condition, sigmas, noise_level)

    def _means(
        self, model: Any, latents: torch.Tensor, condition: torch.Tensor, sigmas: list[float], noise_level: float
    ) -> list[torch.Tensor]:
        """Means (b, *latent_shape) of the T steps from the stored latents."""
        if self.checkpoint_steps:
            velocity = checkpointed_step(self.velocity, True)
            velocities = [velocity(model, latents[:, t], sigma, condition) for t, sigma in enumerate(sigmas[:-1])]
        else:
            velocities = self._all_velocities(model, latents, condition, sigmas)
        return [step_mean(latents[:, t], velocities[t], *pair, noise_level) for t, pair in enumerate(pairwise(sigmas))]

    def _all_velocities(
        self, model: Any, latents: torch.Tensor, condition: torch.Tensor, sigmas: list[float]
    ) -> list[torch.Tensor]:
        """All steps in one call of the network, which knows of none that another one's state is its input."""
        count, steps = len(latents), len(sigmas) - 1
        inputs = latents[:, :-1].flatten(0, 1).to(self.compute_dtype)
        sigma_of_rows = torch.tensor(sigmas[:-1], device=latents.device).repeat(count)
        found = model(inputs, sigma_of_rows, condition.repeat_interleave(steps, dim=0)).float()
        return list(found.unflatten(0, (count, steps)).unbind(1))


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
    try:
        found: Any = find_entry({}, "network", str(options.network))
    except ValueError as error:
        raise UserError(f"model.network={options.network!r}: {error}") from None
    missing = [name for name in ("from_pretrained", "latent_shape", "encode", "decode") if not hasattr(found, name)]
    if missing:
        raise UserError(
            f"model.network={options.network!r} has no {', '.join(missing)}; a flow network has latent_shape, encode, "
            "decode, forward(latents, sigma, condition) and from_pretrained(folder)"
        )
    if not Path(str(options.path)).is_dir():
        raise UserError(f"model.path={options.path!r}: there is no such folder")
    network = found.from_pretrained(options.path)
    assert isinstance(network, nn.Module)
    return network


def network_weights(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    """The network's weights under its own names, an adapter merged into them; all ranks call it."""
    return {name: value for name, value in engine.full_params() if not name.startswith(REFERENCE)}
