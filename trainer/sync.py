"""`python -m trainer.sync RUN [--to TRACKER] [--all]`: gives trackers what they lack of a run, from its own record.

Those of `trainer.logger` that did not take everything while the run trained (a server was down, or hung); with --to
only that one: a tracker that the run did not have gets the whole run. Run it again for what was still not taken. wandb
and swanlab have commands of their own for what they wrote offline: `wandb sync`, `swanlab sync`. Exit status: 0 all was
taken, 1 not all, 2 wrong input.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from pathlib import Path

from trainer.cli import command
from trainer.console import Console
from trainer.tracking.follower import Follower, taken_file
from trainer.tracking.trackers import OWN, TRACKERS, TrackedRun, check_trackers
from verl_lite.errors import UserError

PATIENCE_S = 60.0
"""How long a tracker may take nothing before it is left alone."""


def sync(run_dir: Path, to: str | None = None, whole: bool = False) -> int:
    """Does what was asked for; returns the exit status. Raises UserError for a folder that is no run, or is in use."""
    from trainer.run import locked_folder

    run = TrackedRun.saved(run_dir, Console())
    names = [to] if to else [name for name in run.options.get("trainer", {}).get("logger", ()) if name not in OWN]
    if to in OWN:
        raise UserError(f"--to {to}: that is no tracker that could lack anything")
    check_trackers(names, f"--to {to}" if to else None)
    if not names:
        run.console.print(f"{run_dir} has no trackers; --to TRACKER names one")
    with locked_folder(run_dir, run.console.note):
        return max([_sync_one(run, name, whole) for name in names], default=0)


def _sync_one(run: TrackedRun, name: str, whole: bool) -> int:
    """One tracker; 1 if it did not take all."""
    if whole:
        taken_file(run.run_dir, name).unlink(missing_ok=True)
    follower = Follower(name, TRACKERS.get_fn(name), run)
    before = follower.lacking()
    if not before:
        run.console.print(f"{name}: lacks nothing (--all sends the whole run)")
        return 0
    failures: list[str] = []

    def work() -> None:
        try:
            follower.catch_up()
            follower.finish()
        except Exception as error:  # the door to code of others, which may raise anything; the record stays
            failures.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    seen, since = dict(follower.taken), time.monotonic()
    while thread.is_alive() and time.monotonic() - since < PATIENCE_S:
        thread.join(min(1.0, PATIENCE_S))
        if follower.taken != seen:
            seen, since = dict(follower.taken), time.monotonic()
    if thread.is_alive():
        failures.append(f"took nothing for {PATIENCE_S:.0f} s, and is left alone")
    left = follower.lacking()
    run.console.print(f"{name}: took {before - left} messages" + (f", lacks {left}" if left else ""))
    for text in failures:
        print(f"{name}: {text}", file=sys.stderr)
    return int(left > 0 or bool(failures))


@command
def main(argv: list[str]) -> int:
    """The command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m trainer.sync", description="Gives trackers what they lack.")
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--to", metavar="TRACKER", help="only this one, which the run need not have had")
    parser.add_argument("--all", action="store_true", help="the whole run anew; with --to")
    given = parser.parse_args(argv)
    if given.all and not given.to:
        parser.error("--all needs --to TRACKER")
    return sync(given.run.expanduser().absolute(), given.to, given.all)


if __name__ == "__main__":
    sys.exit(main())
