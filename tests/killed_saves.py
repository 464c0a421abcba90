"""`python -m tests.killed_saves --kills 25`: kill -9 within the saves of a real run, and what is left of them.

A tiny model is trained inline, with a checkpoint after each step and two of them kept. The run is killed with SIGKILL
at instants spread over its saves, started again with trainer.resume_mode=auto, killed again, and so on; half of the
kills with trainer.async_save. After each kill every folder called global_step_N has to be equal, bit for bit, to that
of a run that nobody killed, and the newest one has to be of the save that was hit or of the one before. At last the run
is left alone and has to end equal as well.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.forked_runs import ACTOR, Runs, differences, driver_state, models_of
from trainer.checkpoint.files import MARKER, find_checkpoint, saved_steps

KEPT = 2
PATIENCE_S = 300.0
BETWEEN = "between two saves"
Kill = tuple[int, float]
"""Saves of the process that are left alone, and the share of the next one's duration after which it is killed."""


def drafts(run_dir: Path) -> list[int]:
    """Steps whose checkpoint is being written."""
    return [int(path.stem.rpartition("_")[2]) for path in run_dir.glob(".global_step_*.draft")]


def newest(run_dir: Path) -> int:
    """The newest whole checkpoint; 0 = none."""
    return max(saved_steps(run_dir), default=0)


def phase(run_dir: Path) -> str:
    """Of the save that was under way."""
    if steps := drafts(run_dir):
        has_state = (run_dir / f".global_step_{steps[0]}.draft" / "data.pt").exists()
        return "data.pt, sync, before the rename" if has_state else "files of the models"
    marker = run_dir / MARKER
    if newest(run_dir) > (int(marker.read_text()) if marker.exists() else 0):
        return "renamed, before the marker"
    return "pruning" if any(run_dir.glob(".global_step_*.gone")) else BETWEEN


class KilledRun:
    """A run that is killed and started again, beside one of the same options that is not."""

    def __init__(self, folder: Path, kills: int, seed: int = 0) -> None:
        rng = random.Random(seed)
        self.folder = folder
        self.kills: list[Kill] = [(rng.choice((0, 0, 1, 2)), rng.uniform(0.0, 0.9)) for _ in range(kills)]
        self.total = sum(before + 1 for before, _ in self.kills) + 3
        self.runs = Runs(folder, 12, 4, [f"trainer.total_training_steps={self.total}"])
        self.duration_s = 0.2  # of a save; measured when one is left alone
        self.whole = self.runs.finish("whole")

    def survive(self, name: str, kills: Sequence[Kill], *options: str) -> Counter[str]:
        """Kills a run of that name again and again; gives how often each phase of a save was hit."""
        options = (*options, f"trainer.max_actor_ckpt_to_keep={KEPT}", "trainer.resume_mode=auto")
        hit: Counter[str] = Counter()
        for kill in kills:
            self._kill(name, kill, options)
            hit[phase(self.folder / name)] += 1
            self._check(self.folder / name)
        run_dir = self.runs.finish(name, *options)
        assert newest(run_dir) == self.total
        self._check(run_dir)
        return hit

    def _kill(self, name: str, kill: Kill, options: tuple[str, ...]) -> None:
        """Starts the run and kills it."""
        process, run_dir, log = self.runs.start(name, *options)
        deadline, (before, share) = time.monotonic() + PATIENCE_S, kill

        def wait_for(is_so: Callable[[], bool]) -> None:
            while not is_so():
                assert process.is_alive() and time.monotonic() < deadline, log.read_text()[-4000:]
                time.sleep(0.0002)

        first = newest(run_dir) + 1
        for step in range(first, first + before + 1):
            wait_for(lambda step=step: step in drafts(run_dir) or newest(run_dir) >= step)  # type: ignore[misc]
            if step < first + before:
                began = time.monotonic()
                wait_for(lambda step=step: newest(run_dir) >= step)  # type: ignore[misc]
                self.duration_s = time.monotonic() - began
        time.sleep(share * self.duration_s)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL, log.read_text()[-4000:]

    def _check(self, run_dir: Path) -> None:
        """All that is there is whole, and nothing is lost but the save that was hit."""
        hit = max([*drafts(run_dir), newest(run_dir)])
        found = find_checkpoint(run_dir, "auto", None)
        last = 0 if found is None else int(found.name.removeprefix("global_step_"))
        # in the background the files of one save are hashed while those of the next are begun
        assert last in (hit - 2, hit - 1, hit), f"the save of step {hit} was hit, and {found} is the newest"
        assert not list(run_dir.glob(".global_step*"))
        for step, folder in saved_steps(run_dir).items():
            expected = self.whole / f"global_step_{step}"
            assert differences(models_of(folder, ACTOR), models_of(expected, ACTOR)) == [], folder
            assert differences(comparable(folder), comparable(expected)) == [], folder


def comparable(checkpoint: Path) -> object:
    """The driver's state but for how it was saved."""
    state = driver_state(checkpoint)
    free = ("trainer.async_save", "trainer.max_actor_ckpt_to_keep")
    state["config"] = {name: value for name, value in state["config"].items() if name not in free}
    return state


def main(argv: list[str] | None = None) -> int:
    """The command; prints the kills by phase."""
    parser = argparse.ArgumentParser(prog="python -m tests.killed_saves", description=__doc__)
    parser.add_argument("--kills", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="killed-saves-") as folder:
        print_survived(Path(folder), options.kills, options.seed)
    return 0


def print_survived(folder: Path, kills: int, seed: int = 0) -> int:
    """Kills half of the times with a save in the foreground and half in the background; gives how many hit a save."""
    run = KilledRun(folder, kills, seed)
    within = 0
    for name, half, options in (
        ("foreground", run.kills[::2], ()),
        ("background", run.kills[1::2], ("trainer.async_save=true",)),
    ):
        began = time.monotonic()
        hit = run.survive(name, half, *options)
        within += sum(count for phase, count in hit.items() if phase != BETWEEN)
        print(f"saves in the {name}: {len(half)} kills survived in {time.monotonic() - began:.0f} s")
        for phase, count in sorted(hit.items()):
            print(f"  {count:3d}  {phase}")
    print(f"{within} of {kills} kills hit a save; each left the checkpoint before or the new one, equal to the bit")
    return within


if __name__ == "__main__":
    sys.exit(main())
