"""`python -m tests.killed_saves --kills 25`: kill -9 within the saves of a real run, and what is left of them.

A tiny model is trained inline, with a checkpoint after each step and two of them kept. The run is killed with SIGKILL
at instants spread over its saves (the files of the models, data.pt, the rename, the marker, the pruning), started again
with trainer.resume_mode=auto, killed again, and so on; half of the kills with trainer.async_save. After each kill every
folder called global_step_N has to be equal, bit for bit, to that of a run that nobody killed, and the newest one has to
be of the save that was hit or of the one before. At last the run is left alone and has to end equal as well.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tests.forked_runs import ACTOR, Runs, differences, driver_state, models_of
from trainer.checkpoint import MARKER, find_checkpoint, saved_steps

AIMS = ("anywhere", "sync", "rename", "prune", "anywhere")  # in turn
KEPT = 2
FIRST_GUESS_S = 0.2
PATIENCE_S = 300.0
BETWEEN = "between two saves"
NAME = re.compile(r"(\.?)global_step_(\d+)\.?(draft|old|gone|)$")


@dataclass(frozen=True)
class Kill:
    """One kill. aim: an instant drawn from the whole save, or right when its last file appears (sync), at its rename
    or at its pruning. share: of the save's duration, for the first. saves_before: of this process, left alone."""

    aim: str
    share: float
    saves_before: int


@dataclass(frozen=True)
class Listing:
    """What the names in a run folder say: steps of whole checkpoints, of drafts, of those being deleted; the marker."""

    saved: frozenset[int]
    drafts: frozenset[int]
    gone: frozenset[int]
    marked: int
    has_driver_state: bool

    @classmethod
    def of(cls, run_dir: Path) -> Listing:
        steps: dict[str, set[int]] = {"": set(), "draft": set(), "gone": set(), "old": set()}
        for match in filter(None, map(NAME.match, os.listdir(run_dir) if run_dir.exists() else ())):
            steps[match[3]].add(int(match[2]))
        marker = run_dir / MARKER
        marked = int(marker.read_text()) if marker.exists() else 0
        state = any((run_dir / f".global_step_{step}.draft" / "data.pt").exists() for step in steps["draft"])
        return cls(frozenset(steps[""]), frozenset(steps["draft"]), frozenset(steps["gone"]), marked, state)

    @property
    def newest(self) -> int:
        return max(self.saved, default=0)

    def has(self, what: str, step: int) -> bool:
        """Whether the save of a step, or its deletion, has come so far, or farther."""
        is_saved = self.newest >= step
        match what:
            case "draft":
                return is_saved or step in self.drafts
            case "state":
                return is_saved or (step in self.drafts and self.has_driver_state)
            case "gone":
                return step in self.gone or step not in self.saved
        return is_saved

    def phase(self) -> str:
        """Of the save that was under way."""
        if self.drafts:
            return "data.pt, sync, before the rename" if self.has_driver_state else "files of the models"
        if self.newest > self.marked:
            return "renamed, before the marker"
        return "pruning" if self.gone else BETWEEN


class KilledRun:
    """A run that is killed and started again, beside one of the same options that is not."""

    def __init__(self, folder: Path, kills: int, seed: int = 0) -> None:
        rng = random.Random(seed)
        self.folder = folder
        self.kills = [Kill(AIMS[i % len(AIMS)], rng.uniform(0.0, 0.9), rng.choice((0, 0, 1, 2))) for i in range(kills)]
        total = sum(kill.saves_before + 1 for kill in self.kills) + 3
        self.runs = Runs(folder, 12, 4, [f"trainer.total_training_steps={total}"])
        self.total, self.duration_s = total, FIRST_GUESS_S
        self.whole = self.runs.finish("whole")

    def survive(self, name: str, kills: list[Kill], *options: str) -> Counter[str]:
        """Kills a run of that name again and again; gives how often each phase of a save was hit."""
        options = (*options, f"trainer.max_actor_ckpt_to_keep={KEPT}", "trainer.resume_mode=auto")
        hit: Counter[str] = Counter()
        for kill in kills:
            left = self._kill(name, kill, options)
            hit[left.phase()] += 1
            self._check(self.folder / name, left)
        run_dir = self.runs.finish(name, *options)
        assert max(saved_steps(run_dir)) == self.total
        self._check(run_dir, Listing.of(run_dir))
        return hit

    def _kill(self, name: str, kill: Kill, options: tuple[str, ...]) -> Listing:
        """Starts the run and kills it; gives what its folder looks like then."""
        process, run_dir, log = self.runs.start(name, *options)
        deadline = time.monotonic() + PATIENCE_S

        def wait_for(what: str, step: int) -> None:
            while not Listing.of(run_dir).has(what, step):
                assert process.is_alive() and time.monotonic() < deadline, log.read_text()[-4000:]
                time.sleep(0 if what == "gone" else 0.0002)  # a small folder is gone soon

        first = Listing.of(run_dir).newest + 1
        for step in range(first, first + kill.saves_before):
            wait_for("draft", step)
            began = time.monotonic()
            wait_for("saved", step)
            self.duration_s = time.monotonic() - began
        step = first + kill.saves_before
        wait_for("draft", step)
        oldest = min(Listing.of(run_dir).saved, default=step)
        if kill.aim == "anywhere":
            time.sleep(kill.share * self.duration_s)
        elif kill.aim == "prune" and step - oldest >= KEPT:
            wait_for("gone", oldest)
        else:
            wait_for("state" if kill.aim == "sync" else "saved", step)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL, log.read_text()[-4000:]
        return Listing.of(run_dir)

    def _check(self, run_dir: Path, left: Listing) -> None:
        """All that is there is whole, and nothing is lost but the save that was hit."""
        hit = max(left.drafts | left.saved, default=0)
        found = find_checkpoint(run_dir, "auto", None)
        newest = 0 if found is None else int(found.name.removeprefix("global_step_"))
        # in the background the files of one save are hashed while those of the next are begun
        assert newest in (hit - 2, hit - 1, hit), f"the save of step {hit} was hit, and {found} is the newest"
        assert not [path.name for path in run_dir.iterdir() if path.name.startswith(".global_step")]
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
