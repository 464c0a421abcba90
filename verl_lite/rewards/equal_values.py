"""Decides whether two sympy expressions have the same value, within bounds on their size.

math-verify compares the values. Around it, decimals with many digits may round a constant, values of unequal magnitude
are compared relatively, and the answer must not leave a relation unsolved that the reference solves.
"""

import math
from collections.abc import Mapping
from typing import TypeAlias

import sympy
from latex2sympy2_extended import is_expr_of_only_symbols
from math_verify import verify
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational

Expression: TypeAlias = sympy.Basic | sympy.MatrixBase
"""What math-verify parses an answer to. Mutable matrices do not inherit from `sympy.Basic`."""

MOST_BITS = 20_000
MOST_TERMS = 1000
# a union of n intervals takes time of the order n**2
_INTERVAL_TERMS = 50
_PERCENT = sympy.UnevaluatedExpr(sympy.Rational(1, 100))

_TOLERANCE = sympy.Rational(1, 10**6)
_ROUNDED_DIGITS = 6
"""A decimal with at least this many digits may be a rounded value."""
_PRECISION = 40
_EQUAL = sympy.Float("1e-25")
_POINTS = (
    sympy.Rational(7, 5),
    sympy.Rational(23, 11),
    sympy.Rational(31, 17),
    sympy.Rational(2, 7),
)
"""Values of the symbols at which two expressions are compared."""


def are_equal(gold: Expression | None, answer: Expression | None) -> bool:
    """Returns True if two expressions are equal: exactly, or to one millionth of a constant that a decimal rounds."""
    # the size comes first: the other steps evaluate the expressions
    if answer is None or gold is None or is_too_large(answer) or is_too_large(gold):
        return False
    if not _are_relations_solved(answer, gold):
        return False

    exact_gold = _exact(gold)
    exact_answer = _with_unrounded_constants(_exact(answer), answer, exact_gold)
    exact_gold = _with_unrounded_constants(exact_gold, gold, exact_answer)
    # first, because math-verify's simplification of log_2 3 - 10^30 would compute a power with 10^30 digits
    if _is_contradicted(exact_gold, exact_answer):
        return False
    return bool(verify([exact_gold], [exact_answer], timeout_seconds=None))


def _exact(node: Expression) -> Expression:
    """Returns an expression without percent signs, which are units here, with decimals as fractions."""
    if isinstance(node, sympy.MatrixBase):
        return node.applyfunc(_exact)
    if not isinstance(node, sympy.Basic):
        return node
    if node == _PERCENT:
        return sympy.S.One
    if isinstance(node, sympy.Float):
        # by its digits: 0.1 is one tenth, and not the float next to it
        return sympy.Rational(str(node))
    if not node.args:
        return node

    args = [_exact(arg) for arg in node.args]
    are_numbers = all(isinstance(arg, sympy.Rational) for arg in args)
    if isinstance(node, sympy.Expr) and are_numbers:
        # evaluates powers, products and sums of numbers, whose size is bounded
        return node.func(*args)
    is_changed = any(arg is not old for arg, old in zip(args, node.args, strict=True))
    if not is_changed:
        return node
    is_evaluated = not isinstance(node, sympy.Expr | Relational)  # sets and tuples have no evaluate=False
    try:
        return node.func(*args) if is_evaluated else node.func(*args, evaluate=False)
    except TypeError:
        # limits have no evaluate=False either, and NaN cannot be ordered: the decimals stay
        return node


def _constants(node: Expression) -> set[sympy.Expr]:
    """Returns the largest parts of an expression that are constants."""
    is_scalar = isinstance(node, sympy.Expr) and not isinstance(node, sympy.MatrixBase)
    if is_scalar and not node.free_symbols:
        return {node}
    constants: set[sympy.Expr] = set()
    for part in _parts(node):
        constants |= _constants(part)
    return constants


def _with_unrounded_constants(exact: Expression, written: Expression, other: Expression) -> Expression:
    """Replaces rounded decimals by the constants of the other expression that they round.

    Args:
        exact: the expression with decimals as fractions.
        written: the same expression with its decimals.
        other: the other expression, with decimals as fractions. Its short decimals, such as 0.5, are never rounded.
    """
    if not isinstance(exact, sympy.Basic | sympy.MatrixBase):
        return exact
    long_decimals = [number for number in written.atoms(sympy.Float) if _digits(number) >= _ROUNDED_DIGITS]
    if not long_decimals:
        return exact

    constants = []
    for constant in _constants(other):
        if constant.is_real and not _is_short_decimal(constant):
            constants.append(constant)
    replaced = {}
    for decimal in long_decimals:
        number = sympy.Rational(str(decimal))
        for constant in constants:
            if constant != number and _is_close(number, constant):
                replaced[number] = constant
                replaced[-number] = -constant
    return exact.xreplace(replaced) if replaced else exact


