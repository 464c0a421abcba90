"""`python -m trainer.sweep_report` is `python -m trainer.report` now; this says so."""

from __future__ import annotations

import sys

from trainer.cli import command
from verl_lite.errors import UserError


@command
def main(argv: list[str]) -> int:
    """Raises UserError, always."""
    raise UserError(f"the page of a sweep is made by: python -m trainer.report {' '.join(argv) or 'STUDY'}")


if __name__ == "__main__":
    sys.exit(main())
