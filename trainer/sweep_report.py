"""`python -m trainer.sweep_report STUDY ...`: report.html, pictures and trials.csv of a sweep, also while it runs.

The page is one file that needs no network and no server. A sweep writes the same at its end. Guide: SWEEPS.md beside
this file.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from trainer.cli import command

PAGE = "report.html"


@command
def main(argv: list[str]) -> int:
    """The command; returns the exit status."""
    from trainer.sweeps.options import study_folder

    parser = argparse.ArgumentParser(
        prog="python -m trainer.sweep_report",
        description="report.html, pictures (PNG) and trials.csv of a sweep, in its folder.",
        epilog="Guide: trainer/SWEEPS.md",
    )
    parser.add_argument("study", nargs="+", help="folder of the study, or its name in runs/sweeps")
    for name in parser.parse_args(argv).study:
        for path in write_report(study_folder(name)):
            print(path)
    return 0


def write_report(folder: Path) -> list[Path]:
    """Writes the page, the pictures and the table of a study into its folder; gives the paths, the page first.

    Raises UserError if there is no study.
    """
    from trainer.checkpoint import write_atomically
    from trainer.sweeps.engine import locked
    from trainer.sweeps.importance import importance_of
    from trainer.sweeps.pictures import pictures
    from trainer.sweeps.report_page import report_page
    from trainer.sweeps.study import read_study, write_csv

    record = read_study(folder)
    importance = importance_of(record)
    drawn = pictures(record, importance)
    html, page, table = report_page(record, importance, drawn), folder / PAGE, folder / "trials.csv"
    with locked(folder):  # several sweeps of a study may end at once
        write_atomically(page, html)
        write_csv(record, table)
        return [page, table, *(picture.png(folder) for picture in drawn)]


if __name__ == "__main__":
    sys.exit(main())
