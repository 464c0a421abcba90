"""The value of an arithmetic expression that somebody else wrote, without running it as code.

Numbers, + - * / // % **, brackets, unary signs, and abs, round, min, max. Numbers are exact (fractions), and their size
is limited, so that no expression takes long.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from fractions import Fraction

MAX_CHARACTERS = 400
_MAX_BITS = 2_000
_MAX_EXPONENT = 1_000

_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: lambda left, right: left + right,
    ast.Sub: lambda left, right: left - right,
    ast.Mult: lambda left, right: left * right,
    ast.Div: lambda left, right: left / right,
    ast.FloorDiv: lambda left, right: Fraction(left // right),
    ast.Mod: lambda left, right: left % right,
}
_FUNCTIONS: dict[str, Callable[..., Fraction]] = {
    "abs": abs,
    "min": min,
    "max": max,
    "round": lambda value: Fraction(round(value)),
}


def evaluate(expression: str) -> Fraction:
    """The exact value. Raises ValueError saying what is not allowed, ZeroDivisionError where it divides by zero."""
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(f"the expression is longer than {MAX_CHARACTERS} characters")
    cleaned = expression.strip().replace("×", "*").replace("÷", "/").replace("−", "-").replace("^", "**")
    try:
        tree = ast.parse(cleaned, mode="eval")
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{expression!r} is no arithmetic expression") from error
    return _value(tree.body)


def written(value: Fraction) -> str:
    """A whole number as it is, other values with at most 10 significant digits."""
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.10g}"


def number_in(text: str) -> Fraction | None:
    """The number that a text is, "1,234.50" or "2/3"; None if it is none."""
    cleaned = text.strip().rstrip(".").replace(",", "").replace(" ", "").replace("−", "-").lstrip("$")
    if len(cleaned) > MAX_CHARACTERS or "e" in cleaned.lower():
        return None
    try:
        return Fraction(cleaned)
    except (ValueError, ZeroDivisionError):
        return None


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(Fraction(str(node.value)))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.UAdd, ast.USub)):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            return _power(left, right)
        if type(node.op) in _BINARY:
            return _bounded(_BINARY[type(node.op)](left, right))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
        if node.keywords or not node.args or (node.func.id in ("abs", "round") and len(node.args) != 1):
            raise ValueError(f"{node.func.id} is called with the wrong number of values")
        values = [_value(argument) for argument in node.args]
        return _bounded(_FUNCTIONS[node.func.id](*values) if len(values) > 1 else _single(node.func.id, values[0]))
    raise ValueError(
        f"{ast.unparse(node)!r} is not allowed: numbers, + - * / // % **, brackets, {', '.join(_FUNCTIONS)}"
    )


def _single(name: str, value: Fraction) -> Fraction:
    return value if name in ("min", "max") else _FUNCTIONS[name](value)


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ValueError("an exponent has to be a whole number")
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(exponent) > _MAX_EXPONENT or bits * abs(exponent) > _MAX_BITS:
        raise ValueError("the number is too large")
    return base ** int(exponent)


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _MAX_BITS:
        raise ValueError("the number is too large")
    return value
