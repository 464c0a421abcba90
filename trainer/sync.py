"""`python -m trainer.sync RUN [--to TRACKER] [--all]`: gives trackers what they lack of a run.

While a run trains, what a tracker does not take (its server is down, or it hangs) is kept in RUN/spool. This command
hands it over, and forgets what was taken. With --to TRACKER only to that one; a tracker that the run did not have gets
the whole run from metrics.jsonl and samples.jsonl, and with --all any tracker does. Run it again for what was still not
taken. Exit status: 0 all was taken, 1 not all, 2 wrong input.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trainer.cli import command
from trainer.console import Console
from trainer.evaluate.sample import Sample
from trainer.trackers.base import TRACKERS, TrackedRun, check_trackers
from trainer.trackers.spool import LastStep, Message, Spool, spooled_trackers
from trainer.tracking import read_metrics, read_samples
from verl_lite.errors import UserError

USAGE = "usage: python -m trainer.sync RUN [--to TRACKER] [--all]"


@dataclass(frozen=True)
class Asked:
    """The command line: the run's folder, the one tracker or None for all that lack something, the whole run or not."""

    run_dir: Path
    tracker: str | None = None
    whole: bool = False

    @classmethod
    def parse(cls, argv: list[str]) -> Asked:
        """Raises UserError with the usage."""
        rest, tracker, whole = [], None, False
        arguments = iter(argv)
        for argument in arguments:
            if argument == "--to" or argument.startswith("--to="):
                tracker = argument.partition("=")[2] or next(arguments, None)
                if not tracker:
                    raise UserError(f"--to needs the name of a tracker. {USAGE}")
            elif argument == "--all":
                whole = True
            elif argument.startswith("-"):
                raise UserError(f"{argument} is not known. {USAGE}")
            else:
                rest.append(argument)
        if len(rest) != 1 or (whole and tracker is None):
            raise UserError(f"expected one run folder, and --all only with --to. {USAGE}")
        return cls(Path(rest[0]).expanduser().absolute(), tracker, whole)


def sync(asked: Asked) -> int:
    """Does what was asked for; returns the exit status. Raises UserError for a folder that is no run, or is in use."""
    from trainer.run import locked_folder

    console = Console()
    run = TrackedRun.saved(asked.run_dir, console)
    names = spooled_trackers(asked.run_dir) if asked.tracker is None else [asked.tracker]
    check_trackers(names, None if asked.tracker is None else f"--to {asked.tracker}")
    if not names:
        console.print(f"No tracker lacks anything of {asked.run_dir}.")
    with locked_folder(asked.run_dir, console.note):
        return max([_sync_one(run, name, asked.whole) for name in names], default=0)


def _sync_one(run: TrackedRun, name: str, whole: bool) -> int:
    """One tracker; 1 if it did not take all."""
    spool, last, say = Spool(run.run_dir, name), LastStep(run.run_dir, name), run.console.print
    if whole or (not len(spool) and not last.is_known and not (run.run_dir / name).is_dir()):
        spool.clear()
        for message in whole_run(run.run_dir):
            spool.add(message)
    if not len(spool):
        say(f"{name}: lacks nothing (--all sends the whole run)")
        return 0
    try:
        tracker = TRACKERS.get_fn(name)(run)
        taken, failure = spool.hand_over(tracker, lambda message: last.note(message, tracker))
        tracker.finish()
    except Exception as error:  # the door to code of others, which may raise anything; what it lacks stays on disk
        taken, failure = 0, error
    left = len(spool)
    say(f"{name}: took {taken} messages" + (f", lacks {left}" if left else ""))
    if failure is not None:
        print(f"{name} raised {type(failure).__name__}: {failure}", file=sys.stderr)
    return int(left > 0 or failure is not None)


def whole_run(run_dir: Path) -> Iterator[Message]:
    """All that was logged in a run, by step; where a resumed run went back, what it did the second time."""
    path = run_dir / "metrics.jsonl"
    metrics = read_metrics(path) if path.is_file() else {}
    samples = read_samples(run_dir / "samples.jsonl")
    for step in sorted({*metrics, *samples}):
        if step in metrics:
            yield Message(step, metrics=metrics[step])
        if step in samples:
            yield Message(step, samples=[Sample(**row) for row in samples[step]])


@command
def main(argv: list[str]) -> int:
    """The command; returns the exit status."""
    return sync(Asked.parse(argv))


if __name__ == "__main__":
    sys.exit(main())
