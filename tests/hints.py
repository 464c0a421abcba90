"""Commands that a program recommends in what it prints, and their execution."""

from __future__ import annotations

import importlib
import re

_WORD = r"(?:/|--|[\w.+]+=|[\w.]+:|RUN\b)\S*"
_COMMAND = re.compile(rf"python -m ((?:trainer|recipes)\.[\w.]+)((?: {_WORD})*)")


def commands_in(text: str) -> list[tuple[str, list[str]]]:
    """The recommended commands, each once, as (module, words)."""
    found = dict.fromkeys((module, words.rstrip(".,;`)")) for module, words in _COMMAND.findall(text))
    return [(module, words.split()) for module, words in found]


def execute(module: str, words: list[str]) -> None:
    """Runs the command in this process; fails unless it ends as a command does that has done its work."""
    assert importlib.import_module(module).main(words) in (0, None), f"python -m {module} {' '.join(words)}"