def _digits(number: sympy.Float) -> int:
    """Returns the number of significant digits of a decimal, without zeros at its end."""
    mantissa, _, _ = str(number).lower().partition("e")
    digits = mantissa.lstrip("-").replace(".", "")
    significant_digits = digits.strip("0")
    return len(significant_digits)


def _is_short_decimal(constant: sympy.Expr) -> bool:
    """Returns True for a rational number with a finite decimal expansion of few digits, such as 0.5 or 7.

    Nobody rounds such a number, so a decimal near it is wrong: 72.9999999 is not 73.
    """
    if not isinstance(constant, sympy.Rational):
        return False
    # finite expansions have denominators without other primes
    denominator = int(constant.q)
    for prime in (2, 5):
        while denominator % prime == 0:
            denominator //= prime
    if denominator != 1:
        return False
    digits = str(abs(constant.p)).strip("0")
    return len(digits) < _ROUNDED_DIGITS


def _is_close(number: sympy.Rational, constant: sympy.Expr) -> bool:
    """Returns True if a number differs from a constant by at most one millionth of it."""
    difference = sympy.Abs(number - constant).evalf(_PRECISION)
    size = sympy.Abs(constant).evalf(_PRECISION)
    # evalf returns an expression without a value as it is
    if not difference.is_number or not size.is_number:
        return False
    return bool(difference <= _TOLERANCE * size)


def _is_contradicted(gold: Expression, answer: Expression) -> bool:
    """Returns True if the values of two expressions differ, although math-verify may take the expressions for equal.

    math-verify compares absolutely: for it, 1e-19 times the root of 2 equals 1e-19 times the root of 3.
    """
    match gold, answer:
        case sympy.MatrixBase(), sympy.MatrixBase():
            return any(map(_is_contradicted, gold.flat(), answer.flat()))
        case sympy.Tuple(), sympy.Tuple():
            return len(gold) == len(answer) and any(map(_is_contradicted, gold, answer))
        case sympy.FiniteSet(), sympy.FiniteSet():
            return any(_is_missing(element, answer) for element in gold)
        case sympy.Interval(), sympy.Interval():
            return _is_contradicted(gold.start, answer.start) or _is_contradicted(gold.end, answer.end)
        case sympy.Expr(), sympy.Expr():
            return gold != answer and _differ_at_a_point(gold, answer)
    # other kinds of sets, and relations, are left to math-verify
    return False


def _differ_at_a_point(gold: sympy.Expr, answer: sympy.Expr) -> bool:
    """Returns True if two expressions have different values at one of `_POINTS`."""
    symbols = sorted(gold.free_symbols | answer.free_symbols, key=str)
    # at several points, because different expressions can have the same value at one
    num_points = len(_POINTS) if symbols else 1
    for shift in range(num_points):
        # the symbols have different values, so that x - y is not 0
        values = {}
        for number, symbol in enumerate(symbols, shift):
            values[symbol] = _POINTS[number % len(_POINTS)]
        if _differ(gold, answer, values):
            return True
    return False


def _is_missing(element: sympy.Expr, elements: sympy.FiniteSet) -> bool:
    """Returns True if every element of a set is shown to differ from the element."""
    return all(_is_contradicted(element, other) for other in elements)


def _differ(first: sympy.Expr, second: sympy.Expr, points: Mapping[sympy.Symbol, sympy.Expr]) -> bool:
    """Returns True if the values of two expressions differ by more than the share `_EQUAL` of the larger one.

    Args:
        first, second: the expressions.
        points: the values of their symbols.
    """
    first_value = _value_at(first, points)
    second_value = _value_at(second, points)
    # without values, math-verify's verdict stays
    if first_value is None or second_value is None:
        return False
    difference = sympy.Abs(first_value - second_value).evalf(_PRECISION)
    first_size = sympy.Abs(first_value).evalf(_PRECISION)
    second_size = sympy.Abs(second_value).evalf(_PRECISION)
    size = sympy.Max(first_size, second_size)
    return bool(difference > _EQUAL * size)


def _value_at(node: sympy.Expr, points: Mapping[sympy.Symbol, sympy.Expr]) -> sympy.Expr | None:
    """Returns the value of an expression with many digits, None if it has none where its symbols have these values."""
    try:
        # raises for an integral with a limit that would become a number
        value = node.xreplace(points).doit().evalf(_PRECISION)
    except (TypeError, ValueError, ArithmeticError, AttributeError, NotImplementedError):
        return None
    if not value.is_number or not value.is_finite:
        return None
    return value


