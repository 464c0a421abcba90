"""The small world of reward flow: the same each time, and one in which a likeness can be seen, measured and learnt."""

from __future__ import annotations

import csv
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recipes.reward_flow import recipe
from recipes.reward_flow.codec import APPEARANCE, MOTION, EigenfaceCodec, principal
from recipes.reward_flow.faces import (
    FRAMES,
    KEYPOINTS,
    SIZE,
    Cast,
    FisherEmbedder,
    TemplateDetector,
    draw,
    fit_faces,
    in_motion,
    people,
)
from recipes.reward_flow.world import WorldSize, write_world
from verl_lite.config.diffusion import FlowRewardConfig
from verl_lite.visual_rewards import CosineIdentityReward, build_visual_reward
from verl_lite.visual_rewards.contract import check_visual_reward

TINY = WorldSize(people=24, known_people=20, clips=2, high_steps=2, low_steps=2, batch=4)


@pytest.fixture(scope="module")
def cast() -> Cast:
    generator = torch.Generator().manual_seed(5)
    return in_motion(people(64, generator), generator)


@pytest.fixture(scope="module")
def clips(cast: Cast) -> torch.Tensor:
    return draw(cast)


@pytest.fixture(scope="module")
def fitted(clips: torch.Tensor, cast: Cast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("faces") / "faces.safetensors"
    fit_faces(path, clips, cast.sway, known=48)
    return path


@pytest.fixture(scope="module")
def detector(fitted: Path) -> TemplateDetector:
    return TemplateDetector(fitted)


@pytest.fixture(scope="module")
def reward(fitted: Path, detector: TemplateDetector) -> CosineIdentityReward:
    return CosineIdentityReward(FisherEmbedder(fitted), detector)


# ------------------------------------------------------------------------------------------------------- faces


def test_clips_are_pictures_that_move(clips: torch.Tensor) -> None:
    assert clips.shape == (64, FRAMES, 3, SIZE, SIZE)
    assert 0 <= clips.min() and clips.max() <= 1
    assert (clips.amax(1) - clips.amin(1)).amax((1, 2, 3)).min() > 0.1


def test_the_detector_finds_heads_where_they_were_drawn(
    clips: torch.Tensor, cast: Cast, detector: TemplateDetector
) -> None:
    faces = detector(clips.flatten(0, 1))
    truth = torch.tensor(KEYPOINTS) + cast.sway.flatten(0, 1)[:, None] + SIZE / 2
    assert faces.found.all()
    assert (faces.keypoints - truth).abs().max() < 1.5


def test_the_detector_finds_none_in_noise_or_in_one_colour(detector: TemplateDetector) -> None:
    noise = torch.rand(16, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    assert not detector(torch.cat([noise, torch.full((1, 3, SIZE, SIZE), 0.4)])).found.any()


def test_people_are_like_themselves_and_nobody_else(
    clips: torch.Tensor, cast: Cast, reward: CosineIdentityReward
) -> None:
    """People whom the embedder never saw: another clip of the same person, and the next one's."""
    strangers = slice(48, 64)
    references = [reward.prepare(clip) for clip in clips[strangers]]
    again = draw(in_motion(cast.traits[strangers], torch.Generator().manual_seed(9))) * 2 - 1
    same = [reward.score(clip, known).value.item() for clip, known in zip(again, references, strict=True)]
    other = [reward.score(clip, known).value.item() for clip, known in zip(again.roll(1, 0), references, strict=True)]
    assert min(same) > 0.8
    assert abs(float(np.mean(other))) < 0.2 and max(other) < min(same)


def test_the_reward_keeps_its_promises(clips: torch.Tensor, reward: CosineIdentityReward) -> None:
    check_visual_reward(reward, clips[50], clips[51])


# ------------------------------------------------------------------------------------------------------- codec


def test_principal_directions_are_those_of_a_whole_decomposition() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(400, 30, generator=generator) * torch.linspace(3, 0.1, 30)
    variances, vectors = torch.linalg.eigh(rows.T @ rows / 400)
    expected = vectors.flip(1)[:, :4] * variances.flip(0)[:4].sqrt()
    torch.testing.assert_close(principal(rows, 4, generator), expected * expected.sum(0).sign(), atol=1e-2, rtol=0)


@pytest.fixture(scope="module")
def codec(clips: torch.Tensor) -> EigenfaceCodec:
    return EigenfaceCodec.fit(clips * 2 - 1, torch.Generator().manual_seed(0))


def test_decoding_brings_back_what_was_encoded(clips: torch.Tensor, codec: EigenfaceCodec) -> None:
    video = (clips[:4] * 2 - 1).transpose(1, 2)  # (B, 3, F, H, W)
    latents = codec.encode_video(video)
    assert latents.shape == (4, 16, 2, 2, 2)
    (found,) = codec.decode(latents, return_dict=False)
    assert found.shape == video.shape and (found - video).square().mean() < 0.02
    # linear: what is encoded of a decoding is what was decoded
    torch.testing.assert_close(codec.encode_video(found), latents, atol=1e-2, rtol=0)
    longer = codec.encode_video(torch.cat([video, video[:, :, 1:]], 2))
    torch.testing.assert_close(longer[:, :, [0, 1, 2]], latents[:, :, [0, 1, 1]])


def test_a_single_frame_has_an_appearance_and_no_motion(clips: torch.Tensor, codec: EigenfaceCodec) -> None:
    latents = codec.encode_video((clips[:3, :1] * 2 - 1).transpose(1, 2))
    numbers = latents.transpose(1, 2).flatten(2)
    assert numbers.shape == (3, 1, APPEARANCE + MOTION)
    assert numbers[..., APPEARANCE:].abs().max() == 0 and numbers[..., :APPEARANCE].abs().max() > 0
    assert codec.decode(latents).sample.shape == (3, 3, 1, SIZE, SIZE)


# ------------------------------------------------------------------------------------------------------- world


def digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_the_world_is_the_same_each_time_and_loads_as_a_pipeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("diffusers")
    from verl_lite.config.diffusion import DiffusionModelConfig
    from workers.diffusion.pipeline import load_pipeline

    first, second = tmp_path / "first", tmp_path / "second"
    random_numbers, threads = torch.get_rng_state(), torch.get_num_threads()
    told: list[str] = []
    write_world(first, 3, TINY, told.append)
    assert told[2::2] == ["step 0/2"] * 2 and "24 people" in told[0] and "transformer_2 (2 of 2)" in told[3]
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
    monkeypatch.setattr(recipe, "cache_folder", lambda: first)
    kwargs: Any = recipe.overrides()["reward.kwargs"]
    assert isinstance(build_visual_reward(FlowRewardConfig(kwargs=kwargs)), CosineIdentityReward)
