"""The data and model of the embedded run: clips of drawn people, and a pretrained image-to-video pipeline.

`write_world` generates from one seed, without downloads:

    data/metadata.csv   video, prompt; the videos are folders of frames
    faces.safetensors   weights of the identity embedder
    model/              a pipeline in diffusers format: two Wan transformers, text encoder, tokenizer, scheduler, codec

The transformers learn by flow matching to draw moving people. In most of their training clips, the first frame that
they get as input shows another person. Therefore the pretrained pipeline seldom draws the person in its input, the
identity score starts near 0, and reward flow has to teach the model to use the first frame.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image

from recipes.reward_flow.codec import BLOCK, CHANNELS, GRID, EigenfaceCodec
from recipes.reward_flow.faces import TRAITS, Cast, FisherEmbedder, cast_of, draw
from verl_lite.diffusion.flow_match import TRAIN_TIMESTEPS
from workers.diffusion.memory_saving import Placement
from workers.diffusion.pipeline import INDEX, PromptEncoder

if TYPE_CHECKING:
    from diffusers import WanTransformer3DModel
    from transformers import PreTrainedTokenizerFast, UMT5EncoderModel

# boundary_ratio as in Wan2.2 I2V-A14B
BOUNDARY = 0.9
# the high-noise expert is also trained this far below the boundary
OVERLAP = 0.02
TEXT_WIDTH = 32
LONGEST_PROMPT = 8
LR = 3e-3
COMPONENTS = {
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "UMT5EncoderModel"],
    "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
    "transformer": ["diffusers", "WanTransformer3DModel"],
    "transformer_2": ["diffusers", "WanTransformer3DModel"],
    "vae": [EigenfaceCodec.__module__, EigenfaceCodec.__name__],
}

Examples = Callable[[torch.Generator], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""Draws a training batch: latents (b, C, f, h, w), channels concatenated to the noisy latents, prompt embeddings."""


@dataclass(frozen=True)
class WorldSize:
    """Sizes of data and training.

    Attributes:
        people: people in the pretraining clips.
        known_people: number of them that fit the embedder.
        clips: rows of metadata.csv, which show other people.
        high_steps: training steps of the high-noise expert.
        low_steps: training steps of the low-noise expert.
        batch: clips in a step of both.
        same_person: share of pretraining clips with their own first frame as input.
    """

    people: int = 1024
    known_people: int = 256
    clips: int = 16
    high_steps: int = 200
    low_steps: int = 600
    batch: int = 128
    same_person: float = 0.3


def write_world(folder: Path, seed: int, size: WorldSize | None = None, tell: Callable[[str], None] = print) -> None:
    """Writes data/, faces.safetensors and model/ into `folder`. The same seed gives the same bytes on one CPU type.

    Args:
        folder: empty folder.
        seed: decides about people, clips and models.
        size: sizes of data and training.
        tell: called with lines on the progress.
    """
    size = size or WorldSize()
    threads = torch.get_num_threads()
    # the order of sums must not depend on the number of cores
    torch.set_num_threads(1)
    # the models take their random weights from torch's own generator, in the order in which they are built
    with torch.random.fork_rng(devices=[]):
        generator = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        tell(f"drawing {size.people} people, and fitting embedder and codec to them")
        cast = cast_of(torch.rand(size.people, TRAITS, generator=generator), generator)
        clips = draw(cast)
        cast_of_data = cast_of(torch.rand(size.clips, TRAITS, generator=generator), generator)
        write_clips(folder / "data", cast_of_data)
        FisherEmbedder.fit(folder / "faces.safetensors", clips[: size.known_people])
        write_pipeline(folder / "model", cast, clips, seed, size, tell)
    torch.set_num_threads(threads)


def write_pipeline(
    folder: Path, cast: Cast, clips: torch.Tensor, seed: int, size: WorldSize, tell: Callable[[str], None]
) -> None:
    """Fits the codec to the clips, trains both experts on them, and writes a pipeline in diffusers format.

    Args:
        folder: folder of the pipeline.
        cast: the people in the clips.
        clips: (n, F, 3, SIZE, SIZE) in [0, 1].
        seed: seed of the batches.
        size: sizes of the training.
        tell: called with lines on the progress.
    """
    from diffusers import FlowMatchEulerDiscreteScheduler

    codec = EigenfaceCodec.fit(clips * 2 - 1)
    tokenizer = tiny_tokenizer()
    text_encoder = tiny_text_encoder()
    cpu = torch.device("cpu")
    # the encoder of the training, so that the experts learn with the embeddings that they will get
    encode = PromptEncoder(tokenizer, text_encoder, Placement(cpu, offload=False))
    prompts = encode([prompt_of(cast, row) for row in range(len(clips))], cpu)
    examples = examples_of(codec, clips, prompts, size)

    high_noise = tiny_transformer()
    tell(f"training the video model, transformer (1 of 2), {size.high_steps} steps")
    generator = torch.Generator().manual_seed(seed)
    flow_match(high_noise, examples, BOUNDARY - OVERLAP, 1.0, size.high_steps, generator)
    low_noise = tiny_transformer()
    tell(f"training the video model, transformer_2 (2 of 2), {size.low_steps} steps")
    generator = torch.Generator().manual_seed(seed + 1)
    flow_match(low_noise, examples, 0.0, BOUNDARY, size.low_steps, generator)

    parts: dict[str, Any] = {
        "vae": codec,
        "tokenizer": tokenizer,
        "text_encoder": text_encoder,
        "transformer": high_noise,
        "transformer_2": low_noise,
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=5.0),
    }
    for name, part in parts.items():
        part.save_pretrained(folder / name)
    settings = {"_class_name": "WanImageToVideoPipeline", "boundary_ratio": BOUNDARY, "expand_timesteps": False}
    (folder / INDEX).write_text(json.dumps(settings | COMPONENTS, indent=2) + "\n", encoding="utf-8")


