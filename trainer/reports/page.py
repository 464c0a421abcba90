"""One HTML file for runs and studies: no network, no server; light and dark, wide and narrow.

Everything from outside is JSON in the element `data`, which the page's script shows as text. A content policy with the
hashes of that script and of the charting library (plotly, packed inside the page) lets no other run, and nothing be
loaded.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

FILES = Path(__file__).parent / "page_files"
SCRIPTS = ("base.js", "charts.js", "panels.js", "samples.js", "run.js", "study.js", "tabs.js")


def page(title: str, data: Any) -> str:
    """The whole document.

    Args:
        title: of the page.
        data: what JSON can hold (`trainer.reports.page_data`).

    Raises:
        ValueError: for a number that is not finite.
    """
    script = "".join((FILES / name).read_text(encoding="utf-8") for name in SCRIPTS)
    library, packed = _plotly()
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(x.encode()).digest()).decode()}'" for x in (script, library)
    )
    title = html.escape(title)
    document = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline';
 script-src {hashes}">
<title>{title}</title>
<style>
{(FILES / "page.css").read_text(encoding="utf-8")}</style>
</head>
<body>
<header><div class="line"><h1>{title}</h1><button id="theme" type="button" class="quiet">light / dark</button></div>
</header>
<main><noscript>This page draws itself with JavaScript that is inside the file.</noscript></main>
<script type="application/json" id="data">{_embedded(data)}</script>
<script type="text/plain" id="plotly">{packed}</script>
<script>{script}</script>
</body>
</html>
"""
    return document.encode("utf-8", "replace").decode("utf-8")  # half a character of a model's has no bytes


@cache
def _plotly() -> tuple[str, str]:
    """The library's code, and the same packed."""
    code = (files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8")
    return code, base64.b64encode(gzip.compress(code.encode(), mtime=0)).decode()


def _embedded(data: Any) -> str:
    """JSON that cannot end the element it stands in."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
