r"""Comparison of expressions by math-verify: bounds on their size, and the final form that strict comparison requires.

Expressions come from math-verify's parser unevaluated: `\boxed{123 \cdot 456}` is a product of two numbers.
"""

import functools
import logging
import math
import re
from typing import Any

import sympy
from latex2sympy2_extended import is_expr_of_only_symbols
from math_verify import LatexExtractionConfig, parse, verify
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational
from sympy.functions.elementary.hyperbolic import HyperbolicFunction
from sympy.functions.elementary.trigonometric import InverseTrigonometricFunction, TrigonometricFunction

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limit is off

MOST_BITS = 20_000
MOST_TERMS = 1000
_INTERVAL_TERMS = 50  # a union of n intervals takes time of the order n**2

_OPERATORS = (sympy.Sum, sympy.Product, sympy.Integral, sympy.Limit, sympy.Derivative)
_FUNCTIONS = (sympy.log, TrigonometricFunction, InverseTrigonometricFunction, HyperbolicFunction)
_PERCENT = sympy.UnevaluatedExpr(sympy.Rational(1, 100))
_EVALUATED = re.compile(r"\\(?:[dt]?binom|det|gcd|lcm|Gamma|gamma|operatorname)\b")
"""Commands that math-verify's parser evaluates while parsing."""

_DIVISION = re.compile(r"/|:|\\frac|\\div")
_WRAPPERS = re.compile(r"\\(?:text|mathrm|mathbf|textbf|textit|textrm|mbox)\b|[{}$~.\s]")
_WORDS = re.compile(r"(?=.*[a-z]{3})[a-z][a-z,'-]*")


@functools.lru_cache(maxsize=4096)
def read_reference(ground_truth: str) -> list[Any]:
    """Returns the reference as math-verify parses it: the expression, if it can be parsed, and its text.

    Raises ValueError if it is not an expression, or is too large.
    """
    gold: list[Any] = parse(ground_truth if "\\boxed" in ground_truth else _boxed(ground_truth), parsing_timeout=None)
    if not gold:
        raise ValueError("cannot be read as a mathematical expression by math-verify")
    if _is_too_large(gold[0]):
        raise ValueError(f"has a value of more than {MOST_BITS} binary digits, or more than {MOST_TERMS} terms")
    return gold


def compare(ground_truth: str, text: str, is_boxed: bool, strict: bool) -> tuple[bool, str]:
    """Returns True if the answer in a text equals the reference, and the parsed answer."""
    gold = read_reference(ground_truth)
    options: dict[str, Any] = {}
    if strict:
        options["extraction_mode"] = "first_match"
    if strict and is_boxed:
        words, expected = _words(text), _words(ground_truth)
        if words and expected:  # math-verify would parse words as products of letters
            return words == expected, text
        if not set(_EVALUATED.findall(text)) <= set(_EVALUATED.findall(ground_truth)):
            return False, text
        options["extraction_config"] = [LatexExtractionConfig(boxed_match_priority=0)]  # the whole content of the box
    answer = parse(_boxed(text) if is_boxed else text, parsing_timeout=None, **options)
    pred = str(answer[-1]) if answer else ""
    if not answer or _is_too_large(answer[0]) or (strict and not _is_final(answer, gold)):
        return False, pred
    if strict:
        answer, gold = [[_without_percent(x) for x in each] for each in (answer, gold)]
    return bool(verify(gold, answer, timeout_seconds=None)), pred


def _boxed(text: str) -> str:
    return f"\\boxed{{{text}}}"


def _words(text: str) -> str:
    r"""Returns the letters of a text that consists of words, such as `\text{No solution}`; "" for mathematics."""
    letters = _WRAPPERS.sub("", text).lower()
    return letters if _WORDS.fullmatch(letters) else ""


def _without_percent(node: Any) -> Any:
    """Removes percent signs from an expression, since a percent sign is a unit here: 5% equals 5, not 0.05."""
    return node.xreplace({_PERCENT: sympy.S.One}) if isinstance(node, sympy.Basic) else node


# ---------------------------------------------------------------------------------------------------- bounds on size


def _is_too_large(node: Any) -> bool:
    bits, terms = _measure(node)
    return bits > MOST_BITS or terms > MOST_TERMS


