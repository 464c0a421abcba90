"""`python -m recipes.flow_grpo key=value ...`: policy gradients for a flow-matching model.

With neither model nor data it runs the embedded default. `--help-config` lists the options, `--print-config` shows them
resolved. Exit status: see `trainer.ending`.
"""

from __future__ import annotations

import sys

from trainer.environment import prepare_driver


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    prepare_driver()
    from trainer.ending import run_command

    def command() -> int:
        from recipes.flow_grpo.run import run_flow_grpo

        return run_flow_grpo(sys.argv[1:] if argv is None else argv)

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())
