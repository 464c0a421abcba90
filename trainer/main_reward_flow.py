"""`python -m trainer.main_reward_flow key=value ...`: an adapter of an image-to-video diffusion model learns through a
differentiable reward.

With neither model nor data it runs the embedded default, `recipes/reward_flow`. `--help-config` lists the options,
`--print-config` shows them resolved. Nothing heavy is imported before the command line has been understood. Exit
status: see `trainer.cli`.
"""

from __future__ import annotations

import sys

from trainer.cli import command


@command
def main(argv: list[str]) -> int:
    """The command; returns the exit status."""
    from trainer.flow.run import run_reward_flow

    return run_reward_flow(argv)


if __name__ == "__main__":
    sys.exit(main())
