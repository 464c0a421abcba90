"""The identity reward: what counts in the mean, and where the crop comes from."""

from __future__ import annotations

import math

import pytest
import torch

from tests.verl_lite.visual_rewards.rewards import MeanColour, TopLeftVector, bright_frames
from verl_lite.visual_rewards.identity import (
    ARCFACE_TEMPLATE,
    CosineIdentityReward,
    align,
    pooled_similarity,
    similarity_transform,
    whole_frame,
)

# ------------------------------------------------------------------------------------------------------- pooling


def naive_pooling(
    vectors: list[list[float]], found: list[bool], reference: list[list[float]], epsilon: float = 1e-8
) -> float:
    """ROLL's pooling in plain loops: weights of reference frames, then the mask of generated ones."""
    weights = [0.0 if j == 0 or not any(row) else 1.0 for j, row in enumerate(reference)]
    total = count = 0.0
    for vector, is_face in zip(vectors, found, strict=True):
        similarity = 0.0
        for weight, row in zip(weights, reference, strict=True):
            lengths = math.hypot(*vector) * math.hypot(*row)
            cosine = sum(a * b for a, b in zip(vector, row, strict=True)) / lengths if lengths else 0.0
            similarity += weight * cosine
        similarity /= sum(weights) + epsilon
        total += float(is_face) * similarity
        count += float(is_face)
    return total / (count + epsilon)


@pytest.mark.parametrize("seed", range(5))
def test_pooling_is_that_of_a_naive_loop(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(5, 8, generator=generator)
    reference = torch.randn(6, 8, generator=generator)
    found = torch.rand(5, generator=generator) > 0.4
    found[2] = True
    reference[torch.rand(6, generator=generator) > 0.6] = 0
    reference[3] = 1.0
    expected = naive_pooling(vectors.tolist(), found.tolist(), reference.tolist())
    assert pooled_similarity(vectors[found], reference).item() == pytest.approx(expected, abs=1e-6)


# --------------------------------------------------------------------------------------------------- frames, masks


def frames_of(*colours: tuple[float, float, float]) -> torch.Tensor:
    """(F, 3, 4, 4) in [0, 1], each frame of one colour."""
    return torch.tensor(colours).view(-1, 3, 1, 1).expand(-1, 3, 4, 4).clone()


RED, BLUE, BLACK = (1.0, 0.5, 0.5), (0.5, 0.5, 1.0), (0.0, 0.0, 0.0)


def reward() -> CosineIdentityReward:
    return CosineIdentityReward(TopLeftVector(), lambda frames: bright_frames(frames)._replace(keypoints=_full(frames)))


def _full(frames: torch.Tensor) -> torch.Tensor:
    return whole_frame(frames).keypoints


def test_generated_frames_without_a_face_are_masked_and_get_no_gradient() -> None:
    reference = reward().prepare(frames_of(RED, RED))
    generated = (frames_of(RED, BLACK, BLUE) * 2 - 1).requires_grad_()
    score = reward().score(generated, reference)
    assert score.counted and score.value.item() == pytest.approx(0.5)  # (1 + 0) / 2, not / 3
    (gradient,) = torch.autograd.grad(score.value, generated)
    assert gradient[1].abs().sum() == 0 and gradient[2].abs().sum() > 0


@pytest.mark.parametrize("clip", [(RED,), (RED, BLACK, BLACK), (BLACK, BLACK)])
def test_a_reference_that_shows_no_face_after_the_first_frame_is_an_error(clip: tuple) -> None:
    with pytest.raises(ValueError, match="no face in any of the . reference frames after the first"):
        reward().prepare(frames_of(*clip))


def test_nothing_but_generated_pixels_gets_a_gradient() -> None:
    identity = CosineIdentityReward(MeanColour())
    clip = torch.rand(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    reference = identity.prepare(clip.requires_grad_())
    assert not reference.requires_grad
    generated = (torch.rand(3, 3, 16, 16, generator=torch.Generator().manual_seed(1)) * 2 - 1).requires_grad_()
    (gradient,) = torch.autograd.grad(identity.score(generated, reference).value, generated)
    step = generated.detach() + 5 * gradient / gradient.abs().max()
    assert identity.score(step, reference).value > identity.score(generated, reference).value


# ----------------------------------------------------------------------------------------------------- alignment


def test_a_picture_twice_as_large_and_turned_by_a_quarter() -> None:
    """Each pixel of the crop is the middle of four of the picture's: their mean, as bilinear sampling gives it."""
    upright = torch.rand(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    turned = upright.rot90(1, (2, 3))  # counterclockwise: (x, y) goes to (y, 223 - x)
    points = (torch.tensor([ARCFACE_TEMPLATE]) + 0.5) * 2 - 0.5
    moved = torch.stack([points[..., 1], 223 - points[..., 0]], -1)
    torch.testing.assert_close(align(turned, moved, 112), torch.nn.functional.avg_pool2d(upright, 2), atol=1e-3, rtol=0)


def test_the_transform_is_that_of_least_squares() -> None:
    """a x - b y + c = u and b x + a y + d = v for all points, solved as one linear system."""
    generator = torch.Generator().manual_seed(3)
    points = torch.randn(1, 5, 2, generator=generator, dtype=torch.float64)
    targets = torch.randn(5, 2, generator=generator, dtype=torch.float64)
    rows, right = [], []
    for (x, y), (u, v) in zip(points[0].tolist(), targets.tolist(), strict=True):
        rows += [[x, -y, 1.0, 0.0], [y, x, 0.0, 1.0]]
        right += [u, v]
    solved = torch.linalg.lstsq(torch.tensor(rows).double(), torch.tensor(right).double()).solution
    a, b, c, d = solved.tolist()
    expected = torch.tensor([[a, -b, c], [b, a, d], [0, 0, 1]], dtype=torch.float64)
    torch.testing.assert_close(similarity_transform(points, targets)[0], expected, atol=1e-6, rtol=0)


def test_the_crop_of_a_whole_frame_is_the_frame() -> None:
    frames = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(align(frames, whole_frame(frames).keypoints, 32), frames, atol=1e-4, rtol=0)
