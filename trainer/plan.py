"""`python -m trainer.plan key=value ...`: what a run would take, from its options alone; see `planner.command`."""

from __future__ import annotations

import sys


def main() -> int:
    from trainer.environment import prepare_driver

    prepare_driver()
    from trainer.ending import run_command
    from trainer.planner.command import run

    return run_command(lambda: run(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(main())
