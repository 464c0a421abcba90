"""`python -m trainer.main_ppo key=value ...`: parse, check, plan, build, fit, report.

With no arguments it runs the embedded default, `recipes/quickstart`. Nothing heavy is imported before the command line
has been understood. Exit status: see `trainer.cli`.
"""

from trainer.cli import command


@command
def main(argv: list[str]) -> int:
    """The command; returns the exit status."""
    from trainer.build import run_ppo

    return run_ppo(argv)


if __name__ == "__main__":
    raise SystemExit(main())
