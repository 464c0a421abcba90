"""`python -m trainer.inspect RUN [--step N] [--best | --worst | --changed] [--grep TEXT] [--uid UID] [--follow]`: a run
in the terminal.

RUN is a run folder of any command that trains: running, killed or finished. Without a choice of samples: state and
time, validation before and after, curves, time by stage, findings on the health of the run, and its best, worst and
changed answers. With one: those answers as they were written, --count of them. --follow draws the first again as the
run goes on, until it ends or Ctrl-C. `python -m trainer.report` shows the same and more in a browser.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.cli import command

if TYPE_CHECKING:
    from rich.console import Console

EVERY_S = 2.0
_SHOWN = 3


@command
def main(argv: list[str]) -> int:
    """The command; returns the exit status."""
    import rich.console

    from trainer.reports.run_data import read_run
    from trainer.reports.sample_choice import Choice, changed, chosen
    from trainer.reports.terminal import changed_samples, overview, samples_shown

    given = _given(argv)
    folder = given.run.expanduser()
    folder = folder.parent if folder.is_file() else folder
    console = rich.console.Console(highlight=False)
    read_run(folder)  # what is no run is said before anything is drawn
    order = "best" if given.best else "worst" if given.worst else ""
    choice = Choice(given.step, given.grep, given.uid, order)
    if given.changed:
        console.print(changed_samples(changed(folder, choice, given.count)))
    elif choice != Choice():
        found, total = chosen(folder, choice, given.count)
        console.print(samples_shown(found, total))
    elif given.follow:
        _follow(folder, console)
    else:
        console.print(overview(read_run(folder), console.width, _SHOWN))
    return 0


def _given(argv: list[str]) -> argparse.Namespace:
    """The command line; what contradicts itself ends the command with a sentence."""
    parser = _parser()
    given = parser.parse_args(argv)
    if given.count < 1:
        parser.error(f"--count {given.count}: expected 1 or more")
    if given.changed and given.step is not None:
        parser.error("--changed compares the steps of a run: leave out --step")
    chooses = given.best or given.worst or given.changed or (given.step, given.grep, given.uid) != (None, None, None)
    if given.follow and chooses:
        parser.error("--follow draws the overview, without samples: leave out what chooses samples")
    return given


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m trainer.inspect", description="A run in the terminal.")
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--step", type=int, metavar="N", help="samples of this step only")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--best", action="store_true", help="samples of the highest score, the latest first")
    which.add_argument("--worst", action="store_true", help="samples of the lowest score, and those that failed")
    which.add_argument("--changed", action="store_true", help="prompts whose answers became better or worse")
    parser.add_argument("--grep", metavar="TEXT", help="samples with this text in prompt, answer or ground truth")
    parser.add_argument("--uid", help="all answers to this prompt, by step")
    parser.add_argument("--count", type=int, default=10, metavar="N", help="how many samples (10)")
    parser.add_argument("--follow", action="store_true", help="draw again as the run goes on")
    return parser


def _follow(folder: Path, console: Console) -> None:
    """Draws the run again whenever it has logged, until it has ended or somebody has seen enough (Ctrl-C)."""
    from rich.live import Live

    from trainer.reports.run_data import read_run
    from trainer.reports.terminal import overview

    with (
        suppress(KeyboardInterrupt),  # which ends the looking, not the run
        Live(console=console, auto_refresh=False, vertical_overflow="crop") as live,
    ):
        seen = None
        while True:
            run = read_run(folder)
            if run.modified != seen:
                seen = run.modified
                live.update(overview(run, console.width, 0), refresh=True)
            if not run.is_running:
                return
            time.sleep(EVERY_S)


if __name__ == "__main__":
    sys.exit(main())
