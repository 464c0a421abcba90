"""The network of reward flow: from noise, a first frame and a prompt to frames, and what they are worth.

Its parameters are the low-noise expert's alone, of which the engine trains the adapter. All else (the high-noise
expert, text encoder, decoder, reward) is frozen, whole on every rank, and on the device as `model.offload_frozen` says.
Every output belongs to one sample and depends on that sample alone: its clip, prompt and noise seed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from verl_lite.config.diffusion import RewardFlowConfig
from verl_lite.errors import UserError
from verl_lite.flow_match import TRAIN_TIMESTEPS, euler_step, flow_kl, flow_sigmas, high_noise_steps, reward_flow_loss
from verl_lite.protocol import DataProto
from verl_lite.visual_rewards.base import VisualReward, build_visual_reward, score_frames
from workers.diffusion.lora import add_adapter
from workers.diffusion.memory_saving import Decode, Placement, checkpointed_decode
from workers.diffusion.pipeline import DiffusionParts, PromptEncoder, load_pipeline
from workers.engine.network import BuildArguments, EngineNetwork, NetworkBuilder, blocks_named
from workers.policy.adapter import adapter_off

# (latents (b, C, T, h, w), sigma) -> velocity of the same shape
Velocity = Callable[[torch.Tensor, float], torch.Tensor]


def denoise(
    x: torch.Tensor,
    sigmas: Sequence[float],
    steps: range,
    velocity: Velocity,
    condition: Callable[[torch.Tensor], torch.Tensor],
    base_velocity: Velocity | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Euler steps; where gradients are on, one differentiable function: latents are not detached between steps.

    Args:
        x: (b, C, T, h, w) at sigmas[steps.start].
        condition: puts the first frame in its place, after each step.
        base_velocity: the base model's, asked without gradient; None = not asked, the divergence is 0.

    Returns:
        Latents after `steps`, and how far the velocities are from the base model's, (b,), averaged over the steps.
    """
    kl = torch.zeros(len(x), device=x.device)
    for step in steps:
        sigma, v = sigmas[step], velocity(x, sigmas[step])
        if base_velocity is not None:
            with torch.no_grad():
                base = base_velocity(x, sigma)
            kl = kl + flow_kl(v, base, sigma)
        x = condition(euler_step(x, v, sigma, sigmas[step + 1]))
    return x, kl / max(1, len(steps))


