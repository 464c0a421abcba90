"""`python -m trainer.report RUN [RUN ...] [--out FILE]`: runs as one HTML page, which needs no server and no network.

RUN is a run folder (or a metrics.jsonl) of any command that trains: running, killed or finished. The page has curves,
time by stage, findings on the health of the run, all metrics with their formulas, the samples of all steps, and the
configuration with what is not the default; of several runs, the comparison. It is written to RUN/report.html, of
several runs to report.html here; --out names another place. Nothing of what a model wrote can act on the page: texts
are data, and a content policy allows only the page's own script.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from trainer.cli import command

PAGE = Path(__file__).parent / "reports" / "run_page"
SCRIPTS = [PAGE / name for name in ("charts.js", "panels.js", "samples.js", "run.js")]
NAME = "report.html"


def write_report(folders: Sequence[Path], out: Path) -> Path:
    """Writes the page about these run folders. Raises UserError for a folder that holds no run."""
    from trainer.checkpoint import write_atomically
    from trainer.reports.page_data import page_data
    from trainer.reports.pages.page import element, page, text
    from trainer.reports.run_data import read_run

    data = page_data([read_run(folder) for folder in folders])
    title = " · ".join(run["title"] for run in data["runs"])
    needs = element("noscript", text("This page draws itself with JavaScript that is inside the file."))
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, page(title, needs, data=data, scripts=SCRIPTS, styles=[PAGE / "run.css"]))
    return out


@command
def main(argv: list[str]) -> int:
    """The command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m trainer.report", description="Runs as one self-contained page.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
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
