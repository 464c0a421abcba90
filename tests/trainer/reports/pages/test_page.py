"""Pages of HTML: what comes from outside cannot become markup, and the document is whole."""

from __future__ import annotations

import base64
import hashlib
import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from trainer.reports.pages.page import Cell, command, element, embedded, page, section, table, text

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


def test_what_comes_from_outside_is_shown_and_not_obeyed() -> None:
    cells = [[Cell(text(EVIL), EVIL)], [Cell(text(2), 2.0)]]
    parts = [section(EVIL, command(EVIL)), table([EVIL], cells, [EVIL, "b"]), element("p", text(EVIL), title=EVIL)]
    document = page(EVIL, *parts, data={EVIL: [EVIL, 1.5]}, scripts=[], styles=[])
    found = Reader(document)
    assert not found.open and found.names.count("script") == 2 and "b" not in found.names
    assert json.loads(found.scripts[0]) == {EVIL: [EVIL, 1.5]}
    assert ("title", EVIL) in found.attributes and ("data-key", EVIL) in found.attributes


def test_a_page_allows_its_own_script_and_nothing_from_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "own.js").write_text("let own = 1;\n")
    document = page("t", section("s"), data={}, scripts=[tmp_path / "own.js"], styles=[])
    found = Reader(document)
    digest = base64.b64encode(hashlib.sha256(found.scripts[1].encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    assert ("content", policy) in found.attributes and found.scripts[1].endswith("let own = 1;\n")
    assert "http:" not in document and "https:" not in document and "@import" not in document
    assert not {name for name, _ in found.attributes} & {"src", "href"}


def test_text_with_halves_of_characters_goes_through_and_what_is_no_number_does_not() -> None:
    found = Reader(page("\ud800", data={"a": "\ud800 \u2028"}, scripts=[], styles=[]))
    assert json.loads(found.scripts[0]) == {"a": "? \u2028"}
    with pytest.raises(ValueError):
        embedded(float("nan"))