def noise_of(seeds: Sequence[int], shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Standard normal (b, *shape), fp32: each sample's depends on its own seed alone, on every device alike."""
    rows = [torch.randn(shape, generator=torch.Generator().manual_seed(int(seed))) for seed in seeds]
    return torch.stack(rows).to(device)


@dataclass(frozen=True)
class FlowInputs:
    """What n of the b rows of a micro-batch are sampled from.

    noise: (n, C, T, h, w). condition: what the experts read beside the latents, (n, 4 + C, T, h, w); or, where
    timesteps are expanded, the first frame's latents (n, C, 1, h, w). prompts: (n, L, D). references: what the reward
    prepared of each clip. places: (n,) of the rows among the b.
    """

    noise: torch.Tensor
    condition: torch.Tensor
    prompts: torch.Tensor
    references: list[Any]
    places: torch.Tensor
    rows: int
    is_counting: bool


class RewardFlowPolicy(EngineNetwork):
    """parts: the pipeline, whose low-noise expert has the adapter by now. reward: what frames are worth.

    device: where all of it computes.
    """

    prefix = "model."
    is_cast = False  # parts of the expert stay fp32 in half precision, as diffusers has them; the adapter casts itself

    def __init__(
        self, parts: DiffusionParts, reward: VisualReward, config: RewardFlowConfig, device: torch.device
    ) -> None:
        super().__init__()
        self.model: Any = parts.low_noise
        self.config, self.device, self.codec = config, device, parts.codec
        self.expand_timesteps = parts.expand_timesteps
        self.sigmas = flow_sigmas(config.sampler.num_inference_steps, config.sampler.shift)
        self.high_steps = high_noise_steps(self.sigmas, parts.boundary_ratio)
        # in tuples: the engine must not shard, move or save them as parts of this module
        self._high_noise, self._reward = (parts.high_noise,), (reward,)
        self.placement = Placement(device, config.model.offload_frozen)
        if parts.high_noise is not None:
            self.placement.add(parts.high_noise)
        self.encode_prompts = PromptEncoder(parts.tokenizer, parts.text_encoder, self.placement)
        self.codec.vae.to(device)
        self.decode: Decode = self.codec.decode
        if config.model.checkpoint_decode:
            self.decode = checkpointed_decode(self.codec.decode, self.codec.vae)
        reward.to(device)
        self._references: dict[int, Any] = {}

    def blocks(self) -> list[nn.Module]:
        """The transformer's blocks."""
        return blocks_named(self.model, set(getattr(self.model, "_no_split_modules", None) or ()))

    def save_assets(self, path: str) -> None:
        """The adapter's config, and the path of the pipeline that it belongs to."""
        assert self.adapter is not None
        self.adapter.save_pretrained(path)
        (Path(path) / "pipeline.txt").write_text(f"{self.config.model.path}\n", encoding="utf-8")

    @torch.no_grad()
    def prepare_inputs(self, micro_batch: DataProto, device: torch.device) -> tuple[FlowInputs, bool]:
        """Noise, conditions and references of the rows that are no padding; where all are, of the first.

        Reads video, noise_seed, row, prompt, is_padding.
        """
        is_real = ~micro_batch.batch["is_padding"]
        is_counting = bool(is_real.any())
        places = is_real.nonzero().squeeze(1) if is_counting else torch.zeros(1, dtype=torch.long)
        chosen = micro_batch[places]
        video = chosen.batch["video"].to(device)
        frames, _, height, width = video.shape[1:]
        shape = self.codec.latent_shape(frames, height, width, int(self.model.config.patch_size[-1]))
        inputs = FlowInputs(
            noise=noise_of(chosen.batch["noise_seed"].tolist(), shape, device),
            condition=self._condition(video),
            prompts=self.encode_prompts(chosen.non_tensor_batch["prompt"].tolist(), device),
            references=[self._reference(int(row), clip) for row, clip in zip(chosen.batch["row"], video, strict=True)],
            places=places.to(device),
            rows=len(micro_batch),
            is_counting=is_counting,
        )
        return inputs, is_counting

    def _condition(self, video: torch.Tensor) -> torch.Tensor:
        """See `FlowInputs`. video: (n, F, 3, H, W) in [0, 1]."""
        clip = video.transpose(1, 2) * 2 - 1  # (n, 3, F, H, W)
        if self.expand_timesteps:
            return self.codec.encode(clip[:, :, :1])
        clip[:, :, 1:] = 0
        latents = self.codec.encode(clip)
        is_given = latents.new_zeros(len(latents), self.codec.temporal_factor, *latents.shape[2:])
        is_given[:, :, 0] = 1  # one channel for each frame that a latent frame stands for
        return torch.cat([is_given, latents], dim=1)

    def _reference(self, row: int, clip: torch.Tensor) -> Any:
        """What the reward wants to know of a clip of the data, prepared once. clip: (F, 3, H, W) in [0, 1]."""
        if row not in self._references:
            try:
                self._references[row] = self._reward[0].prepare(clip)
            except ValueError as error:
                name = self.config.reward.name
                raise UserError(f"data.train_files, data.val_files: row {row}, {name}: {error}") from error
        return self._references[row]

    def forward(self, inputs: FlowInputs, *, is_scored: bool = True) -> dict[str, torch.Tensor]:
        """loss, face_score, kl_loss, counted (b,), and frames (b, F, 3, H, W) in [0, 1] without gradient.

        loss: of each sample that counts, 0 of the others (no face in its frames, padding). is_scored: False gives the
        score without the loss and divergence, as nothing is to be learnt.
        """
        latents, kl = self._sample(inputs, is_scored)
        decoded = self.decode(latents)
        scores = [
            score_frames(self._reward[0], clip, reference)
            for clip, reference in zip(decoded, inputs.references, strict=True)
        ]
        outputs = {
            "face_score": torch.stack([score.value.float() for score in scores]),
            "counted": torch.tensor([float(score.counted) for score in scores], device=decoded.device),
            "frames": (decoded.detach() + 1) / 2,
        }
        if is_scored:
            outputs |= {"loss": self.loss(outputs["face_score"], kl) * outputs["counted"], "kl_loss": kl}
        whole = {name: value.new_zeros(inputs.rows, *value.shape[1:]) for name, value in outputs.items()}
        if not inputs.is_counting:  # a stand-in: 0 with its gradient
            return {name: zeros + 0.0 * outputs[name].sum() for name, zeros in whole.items()}
        return {name: zeros.index_copy(0, inputs.places, outputs[name]) for name, zeros in whole.items()}

    def loss(self, face_score: torch.Tensor, kl_loss: torch.Tensor) -> torch.Tensor:
        """`reward_flow_loss` of each sample, with the configured constants."""
        reward, kl_coef = self.config.reward, self.config.actor.kl_loss_coef
        return reward_flow_loss(
            face_score, kl_loss, baseline=reward.baseline, std=reward.std, coef=reward.coef, kl_coef=kl_coef
        )

    def _sample(self, inputs: FlowInputs, with_divergence: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents (n, C, T, h, w) after the last step, and the divergence (n,)."""
        sampler, high = self.config.sampler, self._high_noise[0]
        first, last = sampler.mid_timestep, sampler.final_timestep + 1

        def keep(x: torch.Tensor) -> torch.Tensor:
            """Latents whose first frame is the clip's, in the layout that has it there."""
            given = inputs.condition
            return torch.cat([given.to(x.dtype), x[:, :, given.shape[2] :]], dim=2) if self.expand_timesteps else x

        x = keep(inputs.noise)
        if high is not None and self.high_steps:
            with self.placement.at_work(high):
                x, _ = denoise(x, self.sigmas, range(self.high_steps), self._velocity(high, inputs), keep)
        velocity = self._velocity(self.model, inputs)
        with torch.no_grad():
            x, _ = denoise(x, self.sigmas, range(self.high_steps, first), velocity, keep)

        def base(x: torch.Tensor, sigma: float) -> torch.Tensor:
            with adapter_off(self.model):
                return velocity(x, sigma)

        # blocks with checkpoints of their own then hold their inputs for one step at a time instead of for all
        learnt: Any = partial(checkpoint, velocity, use_reentrant=False)
        learnt = learnt if self.config.model.checkpoint_steps else velocity
        return denoise(x, self.sigmas, range(first, last), learnt, keep, base if with_divergence else None)

    def _velocity(self, expert: Any, inputs: FlowInputs) -> Velocity:
        dtype = expert.patch_embedding.weight.dtype
        prompts = inputs.prompts.to(dtype)

        def velocity(x: torch.Tensor, sigma: float) -> torch.Tensor:
            timestep = torch.full((len(x),), TRAIN_TIMESTEPS * sigma, device=x.device)
            if self.expand_timesteps:  # one for each token, 0 for those of the first latent frame, which has no noise
                _, patch_h, patch_w = self.model.config.patch_size
                is_noisy = torch.ones(x.shape[2], (x.shape[3] // patch_h) * (x.shape[4] // patch_w), device=x.device)
                is_noisy[0] = 0
                seen, timestep = x, timestep.unsqueeze(1) * is_noisy.flatten()
            else:
                seen = torch.cat([x, inputs.condition], dim=1)
            return expert(
                hidden_states=seen.to(dtype), timestep=timestep, encoder_hidden_states=prompts, return_dict=False
            )[0]

        return velocity


def reward_flow_network(config: RewardFlowConfig) -> NetworkBuilder:
    """The network of the engine: the pipeline of `config.model` with an adapter, and the reward of `config.reward`."""

    def build(arguments: BuildArguments) -> RewardFlowPolicy:
        parts = load_pipeline(config.model, arguments.compute_dtype)
        expert: Any = parts.low_noise
        adapter = add_adapter(expert, config.model)
        if arguments.trains and config.model.enable_gradient_checkpointing:
            expert.enable_gradient_checkpointing()
        policy = RewardFlowPolicy(parts, build_visual_reward(config.reward), config, arguments.device)
        policy.adapter = adapter
        return policy

    return build
