"""With `--verbose`: what workers print, shown by the driver while it is written to the files in RUN/logs.

Each line is shown with the file it comes from, `actor_rollout-0 | ...`. The files stay as they are, whole.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer.console import Console

_LOOK_EVERY_S = 0.5


@contextmanager
def following(folder: Path, console: Console) -> Iterator[None]:
    """Inside, lines that are added to the *.log files below `folder` are shown, if the console is verbose."""
    if console.verbosity != "verbose":
        yield
        return
    follower = LogFollower(folder, console)
    follower.start()
    try:
        yield
    finally:
        follower.stop()


class LogFollower:
    """Shows what is added from now on; a thread looks at the files every half second."""

    def __init__(self, folder: Path, console: Console) -> None:
        self._folder, self._console = folder, console
        self._read = {file: file.stat().st_size for file in self._files()}  # an earlier process of the run wrote that
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="log-follower", daemon=True)

    def start(self) -> None:
        """Begins to look."""
        self._thread.start()

    def stop(self) -> None:
        """Shows the rest, and ends."""
        self._ended.set()
        self._thread.join()
        self._look(is_last=True)

    def _follow(self) -> None:
        while not self._ended.wait(_LOOK_EVERY_S):
            self._look()

    def _look(self, is_last: bool = False) -> None:
        for file in self._files():
            begin = self._read.get(file, 0)
            try:
                with file.open("rb") as opened:
                    opened.seek(begin)
                    added = opened.read()
            except FileNotFoundError:
                continue  # removed since it was listed
            whole = added if is_last else added[: added.rfind(b"\n") + 1]  # a line is shown when it has ended
            self._read[file] = begin + len(whole)
            for line in whole.decode(errors="replace").splitlines():
                self._console.worker_line(str(file.relative_to(self._folder).with_suffix("")), line)

    def _files(self) -> list[Path]:
        return sorted(self._folder.rglob("*.log")) if self._folder.is_dir() else []
