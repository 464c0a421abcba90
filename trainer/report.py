"""`python -m trainer.report RUN [RUN ...] [--out FILE]`: writes an HTML page about runs that needs no server and no
network.

RUN is the folder (or the metrics.jsonl) of a running, killed or finished run of any training command, or the folder of
a sweep, whose page lists its trials and compares the best runs. The page shows curves, time by stage, findings on the
health of the run, all metrics with their formulas, the samples of all steps, and the configuration with its changes
from the defaults. For several runs it compares them. The page of one run is RUN/report.html; that of several runs is
report.html in the current folder.

Text written by a model cannot execute in the page. All external data is JSON in the element `data`, which the page's
script shows as text. A content security policy with the hashes of this script and of the charting library (plotly,
embedded in the page) forbids all other scripts and all network requests.
"""

import argparse
import base64
import gzip
import hashlib
import html
import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from trainer.cli import command
from verl_lite.errors import UserError

NAME = "report.html"
FILES = Path(__file__).parent / "observe" / "page_files"


def write_report(folders: Sequence[Path], out: Path, *, is_public: bool = False) -> Path:
    """Writes the page about run folders, or about the folder of one sweep, and returns its path.

    Args:
        folders: The folders.
        out: The file of the page.
        is_public: The page has fewer samples, and of each path of this machine only the last part.

    Raises:
        UserError: for a folder without a run, and for a file that cannot be written.
    """
    from trainer.checkpoint.files import write_atomically
    from trainer.observe.page_data import (
        PUBLIC_SAMPLE_BYTES,
        SAMPLE_BYTES,
        known_folders,
        page_data,
        without_folders,
    )
    from trainer.observe.run_data import read_run

    first = folders[0].absolute()
    study = None
    run_folders = folders
    if (first / "study.json").is_file():
        # imports optuna
        from trainer.sweeps.study_page import read_study

        study = read_study(first)
        run_folders = study.pop("runs")
    runs = [read_run(folder) for folder in run_folders]

    sample_bytes = PUBLIC_SAMPLE_BYTES if is_public else SAMPLE_BYTES
    data = page_data(runs, study, sample_bytes)
    if is_public:
        folders_here = known_folders(runs)
        # texts of the data and of the model stay as they are
        for name in data.keys() - {"samples", "prompts"}:
            data[name] = without_folders(data[name], folders_here)

    title = f"Sweep {first.name}"
    if study is None:
        title = " · ".join(run["title"] for run in data["runs"])
    page = document(title, data)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, page)
    except OSError as error:
        raise UserError(f"--out {out} cannot be written ({error.strerror}: {error.filename})") from error
    return out


def document(title: str, data: object) -> str:
    """Returns the HTML document.

    Args:
        title: the title of the page.
        data: a JSON-compatible value.

    Raises:
        ValueError: for a number that is not finite.
    """
    script = (FILES / "page.js").read_text(encoding="utf-8")
    library = (files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8")
    # without the time, so that equal runs have equal pages
    compressed_library = gzip.compress(library.encode(), mtime=0)
    packed_library = base64.b64encode(compressed_library).decode()
    # the browser runs only these two scripts, whatever the texts of a model contain
    script_sources = f"{_source_hash(script)} {_source_hash(library)}"
    embedded = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    # without "<", the JSON cannot close the script element that contains it
    embedded = embedded.replace("<", "\\u003c")
    title = html.escape(title)
    text = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline';
 script-src {script_sources}">
<title>{title}</title>
<style>
{(FILES / "page.css").read_text(encoding="utf-8")}</style>
</head>
<body>
<header><div class="line"><h1>{title}</h1><button id="theme" type="button" class="quiet">light / dark</button></div>
</header>
<main><noscript>This page draws itself with JavaScript that is inside the file.</noscript></main>
<script type="application/json" id="data">{embedded}</script>
<script type="text/plain" id="plotly">{packed_library}</script>
<script>{script}</script>
</body>
</html>
"""
    # a model can write a lone surrogate, which has no UTF-8
    return text.encode("utf-8", "replace").decode("utf-8")


def _source_hash(script: str) -> str:
    """Returns a script's hash in the form of a Content-Security-Policy."""
    digest = hashlib.sha256(script.encode()).digest()
    encoded_digest = base64.b64encode(digest).decode()
    return f"'sha256-{encoded_digest}'"


@command
def main(argv: list[str]) -> int:
    """Runs the command and returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m trainer.report", description="Writes a page about runs.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, or of a sweep")
    parser.add_argument("--out", type=Path, help=f"output file; default: RUN/{NAME}, for several runs ./{NAME}")
    parser.add_argument(
        "--public",
        action="store_true",
        help="for a page that others read: fewer samples, and paths of this machine without their folders",
    )
    options = parser.parse_args(argv)
    paths = [path.expanduser() for path in options.runs]
    # the file metrics.jsonl names its run, too
    folders = [path.parent if path.is_file() else path for path in paths]
    out = options.out
    if out is None:
        # the page of several runs is in none of their folders
        out = folders[0] / NAME if len(folders) == 1 else Path(NAME)
    out = out.expanduser()
    # a wrong order of the arguments would replace a file of a run
    if not out.name or (out.exists() and out.suffix not in (".html", ".htm")):
        raise UserError(f"--out {out}: expected a new file, or one named .html, which is replaced")
    write_report(folders, out, is_public=options.public)
    megabytes = out.stat().st_size / 2**20
    print(f"{out}: {megabytes:.1f} MiB; open it in a browser")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
