"""`python -m trainer.report RUN [RUN ...] [--out FILE]`: runs as one HTML page, which needs no server and no network.

RUN is a run folder (or a metrics.jsonl) of any command that trains: running, killed or finished; or the folder of a
sweep, whose page has its trials and compares the best runs. The page has curves, time by stage, findings on the health
of the run, all metrics with their formulas, the samples of all steps, and the configuration with what is not the
default; of several runs, the comparison. It is written to RUN/report.html, of several runs to report.html here.
Nothing of what a model wrote can act on the page: texts are data, and a content policy allows only the page's own
scripts.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from trainer.cli import command

NAME = "report.html"


def write_report(folders: Sequence[Path], out: Path) -> Path:
    """Writes the page about these run folders, or about one study.

    Raises:
        UserError: for a folder that holds no run.
    """
    from trainer.checkpoint import write_atomically
    from trainer.reports.page import page
    from trainer.reports.page_data import page_data
    from trainer.reports.run_data import read_run
    from trainer.reports.study import is_study, read_study

    study = read_study(folders[0].absolute()) if len(folders) == 1 and is_study(folders[0]) else None
    runs = [read_run(folder) for folder in (folders if study is None else study.pop("best"))]
    data = page_data(runs, study)
    title = " · ".join(run["title"] for run in data["runs"]) if study is None else f"Sweep {folders[0].absolute().name}"
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, page(title, data))
    return out


@command
def main(argv: list[str]) -> int:
    """The command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m trainer.report", description="Runs as one self-contained page.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, or of a sweep")
    parser.add_argument("--out", type=Path, help=f"the file to write; RUN/{NAME} if not given")
    given = parser.parse_args(argv)
    folders = [path.parent if path.is_file() else path for path in (path.expanduser() for path in given.runs)]
    out = given.out or (folders[0] / NAME if len(folders) == 1 else Path(NAME))
    began = time.monotonic()
    write_report(folders, out)
    size = out.stat().st_size / 2**20
    print(f"{out}: {size:.1f} MiB, made in {time.monotonic() - began:.1f} s; open it in a browser")
    return 0


if __name__ == "__main__":
    sys.exit(main())
