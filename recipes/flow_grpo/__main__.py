"""`python -m recipes.flow_grpo key=value ...`: policy gradients for a flow-matching model.

Without a model and data it runs the embedded default. `--help-config` lists the options, `--print-config` prints the
resolved configuration. Exit status: see `trainer.cli`.
"""

from trainer.cli import command, leave
from trainer.launch.start import start
from verl_lite.config.flow_grpo import FlowGRPOConfig


@command
def main(argv: list[str]) -> int:
    """Runs the command and returns its exit status."""
    return start("recipes.flow_grpo.run:FlowGRPOJob", FlowGRPOConfig, argv, "flow_grpo")


if __name__ == "__main__":
    leave(main())
