"""The options of `python -m trainer.main_reward_flow`: LoRA training of an image-to-video diffusion model through a
differentiable reward.

Names are those of diffusers for the model and of ROLL's reward flow for the sampler (`num_inference_steps`,
`mid_timestep`, `final_timestep`).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_lite.config.fields import (
    ALL_OR_SOME,
    FINITE,
    POSITIVE,
    POSITIVE_SHARE,
    SEED,
    Options,
    Problems,
    at_least,
    opt,
    section,
)
from verl_lite.config.learners import FSDPConfig, OptimConfig
from verl_lite.config.run import RunConfig, RunOptions

EXPERTS = ("transformer", "transformer_2")
_LAYERS = ["to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2"]
FRAMES_PER_LATENT = 4
"""Frames that a video autoencoder of Wan's kind makes into one in time, after the first, which stands alone."""


@dataclass
class DiffusionModelConfig(Options):
    """The frozen pipeline and the adapter that learns."""

    path: str | None = opt(None, "folder of an image-to-video pipeline in diffusers format (model_index.json)")
    lora_rank: int = opt(32, "rank of the adapter, which is all that learns", at_least(1))
    lora_alpha: int = opt(32, "the adapter counts lora_alpha / lora_rank", at_least(1))
    target_modules: list[str] = opt(_LAYERS, "linear layers with an adapter")
    boundary_ratio: float | None = opt(None, "high noise is t >= 1000 x this; null = the pipeline's", POSITIVE_SHARE)
    fused_loras: dict[str, str] = opt({}, "adapters merged into the frozen experts first: {transformer: FILE, ...}")
    enable_gradient_checkpointing: bool = opt(True, "recompute activations inside the blocks in the backward pass")
    checkpoint_steps: bool = opt(True, "recompute each denoising step in the backward pass")
    checkpoint_decode: bool = opt(True, "recompute the decoding into frames in the backward pass")
    offload_frozen: bool = opt(False, "keep what is not at work (high-noise expert, text encoder) in host memory")

    def check(self) -> Problems:
        if not self.target_modules:
            yield "model.target_modules is empty: name linear layers, such as [to_q,to_v]"
        for expert, file in self.fused_loras.items():
            if expert not in EXPERTS or not Path(str(file)).expanduser().exists():
                yield f"model.fused_loras.{expert}={file}: {' or '.join(EXPERTS)}, and a file that exists, are expected"
        if self.path is None:
            yield "model.path is null: give the folder of an image-to-video pipeline, or recipe=reward_flow"


@dataclass
class FlowSamplerConfig(Options):
    """Flow-match Euler steps from noise to a clip; the last ones with gradient."""

    num_inference_steps: int = opt(8, "steps N; sigma_i = shift s / (1 + (shift - 1) s), s = 1 - i / N", at_least(1))
    mid_timestep: int = opt(4, "first step with gradient; those before run without")
    final_timestep: int = opt(7, "last step that is run; N - 1 = to the end")
    shift: float = opt(5.0, "of the sigmas towards noise; 1 = none", POSITIVE)
    noise_seed: int | None = opt(None, "one noise for all, as ROLL has it (24); null = each sample's own", SEED)

    def check(self) -> Problems:
        steps, middle, final = self.num_inference_steps, self.mid_timestep, self.final_timestep
        if not 0 <= middle <= final < steps:
            shown = f"sampler.mid_timestep={middle}, sampler.final_timestep={final}"
            yield f"{shown}: 0 <= mid_timestep <= final_timestep < num_inference_steps={steps} is expected"


@dataclass
class FlowRewardConfig(Options):
    """What the frames are worth, and how it becomes a loss."""

    name: str = opt("cosine_identity", "a registered visual reward, or pkg.module:object")
    kwargs: dict[str, Any] = opt({}, "arguments of the reward")
    baseline: float = opt(0.54, "score that counts 0", FINITE)
    std: float = opt(0.16, "score difference that counts 1", POSITIVE)
    coef: float = opt(0.1, "weight of the normalised score in the loss", POSITIVE)


