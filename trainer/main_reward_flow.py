"""`python -m trainer.main_reward_flow key=value ...`: an adapter of an image-to-video diffusion model learns through a
differentiable reward.

With neither model nor data it runs the embedded default, `recipes/reward_flow`. `--help-config` lists the options,
`--print-config` shows them resolved. Nothing heavy is imported before the command line has been understood. Exit
status: see `trainer.ending`.
"""

from __future__ import annotations

import sys

from trainer.environment import prepare_driver


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    prepare_driver()
    from trainer.ending import run_command

    def command() -> int:
        from trainer.flow.run import run_reward_flow

        return run_reward_flow(sys.argv[1:] if argv is None else argv)

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())