# -------------------------------------------------------------------------------------------------------- relations


def _are_relations_solved(answer: Expression, gold: Expression) -> bool:
    """Returns True if the answer leaves no relation unsolved that the reference does not leave unsolved."""
    gold_relations = _relations(gold)
    # the reference is an equation of a curve, for example
    if not all(map(_is_solved, gold_relations)):
        return True

    # f(x) = 2x is right for 2x
    may_define_name = not gold_relations and bool(getattr(gold, "free_symbols", None))
    for relation in _relations(answer):
        is_definition = may_define_name and _is_defined_name(relation.lhs)
        if not _is_solved(relation) and not is_definition:
            return False
    return True


def _relations(node: Expression) -> set[Relational]:
    if not isinstance(node, sympy.Basic):
        return set()
    return node.atoms(Relational)


def _is_solved(relation: Relational) -> bool:
    """Returns True for a relation between a name and a constant, such as x = 7 and 3 < x."""
    left = relation.lhs
    right = relation.rhs
    if _is_defined_name(left) and not right.free_symbols:
        return True
    return _is_defined_name(right) and not left.free_symbols


def _is_defined_name(node: sympy.Basic) -> bool:
    """Returns True for the side of an equation that it defines: f(x), or symbols alone."""
    return isinstance(node, AppliedUndef) or is_expr_of_only_symbols(node)


# ------------------------------------------------------------------------------------------------- bounds on size


def is_too_large(node: Expression | str) -> bool:
    """Returns True if an expression exceeds MOST_BITS or MOST_TERMS, so that comparing it would take too long."""
    bits, terms = _measure(node)
    return bits > MOST_BITS or terms > MOST_TERMS


def _measure(node: Expression | str) -> tuple[float, float]:
    """Returns upper bounds of an unevaluated expression: binary digits of its values, and terms after expansion.

    The bounds come from the structure, since a number such as 9^{9^9} must not be evaluated to learn its size.
    """
    if isinstance(node, sympy.Rational):
        return max(node.p.bit_length(), node.q.bit_length()), 1
    if isinstance(node, sympy.Float):
        binary_exponent = node._mpf_[2]
        return 53 + abs(binary_exponent), 1

    parts = _parts(node)
    if not parts:
        # a symbol, a named constant, an empty set
        return 1.0, 1.0

    bits = []
    terms = []
    for part in parts:
        part_bits, part_terms = _measure(part)
        bits.append(part_bits)
        terms.append(part_terms)
    most_bits = max(bits)
    most_terms = max(terms)
    # the exponent of a power, the argument of a factorial, or the limits of a sum
    value = _largest_value(parts[-1], bits[-1])
    match node:
        case sympy.Add():
            return most_bits + len(bits), sum(terms)
        case sympy.Mul():
            return sum(bits), math.prod(terms)
        case sympy.Pow():
            power_bits = bits[0] * value
            is_expanded = node.exp.is_Integer and value < MOST_BITS and terms[0] < MOST_TERMS
            if not is_expanded:
                return power_bits, most_terms
            # the multinomial theorem: number of terms of a sum raised to a power
            further_terms = int(terms[0] - 1)
            power_terms = math.comb(int(value) + further_terms, further_terms)
            return power_bits, power_terms
        case sympy.Sum() | sympy.Product():
            if value >= MOST_TERMS:
                return math.inf, most_terms
            return bits[0] * value, most_terms
        case sympy.factorial() | sympy.exp():
            return (bits[-1] + 2) * value, most_terms
        case sympy.Interval():
            return most_bits, _INTERVAL_TERMS
    return most_bits, sum(terms)


def _largest_value(part: sympy.Basic, bits: float) -> float:
    """Returns an upper bound of an exponent, an argument or the limit of a sum.

    Args:
        part: the expression.
        bits: bound of its binary digits.
    """
    # The digits of a decimal say nothing about its size: 1.5 has 53. At least 2, because a power with an exponent
    # below one can have more digits than `bits` times that exponent.
    if isinstance(part, sympy.Float):
        size = abs(float(part))
        return max(2.0, size)
    # 2.0**1024 raises OverflowError, and values far below 2^64 exceed the bounds already
    if bits >= 64:
        return math.inf
    return 2.0**bits


def _parts(node: Expression | str) -> tuple[sympy.Basic, ...]:
    """Returns the operands of an expression or the entries of a matrix; empty for a text."""
    if isinstance(node, sympy.MatrixBase):
        return tuple(node.flat())
    return getattr(node, "args", ())
