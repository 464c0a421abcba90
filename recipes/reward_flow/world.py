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
from typing import TYPE_CHECKING

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
    # with 0, the reward teaches the model nothing but the clips that it trains on
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
        cast = random_cast(size.people, generator)
        clips = draw(cast)

        # other people than those of the pretraining
        write_clips(folder / "data", random_cast(size.clips, generator))
        FisherEmbedder.fit(folder / "faces.safetensors", clips[: size.known_people])
        write_pipeline(folder / "model", cast, clips, seed, size, tell)
    torch.set_num_threads(threads)


def random_cast(people: int, generator: torch.Generator) -> Cast:
    """Draws people and their motions."""
    traits = torch.rand(people, TRAITS, generator=generator)
    return cast_of(traits, generator)


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
    texts = [prompt_of(cast, row) for row in range(len(clips))]
    examples = examples_of(codec, clips, encode(texts, cpu), size)

    high_noise = tiny_transformer()
    tell(f"training the video model, transformer (1 of 2), {size.high_steps} steps")
    generator = torch.Generator().manual_seed(seed)
    flow_match(high_noise, examples, BOUNDARY - OVERLAP, 1.0, size.high_steps, generator)

    low_noise = tiny_transformer()
    tell(f"training the video model, transformer_2 (2 of 2), {size.low_steps} steps")
    generator = torch.Generator().manual_seed(seed + 1)
    flow_match(low_noise, examples, 0.0, BOUNDARY, size.low_steps, generator)

    scheduler = FlowMatchEulerDiscreteScheduler(shift=5.0)
    codec.save_pretrained(folder / "vae")
    tokenizer.save_pretrained(folder / "tokenizer")
    text_encoder.save_pretrained(folder / "text_encoder")
    high_noise.save_pretrained(folder / "transformer")
    low_noise.save_pretrained(folder / "transformer_2")
    scheduler.save_pretrained(folder / "scheduler")

    # diffusers' index of the folders, and the settings of Wan2.2 I2V-A14B
    index = {
        "_class_name": "WanImageToVideoPipeline",
        "boundary_ratio": BOUNDARY,
        "expand_timesteps": False,
        **COMPONENTS,
    }
    text = json.dumps(index, indent=2)
    (folder / INDEX).write_text(f"{text}\n", encoding="utf-8")


def write_clips(folder: Path, cast: Cast) -> None:
    """Writes metadata.csv and a folder of frames for each person."""
    lines = ["video,prompt"]
    for row, clip in enumerate(draw(cast)):
        name = f"person_{row:02d}"
        frame_folder = folder / name
        frame_folder.mkdir(parents=True)
        pixels = (clip * 255).round().byte()
        frames = pixels.permute(0, 2, 3, 1).numpy()  # (F, H, W, 3)
        for index, frame in enumerate(frames):
            image = Image.fromarray(frame)
            image.save(frame_folder / f"{index:03d}.png")
        lines.append(f"{name},{prompt_of(cast, row)}")
    text = "\n".join(lines)
    (folder / "metadata.csv").write_text(f"{text}\n", encoding="utf-8")


def prompt_of(cast: Cast, row: int) -> str:
    """Returns the prompt of a clip, which describes its motion but not the person."""
    sideways = cast.sway[row, :, 0]
    direction = "right" if sideways[-1] > sideways[0] else "left"
    prompt = f"a person moves {direction}"

    mouth = cast.mouth[row]
    largest_change = float(mouth.max() - mouth.min())
    if largest_change > 0.5:
        prompt += " and speaks"
    return prompt


def tiny_transformer() -> WanTransformer3DModel:
    """Returns a random Wan transformer of 330 thousand parameters, for which a latent frame is one token."""
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        # a latent frame is one token
        patch_size=(1, GRID, GRID),
        num_attention_heads=4,
        attention_head_dim=24,
        # noisy latents, latents of the first frame, and a mask channel for each frame of a block
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
    tokens = [*special.values(), *words.split()]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()

    # a prompt ends with </s>, as T5's tokenizer writes it
    end = ("</s>", vocabulary["</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[end])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=longest, **special)


def tiny_text_encoder(width: int = TEXT_WIDTH) -> UMT5EncoderModel:
    """Returns a random text encoder, whose embeddings distinguish the prompts."""
    from transformers import UMT5Config, UMT5EncoderModel

    config = UMT5Config(
        d_model=width,
        d_kv=16,
        d_ff=64,
        num_layers=1,
        num_heads=2,
        vocab_size=16,
        dropout_rate=0.0,
    )
    encoder = UMT5EncoderModel(config).eval()
    return encoder.requires_grad_(False)


def examples_of(codec: EigenfaceCodec, clips: torch.Tensor, prompts: torch.Tensor, size: WorldSize) -> Examples:
    """Returns the function that draws training batches.

    Args:
        codec: encodes the clips.
        clips: (n, F, 3, SIZE, SIZE) in [0, 1].
        prompts: (n, L, D) embeddings.
        size: batch size and `same_person`.
    """
    video = (clips * 2 - 1).transpose(1, 2)
    latents = codec.encode_video(video)

    # grey after the first frame, as in `RewardFlowPolicy`
    first_frame_only = torch.zeros_like(video)
    first_frame_only[:, :, 0] = video[:, :, 0]
    first_frames = codec.encode_video(first_frame_only)

    # the mask channels of I2V-A14B: only the first frame is given
    is_given = torch.zeros(size.batch, BLOCK, *latents.shape[2:])
    is_given[:, :, 0] = 1

    def draw_batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        pairs_of_rows = torch.randint(len(latents), (2, size.batch), generator=generator)
        rows, other_rows = pairs_of_rows
        uniform = torch.rand(size.batch, generator=generator)
        is_same = uniform < size.same_person

        rows_of_first_frame = torch.where(is_same, rows, other_rows)
        shown_frames = first_frames[rows_of_first_frame]
        condition = torch.cat([is_given, shown_frames], 1)
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
        # linear warm-up, then linear decay to 2%
        warmup = min(1.0, (step + 1) / 20)
        decay = max(0.02, 1 - step / steps)
        for group in optimizer.param_groups:
            group["lr"] = LR * warmup * decay

        latents, condition, prompts = examples(generator)
        uniform = torch.rand(len(latents), generator=generator)
        sigma = low + (high - low) * uniform
        noise = torch.randn(latents.shape, generator=generator)
        noisy = torch.lerp(latents, noise, sigma.view(-1, 1, 1, 1, 1))
        inputs = torch.cat([noisy, condition], 1)
        [velocity] = expert(inputs, TRAIN_TIMESTEPS * sigma, prompts, return_dict=False)

        error = velocity - (noise - latents)
        loss = error.square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(expert.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    expert.eval()
