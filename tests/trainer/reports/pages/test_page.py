"""Pages of HTML: what comes from outside cannot become markup, and the document is whole."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

from trainer.reports.pages.page import Cell, command, element, page, section, table, text, write_page

EVIL = "</script><script>alert('x')</script>&\"<b>"


class Reader(HTMLParser):
    """Collects elements and the text in scripts; knows whether every element is closed."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.open: list[str] = []
        self.scripts: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(document)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += attrs
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)


def test_what_comes_from_outside_is_shown_and_not_obeyed(tmp_path: Path) -> None:
    cells = [[Cell(text(EVIL), EVIL)], [Cell(text(2), 2.0)]]
    parts = [section(EVIL, command(EVIL)), table([EVIL], cells, [EVIL, "b"]), element("p", text(EVIL), title=EVIL)]
    document = page(EVIL, *parts, data={EVIL: [EVIL, float("nan"), 1.5]})
    found = Reader(document)
    assert not found.open and found.names.count("script") == 2 and "b" not in found.names
    assert json.loads(found.scripts[0]) == {EVIL: [EVIL, None, 1.5]}
    assert ("title", EVIL) in found.attributes and ("data-key", EVIL) in found.attributes
    assert write_page(tmp_path / "a.html", document).read_text() == document


def test_a_page_asks_nobody_else_for_anything() -> None:
    document = page("t", section("s"))
    assert "http:" not in document and "https:" not in document and "@import" not in document
    assert not {name for name, _ in Reader(document).attributes} & {"src", "href"}
