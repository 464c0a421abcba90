"""Real face models: ONNX files become modules that the gradient passes, and SCRFD's outputs become the largest face.

No weights of a real model are here; the files are made by the tests with onnx.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from verl_lite.errors import UserError
from verl_lite.visual_rewards import arcface
from verl_lite.visual_rewards.arcface import ArcFaceEmbedder, ScrfdDetector, decode_scrfd, load_onnx, suppress
from verl_lite.visual_rewards.identity import CosineIdentityReward

# ------------------------------------------------------------------------------------------------------ ONNX files


def write_onnx(path: Path, nodes: list[Any], weights: dict[str, np.ndarray], outputs: Sequence[str], side: int) -> str:
    onnx = pytest.importorskip("onnx")
    make, number = onnx.helper, onnx.TensorProto.FLOAT
    graph = make.make_graph(
        nodes,
        "test",
        [make.make_tensor_value_info("input", number, ["n", 3, side, side])],
        [make.make_tensor_value_info(name, number, None) for name in outputs],
        [onnx.numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    model = make.make_model(graph, opset_imports=[make.make_opsetid("", 13)])
    onnx.save(model, path)
    return str(path)


def write_embedder(folder: Path) -> str:
    """A convolution of 16 x 16 patches, batch normalisation, PReLU, flattened, and a linear layer: the operators of
    ArcFace's ResNets."""
    make = pytest.importorskip("onnx").helper
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    weights = {
        "kernel": draw(4, 3, 16, 16) * 0.1,
        "scale": draw(4),
        "shift": draw(4),
        "mean": draw(4),
        "variance": np.abs(draw(4)) + 0.5,
        "slope": np.full((4, 1, 1), 0.25, np.float32),
        "linear": draw(8, 4 * 49) * 0.1,
        "bias": draw(8),
    }
    nodes = [
        make.make_node("Conv", ["input", "kernel"], ["conv"], kernel_shape=[16, 16], strides=[16, 16]),
        make.make_node("BatchNormalization", ["conv", "scale", "shift", "mean", "variance"], ["norm"], epsilon=1e-5),
        make.make_node("PRelu", ["norm", "slope"], ["act"]),
        make.make_node("Flatten", ["act"], ["flat"], axis=1),
        make.make_node("Gemm", ["flat", "linear", "bias"], ["embedding"], transB=1),
    ]
    return write_onnx(folder / "embedder.onnx", nodes, weights, ["embedding"], 112)


def test_an_embedder_is_given_pixels_from_minus_1_to_1_in_either_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arcface, "load_onnx", lambda path, option: torch.nn.Identity())
    crops = torch.rand(2, 3, 112, 112)
    given = (255 * crops - 127.5) / 127.5
    torch.testing.assert_close(ArcFaceEmbedder("any.onnx")(crops), given.flatten(1))
    torch.testing.assert_close(ArcFaceEmbedder("any.onnx", channels="bgr")(crops), given.flip(1).flatten(1))


