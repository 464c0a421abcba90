"""`python -m trainer.main_ppo key=value ...`: trains a language model with reinforcement learning.

Without arguments it runs the embedded recipe `recipes/quickstart`. Heavy modules are imported only after the command
line has been parsed. Exit status: see `trainer.cli`.
"""

from trainer.cli import command, leave
from trainer.launch.start import start
from verl_lite.config import PPOConfig
from verl_lite.config.loader import DEFAULT_RECIPE


@command
def main(argv: list[str]) -> int:
    """Runs the command and returns its exit status."""
    return start("trainer.launch.ppo_job:PPOJob", PPOConfig, argv, DEFAULT_RECIPE)


if __name__ == "__main__":
    leave(main())
