"""One fault at a time in a file's source: the kinds that reviews of trainers find, drawn by a seed; and named ones.

A mutant replaces the text of one syntax node, so that the rest of the file stays as it is written.
"""

from __future__ import annotations

import ast
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mutant:
    """A fault: `new` in the place of `old`, which stands at these character offsets of the file. tests: globs of files,
    or FILE::NAME, of which one must fail."""

    path: str
    kind: str
    line: int
    start: int
    end: int
    old: str
    new: str
    tests: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.path}:{self.line} {self.kind}: {_short(self.old)} -> {_short(self.new)}"

    def apply(self, source: str) -> str:
        return source[: self.start] + self.new + source[self.end :]


def named(table: Path, root: Path) -> list[Mutant]:
    """The mutants of a JSON file {path: [[old, new, test], ...]}. Raises ValueError where `old` is not in the file
    exactly once."""
    mutants = []
    for path, rows in json.loads(table.read_text(encoding="utf-8")).items():
        source = (root / path).read_text(encoding="utf-8")
        for old, new, test in rows:
            if source.count(old) != 1:
                raise ValueError(f"{table.name}: {path} has {old!r} {source.count(old)} times; expected once")
            start = source.index(old)
            line = source.count("\n", 0, start) + 1
            mutants.append(Mutant(path, "named", line, start, start + len(old), old, new, (test,)))
    return mutants


def draw(paths: list[Path], root: Path, count: int, seed: int) -> list[Mutant]:
    """`count` mutants over these files, as many of each kind as there are, each file in turn."""
    rng = random.Random(seed)
    by_kind: dict[str, dict[str, list[Mutant]]] = {}
    for path in paths:
        for mutant in candidates(path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")):
            by_kind.setdefault(mutant.kind, {}).setdefault(mutant.path, []).append(mutant)
    drawn: list[Mutant] = []
    while len(drawn) < count and by_kind:
        for kind in sorted(by_kind):
            files = by_kind[kind]
            path = rng.choice(sorted(files))
            drawn.append(files[path].pop(rng.randrange(len(files[path]))))
            by_kind[kind] = {name: left for name, left in files.items() if left}
        by_kind = {kind: files for kind, files in by_kind.items() if files}
    return drawn[:count]


def candidates(path: str, source: str) -> Iterator[Mutant]:
    """Every fault that can be put into a file, docstrings and annotations left out."""
    starts = [0]
    for text in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(text))

    def offset(line: int, column: int) -> int:
        text = source[starts[line - 1] : starts[line]]
        return starts[line - 1] + len(text.encode()[:column].decode())

    def text(node: ast.expr | ast.stmt) -> str:
        return ast.get_source_segment(source, node) or ""

    for node in ast.walk(ast.parse(source)):
        for kind, new in _faults(node, text):
            start = offset(node.lineno, node.col_offset)  # type: ignore[attr-defined]
            end = offset(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]
            mutant = Mutant(path, kind, node.lineno, start, end, source[start:end], new)  # type: ignore[attr-defined]
            try:
                ast.parse(mutant.apply(source))
            except SyntaxError:
                continue
            yield mutant


_SWAPPED = {"min": "max", "max": "min", "argmin": "argmax", "minimum": "maximum", "maximum": "minimum", "mean": "sum"}
_BORDERS: dict[type, str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
}
_STATES = (" + ", "None", "False", "True", "{}", "[]")
_RESETS = ("reset", "clear", "zero_grad", "pop", "discard", "close", "release", "sleep")


def _faults(node: ast.AST, text) -> Iterator[tuple[str, str]]:  # type: ignore[no-untyped-def]
    """(kind, new text) of the faults that one node can have."""
    if isinstance(node, ast.BinOp):
        left, right = text(node.left), text(node.right)
        if isinstance(node.op, ast.Sub):
            yield "sign", f"({left} + {right})"
        elif isinstance(node.op, ast.Mult):
            for name, other in ((left, right), (right, left)):
                if "mask" in name or "valid" in name or "weight" in name:
                    yield "mask", f"({other})"
                    break
        elif isinstance(node.op, ast.Div):
            yield "denominator", f"({left})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
        yield "sign", f"({text(node.operand)})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
        yield "mask", f"({text(node.operand)})"
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        other = _BORDERS.get(type(node.ops[0]))
        if other:
            yield "border", f"{text(node.left)} {other} {text(node.comparators[0])}"
    elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice) and isinstance(node.ctx, ast.Load):
        if node.slice.upper is not None and node.slice.step is None:
            lower = text(node.slice.lower) if node.slice.lower else ""
            yield "lost row", f"{text(node.value)}[{lower} : ({text(node.slice.upper)}) - 1]"
    elif isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in _SWAPPED and isinstance(node.func, ast.Attribute):
            args = ", ".join([text(arg) for arg in node.args] + [f"{k.arg}={text(k.value)}" for k in node.keywords])
            yield "extremum", f"{text(node.func.value)}.{_SWAPPED[name]}({args})"
        plain = [arg for arg in node.args if not isinstance(arg, ast.Starred)]
        if len(plain) == len(node.args) >= 2 and not node.keywords and not isinstance(node.args[1], ast.Constant):
            rest = [text(arg) for arg in node.args]
            yield "order", f"{text(node.func)}({', '.join([rest[1], rest[0], *rest[2:]])})"
    elif isinstance(node, ast.Raise) and node.exc is not None:
        yield "swallowed", "pass"
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        func = node.value.func
        if isinstance(func, ast.Attribute) and any(word in func.attr for word in _RESETS):
            yield "no reset", "pass"
    elif isinstance(node, ast.Assign | ast.AugAssign):
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        if isinstance(target, ast.Attribute) and getattr(target.value, "id", "") == "self":
            value = text(node.value)
            if isinstance(node, ast.AugAssign) or any(part in value for part in _STATES):
                yield "state", "pass"
    elif isinstance(node, ast.IfExp):
        yield "branch", f"({text(node.body)} if not ({text(node.test)}) else {text(node.orelse)})"


def _short(code: str) -> str:
    flat = " ".join(code.split())
    return flat if len(flat) <= 60 else flat[:57] + "..."
