"""`python -m trainer.main_ppo key=value ...`: parse, check, plan, build, fit, report.

With no arguments it runs the embedded default, `recipes/quickstart`. Nothing heavy is imported before the command line
has been understood. Exit status: see `trainer.ending`.
"""

from __future__ import annotations

import sys

from trainer.environment import prepare_driver


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    prepare_driver()
    from trainer.ending import run_command

    def command() -> int:
        from trainer.run import run_ppo

        return run_ppo(sys.argv[1:] if argv is None else argv)

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())