def write_clips(folder: Path, cast: Cast) -> None:
    """Writes metadata.csv and a folder of frames for each person."""
    rows = ["video,prompt"]
    for row, clip in enumerate(draw(cast)):
        name = f"person_{row:02d}"
        (folder / name).mkdir(parents=True)
        frames = (clip * 255).round().byte().permute(0, 2, 3, 1).numpy()  # (F, H, W, 3)
        for index, frame in enumerate(frames):
            Image.fromarray(frame).save(folder / name / f"{index:03d}.png")
        rows.append(f"{name},{prompt_of(cast, row)}")
    (folder / "metadata.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")


def prompt_of(cast: Cast, row: int) -> str:
    """Returns the prompt of a clip, which describes its motion but not the person."""
    sideways = cast.sway[row, :, 0]
    mouth = cast.mouth[row]
    direction = "right" if sideways[-1] > sideways[0] else "left"
    speech = " and speaks" if float(mouth.max() - mouth.min()) > 0.5 else ""
    return f"a person moves {direction}{speech}"


def tiny_transformer() -> WanTransformer3DModel:
    """Returns a random Wan transformer of 330 thousand parameters, for which a latent frame is one token."""
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        patch_size=(1, GRID, GRID),
        num_attention_heads=4,
        attention_head_dim=24,
        in_channels=2 * CHANNELS + BLOCK,
        out_channels=CHANNELS,
        text_dim=TEXT_WIDTH,
        freq_dim=64,
        ffn_dim=192,
        num_layers=2,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )


def tiny_tokenizer(
    words: str = "a person moves right left and speaks", longest: int = LONGEST_PROMPT
) -> PreTrainedTokenizerFast:
    """Returns a tokenizer with one token for each of the words.

    Args:
        words: text that contains every word, by default those of `prompt_of`.
        longest: largest number of tokens of a prompt.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    vocabulary = {word: index for index, word in enumerate([*special.values(), *words.split()])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=longest, **special)


def tiny_text_encoder(width: int = TEXT_WIDTH) -> UMT5EncoderModel:
    """Returns a random text encoder, whose embeddings distinguish the prompts."""
    from transformers import UMT5Config, UMT5EncoderModel

    config = UMT5Config(d_model=width, d_kv=16, d_ff=64, num_layers=1, num_heads=2, vocab_size=16, dropout_rate=0.0)
    return UMT5EncoderModel(config).eval().requires_grad_(False)


def examples_of(codec: EigenfaceCodec, clips: torch.Tensor, prompts: torch.Tensor, size: WorldSize) -> Examples:
    """Returns the function that draws training batches.

    Args:
        codec: encodes the clips.
        clips: (n, F, 3, SIZE, SIZE) in [0, 1].
        prompts: (n, L, D) embeddings.
        size: batch size and `same_person`.
    """
    video = (clips * 2 - 1).transpose(1, 2)
    # grey after the first frame, as in `RewardFlowPolicy`
    first_frame_only = torch.zeros_like(video)
    first_frame_only[:, :, 0] = video[:, :, 0]
    latents = codec.encode_video(video)
    first_frames = codec.encode_video(first_frame_only)
    # the mask channels of I2V-A14B: only the first frame is given
    is_given = torch.zeros(size.batch, BLOCK, *latents.shape[2:])
    is_given[:, :, 0] = 1

    def draw_batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows, other_rows = torch.randint(len(latents), (2, size.batch), generator=generator)
        is_same = torch.rand(size.batch, generator=generator) < size.same_person
        rows_of_first_frame = torch.where(is_same, rows, other_rows)
        condition = torch.cat([is_given, first_frames[rows_of_first_frame]], 1)
        return latents[rows], condition, prompts[rows]

    return draw_batch


def flow_match(
    expert: WanTransformer3DModel, examples: Examples, low: float, high: float, steps: int, generator: torch.Generator
) -> None:
    """Trains an expert to predict noise - latents at x = (1 - sigma) latents + sigma noise.

    Args:
        expert: the transformer.
        examples: draws a batch.
        low, high: limits of sigma.
        steps: number of optimizer steps.
        generator: generator of batches, sigmas and noise.
    """
    optimizer = torch.optim.AdamW(expert.parameters(), lr=LR, betas=(0.9, 0.99), weight_decay=0.0, fused=True)
    expert.train()
    for step in range(steps):
        warmup = min(1.0, (step + 1) / 20)
        decay = max(0.02, 1 - step / steps)
        for group in optimizer.param_groups:
            group["lr"] = LR * warmup * decay
        latents, condition, prompts = examples(generator)
        sigma = low + (high - low) * torch.rand(len(latents), generator=generator)
        noise = torch.randn(latents.shape, generator=generator)
        noisy = torch.lerp(latents, noise, sigma.view(-1, 1, 1, 1, 1))
        inputs = torch.cat([noisy, condition], 1)
        velocity = expert(inputs, TRAIN_TIMESTEPS * sigma, prompts, return_dict=False)[0]
        target = noise - latents
        loss = (velocity - target).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(expert.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    expert.eval()
