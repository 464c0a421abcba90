"""Scores answers with the scorers of reasoning-gym, which trust the answers that they score.

Some of them run the answer as Python (`eval`, or sympy's `parse_expr`, which calls it): an answer could change the
scores of all later ones, or delete files. Some give full marks for NaN, for `integrate(...)` around the exercise, or
for any text, and some raise. `score` passes on an answer only if it can do no more than be wrong.
"""

import ast
import functools
import math
import operator
import re
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from fractions import Fraction

Scorer = Callable[..., float]
"""A scorer of reasoning-gym, called with the keyword arguments `answer` and `entry`."""

_NOT_FINITE = re.compile(r"(?i)(?<![a-z])(?:nan|inf|infinity)[ij]?(?![a-z])")
# a match begins at the first character of a number and gives none back, so that a long row of digits is read once
_POWER_OF_TEN = re.compile(r"(?<![\d._])[\d.][\d._]*+e[+-]?(?P<exponent>[\d_]+)", re.IGNORECASE)
_LARGEST_EXPONENT = 300
"""Largest exponent of a power of ten in an answer, nearly that of a float.

Beyond it, floats are infinite, and a scorer that calculates with fractions needs as many digits as the exponent says.
"""
_INTEGER = re.compile(r"\d+")
_MANY_TURNS = re.compile(r"\d\d")
"""A number of turns that the scorer of rubiks_cube would write out, such as R999999999. Four turns are none."""
_COIN_TOLERANCE = Fraction(1, 10_000)
_MOST_BITS = 20_000
"""Largest number of binary digits that an expression may have as value. Computing more takes seconds."""
_LONGEST_EXPONENT = 15
"""Binary digits of an exponent. The bound above excludes larger ones, and 2**bits would be large itself."""

_FUNCTIONS = frozenset(
    "sqrt exp log ln sin cos tan cot sec csc asin acos atan acot asec acsc sinh cosh tanh coth asinh acosh atanh abs "
    "Abs Rational".split()
)
_LITERAL_NODES = (
    ast.Expression,
    ast.List,
    ast.Tuple,
    ast.Set,
    ast.Dict,
    ast.Constant,
    ast.UnaryOp,
    ast.unaryop,
    ast.expr_context,
    # a word is read, but not called
    ast.Name,
)
_CALCULATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_ARITHMETIC = tuple(_CALCULATIONS)
_SIGNS = (ast.UAdd, ast.USub)


@dataclass(frozen=True)
class _Grammar:
    """What an answer may consist of besides numbers, signs and brackets.

    Attributes:
        operators: binary operators.
        has_names: whether symbols are allowed.
        functions: names that may be called.
    """

    operators: tuple[type[ast.operator], ...]
    has_names: bool = False
    functions: frozenset[str] = frozenset()


_GAME = _Grammar(_ARITHMETIC)
_POLYNOMIAL = _Grammar((*_ARITHMETIC, ast.Pow), has_names=True)
# without Integral and integrate, which would restate the exercise
_ANTIDERIVATIVE = _Grammar((*_ARITHMETIC, ast.Pow), has_names=True, functions=_FUNCTIONS)

EXPRESSIONS = {
    "countdown": _GAME,
    "puzzle24": _GAME,
    "polynomial_multiplication": _POLYNOMIAL,
    "simple_integration": _ANTIDERIVATIVE,
    "intermediate_integration": _ANTIDERIVATIVE,
}
"""Tasks whose scorers run an answer as an expression of sympy."""

LITERALS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
"""Tasks whose scorers run an answer as Python to read a list."""