def _measure(node: Any) -> tuple[float, float]:
    """Returns upper bounds of an unevaluated expression: binary digits of its values, and terms after expansion."""
    if isinstance(node, sympy.Rational):
        return max(node.p.bit_length(), node.q.bit_length()), 1
    if isinstance(node, sympy.Float):
        return 53 + abs(node._mpf_[2]), 1
    bits, terms = zip(*map(_measure, _parts(node)), strict=True) if _parts(node) else ((1.0,), (1.0,))
    value = 2.0 ** bits[-1] if bits[-1] < 64 else math.inf  # bound of an exponent, an argument or a sum's limit
    match node:
        case sympy.Add():
            return max(bits) + len(bits), sum(terms)
        case sympy.Mul():
            return sum(bits), math.prod(terms)
        case sympy.Pow():
            is_expanded = node.exp.is_Integer and value < MOST_BITS and terms[0] < MOST_TERMS
            further = int(terms[0] - 1)
            return bits[0] * value, math.comb(int(value) + further, further) if is_expanded else max(terms)
        case sympy.Sum() | sympy.Product():
            return bits[0] * value if value < MOST_TERMS else math.inf, max(terms)
        case sympy.factorial() | sympy.exp():
            return (bits[-1] + 2) * value, max(terms)
    return max(bits), _INTERVAL_TERMS if isinstance(node, sympy.Interval) else sum(terms)


def _parts(node: Any) -> tuple[Any, ...]:
    return tuple(node.flat()) if isinstance(node, sympy.MatrixBase) else getattr(node, "args", ())


# --------------------------------------------------------------------------------------------------------- final form


def _is_final(answer: list[Any], gold: list[Any]) -> bool:
    """Returns True if the answer has no open operation and no unsolved relation that the reference does not have.

    answer, gold: parsed by math-verify, as `read_reference` returns them.
    """
    open_operations, gold_open_operations = (_open_operations(x[0], str(x[-1])) for x in (answer, gold))
    relations, gold_relations = (_relations(x[0]) for x in (answer, gold))
    is_value = not gold_relations and bool(getattr(gold[0], "free_symbols", None))  # accepts f(x) = 2x for 2x
    is_solved = all(_is_solved(x) or (is_value and _is_name(x.lhs)) for x in relations)
    return open_operations <= gold_open_operations and (is_solved or not all(map(_is_solved, gold_relations)))


def _relations(node: Any) -> set[Relational]:
    return node.atoms(Relational) if isinstance(node, sympy.Basic) else set()


def _is_solved(relation: Relational) -> bool:
    sides = ((relation.lhs, relation.rhs), (relation.rhs, relation.lhs))
    return any(_is_name(name) and not value.free_symbols for name, value in sides)


def _is_name(node: Any) -> bool:
    return isinstance(node, AppliedUndef) or is_expr_of_only_symbols(node)


def _open_operations(node: Any, text: str = "") -> set[str]:
    """Returns the names of the operations in an expression, or in its text, that could still be evaluated."""
    if isinstance(node, sympy.Eq) and _is_name(node.lhs):
        return _open_operations(node.rhs, text)
    found = {_operation(node), *_EVALUATED.findall(text)} - {""}
    if _DIVISION.search(text) and isinstance(node, sympy.Basic):  # the parser evaluates divisions of integers
        powers, numbers = node.atoms(sympy.Pow), node.atoms(sympy.Rational)
        if all(x.q == 1 for x in numbers) and all(x.exp != -1 for x in powers):
            found.add("division")
    return found.union(*map(_open_operations, _parts(node)))


def _operation(node: Any) -> str:
    """Returns the name of a node that could be evaluated, an operator or an operation on numbers only; else ""."""
    kind = type(node).__name__
    if isinstance(node, _OPERATORS):
        return kind
    if not isinstance(node, sympy.Expr) or not node.args or node.free_symbols or _is_number(node):
        return ""
    if isinstance(node, sympy.Add):
        return kind if sum(map(_is_number, node.args)) > 1 else ""
    if isinstance(node, sympy.Mul):
        factors = [x for x in _factors(node) if x != -1]
        above = sum(map(_is_number, factors))
        below = sum(x.is_Pow and x.exp == -1 and _is_number(x.base) for x in factors)
        return kind if max(above, below) > 1 or 1 < len(factors) == above + below else ""
    if isinstance(node, sympy.Pow):
        is_power = node.exp.is_Integer and node.exp != -1 and not node.base.is_NumberSymbol
        return kind if is_power or _is_rational_root(*node.args) else ""
    if isinstance(node, sympy.exp) or node == _PERCENT:
        return ""
    return "function" if isinstance(node, _FUNCTIONS) else kind


def _factors(node: Any) -> list[Any]:
    return [x for factor in node.args for x in (_factors(factor) if factor.is_Mul else [factor])]


def _is_number(node: Any) -> bool:
    """Returns True if an expression is a numeral: 7, 0.5, 3/4, 10**6, 6.02 * 10**23."""
    if isinstance(node, sympy.Mul) and len(node.args) == 2:
        return bool(node.args[0].is_Number and node.args[1].is_Pow and _is_number(node.args[1]))
    return bool(node.is_Number or (node.is_Pow and node.base == 10 and node.exp.is_Integer))


def _is_rational_root(base: Any, exponent: Any) -> bool:
    if not base.is_Rational or not exponent.is_Rational or exponent.is_Integer:
        return False
    return all(sympy.integer_nthroot(abs(x), exponent.q)[1] for x in (base.p, base.q))
