"""`python -m trainer.sync RUN [--to TRACKER] [--all]`: gives trackers what they lack of a run, from its own record.

Those of `trainer.logger` that did not take everything while the run trained (a server was down, or hung); with --to
only that one: a tracker that the run did not have gets the whole run. Run it again for what was still not taken. wandb
and swanlab have commands of their own for what they wrote offline: `wandb sync`, `swanlab sync`. Exit status: 0 all was
taken, 1 not all, 2 wrong input.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import yaml

from trainer.cli import command
from trainer.console import Console
from trainer.tracking import TRACKERS, Follower, TrackedRun, check_trackers
from trainer.tracking.trackers import OWN
from verl_lite.errors import UserError

PATIENCE_S = 60.0
"""How long a tracker may take nothing before it is left alone."""


@command
def main(argv: list[str]) -> int:
    """The command; returns the exit status."""
    from trainer.run import locked_folder

    parser = argparse.ArgumentParser(prog="python -m trainer.sync", description="Gives trackers what they lack.")
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--to", metavar="TRACKER", help="only this one, which the run need not have had")
    parser.add_argument("--all", action="store_true", help="the whole run anew")
    given = parser.parse_args(argv)
    folder, console, status = given.run.expanduser().absolute(), Console(), 0
    if not (folder / "config.yaml").is_file():
        raise UserError(f"{folder}: expected the folder of a run, with config.yaml in it")
    options = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    trainer = options["trainer"]
    name = trainer.get("experiment_name") or folder.name
    run = TrackedRun(folder, trainer.get("project_name") or "verl_lite", name, options, console)
    names = [given.to] if given.to else [name for name in trainer["logger"] if name not in OWN]
    check_trackers(names, f"--to {given.to}" if given.to else None)
    with locked_folder(folder, console.note):
        for name in names:
            if given.all:
                (folder / f"{name}_taken.json").unlink(missing_ok=True)
            follower = Follower(name, TRACKERS.get_fn(name), run)
            before = left = follower.lacking()
            while not follower.finish(PATIENCE_S) and follower.lacking() < left:
                left = follower.lacking()
            left = follower.lacking()
            console.print(f"{name}: took {before - left} messages" + (f", lacks {left}" if left else ""))
            status = max(status, int(left > 0 or follower.is_alive()))
    return status


if __name__ == "__main__":
    sys.exit(main())
