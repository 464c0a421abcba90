"""The small world of the embedded run: clips of drawn people, and an image-to-video pipeline that knows them a little.

`write_world` makes, from one seed and with nothing but this project's code:

    data/metadata.csv   video, prompt; the videos are folders of frames
    faces/              the detector and the identity embedder, for reward.kwargs
    model/              a pipeline in diffusers format: two Wan transformers, text encoder, tokenizer, scheduler, codec

The transformers learn by flow matching to draw people who move. In most of the clips that they learn from, the first
frame that is given shows somebody else: so the pipeline draws a person, but seldom the one that it is shown, and the
identity score begins near 0. To look at the first frame is what reward flow has to teach.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from recipes.reward_flow.codec import BLOCK, CHANNELS, GRID, EigenfaceCodec
from recipes.reward_flow.faces import (
    Cast,
    FisherEmbedder,
    TemplateDetector,
    cropped,
    draw,
    in_motion,
    people,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, UMT5EncoderModel

BOUNDARY, OVERLAP = 0.9, 0.02
TEXT_WIDTH, LONGEST_PROMPT = 32, 8
PAD, END, UNKNOWN = "<pad>", "</s>", "<unk>"
TOLD_STEPS = 100

Tell = Callable[[str], None]


@dataclass(frozen=True)
class WorldSize:
    """How much is drawn and learnt. people: in the clips that the models learn from. clips: rows of metadata.csv, of
    other people. same_person: share of clips to learn from whose first frame is their own."""

    people: int = 1024
    known_people: int = 256
    clips: int = 16
    high_steps: int = 200
    low_steps: int = 600
    batch: int = 128
    same_person: float = 0.3


def write_world(folder: Path, seed: int, size: WorldSize | None = None, tell: Tell = print) -> None:
    """Writes data/, faces/ and model/ into `folder`. Same seed, same bytes on one kind of processor. tell: hears what
    is being made."""
    size = size or WorldSize()
    with _one_thread(), torch.random.fork_rng(devices=[]):
        generator = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        tell(f"drawing {size.people} people, and fitting face detector, embedder and codec to them")
        cast = in_motion(people(size.people, generator), generator)
        clips = draw(cast)
        write_clips(folder / "data", in_motion(people(size.clips, generator), generator))
        write_faces(folder / "faces", clips, cast, size.known_people)
        codec = EigenfaceCodec.fit(clips * 2 - 1, generator)
        prompts = [prompt_of(cast, row) for row in range(size.people)]
        write_pipeline(folder / "model", codec, clips, prompts, size, seed, tell)


# ------------------------------------------------------------------------------------------------------- clips


def write_clips(folder: Path, cast: Cast) -> None:
    """metadata.csv and a folder of frames for each person."""
    from PIL import Image

    folder.mkdir(parents=True)
    rows = []
    for row, clip in enumerate(draw(cast)):
        name = f"person_{row:02d}"
        (folder / name).mkdir()
        pixels = (clip * 255).round().byte().permute(0, 2, 3, 1).numpy()  # (F, H, W, 3)
        for index, frame in enumerate(pixels):
            Image.fromarray(frame).save(folder / name / f"{index:03d}.png")
        rows.append({"video": name, "prompt": prompt_of(cast, row)})
    with (folder / "metadata.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=["video", "prompt"])
        writer.writeheader()
        writer.writerows(rows)


def prompt_of(cast: Cast, row: int) -> str:
    """What happens in a clip; who it is, the first frame says."""
    way = "right" if cast.sway[row, -1, 0] > cast.sway[row, 0, 0] else "left"
    speech = " and speaks" if float(cast.mouth[row].max() - cast.mouth[row].min()) > 0.5 else ""
    return f"a person moves {way}{speech}"


# ------------------------------------------------------------------------------------------------------- faces


def write_faces(folder: Path, clips: torch.Tensor, cast: Cast, count: int) -> None:
    """detector/ and embedder/. clips: (n, F, 3, SIZE, SIZE) in [0, 1]. count: of people that the embedder learns."""
    detector = TemplateDetector.fit(clips[:, 0], cast.sway[:, 0])
    embedder = FisherEmbedder.fit(torch.stack([cropped(detector, clip) for clip in clips[:count]]))
    detector.save(folder / "detector")
    embedder.save(folder / "embedder")


# ---------------------------------------------------------------------------------------------------- pipeline


def write_pipeline(
    folder: Path,
    codec: EigenfaceCodec,
    clips: torch.Tensor,
    prompts: list[str],
    size: WorldSize,
    seed: int,
    tell: Tell = print,
) -> None:
    """The pipeline in diffusers format, its experts trained on `clips` (n, F, 3, SIZE, SIZE) in [0, 1]."""
    from diffusers import FlowMatchEulerDiscreteScheduler
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()

    tokenizer, text_encoder = tiny_tokenizer(), tiny_text_encoder()
    lessons = Lessons.of(codec, clips, _embedded(prompts, tokenizer, text_encoder), size)
    experts = {
        "transformer": (BOUNDARY - OVERLAP, 1.0, size.high_steps),
        "transformer_2": (0.0, BOUNDARY, size.low_steps),
    }
    for place, (name, (low, high, steps)) in enumerate(experts.items()):
        expert = tiny_transformer()
        tell(f"training the video model, {name} ({place + 1} of {len(experts)}), {steps} steps")
        flow_match(expert, lessons, low, high, steps, torch.Generator().manual_seed(seed + place), tell)
        expert.save_pretrained(folder / name)
    codec.save_pretrained(folder / "vae")
    tokenizer.save_pretrained(folder / "tokenizer")
    text_encoder.save_pretrained(folder / "text_encoder")
    scheduler: Any = FlowMatchEulerDiscreteScheduler(shift=5.0)
    scheduler.save_pretrained(folder / "scheduler")
    index = {
        "_class_name": "WanImageToVideoPipeline",
        "boundary_ratio": BOUNDARY,
        "expand_timesteps": False,
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
        "transformer": ["diffusers", "WanTransformer3DModel"],
        "transformer_2": ["diffusers", "WanTransformer3DModel"],
        "vae": [EigenfaceCodec.__module__, EigenfaceCodec.__name__],
    }
    (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def tiny_transformer() -> Any:
    """A random Wan transformer of 330 thousand parameters, for which a latent frame is one token."""
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


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word, of the words that `prompt_of` uses."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    words = [PAD, END, UNKNOWN, *"a person moves right left and speaks".split()]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(single=f"$A {END}", special_tokens=[(END, vocabulary[END])])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        model_max_length=LONGEST_PROMPT,
    )


def tiny_text_encoder() -> UMT5EncoderModel:
    """A random encoder: what matters is that prompts differ."""
    from transformers import UMT5Config, UMT5EncoderModel

    config = UMT5Config(
        d_model=TEXT_WIDTH, d_kv=16, d_ff=64, num_layers=1, num_heads=2, vocab_size=16, dropout_rate=0.0
    )
    return UMT5EncoderModel(config).eval().requires_grad_(False)


# ------------------------------------------------------------------------------------------------ flow matching


@dataclass(frozen=True)
class Lessons:
    """What the experts learn from. latents, first_frames: (n, C, f, h, w) of whole clips, and of clips that are grey
    after the first frame. given: (1, BLOCK, f, h, w), 1 where a frame is given. prompts: (n, L, D)."""

    latents: torch.Tensor
    first_frames: torch.Tensor
    given: torch.Tensor
    prompts: torch.Tensor
    batch: int
    same_person: float

    @classmethod
    def of(cls, codec: EigenfaceCodec, clips: torch.Tensor, prompts: torch.Tensor, size: WorldSize) -> Lessons:
        video = (clips * 2 - 1).transpose(1, 2)
        first = torch.zeros_like(video)
        first[:, :, 0] = video[:, :, 0]
        latents, given = codec.encode_video(video), codec.encode_video(first)
        mask = torch.zeros(1, BLOCK, *latents.shape[2:])
        mask[:, :, 0] = 1
        return cls(latents, given, mask, prompts, size.batch, size.same_person)

    def draw(self, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Latents to be drawn, what the transformer reads beside its noisy latents, and the prompts."""
        shown = torch.randint(len(self.latents), (2, self.batch), generator=generator)
        is_same = torch.rand(self.batch, generator=generator) < self.same_person
        given = self.first_frames[torch.where(is_same, shown[0], shown[1])]
        beside = torch.cat([self.given.expand(self.batch, -1, -1, -1, -1), given], 1)
        return self.latents[shown[0]], beside, self.prompts[shown[0]]


