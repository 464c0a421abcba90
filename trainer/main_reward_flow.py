"""`python -m trainer.main_reward_flow key=value ...`: trains an adapter of an image-to-video diffusion model with a
differentiable reward. The guide is trainer/DIFFUSION.md.

Without a model and data it runs the embedded recipe `recipes/reward_flow`. `--help-config` lists the options,
`--print-config` prints the resolved configuration. Exit status: see `trainer.cli`.
"""

from trainer.cli import command, leave
from trainer.launch.start import start
from verl_lite.config.diffusion import RewardFlowConfig


@command
def main(argv: list[str]) -> int:
    """Runs the command and returns its exit status."""
    return start("trainer.diffusion.reward_flow:RewardFlowJob", RewardFlowConfig, argv, "reward_flow")


if __name__ == "__main__":
    leave(main())