def score(task: str, scorer: Scorer, answer: str, entry: Mapping[str, object]) -> float:
    """Returns the score of an answer, from 0 to 1.

    An answer that makes the scorer raise scores 0. Some scorers parse the answer, with `int()` for example, and raise
    for every other text. As a failed reward such an answer would be left out of the loss, and a model could escape low
    scores by answers of that kind.

    Args:
        task: name of the task.
        scorer: its scorer.
        answer: the answer, without white space at its ends.
        entry: the entry of the answered question.

    Raises:
        Exception: Whatever the scorer raises for the entry's own answer, because then the entry is at fault.
    """
    own_answer = str(entry.get("answer"))
    if not _is_finite(answer) and _is_finite(own_answer):
        return 0.0
    tasks = _tasks_of(task, entry)
    if not _is_harmless(answer, own_answer, tasks):
        # the lowest mark is not 0 in every task
        answer = ""

    try:
        points = float(scorer(answer=answer, entry=entry))
    except Exception:
        float(scorer(answer=own_answer, entry=entry))
        return 0.0
    # calendar_arithmetic, for example, has no upper bound if the right number is negative
    if not 0 <= points <= 1:
        return 0.0
    conditions = [_CONDITIONS[name] for name in tasks if name in _CONDITIONS]
    if points == 1 and not all(is_met(answer, own_answer) for is_met in conditions):
        return 0.0
    return points


def _tasks_of(task: str, entry: Mapping[str, object]) -> set[str]:
    """Returns the task, and the task that a composite one took the entry from."""
    tasks = {task}
    metadata = entry.get("metadata")
    if isinstance(metadata, Mapping):
        tasks.add(str(metadata.get("source_dataset")))
    return tasks


def _is_finite(text: str) -> bool:
    """Returns False for a text with NaN, infinity, or a power of ten with an exponent beyond `_LARGEST_EXPONENT`.

    Each comparison with NaN is false: `abs(nan - 7) > tolerance`, for example. And `min(1.0, nan)` is 1.
    """
    if _NOT_FINITE.search(text):
        return False
    return all(_has_small_exponent(match["exponent"]) for match in _POWER_OF_TEN.finditer(text))


def _has_small_exponent(digits: str) -> bool:
    """Returns True if the exponent with these digits, which Python divides with _, is at most `_LARGEST_EXPONENT`."""
    significant = digits.replace("_", "").lstrip("0")
    # the length first, because Python refuses to convert thousands of digits
    if len(significant) > len(str(_LARGEST_EXPONENT)):
        return False
    return int(significant or "0") <= _LARGEST_EXPONENT


# ------------------------------------------------------------------------------------------------- code in an answer


def _is_harmless(answer: str, own_answer: str, tasks: Container[str]) -> bool:
    """Returns False if the scorer of one of these tasks would run more of the answer than it should."""
    for task, grammar in EXPRESSIONS.items():
        if task in tasks and not _is_expression(answer, own_answer, grammar):
            return False
    if "rubiks_cube" in tasks and _MANY_TURNS.search(answer):
        return False
    needs_literal = any(task in tasks for task in LITERALS)
    return not needs_literal or _is_literal(answer)


def _is_literal(answer: str) -> bool:
    """Returns True if Python reads the text without running anything: as lists of values, or not at all."""
    try:
        # `eval` ignores this white space
        tree = ast.parse(answer.lstrip(" \t"), mode="eval")
    except (SyntaxError, ValueError):
        return True
    except (RecursionError, MemoryError):
        return False
    return all(isinstance(node, _LITERAL_NODES) for node in ast.walk(tree))


def _is_expression(answer: str, own_answer: str, grammar: _Grammar) -> bool:
    """Returns True if the text is an expression of this grammar whose value has a bounded size.

    Functions of the right answer are allowed, too: some entries have an integral in it, which sympy cannot solve.
    """
    tree = _parsed(answer)
    if tree is None:
        return False
    functions = grammar.functions
    if functions:
        functions = functions | _called_names(own_answer)
    if not all(_is_allowed(node, grammar, functions) for node in ast.walk(tree)):
        return False
    try:
        return _bits(tree) <= _MOST_BITS
    except RecursionError:
        # a sum of a thousand terms
        return False


@functools.lru_cache(maxsize=256)
def _called_names(text: str) -> frozenset[str]:
    """Returns the names of the functions that an expression calls."""
    tree = _parsed(text)
    if tree is None:
        return frozenset()
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return frozenset(call.func.id for call in calls if isinstance(call.func, ast.Name))


