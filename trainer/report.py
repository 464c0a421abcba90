"""`python -m trainer.report RUN [RUN ...] [--out FILE]`: runs as one HTML page, which needs no server and no network.

RUN is a run folder (or a metrics.jsonl) of any command that trains: running, killed or finished. The page has curves,
time by stage, findings on the health of the run, all metrics with their formulas, the samples of all steps, and the
configuration with what is not the default; of several runs, the comparison. It is written to RUN/report.html, of
several runs to report.html here; --out names another place. Nothing of what a model wrote can act on the page: texts
are data, and a content policy allows only the page's own script.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import html
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.ending import run_command

PAGE = Path(__file__).parent / "reports" / "run_page"
SCRIPTS = ("charts.js", "panels.js", "samples.js", "page.js")
NAME = "report.html"


def write_report(folders: Sequence[Path], out: Path) -> Path:
    """Writes the page about these run folders. Raises UserError for a folder that holds no run."""
    from trainer.reports.page_data import page_data
    from trainer.reports.run_data import read_run

    text = render(page_data([read_run(folder) for folder in folders]))
    out.parent.mkdir(parents=True, exist_ok=True)
    draft = out.with_name(f".{out.name}.draft")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, out)
    return out


def render(data: dict[str, Any]) -> str:
    """The page with this data (`trainer.reports.page_data.page_data`)."""
    script = "\n".join((PAGE / name).read_text(encoding="utf-8") for name in SCRIPTS)
    parts = {
        "title": html.escape(", ".join(run["title"] for run in data["runs"])),
        "script_hash": f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}",
        "style": (PAGE / "page.css").read_text(encoding="utf-8"),
        "data": embedded(data),
        "script": script,
    }
    page = (PAGE / "page.html").read_text(encoding="utf-8")
    pieces = page.split("{{")
    return pieces[0] + "".join(parts[name] + rest for name, _, rest in (piece.partition("}}") for piece in pieces[1:]))


def embedded(data: Any) -> str:
    """JSON that is safe between script tags: `<` cannot open or close one. Numbers that are not finite are an error."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    text = text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    return text.encode("utf-8", "replace").decode("utf-8")  # half a character of a model's has no bytes


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m trainer.report", description="Runs as one self-contained page.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--out", type=Path, help=f"the file to write; RUN/{NAME} if not given")
    given = parser.parse_args(sys.argv[1:] if argv is None else argv)
    folders = [path.parent if path.is_file() else path for path in (path.expanduser() for path in given.runs)]
    return run_command(lambda: _report(folders, given.out or (folders[0] / NAME if len(folders) == 1 else Path(NAME))))


def _report(folders: Sequence[Path], out: Path) -> int:
    began = time.monotonic()
    write_report(folders, out)
    size = out.stat().st_size / 2**20
    print(f"{out}: {size:.1f} MiB, made in {time.monotonic() - began:.1f} s; open it in a browser")
    return 0


if __name__ == "__main__":
    sys.exit(main())
