"""A page of HTML in one file: its parts, as text, with everything that comes from outside escaped.

`Html` is text that is HTML already; `text(value)` makes it of anything else. Only `Html` goes into a page, so that
nothing gets there unescaped by oversight. Scripts find their data as JSON in the element `data`; a content policy with
the hash of the page's script lets no other run, and nothing be loaded.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
_LONG = 40
"""Characters of a cell that gets a broad column."""


class Html(str):
    """Text that is HTML."""


@dataclass(frozen=True)
class Cell:
    """Of a table. shown: what stands there. order: what it is sorted by; None = the text, or the number it begins
    with."""

    shown: Html
    order: float | str | None = None


def text(value: object) -> Html:
    """Any value as HTML that shows it."""
    return Html(html.escape(str(value)))


def join(parts: Sequence[Html], between: str = "\n") -> Html:
    return Html(between.join(parts))


def element(name: str, *inside: Html, **attributes: object) -> Html:
    """<name attribute="...">inside</name>; `class_` stands for class, `_` in a name for `-`."""
    words = [f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"' for key, value in attributes.items()]
    return Html(f"<{name}{''.join(words)}>{''.join(inside)}</{name}>")


def command(words: str) -> Html:
    """A command to be copied: one click marks all of it."""
    return element("pre", text(words), class_="command")


def folded(title: str, inside: Html) -> Html:
    """What is shown when its title is clicked."""
    return element("details", element("summary", text(title)), inside)


def section(title: str, *inside: Html, key: str = "") -> Html:
    """A part of the page with a heading. key: for links to it."""
    return element("section", element("h2", text(title)), *inside, **({"id": key} if key else {}))


def table(columns: Sequence[str], rows: Sequence[Sequence[Cell]], keys: Sequence[str] = ()) -> Html:
    """A table that a click on a heading sorts. keys: of each row, for what else on the page belongs to the same."""
    head = element("tr", *(element("th", text(name), scope="col") for name in columns))
    lines = []
    for number, row in enumerate(rows):
        lines.append(element("tr", *map(_cell, row), **({"data_key": keys[number]} if keys else {})))
    inside = element("table", element("thead", head), element("tbody", *lines), class_="sortable")
    return element("div", inside, class_="scroll")


def _cell(cell: Cell) -> Html:
    words: dict[str, object] = {} if cell.order is None else {"data_order": cell.order}
    if len(cell.shown) > _LONG and not cell.shown.startswith("<"):
        words["class_"] = "long"
    return element("td", cell.shown, **words)


def page(title: str, *parts: Html, data: Any, scripts: Sequence[Path], styles: Sequence[Path]) -> str:
    """The whole document. data: what JSON can hold; scripts, styles: files, read after page.js and page.css."""
    script = "".join(file.read_text(encoding="utf-8") for file in (_HERE / "page.js", *scripts))
    style = "".join(file.read_text(encoding="utf-8") for file in (_HERE / "page.css", *styles))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    theme = element("button", text("light / dark"), id="theme", type="button", class_="quiet")
    document = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{text(title)}</title>
<style>
{style}</style>
</head>
<body>
<header><div class="line"><h1>{text(title)}</h1>{theme}</div></header>
<main>
{join(parts)}
</main>
<script type="application/json" id="data">{embedded(data)}</script>
<script>{script}</script>
</body>
</html>
"""
    return document.encode("utf-8", "replace").decode("utf-8")  # half a character of a model's has no bytes


def embedded(data: Any) -> str:
    """JSON that cannot end the element it stands in. Raises ValueError for a number that is not finite."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