def _parsed(text: str) -> ast.expr | None:
    """Returns the tree of an expression, None if the text is none."""
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _is_allowed(node: ast.AST, grammar: _Grammar, functions: Container[str]) -> bool:
    """Returns True if a grammar allows a node of an expression, whatever is inside it.

    Args:
        node: the node.
        grammar: the grammar.
        functions: names that may be called, instead of those of the grammar.
    """
    match node:
        case ast.Constant(value):
            # not True, a text or an imaginary number
            return type(value) in (int, float)
        case ast.Name():
            return grammar.has_names
        case ast.operator():
            return isinstance(node, grammar.operators)
        case ast.unaryop():
            return isinstance(node, _SIGNS)
        case ast.Call(ast.Name(name), _, []):
            return name in functions
    return isinstance(node, ast.UnaryOp | ast.BinOp | ast.expr_context)


def _bits(node: ast.expr) -> float:
    """Returns an upper bound of the binary digits of the numbers in the value of an expression.

    The bound comes from the structure, because a number such as 9**9**9 must not be computed to learn its size.
    """
    match node:
        case ast.Constant(int(value)):
            return value.bit_length()
        case ast.UnaryOp(_, operand):
            return _bits(operand)
        case ast.BinOp(left, ast.Pow(), right):
            exponent_bits = _bits(right)
            if exponent_bits > _LONGEST_EXPONENT:
                return math.inf
            return _bits(left) * 2.0**exponent_bits
        case ast.BinOp(left, _, right):
            return _bits(left) + _bits(right) + 1
        case ast.Call(_, arguments):
            return max(map(_bits, arguments), default=1)
    # a symbol or a decimal
    return 1


# ------------------------------------------------------------------------------------- what a scorer does not check


def _solves_game(answer: str, own_answer: str) -> bool:
    """Returns True for expressions of the same numbers with the same value.

    puzzle24's scorer accepts 4*6*1*1 for all questions, and rounds the value down.
    """
    numbers = sorted(map(int, _INTEGER.findall(answer)))
    own_numbers = sorted(map(int, _INTEGER.findall(own_answer)))
    if numbers != own_numbers:
        return False
    return _value_of(answer) == _value_of(own_answer)


def _value_of(expression: str) -> Fraction | None:
    """Returns the exact value of an expression that `_GAME` allows; None if it has none."""
    tree = _parsed(expression)
    if tree is None:
        return None
    try:
        return _value(tree)
    # ValueError for a decimal that is read as infinite
    except (ArithmeticError, KeyError, TypeError, ValueError, RecursionError):
        return None


def _value(node: ast.expr) -> Fraction:
    """Returns the value of a tree. Raises TypeError or KeyError for a node that is no arithmetic."""
    match node:
        case ast.Constant(value):
            return Fraction(str(value))
        case ast.UnaryOp(ast.USub(), operand):
            return -_value(operand)
        case ast.UnaryOp(ast.UAdd(), operand):
            return _value(operand)
        case ast.BinOp(left, operation, right):
            calculate = _CALCULATIONS[type(operation)]
            return calculate(_value(left), _value(right))
    raise TypeError(f"{ast.unparse(node)!r} is no arithmetic")


def _is_same_word(answer: str, own_answer: str) -> bool:
    """Returns True for the same word. The scorer of game_of_life_halting takes every text for True."""
    return answer.casefold() == own_answer.casefold()


def _is_same_probability(answer: str, own_answer: str) -> bool:
    """Returns True for nearly equal numbers. coin_flip's scorer gives full marks for the first digits of the number."""
    # the scorer has read both
    difference = Fraction(answer.replace(",", "")) - Fraction(own_answer.replace(",", ""))
    return abs(difference) <= _COIN_TOLERANCE


_CONDITIONS: dict[str, Callable[[str, str], bool]] = {
    "coin_flip": _is_same_probability,
    "countdown": _solves_game,
    "game_of_life_halting": _is_same_word,
    "puzzle24": _solves_game,
}
"""Conditions of full marks that a task's scorer does not check, as functions of an answer and the entry's own."""
