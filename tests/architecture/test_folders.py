"""The folders of the product: which import each other, and what each says about itself."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.test_imports import LAYERS, ROOT, imports, sources

MUTUAL = {
    ("verl_lite/config", "verl_lite/rewards"): "options are checked against the rewards that they name",
    ("verl_lite/config", "verl_lite/visual_rewards"): "options are checked against the rewards that they name",
}
"""Pairs of folders that import each other on purpose, with the reason."""

FOLDERS = sorted(
    {path.parent.relative_to(ROOT).as_posix() for path in sources() if path.parts[len(ROOT.parts)] != "recipes"}
)


def folder_of(path: str) -> str:
    """Returns the folder that a file belongs to: LAYER/FOLDER, or the file itself on the ground floor of a layer."""
    parts = path.split("/")
    if len(parts) == 2:
        return path
    return "/".join(parts[:2])


def imported_files(path: Path) -> Iterator[str]:
    """Yields the files of the product that a file imports when it runs, relative to the root."""
    source = path.read_text(encoding="utf-8")
    module = path.relative_to(ROOT).as_posix().removesuffix(".py").replace("/", ".")
    for name in {name for _, name in imports(without_type_checking(source), module)}:
        # `from a.b import c` names a.b.c: a module c of the package a.b, or an object c in the module a.b
        for candidate in (name, name.rpartition(".")[0]):
            file = f"{candidate.replace('.', '/')}.py"
            if (ROOT / file).is_file():
                yield file
                break


def without_type_checking(source: str) -> str:
    """Returns the source without the blocks `if TYPE_CHECKING:`, which only a type checker reads."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = [ast.Pass()]
    return ast.unparse(tree)


def mutual_pairs(imports_of: dict[str, set[str]]) -> list[tuple[str, str]]:
    """Returns the pairs of folders that import each other. imports_of: the folders that each folder imports."""
    pairs = []
    for folder, imported in imports_of.items():
        for other in imported:
            if folder < other and folder in imports_of.get(other, set()):
                pairs.append((folder, other))
    return sorted(pairs)


def test_no_two_folders_import_each_other() -> None:
    imports_of: dict[str, set[str]] = defaultdict(set)
    for path in sources():
        relative = path.relative_to(ROOT).as_posix()
        if relative.startswith("recipes/"):
            continue
        for file in imported_files(path):
            if folder_of(file) != folder_of(relative):
                imports_of[folder_of(relative)].add(folder_of(file))
    pairs = mutual_pairs(imports_of)
    unexpected = [pair for pair in pairs if pair not in MUTUAL]
    assert not unexpected, f"folders that import each other: {unexpected}; move what both need below both"
    assert set(MUTUAL) <= set(pairs), "MUTUAL names a pair that no longer exists"


def test_a_mutual_pair_is_found() -> None:
    assert mutual_pairs({"a": {"b", "c"}, "b": {"a"}, "c": set()}) == [("a", "b")]


@pytest.mark.parametrize("folder", FOLDERS)
def test_each_folder_says_what_it_does_and_where_to_start(folder: str) -> None:
    """The docstring of a folder's __init__.py names files, and all of them exist."""
    text = ast.get_docstring(ast.parse((ROOT / folder / "__init__.py").read_text(encoding="utf-8"))) or ""
    assert len(text.splitlines()) >= 3, "says what the folder does, which file to read first, and what it imports"
    named = re.findall(r"`((?:\w+/)*\w+\.py)`", text)
    assert named, "names the file to read first"
    missing = [name for name in named if not (ROOT / folder / name).is_file() and not (ROOT / name).is_file()]
    assert not missing, f"names files that do not exist: {missing}"


def test_each_layer_has_folders() -> None:
    """`FOLDERS` would be empty if the sources were not found."""
    assert {folder.split("/")[0] for folder in FOLDERS} == set(LAYERS) - {"recipes"}
