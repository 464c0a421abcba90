"""`python -m trainer.main_ppo key=value ...`: parse, check, plan, build, fit, report.

With no arguments it runs the embedded default, `recipes/quickstart`. Nothing heavy is imported before the command line
has been understood. Exit status: 0 done, 2 the user's input was wrong (one message, no traceback), 1 anything else.
"""

from __future__ import annotations

import sys

from trainer.environment import prepare_driver


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    prepare_driver()
    from trainer.run import run_ppo
    from verl_lite.errors import UserError

    try:
        return run_ppo(sys.argv[1:] if argv is None else argv)
    except UserError as error:
        print(f"\n{type(error).__name__}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
