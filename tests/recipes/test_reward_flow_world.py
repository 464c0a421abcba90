"""The small world of reward flow: the same each time, and one in which a likeness can be seen, measured and learnt."""

from __future__ import annotations

import csv
import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("diffusers")

from recipes.reward_flow import recipe
from recipes.reward_flow.codec import EigenfaceCodec
from recipes.reward_flow.faces import FRAMES, SIZE, TRAITS, Cast, FisherEmbedder, cast_of, draw
from recipes.reward_flow.world import WorldSize, write_world
from verl_lite.config.diffusion import DiffusionModelConfig, FlowRewardConfig
from verl_lite.visual_rewards import CosineIdentityReward, build_visual_reward
from workers.diffusion.pipeline import load_pipeline

TINY = WorldSize(people=48, known_people=40, clips=2, high_steps=2, low_steps=2, batch=4)


@pytest.fixture(scope="module")
def cast() -> Cast:
    generator = torch.Generator().manual_seed(5)
    return cast_of(torch.rand(160, TRAITS, generator=generator), generator)


@pytest.fixture(scope="module")
def clips(cast: Cast) -> torch.Tensor:
    return draw(cast)


def test_people_are_like_themselves_and_nobody_else(clips: torch.Tensor, cast: Cast, tmp_path: Path) -> None:
    """People whom the embedder never saw: another clip of the same person, and the next one's."""
    assert clips.shape == (160, FRAMES, 3, SIZE, SIZE) and 0 <= clips.min() and clips.max() <= 1
    assert (clips.amax(1) - clips.amin(1)).amax((1, 2, 3)).min() > 0.1  # they move
    FisherEmbedder.fit(tmp_path / "faces.safetensors", clips[:144])
    reward = CosineIdentityReward(FisherEmbedder(tmp_path / "faces.safetensors"))
    references = [reward.prepare(clip) for clip in clips[144:]]
    again = draw(cast_of(cast.traits[144:], torch.Generator().manual_seed(9))) * 2 - 1
    same = [reward.score(clip, known).value.item() for clip, known in zip(again, references, strict=True)]
    other = [reward.score(clip, known).value.item() for clip, known in zip(again.roll(1, 0), references, strict=True)]
    assert np.mean(same) > 0.8 and abs(np.mean(other)) < 0.2 and min(same) > max(other), (same, other)


def test_decoding_brings_back_what_was_encoded(clips: torch.Tensor) -> None:
    codec = EigenfaceCodec.fit(clips * 2 - 1)
    video = (clips[:4] * 2 - 1).transpose(1, 2)  # (B, 3, F, H, W)
    latents = codec.encode_video(video)
    assert latents.shape == (4, 16, 2, 2, 2)
    (found,) = codec.decode(latents)
    assert found.shape == video.shape and (found - video).square().mean() < 0.05
    # linear: what is encoded of a decoding is what was decoded
    torch.testing.assert_close(codec.encode_video(found), latents, atol=1e-2, rtol=0)
    longer = codec.encode_video(torch.cat([video, video[:, :, 1:]], 2))
    torch.testing.assert_close(longer[:, :, [0, 1, 2]], latents[:, :, [0, 1, 1]])


def digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_the_world_is_the_same_each_time_and_loads_as_a_pipeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    random_numbers, threads = torch.get_rng_state(), torch.get_num_threads()
    write_world(first, 3, TINY)
    assert torch.equal(torch.get_rng_state(), random_numbers) and torch.get_num_threads() == threads
    write_world(second, 3, TINY)
    assert digests(first) == digests(second)
    rows = list(csv.DictReader((first / "data" / "metadata.csv").open(encoding="utf-8")))
    assert [row["video"] for row in rows] == ["person_00", "person_01"]
    assert len(list((first / "data" / "person_00").glob("*.png"))) == FRAMES
    parts = load_pipeline(DiffusionModelConfig(path=str(first / "model")), torch.float32)
    assert parts.boundary_ratio == 0.9 and parts.high_noise is not None and not parts.expand_timesteps
    assert parts.codec.latent_shape(FRAMES, SIZE, SIZE) == (16, 2, 2, 2)
    ids = parts.tokenizer(rows[0]["prompt"]).input_ids
    assert parts.tokenizer.unk_token_id not in ids and len(ids) <= parts.tokenizer.model_max_length
    monkeypatch.setattr(recipe, "MADE", SimpleNamespace(folder=first))
    embedder: Any = recipe.overrides()["reward.kwargs.embedder"]
    assert isinstance(build_visual_reward(FlowRewardConfig(kwargs={"embedder": embedder})), CosineIdentityReward)
