"""`python -m recipes.flow_grpo key=value ...`: policy gradients for a flow-matching model.

With neither model nor data it runs the embedded default. `--help-config` lists the options, `--print-config` shows them
resolved. Exit status: see `trainer.cli`.
"""

import sys

from trainer.cli import command


@command
def main(argv: list[str]) -> int:
    """The command; returns the exit status."""
    from recipes.flow_grpo.run import FlowGRPOJob
    from trainer.run import run

    return run(FlowGRPOJob, argv)


if __name__ == "__main__":
    sys.exit(main())
