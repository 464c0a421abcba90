"""Clips written beside the training, which never waits for them, and the picture of before and after."""

from __future__ import annotations

import os
import queue
import textwrap
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from trainer.clips.reading import Frames, require_av
from verl_lite.errors import UserError

FPS = 16
"""Wan's, and ROLL's."""

CODEC = "libx264"
_BT601 = 6  # what PyAV makes of RGB; without the word players take 720 lines and more for BT.709
WAITING_BYTES = 2**30
_FINISH_TIMEOUT_S = 60.0

Encode = Callable[[Path, Frames, int], None]


def write_mp4(path: Path, frames: Frames, fps: int = FPS) -> None:
    """Writes frames (F, H, W, 3) as H.264, yuv420p, which every player shows; an odd side gets its last line twice."""
    av = require_av()
    height, width = frames.shape[1:3]
    even = np.pad(frames, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    with av.open(str(path), "w", format="mp4", options={"movflags": "+faststart"}) as container:
        stream: Any = container.add_stream(CODEC, rate=Fraction(fps), options={"crf": "18", "threads": "1"})
        stream.height, stream.width = even.shape[1:3]
        stream.pix_fmt = "yuv420p"
        stream.codec_context.colorspace = _BT601
        for frame in even:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
        container.mux(stream.encode(None))


def as_frames(video: torch.Tensor) -> Frames:
    """(F, 3, H, W) in [0, 1], of any device and floating type, as uint8 (F, H, W, 3); values outside are clipped."""
    scaled = video.detach().to(torch.float32).clamp(0.0, 1.0).mul(255.0).round()
    return scaled.to(torch.uint8).permute(0, 2, 3, 1).contiguous().cpu().numpy()


class VideoWriter:
    """Writes clips as FOLDER/NAME.mp4 in a thread; a context that finishes when left.

    What waits is bounded in bytes: a clip that finds no room is dropped. An encoder that fails costs its own clip and
    one sentence. A file has its final name only when it is whole.

    Args:
        tell: takes a sentence for the user, at most one for each kind of trouble; called from the thread too.
        encode: writes a file.
        waiting_bytes: of the clips that wait; one larger than that is taken only alone.

    Raises:
        UserError: PyAV or its H.264 encoder is missing.
    """

    def __init__(
        self,
        folder: Path,
        tell: Callable[[str], None],
        *,
        encode: Encode = write_mp4,
        waiting_bytes: int = WAITING_BYTES,
    ) -> None:
        if encode is write_mp4 and CODEC not in require_av().codecs_available:
            raise UserError(
                f"The installed PyAV has no encoder {CODEC}, with which clips are written: install av from PyPI, or "
                "set trainer.video_freq=0"
            )
        self.folder, self.waiting_bytes = Path(folder), waiting_bytes
        self.taken = self.written = self.failed = self.dropped = 0
        self._tell, self._encode = tell, encode
        self._names: Counter[str] = Counter()
        self._bytes = 0
        self._lock = threading.Lock()
        self._is_abandoned = False
        self._queue: queue.SimpleQueue[tuple[str, Frames] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="video-writer", daemon=True)
        self._thread.start()

    def __enter__(self) -> VideoWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.finish()

    def write(self, name: str, video: torch.Tensor) -> None:
        """Takes a clip (F, 3, H, W) in [0, 1], copied here. Never waits.

        Args:
            name: without the suffix, may have folders; one that came before gets a number, NAME_1.
        """
        frames = as_frames(video)
        self._names[name] += 1
        if self._names[name] > 1:
            name = f"{name}_{self._names[name] - 1}"
        with self._lock:
            has_room = not self._bytes or self._bytes + frames.nbytes <= self.waiting_bytes
            self._bytes += frames.nbytes * has_room
        if has_room:
            self.taken += 1
            self._queue.put((name, frames))
            return
        self.dropped += 1
        if self.dropped == 1:
            self._tell(
                f"videos: the writer is {self.waiting_bytes / 2**20:.0f} MiB behind, so {name}.mp4 and others that "
                "find no room are dropped; the training goes on"
            )

    def finish(self, timeout_s: float = _FINISH_TIMEOUT_S) -> None:
        """Waits until all clips are written, for so long at most, and tells what is lost."""
        self._queue.put(None)
        self._thread.join(timeout_s)
        self._is_abandoned = True
        lost = self.taken - self.written - self.failed
        if lost:
            for draft in self.folder.rglob(".*.mp4.part"):
                draft.unlink(missing_ok=True)
        if lost or self.failed or self.dropped:
            late = f", {lost} not written within {timeout_s:g} s" * bool(lost)
            self._tell(f"videos: {self.written} written, {self.failed} failed, {self.dropped} dropped{late}")

    def _work(self) -> None:
        while (item := self._queue.get()) is not None and not self._is_abandoned:
            name, frames = item
            final = self.folder / f"{name}.mp4"
            draft = final.with_name(f".{final.name}.part")
            try:
                draft.parent.mkdir(parents=True, exist_ok=True)
                self._encode(draft, frames, FPS)
                os.replace(draft, final)
                self.written += 1
            except Exception as error:  # a lost clip must not end a run, whatever the encoder raises
                self.failed += 1
                with suppress(OSError):
                    draft.unlink(missing_ok=True)
                if self.failed == 1:
                    self._tell(f"videos: {final} failed ({type(error).__name__}: {error}); the run goes on")
            with self._lock:
                self._bytes -= frames.nbytes


@dataclass(frozen=True)
class Strip:
    """A row of frames (n, H, W, 3) in a picture, with what stands before it; green where it is better."""

    label: str
    frames: Frames
    is_better: bool | None = None


_WIDTH, _LABEL, _TALLEST = 8.3, 1.0, 1.15  # inches
_COLOURS = {None: "#1c2126", True: "#2f7d4a", False: "#b5495b"}


def draw_strips(path: Path, groups: Sequence[tuple[str, Sequence[Strip]]], title: str, columns: int = 6) -> Path:
    """Writes a PNG: for each prompt its strips below each other, of each `columns` frames from the first to the last.

    Args:
        groups: prompts with their strips; all frames have one size, all strips one number of them.
    """
    strips = [(prompt if row == 0 else "", strip) for prompt, group in groups for row, strip in enumerate(group)]
    count, high, wide = strips[0][1].frames.shape[:3]
    numbers = np.linspace(0, count - 1, min(columns, count)).round().astype(int)
    width = min((_WIDTH - _LABEL) / len(numbers), _TALLEST * wide / high)
    height = width * high / wide
    heads = [0.06 + (0.3 if prompt else 0.0) for prompt, _ in strips]
    total = 0.4 + sum(heads) + height * len(strips)
    figure = Figure(figsize=(_WIDTH, total), facecolor="white")
    FigureCanvasAgg(figure)
    figure.text(0.01, 1 - 0.1 / total, title, va="top", weight="bold")
    top = 0.35
    for head, (prompt, strip) in zip(heads, strips, strict=True):
        text = textwrap.shorten(prompt, 108, placeholder=" ...")
        figure.text(0.01, 1 - (top + 0.04) / total, text, va="top", size=9, parse_math=False)
        top += head
        middle, color = 1 - (top + height / 2) / total, _COLOURS[strip.is_better]
        figure.text(0.01, middle, strip.label, va="center", color=color, parse_math=False)
        for column, number in enumerate(numbers):
            box = ((_LABEL + column * width) / _WIDTH, 1 - (top + height) / total, 0.96 * width / _WIDTH)
            axes = figure.add_axes((*box, height / total))
            axes.imshow(strip.frames[number], interpolation="nearest")
            axes.set_axis_off()
        top += height
    figure.savefig(path, dpi=200)
    return path
