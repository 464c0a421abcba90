"""Clips written to mp4 files beside the training, which never waits for them.

`VideoWriter` takes frames and writes them in a thread. What is waiting is bounded in bytes: a clip that finds no room
is dropped and counted. An encoder that fails costs its own clip and one sentence; one that hangs costs the clips behind
it. A file has its final name only when it is whole.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer.clips.reading import Frames, require_av
from verl_lite.errors import UserError

FPS = 16
"""Wan's, and ROLL's."""

CODEC = "libx264"
QUALITY_CRF = "18"
_BT601 = 6  # what PyAV makes of RGB; without the word players take 720 lines and more for BT.709
_WAITING_BYTES = 2**30
_FINISH_TIMEOUT_S = 60.0

Encode = Callable[[Path, Frames, int], None]


def write_mp4(path: Path, frames: Frames, fps: int = FPS) -> None:
    """Writes frames (F, H, W, 3) as H.264 in yuv420p, which every player shows; an odd side gets its last row or column
    twice. One thread of the processor."""
    av = require_av()
    height, width = frames.shape[1:3]
    even = np.pad(frames, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    with av.open(str(path), "w", format="mp4", options={"movflags": "+faststart"}) as container:
        stream: Any = container.add_stream(CODEC, rate=Fraction(fps), options={"crf": QUALITY_CRF, "threads": "1"})
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
    """Writes clips as FOLDER/NAME.mp4; a context that finishes when left.

    tell: takes a sentence for the user, at most one for each kind of trouble; called from the writing thread too.
    encode: writes a file. waiting_bytes: of the clips that wait; one larger than that is taken only alone.
    written, failed, dropped: counts so far. Raises UserError where PyAV or its H.264 encoder is missing.
    """

    def __init__(
        self,
        folder: Path,
        tell: Callable[[str], None],
        *,
        fps: int = FPS,
        encode: Encode = write_mp4,
        waiting_bytes: int = _WAITING_BYTES,
    ) -> None:
        if encode is write_mp4 and CODEC not in require_av().codecs_available:
            raise UserError(
                f"The installed PyAV has no encoder {CODEC}, with which clips are written: install av from PyPI, or "
                "set trainer.video_freq=0"
            )
        self.folder, self.fps, self.waiting_bytes = Path(folder), fps, waiting_bytes
        self.written = self.failed = self.dropped = 0
        self._tell, self._encode = tell, encode
        self._told: set[str] = set()
        self._names: Counter[str] = Counter()
        self._waiting: deque[tuple[str, Frames]] = deque()
        self._at_work: Path | None = None
        self._bytes = 0
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="video-writer", daemon=True)
        self._thread.start()

    def __enter__(self) -> VideoWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.finish()

    def write(self, name: str, video: torch.Tensor) -> bool:
        """Takes a clip (F, 3, H, W) in [0, 1], copied here; whether there was room for it. name: without the suffix,
        may have folders; one that came before gets a number, NAME_1. Never waits. Raises ValueError for another shape,
        or once it is finished."""
        if video.ndim != 4 or video.shape[1] != 3 or 0 in video.shape:
            raise ValueError(f"video {name!r} has shape {tuple(video.shape)}, expected (F, 3, H, W)")
        frames = as_frames(video)
        with self._changed:
            if self._is_closed:
                raise ValueError(f"video {name!r} comes after finish()")
            self._names[name] += 1
            if self._names[name] > 1:
                name = f"{name}_{self._names[name] - 1}"
            if self._bytes and self._bytes + frames.nbytes > self.waiting_bytes:
                self.dropped += 1
            else:
                self._waiting.append((name, frames))
                self._bytes += frames.nbytes
                self._changed.notify_all()
                return True
        self._tell_once(
            "dropped",
            f"videos: the writer is {self.waiting_bytes / 2**20:.0f} MiB behind, so {name}.mp4 and others that find no "
            "room are dropped; the training goes on",
        )
        return False

    def finish(self, timeout_s: float = _FINISH_TIMEOUT_S) -> None:
        """Waits until all clips are written, for so long at most, and tells what is lost. May be called again."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(max(0.0, deadline - time.monotonic()))
        with self._changed:
            lost, draft = len(self._waiting), self._at_work
            self._waiting.clear()
        if draft is not None:
            draft.unlink(missing_ok=True)
            lost += 1
        if lost:
            self._tell(f"videos: the writer does not end within {timeout_s:g} s; {lost} clips are not written")
        if self.failed or self.dropped:
            self._tell(f"videos: {self.written} written, {self.failed} failed, {self.dropped} dropped")

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if not self._waiting:
                    return
                name, frames = self._waiting.popleft()
                final = self.folder / f"{name}.mp4"
                self._at_work = final.with_name(f".{final.name}.part")
            try:
                self._write_whole(self._at_work, final, frames)
                self.written += 1
            except Exception as error:  # a lost clip must not end a run, whatever the encoder raises
                self.failed += 1
                self._tell_once("failed", f"videos: {final} failed ({type(error).__name__}: {error}); the run goes on")
            with self._changed:
                self._at_work = None
                self._bytes -= frames.nbytes

    def _write_whole(self, draft: Path, final: Path, frames: Frames) -> None:
        draft.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._encode(draft, frames, self.fps)
            os.replace(draft, final)
        finally:
            draft.unlink(missing_ok=True)

    def _tell_once(self, kind: str, sentence: str) -> None:
        if kind not in self._told:
            self._told.add(kind)
            self._tell(sentence)
