"""A flow-matching model as a policy: its denoising steps are actions with log-probabilities
(`verl_lite.diffusion.flow_sde`).

As the engine's network it takes rows with a prompt and has two modes. `sample` turns each row's seeds into frames and
returns the path and the log-probability of each of its T steps. `judge` computes the log-probabilities (b, T) of stored
paths under the current weights, with gradient, and their closed-form KL to the initial model. A path is then handled
like a response of T tokens whose response_mask is 1 on all steps: losses, metrics, optimizer steps and checkpoints
are those of language models (`workers.losses`, `workers.engine.update`, `workers.engine`).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from verl_lite.config.flow_grpo import FlowGRPOConfig, FlowModelConfig
from verl_lite.diffusion.flow_match import flow_sigmas
from verl_lite.diffusion.flow_sde import step_kl, step_log_prob, step_mean, step_std
from verl_lite.errors import UserError
from verl_lite.protocol import DataProto
from verl_lite.registry import Registry
from verl_lite.single_controller.decorator import Dispatch, register
from workers.diffusion.lora import add_adapter
from workers.diffusion.reward_policy import noise_of
from workers.engine.lora import adapter_off
from workers.engine.network import BuildArguments, EngineNetwork, NetworkBuilder, block_classes, blocks_named
from workers.losses import actor_loss
from workers.roles.training_worker import TrainingWorker

if TYPE_CHECKING:
    from peft import LoraConfig


REFERENCE = "reference."
"""Prefix of the parameter names of the frozen reference model."""


class FlowNetwork(Protocol):
    """Interface of the class in `model.network`: an nn.Module with a classmethod from_pretrained(folder).

    Its linear layers can get an adapter. Modules of the classes in its optional list `_no_split_modules` are sharded
    one by one.

    latent_shape: shape of the latents of one sample.
    """

    latent_shape: tuple[int, ...]

    def encode(self, prompts: Sequence[str]) -> torch.Tensor:
        """Returns conditions (n, ...) on the CPU or the network's device. Called without gradient."""

    def __call__(self, latents: torch.Tensor, sigma: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        """Returns the velocity x_1 - x_0 from data to noise, in the shape of the latents.

        Args:
            latents: (n, *latent_shape), in the compute dtype.
            sigma: (n,), fp32.
            condition: result of `encode` for the n samples.
        """

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Decodes latents into frames (n, F, 3, H, W) in [0, 1]; an image has F = 1."""


class SDEPolicy(EngineNetwork):
    """The trained flow-matching model, with the initial model as the reference of a KL loss.

    With a KL loss and no adapter it holds a frozen copy of the initial model as `reference`. With an adapter, the
    reference of the KL is the model with its adapter disabled.
    """

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
        self.compute_dtype = compute_dtype
        self.shift = config.sampler.shift
        self.reference: Any = None
        # the base model under an adapter is the initial model, and needs no copy
        if config.actor.use_kl_loss and adapter is None:
            self.reference = copy.deepcopy(model).requires_grad_(False)

    def blocks(self) -> list[nn.Module]:
        """Returns the modules of the classes in the network's `_no_split_modules`."""
        return blocks_named(self, block_classes(self.model))

    def prepare_inputs(self, micro_batch: DataProto, device: torch.device) -> tuple[DataProto, bool]:
        """Returns the micro-batch unchanged, and False if all its rows are masked.

        Args:
            micro_batch: columns prompt, first_seed and path_seed; for stored paths also latents
                (b, T + 1, *latent_shape) in fp32 and response_mask.
            device: not used; `forward` moves what it needs.
        """
        batch = micro_batch.batch
        # rows without a stored path are sampled, and a masked row counts nothing
        if "latents" not in batch.keys():
            return micro_batch, True
        is_counting = bool(batch["response_mask"].any())
        return micro_batch, is_counting

    def save_assets(self, path: str) -> None:
        """Does nothing: `FlowActorWorker.export` writes the files for other programs."""

    def forward(
        self,
        rows: DataProto,
        *,
        steps: int,
        noise_level: float,
        with_kl: bool = False,
    ) -> dict[str, torch.Tensor]:
        """Returns the outputs of `judge` if the rows have latents, else those of `sample`.

        Args:
            rows: result of `prepare_inputs`.
            steps: T, the number of denoising steps.
            noise_level: strength of the noise in a step; 0 samples with the ODE.
            with_kl: whether `judge` also computes the KL to the reference.
        """
        sigmas = flow_sigmas(steps, self.shift)
        prompts = [str(prompt) for prompt in rows.non_tensor_batch["prompt"]]
        with torch.no_grad():
            host_condition = self.model.encode(prompts)
        device = next(self.model.parameters()).device
        condition = host_condition.to(device)
        if "latents" not in rows.batch.keys():
            return self.sample(rows, condition, sigmas, noise_level)
        return self.judge(rows.batch["latents"], condition, sigmas, noise_level, with_kl)

    @torch.no_grad()
    def sample(
        self,
        rows: DataProto,
        condition: torch.Tensor,
        sigmas: list[float],
        noise_level: float,
    ) -> dict[str, torch.Tensor]:
        """Returns frames (b, F, 3, H, W); with noise also latents (b, T + 1, *latent_shape) and log_probs (b, T).

        Noise is drawn on the CPU from each row's seeds, so it depends on neither ranks, micro-batches nor device.

        Args:
            rows: columns first_seed (start of the path) and path_seed (noise of the steps).
            condition: (b, ...) conditions of the prompts.
            sigmas: T + 1 noise levels from 1 to 0.
            noise_level: strength of the noise in a step.
        """
        shape = tuple(self.model.latent_shape)
        steps = len(sigmas) - 1
        first_seeds = rows.batch["first_seed"].tolist()
        path_seeds = rows.batch["path_seed"].tolist()
        x = noise_of(first_seeds, shape, condition.device)
        noise = noise_of(path_seeds, (steps, *shape), condition.device)

        path = [x]
        log_probs = []
        for step, (sigma, sigma_next) in enumerate(pairwise(sigmas)):
            sigma_of_rows = x.new_full((len(x),), sigma)
            # only the network computes in compute_dtype, because rounding errors of the steps would accumulate
            inputs = x.to(self.compute_dtype)
            velocity = self.model(inputs, sigma_of_rows, condition).float()
            mean = step_mean(x, velocity, sigma, sigma_next, noise_level)
            std = step_std(sigma, sigma_next, noise_level)
            x = mean + std * noise[:, step]
            path.append(x)
            # without noise a step is deterministic and has no density
            if noise_level > 0:
                log_probs.append(step_log_prob(x, mean, std))

        frames = self.model.decode(x.to(self.compute_dtype))
        outputs = {"frames": frames.float()}
        if log_probs:
            outputs["latents"] = torch.stack(path, dim=1)
            outputs["log_probs"] = torch.stack(log_probs, dim=1)
        return outputs

    def judge(
        self,
        latents: torch.Tensor,
        condition: torch.Tensor,
        sigmas: list[float],
        noise_level: float,
        with_kl: bool,
    ) -> dict[str, torch.Tensor]:
        """Returns log_probs (b, T) of stored paths and, if with_kl, their kl (b, T) to the reference; with gradient."""
        # the reference first: it runs without gradient, and the policy's activations do not exist yet
        reference_means: list[torch.Tensor] = []
        if with_kl:
            reference_means = self._reference_means(latents, condition, sigmas, noise_level)
        means = self._means(self.model, latents, condition, sigmas, noise_level)

        log_probs = []
        kl = []
        for step, (sigma, sigma_next) in enumerate(pairwise(sigmas)):
            std = step_std(sigma, sigma_next, noise_level)
            next_latents = latents[:, step + 1]
            log_probs.append(step_log_prob(next_latents, means[step], std))
            if with_kl:
                kl.append(step_kl(means[step], reference_means[step], std))

        outputs = {"log_probs": torch.stack(log_probs, dim=1)}
        if with_kl:
            outputs["kl"] = torch.stack(kl, dim=1)
        return outputs

    @torch.no_grad()
    def _reference_means(
        self,
        latents: torch.Tensor,
        condition: torch.Tensor,
        sigmas: list[float],
        noise_level: float,
    ) -> list[torch.Tensor]:
        """Returns `_means` of the initial model: of the frozen copy, or of the model with its adapter disabled."""
        if self.reference is not None:
            return self._means(self.reference, latents, condition, sigmas, noise_level)
        with adapter_off(self.model):
            return self._means(self.model, latents, condition, sigmas, noise_level)

    def _means(
        self,
        model: FlowNetwork,
        latents: torch.Tensor,
        condition: torch.Tensor,
        sigmas: list[float],
        noise_level: float,
    ) -> list[torch.Tensor]:
        """Returns the means (b, *latent_shape) of the T steps that start at the stored latents.

        One network call computes all steps, because the input of each step is stored.
        """
        num_paths = len(latents)
        steps = len(sigmas) - 1
        # rows in the order (path, step): the T steps of a path are adjacent
        starts = latents[:, :-1].flatten(0, 1)
        inputs = starts.to(self.compute_dtype)
        start_sigmas = torch.tensor(sigmas[:-1], device=latents.device)
        sigma_of_rows = start_sigmas.repeat(num_paths)
        condition_of_rows = condition.repeat_interleave(steps, dim=0)
        velocity_of_rows = model(inputs, sigma_of_rows, condition_of_rows).float()
        velocities = velocity_of_rows.unflatten(0, (num_paths, steps)).unbind(1)

        means = []
        for step, (sigma, sigma_next) in enumerate(pairwise(sigmas)):
            mean = step_mean(latents[:, step], velocities[step], sigma, sigma_next, noise_level)
            means.append(mean)
        return means


def sde_policy(config: FlowGRPOConfig) -> NetworkBuilder:
    """Returns a function that builds the engine's network from `model.network` and `model.path`.

    The network gets an adapter if `model.lora_rank` is above 0. The function raises the `UserError`s of `load_network`
    and `add_adapter`.
    """

    def build(arguments: BuildArguments) -> SDEPolicy:
        model = load_network(config.model)
        if not config.model.lora_rank:
            return SDEPolicy(model.to(arguments.dtype), config, arguments.compute_dtype)
        # before the adapter is added, whose parameters stay in fp32
        model.to(arguments.compute_dtype)
        adapter = add_adapter(model, config.model)
        return SDEPolicy(model, config, arguments.compute_dtype, adapter)

    return build


def load_network(options: FlowModelConfig) -> nn.Module:
    """Loads the `FlowNetwork` in model.network from the folder model.path.

    Raises:
        UserError: the class or the folder does not exist, or the class lacks a member of `FlowNetwork`.
    """
    name = f"model.network={options.network!r}"
    try:
        network_class: Any = Registry[Any]("network").get_fn(str(options.network))
    except ValueError as error:
        raise UserError(f"{name}: {error}") from None
    members = ("from_pretrained", "latent_shape", "encode", "decode")
    missing = [member for member in members if not hasattr(network_class, member)]
    if missing or not Path(str(options.path)).is_dir():
        raise UserError(
            f"{name}, model.path={options.path!r}: expected a folder and a class with latent_shape, encode, decode, "
            f"forward(latents, sigma, condition) and from_pretrained(folder); missing: {missing or 'the folder'}"
        )
    network = network_class.from_pretrained(options.path)
    assert isinstance(network, nn.Module)
    return network


class FlowActorWorker(TrainingWorker):
    """One rank of the policy. The training engine also samples, so sampling always uses the current weights."""

    config: FlowGRPOConfig

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Builds the engine."""
        actor = self.config.actor
        network = sde_policy(self.config)
        self.build_engine(network, actor.fsdp_config, actor.optim)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def generate(self, data: DataProto) -> DataProto:
        """Samples one path for each row of a planned batch.

        Args:
            data: columns prompt, first_seed, path_seed; meta_info steps (T) and noise_level.

        Returns:
            frames (B, F, 3, H, W) in [0, 1]; with noise_level > 0 also latents (B, T + 1, ...) and old_log_probs
            (B, T).
        """
        self.phases.enter(self.engine)
        # `infer` runs `SDEPolicy.sample`, because the rows have no latents
        meta = data.meta_info
        outputs = self.engine.infer(data, steps=meta["steps"], noise_level=meta["noise_level"])
        # "log_probs" are those that the update computes and compares with these
        if "log_probs" in outputs:
            outputs["old_log_probs"] = outputs.pop("log_probs")
        return DataProto.from_dict(tensors=outputs)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def update_actor(self, data: DataProto) -> DataProto:
        """Takes one optimizer step per mini-batch of a planned batch of paths; returns actor/* metrics in meta_info.

        Args:
            data: the columns of `generate`, latents, response_mask and advantages; with several optimizer steps also
                old_log_probs.
        """
        self.phases.enter(self.engine)
        actor = self.config.actor
        sampler = self.config.sampler
        metrics = self.engine.train(
            data,
            lambda micro_batch, outputs: actor_loss(micro_batch, outputs, actor),
            steps=sampler.num_train_steps,
            noise_level=sampler.noise_level,
            with_kl=actor.use_kl_loss,
        )
        actor_metrics = {f"actor/{name}": metric for name, metric in metrics.items()}
        return DataProto(meta_info={"metrics": actor_metrics})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def export(self, path: str) -> None:
        """Saves the current network, with its adapter merged, into the folder `path` by its `save_pretrained`."""
        # gathering is collective, so every rank iterates over all parameters
        weights = {}
        for name, value in self.engine.full_params():
            if not name.startswith(REFERENCE):
                weights[name] = value.cpu()

        if dist.get_rank() == 0:
            network = load_network(self.config.model)
            network.load_state_dict(weights)
            network.save_pretrained(path)  # type: ignore[operator]
        # no rank may use the folder before rank 0 has written it
        dist.barrier()
