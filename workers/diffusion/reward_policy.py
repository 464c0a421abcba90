"""The network of reward flow: generates frames from noise, a first frame and a prompt, and scores them.

Its parameters are those of the low-noise expert, whose adapter the engine trains. The other modules (high-noise expert,
text encoder, decoder, reward) are frozen and unsharded on every rank; `model.offload_frozen` moves the high-noise
expert and the text encoder to the host while they are not in use. The outputs of a sample depend only on its own clip,
prompt and noise seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from verl_lite.config.diffusion import RewardFlowConfig
from verl_lite.diffusion.flow_match import (
    TRAIN_TIMESTEPS,
    euler_step,
    flow_kl,
    flow_sigmas,
    high_noise_steps,
    reward_flow_loss,
)
from verl_lite.errors import UserError
from verl_lite.protocol import DataProto
from verl_lite.visual_rewards.base import VisualReward, build_visual_reward, score_frames
from workers.diffusion.lora import add_adapter
from workers.diffusion.memory_saving import Decode, Placement, checkpointed_decode
from workers.diffusion.pipeline import DiffusionParts, PromptEncoder, load_pipeline
from workers.engine.lora import adapter_off
from workers.engine.network import BuildArguments, EngineNetwork, NetworkBuilder, block_classes, blocks_named

if TYPE_CHECKING:
    from diffusers import WanTransformer3DModel

Velocity = Callable[[torch.Tensor, float], torch.Tensor]
"""Computes the velocity of latents (b, C, T, h, w) at a sigma, in the shape of the latents."""


def denoise(
    x: torch.Tensor,
    sigmas: Sequence[float],
    steps: range,
    velocity: Velocity,
    condition: Callable[[torch.Tensor], torch.Tensor],
    base_velocity: Velocity | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs Euler steps. Latents are not detached between steps, so gradients flow through all of them.

    Args:
        x: (b, C, T, h, w) latents at sigmas[steps.start].
        sigmas: noise levels of the whole sampler, one more than its steps.
        steps: indices of the steps to run.
        velocity: velocity of the model that denoises.
        condition: function applied to the latents after each step, which restores the given first frame.
        base_velocity: velocity of the base model, called without gradient; None skips it, and the divergence is 0.

    Returns:
        The latents after `steps`, and the divergence of the velocities from the base model's (`flow_kl`), (b,),
        averaged over the steps.
    """
    # in fp32, whatever the dtype of the velocities (see `flow_kl`)
    kl = torch.zeros(len(x), device=x.device)
    for step in steps:
        sigma = sigmas[step]
        step_velocity = velocity(x, sigma)
        if base_velocity is not None:
            with torch.no_grad():
                step_base_velocity = base_velocity(x, sigma)
            kl = kl + flow_kl(step_velocity, step_base_velocity, sigma)
        x = condition(euler_step(x, step_velocity, sigma, sigmas[step + 1]))
    return x, kl / max(1, len(steps))