def test_the_gradient_passes_an_embedder_from_onnx(tmp_path: Path) -> None:
    reward = CosineIdentityReward(write_embedder(tmp_path))
    clip = torch.rand(3, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    frames = (torch.rand(3, 3, 64, 64, generator=torch.Generator().manual_seed(2)) * 2 - 1).requires_grad_()
    (gradient,) = torch.autograd.grad(reward.score(frames, reward.prepare(clip)).value, frames)
    assert bool(torch.isfinite(gradient).all()) and gradient.abs().sum() > 0


def test_without_onnx2torch_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_embedder(tmp_path)
    monkeypatch.setitem(sys.modules, "onnx2torch", None)
    with pytest.raises(UserError, match=r"reward.kwargs.embedder: .*onnx2torch is missing.*verl_lite\[diffusion\]"):
        ArcFaceEmbedder(path)
    with pytest.raises(UserError, match="reward.kwargs.embedder channels='gbr'; expected rgb or bgr"):
        ArcFaceEmbedder("unread.onnx", channels="gbr")
    with pytest.raises(UserError, match="size=100; expected a multiple of 32"):
        ScrfdDetector("any.onnx", size=100)


def test_what_onnx2torch_cannot_convert_is_named(tmp_path: Path) -> None:
    make, before = pytest.importorskip("onnx").helper, sys.modules.get("torchvision")
    path = write_onnx(tmp_path / "odd.onnx", [make.make_node("Det", ["input"], ["out"])], {}, ["out"], 8)
    with pytest.raises(UserError, match="reward.kwargs.detector=.*onnx2torch cannot convert it"):
        load_onnx(path, "reward.kwargs.detector")
    assert sys.modules.get("torchvision") is before  # no stand-in stays behind


# --------------------------------------------------------------------------------------------------------- SCRFD


def empty_outputs(size: int) -> list[torch.Tensor]:
    """Nine outputs for a picture without faces: scores, boxes and points at strides 8, 16, 32, two anchors a cell."""
    cells = [(size // stride) ** 2 * 2 for stride in (8, 16, 32)]
    return [torch.zeros(count, width) for width in (1, 4, 10) for count in cells]


def put_face(
    outputs: list[torch.Tensor], level: int, anchor: int, score: float, box: Sequence[float], points: Sequence[float]
) -> None:
    """Distances in units of the stride."""
    outputs[level][anchor] = score
    outputs[3 + level][anchor] = torch.tensor(box)
    outputs[6 + level][anchor] = torch.tensor(points)


def test_decoding_by_hand() -> None:
    """Of 64 x 64, stride 16 makes 4 x 4 cells; the second anchor of row 2, column 1 is number 19, at (16, 32)."""
    outputs = empty_outputs(64)
    put_face(outputs, 1, 19, 0.9, (0.5, 1.0, 1.5, 0.25), (-0.5, 0, 0.5, 0, 0, 0.25, -0.25, 0.5, 0.25, 0.5))
    put_face(outputs, 0, 0, 0.4, (1, 1, 1, 1), [0] * 10)  # below the threshold
    scores, boxes, points = decode_scrfd(outputs, 64, threshold=0.5)
    assert scores.tolist() == pytest.approx([0.9])
    assert boxes.tolist() == [[8.0, 16.0, 40.0, 36.0]]
    assert points.tolist() == [[[8, 32], [24, 32], [16, 36], [12, 40], [20, 40]]]
    batched = decode_scrfd([output[None] for output in outputs], 64, threshold=0.5)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(batched, (scores, boxes, points), strict=True))


def test_decoding_refuses_outputs_of_another_model() -> None:
    with pytest.raises(UserError, match="has 6 outputs of .* expected 9 of"):
        decode_scrfd(empty_outputs(64)[:6], 64, 0.5)
    with pytest.raises(UserError, match="expected 9 of sizes .288, .* for 96 x 96 pixels"):
        decode_scrfd(empty_outputs(64), 96, 0.5)


def naive_suppression(boxes: list[list[float]], scores: list[float], overlap: float) -> list[int]:
    kept: list[int] = []
    for index in sorted(range(len(boxes)), key=lambda each: -scores[each]):
        left, top, right, bottom = boxes[index]
        for other in kept:
            a, b, c, d = boxes[other]
            common = max(0.0, min(right, c) - max(left, a)) * max(0.0, min(bottom, d) - max(top, b))
            union = (right - left) * (bottom - top) + (c - a) * (d - b) - common
            if common / union > overlap:
                break
        else:
            kept.append(index)
    return kept


@pytest.mark.parametrize("seed", range(4))
def test_suppression_is_that_of_a_naive_loop(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    corner = torch.rand(40, 2, generator=generator) * 20
    boxes = torch.cat([corner, corner + 1 + torch.rand(40, 2, generator=generator) * 15], -1)
    scores = torch.rand(40, generator=generator)
    found = suppress(boxes, scores, 0.4).tolist()
    assert found == naive_suppression(boxes.tolist(), scores.tolist(), 0.4) and 1 < len(found) < 40
    assert suppress(boxes[:0], scores[:0], 0.4).tolist() == []


class Answers(torch.nn.Module):
    """In place of SCRFD's network: remembers what it is given and gives what it was told, picture by picture."""

    def __init__(self, answers: list[list[torch.Tensor]]) -> None:
        super().__init__()
        self.answers, self.given = answers, [torch.empty(0)] * 0

    def forward(self, picture: torch.Tensor) -> list[torch.Tensor]:
        self.given.append(picture)
        return self.answers[len(self.given) - 1]


def test_the_largest_face_of_each_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames of 32 x 64 are scaled by 2 into 128 x 128. One has a small sure face and a larger one whose nearly equal
    box scores less and is dropped; one has no face."""
    crowd, nobody = empty_outputs(128), empty_outputs(128)
    eyes = (0, 0, 1, 0, 0.5, 0.5, 0, 1, 1, 1)
    put_face(crowd, 0, 4, 0.99, (0, 0, 1, 1), eyes)  # at (16, 0), 8 x 8
    put_face(crowd, 2, 0, 0.8, (0, 0, 1, 1), eyes)  # at (0, 0), 32 x 32
    put_face(crowd, 2, 1, 0.7, (0, 0, 1.05, 1.05), [0.1] * 10)  # nearly the same, larger, less sure
    network = Answers([crowd, nobody])
    monkeypatch.setattr(arcface, "load_onnx", lambda path, option: network)
    frames = torch.rand(2, 3, 32, 64, generator=torch.Generator().manual_seed(0))
    faces = ScrfdDetector("any.onnx", size=128)(frames)
    assert faces.found.tolist() == [True, False]
    # (0, 0) and (32, 0) of the scaled picture are at half of that in the frame; pixel centres: (p + 0.5) / 2 - 0.5
    expected = (torch.tensor(eyes).view(5, 2) * 32 + 0.5) / 2 - 0.5
    torch.testing.assert_close(faces.keypoints[0], expected)
    given = network.given[0]
    assert given.shape == (1, 3, 128, 128)
    assert given[:, :, 64:].unique().tolist() == pytest.approx([-127.5 / 128])  # below the frame: black
    assert given[:, :, :64].mean().item() == pytest.approx((frames[0].mean().item() * 255 - 127.5) / 128, abs=0.01)


def test_a_detector_from_onnx_sees_a_bright_square(tmp_path: Path) -> None:
    """Nine convolutions whose kernels are as large as their strides; the score is the mean brightness of the cell."""
    make = pytest.importorskip("onnx").helper
    nodes: list[Any] = []
    weights: dict[str, np.ndarray] = {}
    names: list[str] = []
    for kind, width in (("score", 1), ("box", 4), ("points", 10)):
        weights[f"{kind}_shape"] = np.array([-1, width], np.int64)
        for stride in (8, 16, 32):
            name = f"{kind}_{stride}"
            kernel = np.zeros((2 * width, 3, stride, stride), np.float32)
            bias = np.full(2 * width, 0.5, np.float32)
            if kind == "score":
                kernel[:] = 0.5 / (3 * stride * stride)  # 1 where the cell is white, 0 where it is black
            weights |= {f"{name}_kernel": kernel, f"{name}_bias": bias}
            inputs = ["input", f"{name}_kernel", f"{name}_bias"]
            nodes += [
                make.make_node("Conv", inputs, [f"{name}_map"], kernel_shape=[stride] * 2, strides=[stride] * 2),
                make.make_node("Transpose", [f"{name}_map"], [f"{name}_last"], perm=[2, 3, 0, 1]),
                make.make_node("Reshape", [f"{name}_last", f"{kind}_shape"], [name]),
            ]
            names.append(name)
    path = write_onnx(tmp_path / "scrfd.onnx", nodes, weights, names, 64)
    frames = torch.zeros(2, 3, 64, 64)
    frames[1, :, 32:48, 16:32] = 1.0
    faces = ScrfdDetector(path, threshold=0.9, size=64)(frames)
    assert faces.found.tolist() == [False, True]
    assert faces.keypoints[1].tolist() == [[24.0, 40.0]] * 5  # the cell of stride 16 at (16, 32), half a stride further
