"""`python -m trainer.plan key=value ...`: what a run would take, from its options alone; see `planner.command`."""

from __future__ import annotations

import sys

from trainer.cli import command


@command
def main(argv: list[str]) -> int:
    """The command; returns the exit status."""
    from trainer.planner.command import run

    return run(argv)


if __name__ == "__main__":
    sys.exit(main())
