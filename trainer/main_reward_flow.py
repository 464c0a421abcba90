"""`python -m trainer.main_reward_flow key=value ...`: an adapter of an image-to-video diffusion model learns through a
differentiable reward; DIFFUSION.md beside this file is the guide.

With neither model nor data it runs the embedded default, `recipes/reward_flow`. `--help-config` lists the options,
`--print-config` shows them resolved. Exit status: see `trainer.cli`.
"""

from trainer.cli import command, leave
from trainer.start import start
from verl_lite.config.diffusion import RewardFlowConfig


@command
def main(argv: list[str]) -> int:
    """The command; returns the exit status."""
    return start("trainer.diffusion.reward_flow:RewardFlowJob", RewardFlowConfig, argv, "reward_flow")


if __name__ == "__main__":
    leave(main())
