"""Clips as files: frames of known content come back from every kind of file; each kind of damage has its sentence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.trainer.made_clips import corner_frames, grey_frames, which, write_folder, write_video
from trainer.diffusion.clips.reading import ClipError, fitted_size, read_frames, read_header

KINDS = ("a.mp4", "a.mov", "a.mkv", "a.avi", "a")


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_file_gives_its_frames(tmp_path: Path, name: str) -> None:
    path, frames = tmp_path / name, grey_frames(12)
    if not path.suffix:
        write_folder(path, frames)
    else:
        write_video(path, frames, codec="mpeg4" if path.suffix == ".avi" else "libx264")
    header = read_header(path)
    assert (header.height, header.width, header.frames) == (32, 48, 12)
    found = read_frames(path, 11, 32, 48)
    assert found.shape == (11, 32, 48, 3) and found.dtype == np.uint8 and which(found) == list(range(11))


@pytest.mark.parametrize(("turned", "corner"), [(90, (1, 0)), (-90, (0, 1)), (180, (1, 1))])
def test_a_clip_that_was_filmed_sideways_is_upright(tmp_path: Path, turned: int, corner: tuple[int, int]) -> None:
    """Turned counter-clockwise by a quarter, what was in the upper left corner is in the lower left one."""
    path = write_video(tmp_path / "a.mp4", corner_frames(2), turned=turned)
    header = read_header(path)
    assert (header.height, header.width) == ((32, 48) if turned == 180 else (48, 32))
    frame = read_frames(path, 1, header.height, header.width)[0]
    bright = frame.reshape(2, header.height // 2, 2, header.width // 2, 3).mean((1, 3, 4)) > 128
    assert [tuple(place) for place in np.argwhere(bright)] == [corner]


def test_pictures_of_a_folder_in_natural_order_and_upright(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "a", grey_frames(12))
    (folder / "notes.txt").write_text("no frame")
    (folder / ".hidden.png").write_text("nor this")
    assert which(read_frames(folder, 12, 32, 48)) == list(range(12))  # frame_10 after frame_9
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise by a quarter
    side = tmp_path / "b"
    side.mkdir()
    Image.fromarray(corner_frames(1)[0]).save(side / "0.jpg", exif=exif)
    header = read_header(side)
    assert (header.height, header.width) == (48, 32)
    frame = read_frames(side, 1, 48, 32)[0]
    assert frame[:20, 20:].mean() > 250 and frame[:20, :12].mean() < 5


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((480, 480), (480, 480)),
        ((32, 48), (32, 48)),  # never scaled up
        ((720, 1280), (352, 640)),  # 360 x 640 has 480^2 pixels, and 360 is no multiple of 16
    ],
)
def test_sizes_by_area(size: tuple[int, int], expected: tuple[int, int]) -> None:
    assert fitted_size(*size, max_pixels=480 * 480, multiple=16) == expected
    with pytest.raises(ClipError, match="its frames are 2000 x 20, and a side is below 16"):
        fitted_size(20, 2000, max_pixels=20_000, multiple=16)


def test_frames_are_scaled_until_they_cover_and_cropped_around_the_centre(tmp_path: Path) -> None:
    # left third black, middle white, right third black: 96 x 32 covers 32 x 32 with its middle alone
    frames = np.zeros((1, 32, 96, 3), dtype=np.uint8)
    frames[:, :, 32:64] = 255
    folder = write_folder(tmp_path / "a", frames)
    assert read_frames(folder, 1, 32, 32).min() == 255
    half = read_frames(folder, 1, 16, 48)[0]  # scaled by a half, nothing cropped
    assert half.shape == (16, 48, 3)
    assert half[:, :14].max() < 20 and half[:, 18:30].min() > 235 and half[:, 34:].max() < 20


def test_what_can_be_wrong_with_a_file(tmp_path: Path) -> None:
    good = write_video(tmp_path / "good.mp4", grey_frames(6))
    whole = good.read_bytes()
    cases = {
        "goood.mp4": (None, "there is no such file or folder; did you mean good.mp4"),
        "empty.mp4": (b"", "empty.mp4 cannot be read as a video or picture"),
        "text.mp4": (b"no video" * 100, "text.mp4 cannot be read"),
        "cut.mp4": (whole[:600], "cut.mp4 cannot be read"),
    }
    for name, (content, words) in cases.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(ClipError) as error:
            read_header(tmp_path / name)
        assert words in str(error.value)
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ClipError, match="the folder holds no picture"):
        read_header(tmp_path / "nothing")


def test_frames_that_the_header_promises_and_the_file_lacks(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (12, 32, 48, 3), dtype=np.uint8)
    path = write_video(tmp_path / "a.mkv", noise)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ClipError, match="cannot be decoded: the file is damaged"):
        read_frames(path, 12, 32, 48)


def test_bytes_that_are_wrong_anywhere_are_a_sentence_or_another_picture(tmp_path: Path) -> None:
    """Files cut short, and with bytes changed, of every kind: nothing but ClipError comes out."""
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 255, (6, 32, 48, 3), dtype=np.uint8)
    sources = [write_video(tmp_path / f"a.{kind}", noise) for kind in ("mp4", "mkv", "mov", "avi")]
    for kind in ("png", "jpg", "bmp"):
        sources.append(tmp_path / f"a.{kind}")
        Image.fromarray(noise[0]).save(sources[-1])
    refused = 0
    for number in range(4 * len(sources)):
        source = sources[number % len(sources)]
        content = bytearray(source.read_bytes())
        if number % 3:
            reach = len(content) if number % 3 == 1 else 400  # anywhere, or in the header
            for place in rng.integers(0, min(reach, len(content)), rng.integers(1, 30)):
                content[place] = rng.integers(256)
        else:
            content = content[: rng.integers(1, len(content))]
        path = tmp_path / f"damaged{source.suffix}"
        path.write_bytes(content)
        frames = 1 if source.suffix in (".png", ".jpg", ".bmp") else 5
        try:
            read_header(path)
            assert read_frames(path, frames, 16, 16).shape == (frames, 16, 16, 3)
        except ClipError:
            refused += 1
    assert 8 < refused < 28
