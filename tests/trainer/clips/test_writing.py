"""The writer of clips: files that players show, and a training that never waits, whatever the encoder does."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.trainer.made_clips import corner_frames, grey_frames, which
from trainer.clips import writing as video_files
from trainer.clips.reading import Frames, read_frames, read_header
from trainer.clips.writing import VideoWriter, as_frames, write_mp4
from verl_lite.errors import UserError

CLIP = torch.zeros(2, 3, 16, 16)
CLIP_BYTES = 2 * 3 * 16 * 16


def as_video(frames: Frames) -> torch.Tensor:
    return torch.from_numpy(frames).permute(0, 3, 1, 2).float() / 255


def eventually(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if holds():
            return True
        time.sleep(0.002)
    return False


def test_a_clip_becomes_a_file_that_every_player_shows(tmp_path: Path) -> None:
    import av

    told: list[str] = []
    with VideoWriter(tmp_path / "videos", told.append) as writer:
        assert writer.write("step_1/row_0", as_video(grey_frames(9)))
    path = tmp_path / "videos/step_1/row_0.mp4"
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, stream.codec_context.pix_fmt) == ("h264", "yuv420p")
        assert (stream.average_rate, stream.frames) == (16, 9)
    assert which(read_frames(path, list(range(9)), 32, 48)) == list(range(9))
    assert (writer.written, writer.failed, writer.dropped, told) == (1, 0, 0, [])
    assert [entry.name for entry in path.parent.iterdir()] == ["row_0.mp4"]


@pytest.mark.parametrize(("height", "width"), [(33, 48), (32, 47), (17, 15)])
def test_an_odd_side_gets_its_last_line_twice(tmp_path: Path, height: int, width: int) -> None:
    path = tmp_path / "a.mp4"
    write_mp4(path, corner_frames(2, height, width))
    header = read_header(path, 2)
    assert (header.height, header.width) == (height + height % 2, width + width % 2)


def test_colours_and_their_range() -> None:
    video = torch.tensor([-0.1, 0.0, 0.25, 1.0, 1.1]).reshape(5, 1, 1, 1).expand(5, 3, 2, 4)
    frames = as_frames(video.to(torch.bfloat16))
    assert frames.shape == (5, 2, 4, 3) and frames[:, 0, 0, 0].tolist() == [0, 0, 64, 255, 255]
    video = torch.zeros(1, 3, 2, 2)
    video[0, 2] = 1.0
    assert as_frames(video)[0, 0, 0].tolist() == [0, 0, 255]


def test_colours_in_a_file_are_those_that_were_given(tmp_path: Path) -> None:
    import av

    color = np.array([200, 60, 30], dtype=np.uint8)
    write_mp4(tmp_path / "a.mp4", np.broadcast_to(color, (2, 720, 64, 3)).copy())
    with av.open(str(tmp_path / "a.mp4")) as container:
        assert next(container.decode(video=0)).colorspace == 6  # SMPTE 170M, in H.273's table of matrices
    frame = read_frames(tmp_path / "a.mp4", [1], 720, 64)[0]
    assert np.abs(frame.reshape(-1, 3).astype(int) - color).max() <= 4


def test_what_was_given_may_change_afterwards(tmp_path: Path) -> None:
    begin, seen = threading.Event(), []

    def encode(path: Path, frames: Frames, fps: int) -> None:
        begin.wait(30)
        seen.append(int(frames.max()))
        path.write_bytes(b"")

    with VideoWriter(tmp_path, lambda _: None, encode=encode) as writer:
        clip = CLIP.clone()
        writer.write("a", clip)
        clip.fill_(1.0)
        begin.set()
    assert seen == [0]


@pytest.fixture
def hanging() -> Iterator[tuple[Callable[[Path, Frames, int], None], threading.Event]]:
    """An encoder that begins its file and hangs until the event, which is set at the end in any case."""
    free = threading.Event()

    def encode(path: Path, frames: Frames, fps: int) -> None:
        path.write_bytes(b"half")
        free.wait(60)

    yield encode, free
    free.set()


def test_an_encoder_that_hangs_costs_clips_and_no_time(
    tmp_path: Path, hanging: tuple[Callable[[Path, Frames, int], None], threading.Event]
) -> None:
    encode, free = hanging
    told: list[str] = []
    writer = VideoWriter(tmp_path, told.append, encode=encode, waiting_bytes=3 * CLIP_BYTES)
    begun = time.process_time()
    assert [writer.write(f"clip_{n}", CLIP) for n in range(6)] == [True, True, True, False, False, False]
    assert time.process_time() - begun < 5
    assert writer.dropped == 3 and len(told) == 1
    assert "clip_3.mp4 and others" in told[0] and "the training goes on" in told[0]
    assert eventually(lambda: (tmp_path / ".clip_0.mp4.part").exists())
    assert not list(tmp_path.glob("*.mp4"))  # no half file under a final name
    writer.finish(timeout_s=0.05)
    assert "does not end within 0.05 s; 3 clips are not written" in told[1]
    assert told[2] == "videos: 0 written, 0 failed, 3 dropped" and not list(tmp_path.iterdir())
    writer.finish()
    assert len(told) == 3
    with pytest.raises(ValueError, match="after finish"):
        writer.write("late", CLIP)


def test_a_slow_encoder_catches_up(
    tmp_path: Path, hanging: tuple[Callable[[Path, Frames, int], None], threading.Event]
) -> None:
    encode, free = hanging
    with VideoWriter(tmp_path, lambda _: None, encode=encode, waiting_bytes=2 * CLIP_BYTES) as writer:
        assert [writer.write(f"a{n}", CLIP) for n in range(3)] == [True, True, False]
        free.set()
        assert eventually(lambda: writer.written == 2)
        assert eventually(lambda: writer.write("b", CLIP))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a0.mp4", "a1.mp4", "b.mp4"]


def test_an_encoder_that_raises_costs_its_clip_and_one_sentence(tmp_path: Path) -> None:
    def encode(path: Path, frames: Frames, fps: int) -> None:
        path.write_bytes(b"half")
        if path.name != ".good.mp4.part":
            raise RuntimeError("no codec")

    told: list[str] = []
    with VideoWriter(tmp_path, told.append, encode=encode) as writer:
        for name in ("bad", "worse", "good"):
            assert writer.write(name, CLIP)
    assert (writer.written, writer.failed) == (1, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["good.mp4"]
    assert told == [
        f"videos: {tmp_path / 'bad.mp4'} failed (RuntimeError: no codec); the run goes on",
        "videos: 1 written, 2 failed, 0 dropped",
    ]


def test_a_folder_that_cannot_be_written_costs_the_clips(tmp_path: Path) -> None:
    (tmp_path / "videos").write_text("a file")
    told: list[str] = []
    with VideoWriter(tmp_path / "videos", told.append) as writer:
        writer.write("a", CLIP)
    assert writer.failed == 1 and "the run goes on" in told[0]


def test_a_clip_that_comes_twice_in_a_step_is_two_files(tmp_path: Path) -> None:
    with VideoWriter(tmp_path, lambda _: None) as writer:
        for name in ("step_1/row_0", "step_1/row_0", "step_1/row_1", "step_1/row_0"):
            writer.write(name, CLIP)
    assert sorted(path.name for path in (tmp_path / "step_1").iterdir()) == [
        "row_0.mp4",
        "row_0_1.mp4",
        "row_0_2.mp4",
        "row_1.mp4",
    ]


def test_a_clip_larger_than_the_memory_is_taken_alone(tmp_path: Path) -> None:
    with VideoWriter(tmp_path, lambda _: None, waiting_bytes=1) as writer:
        assert writer.write("a", CLIP)
    assert writer.written == 1


def test_another_shape_is_an_error_of_the_caller(tmp_path: Path) -> None:
    with VideoWriter(tmp_path, lambda _: None) as writer:
        for shape in ((3, 2, 16, 16), (1, 2, 3, 16, 16), (0, 3, 16, 16)):
            with pytest.raises(ValueError, match=r"expected \(F, 3, H, W\)"):
                writer.write("a", torch.zeros(shape))


def test_without_the_encoder_the_run_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video_files, "CODEC", "no_such_codec")
    with pytest.raises(UserError, match="trainer.video_freq=0"):
        VideoWriter(tmp_path, lambda _: None)


def test_without_pyav_the_sentence_names_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    (tmp_path / "a.mp4").write_bytes(b"x")
    with pytest.raises(UserError, match=r"pip install 'verl_lite\[diffusion\]'"):
        VideoWriter(tmp_path, lambda _: None)
    with pytest.raises(UserError, match=r"pip install 'verl_lite\[diffusion\]'"):
        read_header(tmp_path / "a.mp4", 1)
