"""`python -m trainer.sweep key=a,b key=log(1e-7,1e-5) ... --metric NAME`: many runs of a command over settings.

A grid, `--random N` or `--optuna N` with a pruner; each trial in processes and a folder of its own, on devices that
others use too; what fails is run again by its cause, what was interrupted goes on. Guide: SWEEPS.md beside this file.

Exit status: 0 all trials are done, 1 some failed, 2 wrong input (before anything runs, where it can be known), 130
stopped.
"""

from __future__ import annotations

import sys

from trainer.cli import command


@command
def main(argv: list[str]) -> int:
    """The command; returns the exit status."""
    from trainer.sweeps.command import sweep

    return sweep(argv)


if __name__ == "__main__":
    sys.exit(main())
