"""`python -m trainer.main_ppo key=value ...`: parse, check, plan, build, fit, report.

With no arguments it runs the embedded default, `recipes/quickstart`. Nothing heavy is imported before the command line
has been understood. Exit status: see `trainer.cli`.
"""

from trainer.cli import command, leave
from trainer.start import start
from verl_lite.config import PPOConfig
from verl_lite.config.loader import DEFAULT_RECIPE


@command
def main(argv: list[str]) -> int:
    """The command; returns the exit status."""
    return start("trainer.build:PPOJob", PPOConfig, argv, DEFAULT_RECIPE)


if __name__ == "__main__":
    leave(main())