def noise_of(seeds: Sequence[int], shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Returns standard normal noise (b, *shape) in fp32; a sample's noise depends only on its seed, on any device."""
    rows = []
    for seed in seeds:
        # on the CPU, because a generator of a GPU draws other numbers from the same seed
        generator = torch.Generator()
        generator.manual_seed(int(seed))
        noise = torch.randn(shape, generator=generator)
        rows.append(noise)
    return torch.stack(rows).to(device)


@dataclass(frozen=True)
class FlowInputs:
    """Inputs of the n rows of a micro-batch of b rows that are sampled.

    Attributes:
        noise: (n, C, T, h, w) start of the denoising.
        condition: (n, 4 + C, T, h, w) channels concatenated to the latents; with `expand_timesteps` instead the latents
            of the first frame, (n, C, 1, h, w).
        prompts: (n, L, D) prompt embeddings.
        references: result of the reward's `prepare` for each clip.
        places: (n,) indices of the sampled rows in the micro-batch.
        rows: b.
        is_counting: False if all rows are padding, and the single sampled row only stands in for them.
    """

    noise: torch.Tensor
    condition: torch.Tensor
    prompts: torch.Tensor
    references: list[object]
    places: torch.Tensor
    rows: int
    is_counting: bool


class RewardFlowPolicy(EngineNetwork):
    """The policy of reward flow: samples clips with gradient, decodes them into frames and scores the frames.

    Args:
        parts: components of the pipeline; `add_adapter` was already called on the low-noise expert.
        reward: scores the frames.
        config: options of the run.
        device: device on which all modules compute.
    """

    prefix = "model."
    # diffusers keeps some modules of a half-precision expert in fp32; the adapter casts its weights
    is_cast = False

    def __init__(
        self,
        parts: DiffusionParts,
        reward: VisualReward,
        config: RewardFlowConfig,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.model = parts.low_noise
        self.config = config
        self.device = device
        self.codec = parts.codec
        self.expand_timesteps = parts.expand_timesteps
        self.sigmas = flow_sigmas(config.sampler.num_inference_steps, config.sampler.shift)
        self.num_high_noise_steps = high_noise_steps(self.sigmas, parts.boundary_ratio)
        # tuples hide these modules from nn.Module, so that the engine does not shard, move or save them
        self._high_noise = (parts.high_noise,)
        self._reward = (reward,)
        self.placement = Placement(device, config.model.offload_frozen)
        if parts.high_noise is not None:
            self.placement.add(parts.high_noise)
        self.encode_prompts = PromptEncoder(parts.tokenizer, parts.text_encoder, self.placement)
        # the VAE and the reward compute in every step and stay on the device
        self.codec.vae.to(device)
        self.decode: Decode = self.codec.decode
        if config.model.checkpoint_decode:
            self.decode = checkpointed_decode(self.codec.decode, self.codec.vae)
        reward.to(device)
        # the reward's prepared form of each clip, by the row of the clip in the data
        self._references: dict[int, object] = {}

    def blocks(self) -> list[nn.Module]:
        """Returns the transformer's blocks, which FSDP shards one by one."""
        return blocks_named(self.model, block_classes(self.model))

    def save_assets(self, path: str) -> None:
        """Writes the adapter's config and the path of its pipeline into the folder `path`."""
        assert self.adapter is not None
        self.adapter.save_pretrained(path)
        file = Path(path) / "pipeline.txt"
        file.write_text(f"{self.config.model.path}\n", encoding="utf-8")

    @torch.no_grad()
    def prepare_inputs(self, micro_batch: DataProto, device: torch.device) -> tuple[FlowInputs, bool]:
        """Prepares the inputs of the rows that are not padding, or of the first row if all are padding.

        Args:
            micro_batch: columns video, noise_seed, row, prompt and is_padding.
            device: device of the tensors in the inputs.

        Returns:
            The inputs, and False if all rows are padding.
        """
        is_real = ~micro_batch.batch["is_padding"]
        is_counting = bool(is_real.any())
        if is_counting:
            sampled = is_real.nonzero().squeeze(1)
        else:
            # every rank must take part in FSDP's collectives, so a rank without samples runs one padding row
            sampled = torch.zeros(1, dtype=torch.long)
        sampled_rows = micro_batch[sampled]

        video = sampled_rows.batch["video"].to(device)
        frames, _, height, width = video.shape[1:]
        patch_width = int(self.model.config.patch_size[-1])
        shape = self.codec.latent_shape(frames, height, width, patch_width)
        references = []
        for row, clip in zip(sampled_rows.batch["row"], video, strict=True):
            reference = self._reference(int(row), clip)
            references.append(reference)
        noise_seeds = sampled_rows.batch["noise_seed"].tolist()
        prompts = sampled_rows.non_tensor_batch["prompt"].tolist()
        inputs = FlowInputs(
            noise=noise_of(noise_seeds, shape, device),
            condition=self._condition(video),
            prompts=self.encode_prompts(prompts, device),
            references=references,
            places=sampled.to(device),
            rows=len(micro_batch),
            is_counting=is_counting,
        )
        return inputs, is_counting

    def _condition(self, video: torch.Tensor) -> torch.Tensor:
        """Returns `FlowInputs.condition` of clips (n, F, 3, H, W) in [0, 1]."""
        # (n, 3, F, H, W) in [-1, 1], as the autoencoder expects
        clip = video.transpose(1, 2) * 2 - 1
        if self.expand_timesteps:
            first_frame = clip[:, :, :1]
            return self.codec.encode(first_frame)

        # the policy gets only the first frame; the gray frames after it are those of diffusers' pipeline
        clip[:, :, 1:] = 0
        latents = self.codec.encode(clip)
        # a mask channel for each of the frames that one latent frame encodes
        mask_shape = (len(latents), self.codec.temporal_factor, *latents.shape[2:])
        is_given = latents.new_zeros(mask_shape)
        is_given[:, :, 0] = 1
        return torch.cat([is_given, latents], dim=1)

    def _reference(self, row: int, clip: torch.Tensor) -> object:
        """Returns the reward's `prepare` of a clip (F, 3, H, W) in [0, 1], cached by row."""
        if row in self._references:
            return self._references[row]
        try:
            reference = self._reward[0].prepare(clip)
        except ValueError as error:
            name = self.config.reward.name
            raise UserError(f"data.train_files, data.val_files: row {row}, {name}: {error}") from error
        self._references[row] = reference
        return reference

    def forward(self, inputs: FlowInputs, *, is_scored: bool = True) -> dict[str, torch.Tensor]:
        """Samples clips and scores them.

        Args:
            inputs: result of `prepare_inputs`.
            is_scored: False omits loss and kl_loss, which only training needs.

        Returns:
            loss, face_score, kl_loss and counted, (b,), and frames (b, F, 3, H, W) in [0, 1] without gradient. The loss
            is 0 for samples that are not counted (no face in the frames, or padding).
        """
        latents, kl = self._sample(inputs, is_scored)
        decoded = self.decode(latents)
        scores = []
        for clip, reference in zip(decoded, inputs.references, strict=True):
            scores.append(score_frames(self._reward[0], clip, reference))

        face_score = torch.stack([score.value.float() for score in scores])
        counted = torch.tensor([float(score.counted) for score in scores], device=decoded.device)
        outputs = {
            "face_score": face_score,
            "counted": counted,
            # from [-1, 1] to [0, 1]
            "frames": (decoded.detach() + 1) / 2,
        }
        if is_scored:
            # `_loss` of the worker divides by the number of all samples, so those that are not counted add 0
            outputs["loss"] = self.loss(face_score, kl) * counted
            outputs["kl_loss"] = kl

        outputs_of_rows = {}
        for name, sampled in outputs.items():
            zeros = sampled.new_zeros(inputs.rows, *sampled.shape[1:])
            if inputs.is_counting:
                outputs_of_rows[name] = zeros.index_copy(0, inputs.places, sampled)
            else:
                # only padding: zeros that still depend on the parameters, for FSDP's backward
                outputs_of_rows[name] = zeros + 0.0 * sampled.sum()
        return outputs_of_rows

    def loss(self, face_score: torch.Tensor, kl_loss: torch.Tensor) -> torch.Tensor:
        """Returns `reward_flow_loss` of each sample with the configured constants."""
        reward = self.config.reward
        kl_coef = self.config.actor.kl_loss_coef
        return reward_flow_loss(
            face_score, kl_loss, baseline=reward.baseline, std=reward.std, coef=reward.coef, kl_coef=kl_coef
        )

    def _sample(self, inputs: FlowInputs, with_divergence: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs the denoising steps; returns the final latents (n, C, T, h, w) and the divergence (n,)."""
        sampler = self.config.sampler
        first_trained = sampler.mid_timestep
        end = sampler.final_timestep + 1

        def keep(x: torch.Tensor) -> torch.Tensor:
            """Replaces the first latent frame by the clip's with `expand_timesteps`; otherwise returns x."""
            if not self.expand_timesteps:
                return x
            first_frame = inputs.condition
            later_frames = x[:, :, first_frame.shape[2] :]
            return torch.cat([first_frame.to(x.dtype), later_frames], dim=2)

        # three ranges of steps: high-noise expert, low-noise expert without gradient, low-noise expert with gradient
        high_noise_range = range(self.num_high_noise_steps)
        plain_range = range(self.num_high_noise_steps, first_trained)
        trained_range = range(first_trained, end)

        x = keep(inputs.noise)
        high_noise = self._high_noise[0]
        if high_noise is not None and self.num_high_noise_steps:
            # `at_work` disables gradients: this expert is frozen, and its steps precede all trained ones
            with self.placement.at_work(high_noise):
                high_noise_velocity = self._velocity(high_noise, inputs)
                x, _ = denoise(x, self.sigmas, high_noise_range, high_noise_velocity, keep)

        velocity = self._velocity(self.model, inputs)
        with torch.no_grad():
            x, _ = denoise(x, self.sigmas, plain_range, velocity, keep)

        # the low-noise expert without its adapter is the base model, so that no second copy is needed
        def base_velocity(x: torch.Tensor, sigma: float) -> torch.Tensor:
            with adapter_off(self.model):
                return velocity(x, sigma)

        def recomputed_velocity(x: torch.Tensor, sigma: float) -> torch.Tensor:
            return checkpoint(velocity, x, sigma, use_reentrant=False)

        trained_velocity = velocity
        if self.config.model.checkpoint_steps:
            # with a checkpoint per step, checkpointed blocks hold their inputs for one step instead of for all
            trained_velocity = recomputed_velocity
        compared = base_velocity if with_divergence else None
        return denoise(x, self.sigmas, trained_range, trained_velocity, keep, compared)

    def _velocity(self, expert: WanTransformer3DModel, inputs: FlowInputs) -> Velocity:
        """Returns the velocity of `expert` as a function of (latents, sigma), with the conditions of `inputs`."""
        dtype = expert.patch_embedding.weight.dtype
        prompts = inputs.prompts.to(dtype)

        def velocity(x: torch.Tensor, sigma: float) -> torch.Tensor:
            timestep_of_clip = TRAIN_TIMESTEPS * sigma
            timestep = torch.full((len(x),), timestep_of_clip, device=x.device)
            # TI2V-5B takes a timestep for each token, I2V-A14B one for the clip and the first frame as channels
            if self.expand_timesteps:
                hidden = x
                timestep = timestep.unsqueeze(1) * self._is_noisy_token(x)
            else:
                hidden = torch.cat([x, inputs.condition], dim=1)
            hidden = hidden.to(dtype)
            outputs = expert(hidden_states=hidden, timestep=timestep, encoder_hidden_states=prompts, return_dict=False)
            return outputs[0]

        return velocity

    def _is_noisy_token(self, x: torch.Tensor) -> torch.Tensor:
        """Returns 1 for each token of latents (b, C, T, h, w), and 0 for those of the first latent frame."""
        _, patch_height, patch_width = self.model.config.patch_size
        _, _, latent_frames, height, width = x.shape
        tokens_of_frame = (height // patch_height) * (width // patch_width)
        is_noisy = torch.ones(latent_frames, tokens_of_frame, device=x.device)
        # the clip's own first frame (`keep`), which has no noise, so its timestep is 0
        is_noisy[0] = 0
        return is_noisy.flatten()


def reward_flow_network(config: RewardFlowConfig) -> NetworkBuilder:
    """Returns a builder of the engine's network: the pipeline of `config.model` with an adapter, and the reward."""

    def build(arguments: BuildArguments) -> RewardFlowPolicy:
        parts = load_pipeline(config.model, arguments.compute_dtype)
        expert = parts.low_noise
        adapter = add_adapter(expert, config.model)
        if arguments.trains and config.model.enable_gradient_checkpointing:
            expert.enable_gradient_checkpointing()
        reward = build_visual_reward(config.reward)
        policy = RewardFlowPolicy(parts, reward, config, arguments.device)
        policy.adapter = adapter
        return policy

    return build
