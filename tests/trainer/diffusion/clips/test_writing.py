"""The writer of clips: files that players show, and an encoder that fails."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.trainer.made_clips import corner_frames, grey_frames, which
from trainer.diffusion.clips import writing
from trainer.diffusion.clips.reading import Frames, read_frames, read_header
from trainer.diffusion.clips.writing import Strip, as_frames, draw_strips, require_encoder, write_clips, write_mp4
from verl_lite.errors import UserError


def as_video(frames: Frames) -> torch.Tensor:
    return torch.from_numpy(frames).permute(0, 3, 1, 2).float() / 255


def test_a_clip_becomes_a_file_that_every_player_shows(tmp_path: Path) -> None:
    import av

    told: list[str] = []
    write_clips(tmp_path / "videos", [0, 0, 1], torch.stack([as_video(grey_frames(9))] * 3), told.append)
    path = tmp_path / "videos/row_0.mp4"
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, stream.codec_context.pix_fmt) == ("h264", "yuv420p")
        assert (stream.average_rate, stream.frames) == (16, 9)
    assert which(read_frames(path, 9, 32, 48)) == list(range(9)) and told == []
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["row_0.mp4", "row_0_1.mp4", "row_1.mp4"]


@pytest.mark.parametrize(("height", "width"), [(33, 48), (32, 47), (17, 15)])
def test_an_odd_side_gets_its_last_line_twice(tmp_path: Path, height: int, width: int) -> None:
    write_mp4(tmp_path / "a.mp4", corner_frames(2, height, width))
    header = read_header(tmp_path / "a.mp4")
    assert (header.height, header.width) == (height + height % 2, width + width % 2)


def test_colours_and_their_range(tmp_path: Path) -> None:
    video = torch.tensor([-0.1, 0.0, 0.25, 1.0, 1.1]).reshape(5, 1, 1, 1).expand(5, 3, 2, 4)
    assert as_frames(video.to(torch.bfloat16))[:, 0, 0, 0].tolist() == [0, 0, 64, 255, 255]
    color = np.array([200, 60, 30], dtype=np.uint8)
    write_mp4(tmp_path / "a.mp4", np.broadcast_to(color, (2, 720, 64, 3)).copy())  # players take 720 lines for BT.709
    frame = read_frames(tmp_path / "a.mp4", 2, 720, 64)[1]
    assert np.abs(frame.reshape(-1, 3).astype(int) - color).max() <= 4


def test_an_encoder_that_raises_costs_its_clip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    def encode(path: Path, frames: Frames) -> None:
        path.write_bytes(b"half")
        if "row_0" in path.name:
            raise RuntimeError("no codec")

    monkeypatch.setattr(writing, "write_mp4", encode)
    write_clips(tmp_path, [0, 1], torch.zeros(2, 2, 3, 16, 16), told.append)
    assert [path.name for path in tmp_path.iterdir()] == ["row_1.mp4"]
    assert len(told) == 1 and f"{tmp_path / 'row_0.mp4'}: RuntimeError: no codec" in told[0]


def test_what_is_missing_is_said_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "CODEC", "no_such_codec")
    with pytest.raises(UserError, match="trainer.video_freq=0"):
        require_encoder()
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(UserError, match=r"pip install 'verl_lite\[diffusion\]'"):
        require_encoder()


def test_the_picture_has_a_strip_of_frames_for_each_label(tmp_path: Path) -> None:
    colours = {name: np.eye(3, dtype=np.uint8)[place] * 255 for place, name in enumerate(("red", "green", "blue"))}
    strips = [Strip(name, np.broadcast_to(color, (9, 16, 32, 3)), name == "blue") for name, color in colours.items()]
    groups = [("costs $5 or $6 " * 20, strips), ("a cat", strips)]
    picture = np.asarray(Image.open(draw_strips(tmp_path / "a.png", groups, "after 40 steps")).convert("RGB"))
    tops = []
    for color in colours.values():
        places = np.argwhere((picture == color).all(-1))
        assert (np.diff(np.unique(places[:, 1])) > 1).sum() == 5  # six frames beside each other
        tops.append(places[:, 0].min())
    assert tops == sorted(tops)
