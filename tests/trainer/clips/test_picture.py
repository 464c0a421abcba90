"""The picture of before and after: which frames stand where, and what is written beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

from trainer.clips.picture import BeforeAfter, before_after, before_after_gif

RED, GREEN, BLUE = (1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)


def plain(color: tuple[float, float, float], frames: int = 9, height: int = 16, width: int = 32) -> torch.Tensor:
    return torch.tensor(color).view(1, 3, 1, 1).expand(frames, 3, height, width)


def entry(prompt: str = "a cat", **size: int) -> BeforeAfter:
    return BeforeAfter(prompt, plain(RED, **size), plain(GREEN, **size), plain(BLUE, **size), 0.034, 0.412)


def places(picture: Image.Image, color: tuple[float, float, float]) -> np.ndarray:
    """(N, 2) rows and columns of the pixels that have a colour exactly."""
    wanted = (np.array(color) * 255).astype(np.uint8)
    return np.argwhere((np.asarray(picture.convert("RGB")) == wanted).all(-1))


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """All texts that are written into figures."""
    texts: list[str] = []
    plain_text = Figure.text

    def noting(self: Figure, x: float, y: float, text: str, **style: Any) -> Any:
        texts.append(text)
        return plain_text(self, x, y, text, **style)

    monkeypatch.setattr(Figure, "text", noting)
    return texts


def test_rows_are_reference_before_and_after(tmp_path: Path, written: list[str]) -> None:
    path = before_after(tmp_path / "a.png", [entry()], "after 40 steps")
    picture = Image.open(path)
    assert picture.width == 1660
    red, green, blue = (places(picture, color) for color in (RED, GREEN, BLUE))
    assert red[:, 0].max() < green[:, 0].min() < green[:, 0].max() < blue[:, 0].min()
    gaps = np.diff(np.unique(red[:, 1]))
    assert (gaps > 1).sum() == 5  # six frames beside each other
    assert len(red) == pytest.approx(len(green), rel=0.02) and len(red) == pytest.approx(len(blue), rel=0.02)
    assert set(written) == {
        "after 40 steps",
        "a cat",
        "reference",
        "before\n0.03",
        "after\n0.41",
        *(f"frame {number}" for number in (0, 2, 3, 5, 6, 8)),
    }


def test_short_clips_long_prompts_and_dollars(tmp_path: Path, written: list[str]) -> None:
    clips = [entry("word " * 100, frames=1), entry("costs $5 or $6", frames=1)]
    before_after(tmp_path / "a.png", clips, "")
    assert "costs $5 or $6" in written
    (prompt,) = [text for text in written if text.startswith("word")]
    assert len(prompt.split("\n")) == 2 and prompt.endswith(" ...") and written.count("frame 0") == 2


def test_of_many_clips_the_first_few_are_shown(tmp_path: Path, written: list[str]) -> None:
    clips = [entry(f"clip {number}", frames=1, height=8, width=64) for number in range(9)]
    before_after(tmp_path / "b.png", clips, "")
    before_after_gif(tmp_path / "a.gif", clips)
    assert "clip 3" not in written and written.count("clip 2") == 2


def test_a_tall_clip_keeps_its_shape_within_a_bounded_row(tmp_path: Path) -> None:
    picture = Image.open(before_after(tmp_path / "a.png", [entry(frames=1, height=320, width=32)], ""))
    red = places(picture, RED)
    height, width = red.max(0) - red.min(0) + 1
    assert height / width == pytest.approx(10, rel=0.1) and picture.height < 5 * 200


def test_the_moving_picture_has_every_frame(tmp_path: Path) -> None:
    changing = torch.cat([plain(color, 1) for color in (RED, GREEN, BLUE)])
    clips = [BeforeAfter("a", changing, plain(BLUE, 3), plain(BLUE, 3), 0.1, 0.2), entry("b", frames=3)]
    gif = Image.open(before_after_gif(tmp_path / "a.gif", clips))
    assert (gif.n_frames, gif.info["duration"], gif.width) == (3, 120, 830)  # 125 ms in hundredths of a second
    boxes = []  # of each colour, in boxes of the size of a frame
    for number in range(3):
        gif.seek(number)
        boxes.append([len(places(gif.convert("RGB"), color)) / (267 * 133) for color in (RED, GREEN, BLUE)])
    expected = [[2, 1, 3], [1, 2, 3], [1, 1, 4]]  # 1, 1, 1 of the second clip
    np.testing.assert_allclose(boxes, expected, rtol=0.05)
