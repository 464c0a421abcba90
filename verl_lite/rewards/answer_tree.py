"""The tree of a final answer, and its rendering as LaTeX. `answer_syntax` parses answers into such trees."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Node:
    r"""An expression.

    Attributes:
        kind: number, symbol, word, constant, sum, negative, plus_minus, product, quotient, mixed, power, root,
            function, call, percent, brackets, set, list, relation, operation, matrix, absolute or command (any other).
        parts: its operands. The denominator of a quotient, the exponent of a power and the index of a root are second.
        text: digits of a number, LaTeX of a symbol or a command, both brackets, or the operators of a relation.
    """

    kind: str
    parts: tuple[Node, ...] = ()
    text: str = ""

    def walk(self) -> Iterator[Node]:
        """Yields the node and all nodes below it."""
        yield self
        for part in self.parts:
            yield from part.walk()


def names_of(node: Node) -> set[str]:
    """Returns all symbols and words of an expression in lower case."""
    return {part.text.lower() for part in node.walk() if part.kind in ("symbol", "word")}


def is_integer(node: Node) -> bool:
    """Returns True for an integer without a sign."""
    return node.kind == "number" and node.text.isdigit()


def render(node: Node) -> str:
    """Returns LaTeX that every parser reads as the node: brackets stand wherever precedence could matter."""
    parts = [render(part) for part in node.parts]
    items = ", ".join(parts)
    match node.kind:
        case "number" | "symbol" | "constant":
            return node.text
        case "word":
            return rf"\text{{{node.text}}}"
        case "negative" if node.parts[0].kind == "number":
            return f"-{parts[0]}"
        case "negative":
            return f"-({parts[0]})"
        case "plus_minus" if len(parts) == 1:
            return rf" \pm {parts[0]}"
        case "plus_minus":
            return r" \pm ".join(parts)
        case "product":
            return r" \cdot ".join(f"({part})" for part in parts)
        case "quotient":
            return rf"\frac{{{parts[0]}}}{{{parts[1]}}}"
        case "power" if node.parts[0].kind in ("symbol", "number", "constant"):
            return f"{parts[0]}^{{{parts[1]}}}"
        case "power":
            return f"({parts[0]})^{{{parts[1]}}}"
        case "root" if len(parts) == 1:
            return rf"\sqrt{{{parts[0]}}}"
        case "root":
            return rf"\sqrt[{parts[1]}]{{{parts[0]}}}"
        case "function" if len(parts) > 1:
            return f"{node.text}_{{{parts[1]}}}({parts[0]})"
        case "function" | "call":
            return f"{node.text}({parts[0]})"
        case "percent" if node.parts[0].kind == "number":
            return rf"{parts[0]}\%"
        case "percent":
            # the sign is a unit, which does not change the value
            return parts[0]
        case "brackets":
            return f"{node.text[0]}{items}{node.text[1]}"
        case "set":
            return rf"\{{{items}\}}"
        case "list":
            return items
        case "operation":
            return f" {node.text} ".join(parts)
        case "matrix":
            # each part is a row, rendered as a list
            rows = r" \\ ".join(part.replace(", ", " & ") for part in parts)
            return rf"\begin{{pmatrix}} {rows} \end{{pmatrix}}"
        case "absolute":
            return f"|{parts[0]}|"
        case "sum":
            return _render_sum(node.parts, parts)
        case "mixed":
            return _render_mixed(node.parts)
        case "relation":
            return _render_relation(node.text.split(), parts)
    if node.text == "!":
        return f"({parts[0]})!"
    if node.text == "_":
        return f"{parts[0]}_{{{parts[1]}}}"
    return f"{node.text}{{{items}}}"


def _render_sum(terms: tuple[Node, ...], rendered: list[str]) -> str:
    """Returns the LaTeX of a sum. Terms that are sums or have a sign are put in brackets."""
    texts = []
    for term, text in zip(terms, rendered, strict=True):
        if term.kind in ("sum", "negative", "plus_minus"):
            text = f"({text})"
        texts.append(text)
    return " + ".join(texts)


def _render_mixed(parts: tuple[Node, ...]) -> str:
    r"""Returns a mixed number as one fraction: math-verify would read 2\frac{1}{2} as a product."""
    whole, above, below = (int(part.text) for part in parts)
    numerator = whole * below + above
    return rf"\frac{{{numerator}}}{{{below}}}"


def _render_relation(operators: list[str], sides: list[str]) -> str:
    text = sides[0]
    for operator, side in zip(operators, sides[1:], strict=True):
        text += f" {operator} {side}"
    return text
