"""The table of `python -m tests.mutation` fits the code: each fault can be put in, and its test exists."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.mutation.mutants import named

ROOT = Path(__file__).resolve().parents[2]


def test_each_named_mutant_fits_its_file_and_names_a_test() -> None:
    for mutant in named(ROOT / "tests/mutation/named.json", ROOT):
        ast.parse(mutant.apply((ROOT / mutant.path).read_text(encoding="utf-8")))
        file, _, name = mutant.tests[0].partition("::")
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), mutant.name
