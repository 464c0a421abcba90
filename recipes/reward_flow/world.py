"""The data and model of the embedded run: clips of drawn people, and a pretrained image-to-video pipeline.

`write_world` generates from one seed, without downloads:

    data/metadata.csv   video, prompt; the videos are folders of frames
    faces.safetensors   weights of the identity embedder
    model/              a pipeline in diffusers format: two Wan transformers, text encoder, tokenizer, scheduler, codec

The transformers learn by flow matching to draw moving people. In most of their training clips, the first frame that
they get as input shows another person. Therefore the pretrained pipeline seldom draws the person in its input, the
identity score starts near 0, and reward flow has to teach the model to use the first frame.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from recipes.reward_flow.codec import BLOCK, CHANNELS, GRID, EigenfaceCodec
from recipes.reward_flow.faces import TRAITS, Cast, FisherEmbedder, cast_of, draw
from workers.diffusion.memory_saving import Placement
from workers.diffusion.pipeline import INDEX, PromptEncoder

BOUNDARY, OVERLAP = 0.9, 0.02
TEXT_WIDTH, LONGEST_PROMPT = 32, 8
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

    people: people in the pretraining clips, of which known_people fit the embedder. clips: rows of metadata.csv, which
    show other people. high_steps, low_steps, batch: steps of the two experts, and their batch size. same_person: share
    of pretraining clips with their own first frame as input.
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

    tell: called with lines on the progress.
    """
    from diffusers import FlowMatchEulerDiscreteScheduler

    size, threads = size or WorldSize(), torch.get_num_threads()
    torch.set_num_threads(1)  # the order of sums must not depend on the number of cores
    with torch.random.fork_rng(devices=[]):
        generator = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        tell(f"drawing {size.people} people, and fitting embedder and codec to them")
        cast = cast_of(torch.rand(size.people, TRAITS, generator=generator), generator)
        clips = draw(cast)
        write_clips(folder / "data", cast_of(torch.rand(size.clips, TRAITS, generator=generator), generator))
        FisherEmbedder.fit(folder / "faces.safetensors", clips[: size.known_people])
        codec = EigenfaceCodec.fit(clips * 2 - 1)
        parts: dict[str, Any] = {"vae": codec, "tokenizer": tiny_tokenizer(), "text_encoder": tiny_text_encoder()}
        encode = PromptEncoder(parts["tokenizer"], parts["text_encoder"], Placement(torch.device("cpu"), offload=False))
        prompts = encode([prompt_of(cast, row) for row in range(size.people)], torch.device("cpu"))
        examples = examples_of(codec, clips, prompts, size)
        experts = (
            ("transformer", BOUNDARY - OVERLAP, 1.0, size.high_steps),
            ("transformer_2", 0.0, BOUNDARY, size.low_steps),
        )
        for place, (name, low, high, steps) in enumerate(experts):
            parts[name] = tiny_transformer()
            tell(f"training the video model, {name} ({place + 1} of 2), {steps} steps")
            flow_match(parts[name], examples, low, high, steps, torch.Generator().manual_seed(seed + place))
    torch.set_num_threads(threads)
    parts["scheduler"] = FlowMatchEulerDiscreteScheduler(shift=5.0)
    for name, part in parts.items():
        part.save_pretrained(folder / "model" / name)
    settings = {"_class_name": "WanImageToVideoPipeline", "boundary_ratio": BOUNDARY, "expand_timesteps": False}
    (folder / "model" / INDEX).write_text(json.dumps(settings | COMPONENTS, indent=2) + "\n", encoding="utf-8")


def write_clips(folder: Path, cast: Cast) -> None:
    """Writes metadata.csv and a folder of frames for each person."""
    rows = ["video,prompt"]
    for row, clip in enumerate(draw(cast)):
        name = f"person_{row:02d}"
        (folder / name).mkdir(parents=True)
        pixels = (clip * 255).round().byte().permute(0, 2, 3, 1).numpy()  # (F, H, W, 3)
        for index, frame in enumerate(pixels):
            Image.fromarray(frame).save(folder / name / f"{index:03d}.png")
        rows.append(f"{name},{prompt_of(cast, row)}")
    (folder / "metadata.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")


def prompt_of(cast: Cast, row: int) -> str:
    """Returns the prompt of a clip, which describes its motion but not the person."""
    way = "right" if cast.sway[row, -1, 0] > cast.sway[row, 0, 0] else "left"
    speech = " and speaks" if float(cast.mouth[row].max() - cast.mouth[row].min()) > 0.5 else ""
    return f"a person moves {way}{speech}"


def tiny_transformer() -> Any:
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


def tiny_tokenizer(words: str = "a person moves right left and speaks", longest: int = LONGEST_PROMPT) -> Any:
    """Returns a tokenizer with one token for each word of `prompt_of`."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    known = {word: index for index, word in enumerate([*special.values(), *words.split()])}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=longest, **special)


def tiny_text_encoder(width: int = TEXT_WIDTH) -> Any:
    """Returns a random text encoder, whose embeddings distinguish the prompts."""
    from transformers import UMT5Config, UMT5EncoderModel

    config = UMT5Config(d_model=width, d_kv=16, d_ff=64, num_layers=1, num_heads=2, vocab_size=16, dropout_rate=0.0)
    return UMT5EncoderModel(config).eval().requires_grad_(False)


def examples_of(codec: EigenfaceCodec, clips: torch.Tensor, prompts: torch.Tensor, size: WorldSize) -> Examples:
    """Returns the function that draws training batches. clips: (n, F, 3, SIZE, SIZE) in [0, 1]. prompts: (n, L, D)."""
    video = (clips * 2 - 1).transpose(1, 2)
    first = torch.zeros_like(video)  # clips that are grey after the first frame
    first[:, :, 0] = video[:, :, 0]
    latents, first_frames = codec.encode_video(video), codec.encode_video(first)
    is_given = torch.zeros(size.batch, BLOCK, *latents.shape[2:])
    is_given[:, :, 0] = 1

    def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows, others = torch.randint(len(latents), (2, size.batch), generator=generator)
        is_same = torch.rand(size.batch, generator=generator) < size.same_person
        condition = torch.cat([is_given, first_frames[torch.where(is_same, rows, others)]], 1)
        return latents[rows], condition, prompts[rows]

    return batch


def flow_match(
    expert: Any, examples: Examples, low: float, high: float, steps: int, generator: torch.Generator
) -> None:
    """Trains an expert to predict noise - latents at x = (1 - sigma) latents + sigma noise, sigma in [low, high]."""
    optimizer = torch.optim.AdamW(expert.parameters(), lr=LR, betas=(0.9, 0.99), weight_decay=0.0, fused=True)
    expert.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, (step + 1) / 20) * max(0.02, 1 - step / steps)
        latents, condition, prompts = examples(generator)
        sigma = low + (high - low) * torch.rand(len(latents), generator=generator)
        noise = torch.randn(latents.shape, generator=generator)
        noisy = torch.lerp(latents, noise, sigma.view(-1, 1, 1, 1, 1))
        velocity = expert(torch.cat([noisy, condition], 1), 1000 * sigma, prompts, return_dict=False)[0]
        (velocity - (noise - latents)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(expert.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    expert.eval()