def flow_match(
    expert: Any,
    lessons: Lessons,
    low: float,
    high: float,
    steps: int,
    generator: torch.Generator,
    tell: Tell,
    lr: float = 3e-3,
) -> None:
    """Trains an expert to predict noise - latents at x = (1 - sigma) latents + sigma noise, sigma in [low, high].
    tell: hears how far it is."""
    optimizer = torch.optim.AdamW(expert.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=0.0, fused=True)
    expert.train()
    for step in range(steps):
        if step % TOLD_STEPS == 0:
            tell(f"step {step}/{steps}")
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 20) * max(0.02, 1 - step / steps)
        latents, beside, prompts = lessons.draw(generator)
        sigma = low + (high - low) * torch.rand(len(latents), generator=generator)
        noise = torch.randn(latents.shape, generator=generator)
        noisy = torch.lerp(latents, noise, sigma.view(-1, 1, 1, 1, 1))
        found = expert(torch.cat([noisy, beside], 1), 1000 * sigma, prompts, return_dict=False)[0]
        (found - (noise - latents)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(expert.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    expert.eval()


def _embedded(prompts: list[str], tokenizer: Any, text_encoder: Any) -> torch.Tensor:
    """(n, L, D), as the worker gives prompts to the experts."""
    from workers.diffusion.memory import Placement
    from workers.diffusion.pipeline import PromptEncoder

    device = torch.device("cpu")
    return PromptEncoder(tokenizer, text_encoder, Placement(device, offload=False))(prompts, device)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Sums in the same order wherever this runs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