@dataclass
class FlowActorConfig(Options):
    """How the adapter learns."""

    micro_batch_size_per_gpu: int = opt(1, "samples of one forward and backward pass", at_least(1))
    kl_loss_coef: float = opt(1.0, "weight of the divergence from the base model in the loss", at_least(0))
    optim: OptimConfig = section(OptimConfig, "optimizer")
    fsdp_config: FSDPConfig = section(FSDPConfig, "sharding, precision, offload")


@dataclass
class VideoDataConfig(Options):
    """Clips and prompts."""

    train_files: list[str] = opt([], "metadata.csv files (columns video and prompt; paths beside the file), or folders")
    val_files: list[str] = opt([], "the same for the validation; empty = the first clips of train_files")
    train_batch_size: int = opt(8, "samples of an optimizer step, over all ranks", at_least(1))
    train_max_samples: int = opt(-1, "use only the first rows of train_files; -1 = all", ALL_OR_SOME)
    repeat: int = opt(1, "each clip comes this often in an epoch, with another noise each time", at_least(1))
    shuffle: bool = opt(True, "another order in each epoch")
    num_frames: int = opt(17, "frames of a clip, 4 k + 1, from its start")
    max_pixels: int = opt(480 * 480, "a larger clip is scaled down to this area; sides become multiples")
    height: int | None = opt(None, "frames are scaled and cropped to this; null = by max_pixels")
    width: int | None = opt(None, "likewise, both or none; all clips come to one size")
    side_multiple: int = opt(16, "sides are multiples of this: 16, or 32 for Wan2.2-TI2V-5B", at_least(1))
    video_key: str = opt("video", "column of the clip: mp4 or another video, or a folder of frames")
    prompt_key: str = opt("prompt", "column of the prompt")

    def check(self) -> Problems:
        if not self.train_files:
            yield "data.train_files is empty: give a csv file with the columns video and prompt"
        if self.video_key == self.prompt_key:
            yield f"data.video_key and data.prompt_key are both {self.video_key}: two columns are expected"
        if self.num_frames < 1 or self.num_frames % FRAMES_PER_LATENT != 1:
            yield f"data.num_frames={self.num_frames}: 4 k + 1 is expected, such as 13 or 17"
        multiple, sides = self.side_multiple, (self.height, self.width)
        if multiple >= 1 and any(side is None or side < multiple or side % multiple for side in sides):
            if sides != (None, None):
                shown = f"data.height={self.height}, data.width={self.width}"
                yield f"{shown}: both, or none, multiples of data.side_multiple={multiple}, are expected"
            elif self.max_pixels < multiple**2:
                yield f"data.max_pixels={self.max_pixels}: at least {multiple**2} (side_multiple squared) is expected"


@dataclass
class FlowTrainerConfig(RunConfig):
    """The run."""

    total_epochs: int = opt(1, "passes over the clips", at_least(1))
    project_name: str = opt("reward_flow", "groups runs in trackers and folders")
    test_freq: int = opt(-1, "steps between validations; -1 = before and after; 0 = never", at_least(-1))
    val_clips: int = opt(4, "clips sampled for it, with the same noise: the first of data.val_files", at_least(1))
    video_freq: int = opt(25, "steps between saved clips (mp4, of the step's own samples); 0 = never", at_least(-1))


@dataclass
class RewardFlowConfig(RunOptions):
    """Reward flow, `python -m trainer.main_reward_flow`."""

    gone = {
        "model.activation_offload": "leave it out: model.checkpoint_steps and checkpoint_decode keep activations few",
        "model.vae_tiling": "leave it out: frames are decoded whole; for want of memory lower data.max_pixels",
        "data.fps": "leave it out; clips are brought to a rate before: ffmpeg -i a.mp4 -r 16 b.mp4",
        "data.cache_gb": "leave it out: clips are read as they are needed, and nothing of them is kept",
    }

    data: VideoDataConfig = section(VideoDataConfig, "clips and prompts")
    model: DiffusionModelConfig = section(DiffusionModelConfig, "pipeline and adapter")
    sampler: FlowSamplerConfig = section(FlowSamplerConfig, "from noise to a clip")
    reward: FlowRewardConfig = section(FlowRewardConfig, "what frames are worth")
    actor: FlowActorConfig = section(FlowActorConfig, "how the adapter learns")
    trainer: FlowTrainerConfig = section(FlowTrainerConfig, "the run")
