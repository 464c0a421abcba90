"""The options of `python -m trainer.main_reward_flow`: LoRA training of an image-to-video diffusion model with a
differentiable reward.

Model options have the names of diffusers, sampler options those of ROLL's reward flow (`num_inference_steps`,
`mid_timestep`, `final_timestep`).
"""

from dataclasses import dataclass
from pathlib import Path

from verl_lite.config.fields import (
    ALL_OR_SOME,
    FINITE,
    NOT_NEGATIVE,
    POSITIVE,
    POSITIVE_SHARE,
    SEED,
    FreeDict,
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
"""Number of frames that Wan's video autoencoder compresses into one latent frame; the first frame gets its own."""


@dataclass
class DiffusionModelConfig(Options):
    """The frozen pipeline and the trained adapter."""

    path: str | None = opt(None, "folder of an image-to-video pipeline in diffusers format (model_index.json)")
    lora_rank: int = opt(32, "rank of the adapter, the only trained weights", at_least(1))
    lora_alpha: int = opt(32, "the adapter's output is scaled by lora_alpha / lora_rank", at_least(1))
    target_modules: list[str] = opt(_LAYERS, "linear layers that get an adapter")
    boundary_ratio: float | None = opt(None, "high noise is t >= 1000 x this; null = the pipeline's", POSITIVE_SHARE)
    fused_loras: dict[str, str] = opt({}, "adapters merged into the experts before training: {transformer: FILE, ...}")
    enable_gradient_checkpointing: bool = opt(True, "recompute activations inside the blocks in the backward pass")
    checkpoint_steps: bool = opt(True, "recompute each denoising step in the backward pass")
    checkpoint_decode: bool = opt(True, "recompute the VAE's decoder in the backward pass")
    offload_frozen: bool = opt(False, "keep high-noise expert and text encoder in host memory while not in use")

    def check(self) -> Problems:
        if not self.target_modules:
            yield "model.target_modules is empty: set it to linear layers, such as [to_q,to_v]"
        for expert, file in self.fused_loras.items():
            if expert not in EXPERTS or not Path(str(file)).expanduser().exists():
                yield f"model.fused_loras.{expert}={file}: expected {' or '.join(EXPERTS)}, and an existing file"
        if self.path is None:
            yield "model.path is null: set it to the folder of an image-to-video pipeline, or set recipe=reward_flow"


@dataclass
class FlowSamplerConfig(Options):
    """Denoises noise to a clip with flow-matching Euler steps; the last steps have gradients."""

    num_inference_steps: int = opt(8, "steps N; sigma_i = shift s / (1 + (shift - 1) s), s = 1 - i / N", at_least(1))
    mid_timestep: int = opt(4, "first step with gradients; earlier steps run without")
    final_timestep: int = opt(7, "last step; N - 1 = denoise to the end")
    shift: float = opt(5.0, "shift of the sigmas towards noise; 1 = none", POSITIVE)
    noise_seed: int | None = opt(None, "same noise for all samples, as in ROLL (24); null = one noise per sample", SEED)


@dataclass
class FlowRewardConfig(Options):
    """The score of the frames, and its conversion to a loss."""

    name: str = opt("cosine_identity", "a registered visual reward, or pkg.module:object")
    kwargs: FreeDict = opt({}, "arguments of the reward")
    # the defaults suit the score of ROLL's reward for identity
    baseline: float = opt(0.54, "score that is normalised to 0", FINITE)
    std: float = opt(0.16, "score difference that is normalised to 1", POSITIVE)
    coef: float = opt(0.1, "weight of the normalised score in the loss", POSITIVE)


@dataclass
class FlowActorConfig(Options):
    """Training of the adapter."""

    micro_batch_size_per_gpu: int = opt(1, "samples per forward and backward pass", at_least(1))
    kl_loss_coef: float = opt(1.0, "weight of the divergence from the base model in the loss", NOT_NEGATIVE)
    optim: OptimConfig = section(OptimConfig, "optimizer")
    fsdp_config: FSDPConfig = section(FSDPConfig, "sharding, precision, offload")


@dataclass
class VideoDataConfig(Options):
    """Clips and prompts."""

    train_files: list[str] = opt([], "metadata.csv (columns video and prompt; paths relative to the file), or folders")
    val_files: list[str] = opt([], "the same for validation; empty = the first clips of train_files")
    train_batch_size: int = opt(8, "samples per optimizer step over all ranks", at_least(1))
    train_max_samples: int = opt(-1, "use only the first rows of train_files; -1 = all", ALL_OR_SOME)
    repeat: int = opt(1, "samples per clip and epoch, each with different noise", at_least(1))
    shuffle: bool = opt(True, "shuffle the clips in each epoch")
    num_frames: int = opt(17, "number of frames per clip, from its start: 4 k + 1")
    max_pixels: int = opt(480 * 480, "larger clips are scaled down to this area, with sides of side_multiple")
    height: int | None = opt(None, "frames are scaled and cropped to this height; null = by max_pixels")
    width: int | None = opt(None, "the same for the width; set both or none; all clips must get one size")
    side_multiple: int = opt(16, "sides are multiples of this: 16, or 32 for Wan2.2-TI2V-5B", at_least(1))
    video_key: str = opt("video", "column of the clip: mp4 or another video, or a folder of frames")
    prompt_key: str = opt("prompt", "column of the prompt")

    def check(self) -> Problems:
        if not self.train_files:
            yield "data.train_files is empty: set it to a csv file with the columns video and prompt"
        if self.video_key == self.prompt_key:
            yield f"data.video_key and data.prompt_key are both {self.video_key}: expected two columns"
        if self.num_frames < 1 or self.num_frames % FRAMES_PER_LATENT != 1:
            yield f"data.num_frames={self.num_frames}: expected 4 k + 1, such as 13 or 17"
        if self.side_multiple >= 1:
            yield from self._check_size()

    def _check_size(self) -> Problems:
        """Checks that the sides of frames are multiples of `side_multiple`."""
        multiple = self.side_multiple
        if self.height is None and self.width is None:
            if self.max_pixels < multiple**2:
                yield f"data.max_pixels={self.max_pixels}: expected at least {multiple**2} (side_multiple squared)"
            return
        for side in (self.height, self.width):
            if side is None or side < multiple or side % multiple:
                yield (
                    f"data.height={self.height}, data.width={self.width}: expected null for both, or multiples of "
                    f"data.side_multiple={multiple}"
                )
                return


@dataclass
class FlowTrainerConfig(RunConfig):
    """The run: its length, validations, saved clips and trackers."""

    total_epochs: int = opt(1, "passes over the clips", at_least(1))
    project_name: str = opt("reward_flow", "groups runs in trackers and folders")
    test_freq: int = opt(-1, "steps between validations; -1 = before and after training; 0 = never", at_least(-1))
    val_clips: int = opt(4, "validation clips, the first of data.val_files, with the same noise each time", at_least(1))
    video_freq: int = opt(25, "steps between saved clips (mp4 files of the step's samples); 0 = never", at_least(-1))


@dataclass
class RewardFlowConfig(RunOptions):
    """Options of `python -m trainer.main_reward_flow`."""

    gone = {
        "model.activation_offload": "remove it: model.checkpoint_steps and checkpoint_decode save activation memory",
        "model.vae_tiling": "remove it: frames are decoded without tiles; to save memory lower data.max_pixels",
        "data.fps": "remove it, and convert the clips to the frame rate before training: ffmpeg -i a.mp4 -r 16 b.mp4",
        "data.cache_gb": "remove it: clips are read when they are needed and not cached",
    }

    data: VideoDataConfig = section(VideoDataConfig, "clips and prompts")
    model: DiffusionModelConfig = section(DiffusionModelConfig, "pipeline and adapter")
    sampler: FlowSamplerConfig = section(FlowSamplerConfig, "denoising from noise to a clip")
    reward: FlowRewardConfig = section(FlowRewardConfig, "score of the frames")
    actor: FlowActorConfig = section(FlowActorConfig, "training of the adapter")
    trainer: FlowTrainerConfig = section(FlowTrainerConfig, "the run")
