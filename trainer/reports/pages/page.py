"""A page of HTML in one file: its parts, as text, with everything that comes from outside escaped.

`Html` is text that is HTML already; `text(value)` makes it of anything else. Only `Html` goes into a page, so that
nothing gets there unescaped by oversight.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.checkpoint import write_atomically

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
    head = element("tr", *(element("th", text(name), scope="col", tabindex=0) for name in columns))
    lines = []
    for number, row in enumerate(rows):
        lines.append(element("tr", *map(_cell, row), **({"data_key": keys[number]} if keys else {})))
    inside = element("table", element("thead", head), element("tbody", *lines), class_="sortable")
    return element("div", inside, class_="wide")


def _cell(cell: Cell) -> Html:
    words: dict[str, object] = {} if cell.order is None else {"data_order": cell.order}
    if len(cell.shown) > _LONG and not cell.shown.startswith("<"):
        words["class_"] = "long"
    return element("td", cell.shown, **words)


def page(title: str, *parts: Html, data: Mapping[str, Any] | None = None, script: str = "", style: str = "") -> str:
    """The whole document. data: what scripts find as JSON in the element `data`; script, style: besides page.js and
    page.css."""
    inside = [f"<h1>{text(title)}</h1>", *parts]
    if data is not None:
        inside.append(f'<script type="application/json" id="data">{_embedded(data)}</script>')
    scripts = [(_HERE / "page.js").read_text(encoding="utf-8"), script]
    inside += [f"<script>\n{code}</script>" for code in scripts if code]
    styles = (_HERE / "page.css").read_text(encoding="utf-8") + style
    return "\n".join(
        (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{text(title)}</title>\n<style>\n{styles}</style>\n</head>\n<body>",
            *inside,
            "</body>\n</html>\n",
        )
    )


def _embedded(data: Mapping[str, Any]) -> str:
    """JSON that cannot end the element it stands in; numbers that JSON has no word for are null."""
    text = json.dumps(_finite(data), separators=(",", ":"), allow_nan=False)
    return re.sub("[<>&\u2028\u2029]", lambda found: f"\\u{ord(found[0]):04x}", text)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(inside) for key, inside in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inside) for inside in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value


def write_page(path: Path, document: str) -> Path:
    """Writes it at once or not at all; gives the path."""
    write_atomically(path, document)
    return path
