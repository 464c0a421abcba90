r"""Comparison of a final answer with the reference: the form of the answer, its value, and bounds on its size.

Strict comparison accepts only final forms: a number, a fraction, a radical, an expression in the symbols of the
reference, a tuple, an interval, a set ... with nothing left to compute. `answer_in_text` finds an answer that is not
boxed, `answer_syntax` parses it without evaluating it, `open_operations` lists what it leaves to compute, and
`equal_values` compares values with math-verify.
"""

import functools
import logging
import re
from collections import Counter

from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify

from verl_lite.rewards.answer_in_text import answer_in_text
from verl_lite.rewards.answer_syntax import Answer, parse_answer
from verl_lite.rewards.answer_tokens import UnknownSyntax, clean
from verl_lite.rewards.answer_tree import Node, names_of, render
from verl_lite.rewards.equal_values import MOST_BITS, MOST_TERMS, Expression, are_equal, is_too_large
from verl_lite.rewards.open_operations import is_final, symbols_of

# it warns that its own time limit is off
logging.getLogger("math_verify").setLevel(logging.ERROR)

_WRAPPERS = re.compile(r"\\(?:text|mathrm|mathbf|textbf|textit|textrm|mbox)\b|[{}$~.\s*]")
_TEXT = re.compile(r"\\(?:text|mbox|textbf|textit|textrm|mathrm|mathbf)\s*\{([^{}]*)\}")
_COMMAND = re.compile(r"\\(?!text|left|right|dfrac|tfrac|frac)[a-zA-Z]+")
_NAMES_OF_UNITS = (
    "m meter meters metre metres",
    "cm centimeter centimeters centimetre centimetres",
    "mm millimeter millimeters",
    "km kilometer kilometers kilometre kilometres",
    "g gram grams",
    "kg kilogram kilograms",
    "mg milligram milligrams",
    "s sec second seconds",
    "min minute minutes",
    "h hr hrs hour hours",
    "day days",
    "week weeks",
    "month months",
    "year years",
    "l liter liters litres",
    "ml milliliter milliliters",
    "in inch inches",
    "ft foot feet",
    "yd yard yards",
    "mi mile miles",
    "lb lbs pound pounds",
    "cent cents",
    "dollar dollars usd",
    "euro euros eur",
    "am",
    "pm",
    "nm nanometer nanometers nanometre nanometres",
    "micrometer micrometers micrometre micrometres micron microns",
    "ton tons tonne tonnes",
    "acre acres",
    "hectare hectares ha",
    "degree degrees deg",
    "radian radians rad",
    "celsius c degc",
    "fahrenheit f degf",
    "kelvin kelvins",
    "newton newtons n",
    "kilonewton kilonewtons kn",
    "joule joules j",
    "kilojoule kilojoules kj",
    "calorie calories cal",
    "kilocalorie kilocalories kcal",
    "electronvolt electronvolts ev",
    "kev",
    "mev",
    "watt watts w",
    "kilowatt kilowatts kw",
    "hertz hz",
    "kilohertz khz",
    "megahertz mhz",
    "gigahertz ghz",
    "pascal pascals pa",
    "kilopascal kilopascals kpa",
    "megapascal megapascals mpa",
    "atm atmosphere atmospheres",
    "volt volts v",
    "millivolt millivolts mv",
    "ampere amperes amp amps",
    "milliampere milliamperes ma",
    "ohm ohms",
    "mole moles mol",
    "millimole millimoles mmol",
    "bit bits",
    "byte bytes",
    "kilobyte kilobytes kb",
    "megabyte megabytes mb",
    "gigabyte gigabytes gb",
    "terabyte terabytes tb",
    "unit units",
)
_UNITS: dict[str, str] = {}
"""The usual name of each unit that is known."""
for _names in map(str.split, _NAMES_OF_UNITS):
    _UNITS |= dict.fromkeys(_names, _names[0])

_UNIT_FACTOR = re.compile(r"(?P<unit>[a-z]+)(?:\^\(?(?P<power>-?\d)\)?)?")
_POWER_WORD = re.compile(r"\A(?P<power>square|sq|cubic|cu)\.?(?P<unit>[a-z]+)\Z")
_POWERS_OF_WORDS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_MAGNITUDE = re.compile(r"hundred|thousand|million|billion|trillion|quadrillion|dozen")
"""Words before a unit, or instead of it, that are a part of the number."""
_SPEEDS = {"mph": "mi/h", "kmh": "km/h", "kph": "km/h"}
_MIRRORED = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}
_WORDS = re.compile(r"(?=.*[a-z]{3})[a-z][a-z,'-]*")
_AS_WRITTEN = LatexExtractionConfig(boxed_match_priority=0)
_AS_RENDERED = LatexExtractionConfig(
    boxed_match_priority=0,
    normalization_config=NormalizationConfig(basic_latex=True, units=False, malformed_operators=False, nits=False),
)
"""math-verify reads what `render` writes as it is; by default it drops letters at the end as units."""


# all samples of a prompt have the same reference
@functools.lru_cache(maxsize=4096)
def read_reference(ground_truth: str) -> list[Expression | str]:
    """Returns the reference as math-verify parses it: the expression, if it can be parsed, and its text.

    Raises ValueError if it is not an expression, or is too large.
    """
    text = ground_truth
    if "\\boxed" not in ground_truth:
        # math-verify takes all of a box for the answer, but searches other texts for one
        text = _boxed(ground_truth)
    gold: list[Expression | str] = parse(text, parsing_timeout=None)
    if not gold:
        raise ValueError("cannot be read as a mathematical expression by math-verify")
    if is_too_large(gold[0]):
        raise ValueError(f"has a value of more than {MOST_BITS} binary digits, or more than {MOST_TERMS} terms")
    return gold


def compare(ground_truth: str, text: str, is_boxed: bool, strict: bool) -> tuple[bool, str]:
    """Returns True if the answer in a text equals the reference, and the parsed answer.

    Args:
        ground_truth: the reference.
        text: the content of a box, or a text that is searched for the answer.
        is_boxed: True for the content of a box.
        strict: see `rules.math_verify`.
    """
    if strict:
        answer = text if is_boxed else answer_in_text(text)
        return _compare_strictly(ground_truth, answer)

    gold = read_reference(ground_truth)
    if is_boxed:
        text = _boxed(text)
    # without math-verify's time limits: `mathematics` limits this process
    parsed = parse(text, parsing_timeout=None)
    if not parsed:
        return False, ""
    # its last entry is the text of the expression
    pred = str(parsed[-1])
    if is_too_large(parsed[0]):
        return False, pred
    is_right = verify(gold, parsed, timeout_seconds=None)
    return bool(is_right), pred


def _boxed(text: str) -> str:
    return f"\\boxed{{{text}}}"


# ---------------------------------------------------------------------------------------------------- strict comparison


def _compare_strictly(ground_truth: str, text: str) -> tuple[bool, str]:
    """Returns True if the answer `text` is in its final form and equals the reference, and the parsed answer."""
    words = _words(text)
    expected_words = _words(ground_truth)
    # first, because as mathematics words would be products of letters
    if words and expected_words:
        return words == expected_words, text

    # what the reference itself writes is right, also if this package cannot read it
    plain_text = _without_spaces(text)
    if plain_text and plain_text == _without_spaces(ground_truth):
        return True, text

    # 3m is three metres if the reference has no symbols, else a product
    reference = _reference_answer(ground_truth)
    has_symbols = reference is None or bool(symbols_of(reference.node))
    try:
        answer = parse_answer(text, letters_are_units=not has_symbols)
    except UnknownSyntax:
        return _compare_unreadable(ground_truth, reference, text), text
    if reference is None:
        return _compare_with_unreadable(ground_truth, answer), answer.latex()

    # the reference is an interval or a union of some: an answer may write it as inequalities
    if reference.node.kind in ("brackets", "operation"):
        answer = Answer(_as_intervals(answer.node), answer.unit)
    pred = answer.latex()
    # the parser drops dollar signs
    expected_unit = reference.unit or _dollar_in(ground_truth)
    unit = answer.unit or _dollar_in(text)
    if _are_different_units(expected_unit, unit) or _differ_in_form(reference.node, answer.node):
        return False, pred
    if not is_final(answer.node, reference.node):
        return False, pred
    is_equal = are_equal(_parse_rendered(reference), _parse_rendered(answer))
    return is_equal, pred


def _dollar_in(text: str) -> str:
    """Returns the unit of a text with a dollar sign, "" for other texts."""
    return "dollar" if r"\$" in text else ""


def _compare_with_unreadable(ground_truth: str, answer: Answer) -> bool:
    """Compares an answer with a reference that `answer_syntax` cannot read; math-verify may be able to."""
    if not is_final(answer.node, None):
        return False
    return are_equal(_gold_expression(ground_truth), _parse_rendered(answer))


def _gold_expression(ground_truth: str) -> Expression | None:
    """Returns the reference as math-verify parses it, None if math-verify finds only text."""
    gold = read_reference(ground_truth)[0]
    if isinstance(gold, str):
        return None
    return gold


def _compare_unreadable(ground_truth: str, reference: Answer | None, text: str) -> bool:
    """Compares an answer that `answer_syntax` cannot read, if it cannot read the reference either.

    The answer may use only the commands of the reference: both may be binomial coefficients, for example.
    """
    if reference is not None:
        return False
    commands = set(_COMMAND.findall(text))
    allowed_commands = set(_COMMAND.findall(ground_truth))
    if not commands <= allowed_commands:
        return False
    expression = _parse_latex(clean(text), _AS_WRITTEN)
    return are_equal(_gold_expression(ground_truth), expression)


@functools.lru_cache(maxsize=4096)
def _reference_answer(ground_truth: str) -> Answer | None:
    """Returns the reference as a tree, None if `answer_syntax` cannot read it."""
    text = ground_truth
    _, box, content = ground_truth.rpartition("\\boxed{")
    if box:
        text = content.rstrip().removesuffix("}")
    try:
        answer = parse_answer(text)
    except UnknownSyntax:
        return None
    # a tree that math-verify cannot read has no value to compare
    if _parse_rendered(answer) is None:
        return None
    return answer


def _parse_rendered(answer: Answer) -> Expression | None:
    """Returns an answer of this package as math-verify parses it, None if it cannot."""
    return _parse_latex(answer.latex(), _AS_RENDERED)


def _parse_latex(latex: str, config: LatexExtractionConfig) -> Expression | None:
    """Returns the expression that math-verify parses from the whole text, None if it cannot."""
    parsed = parse(
        _boxed(latex),
        extraction_config=[config],
        fallback_mode="no_fallback",
        extraction_mode="first_match",
        parsing_timeout=None,
    )
    # without an expression the list is empty, because "no_fallback" leaves out the text
    if not parsed:
        return None
    return parsed[0]


def _words(text: str) -> str:
    r"""Returns the letters of a text that consists of words, such as `\text{No solution}`; "" for mathematics."""
    letters = _WRAPPERS.sub("", text).lower()
    if not _WORDS.fullmatch(letters):
        return ""
    return letters


def _without_spaces(text: str) -> str:
    """Returns an answer without spaces, except for those between two digits: 1 2 is not 12."""
    plain = _TEXT.sub(r"\1", clean(text))
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", plain)


def _are_different_units(unit: str, other: str) -> bool:
    """Returns True if two units are known and differ, or have other magnitudes. A missing unit differs from none."""
    if not unit or not other:
        return False
    # 7 million dollars and 7 million, but not 7 billion
    if set(_MAGNITUDE.findall(unit)) != set(_MAGNITUDE.findall(other)):
        return True
    factors = _unit_factors(unit)
    other_factors = _unit_factors(other)
    if not factors or not other_factors:
        return False
    # "units" may stand for any unit of length
    if factors.keys() ^ other_factors.keys() >= {"unit"}:
        return False
    return factors != other_factors


def _unit_factors(unit: str) -> Counter[str]:
    """Returns the exponent of each unit in a product or quotient of units; nothing if a unit is not known."""
    # "square cm" becomes cm^2, and "mph" mi/h
    text = _MAGNITUDE.sub("", unit).replace(".", "")
    power_word = _POWER_WORD.match(text)
    if power_word is not None:
        power_of_word = _POWERS_OF_WORDS[power_word["power"]]
        text = f"{power_word['unit']}^{power_of_word}"
    text = _SPEEDS.get(text, text).replace("per", "/")

    exponents: Counter[str] = Counter()
    sign = 1
    for part in re.split(r"(/|\\cdot)", text):
        # all units after the first slash are below the line
        if part == "/":
            sign = -1
            continue
        if part == "\\cdot":
            continue
        match = _UNIT_FACTOR.fullmatch(part)
        if match is None or match["unit"] not in _UNITS:
            return Counter()
        name = _UNITS[match["unit"]]
        power = int(match["power"] or 1)
        exponents[name] += sign * power
    return exponents


def _differ_in_form(reference: Node, answer: Node) -> bool:
    """Returns True for forms that math-verify takes for equal: a set and a pair, and numerals of different bases."""
    if reference.kind == "brackets" and reference.text == "()" and answer.kind == "set":
        return True
    # of an answer without a base, only the value counts
    bases = _bases_of_numerals(answer)
    return bool(bases) and bases != _bases_of_numerals(reference)


def _bases_of_numerals(node: Node) -> set[str]:
    """Returns the LaTeX of the bases of all numerals such as 101_2."""
    bases = set()
    for part in node.walk():
        if part.kind == "command" and part.text == "_":
            _, base = part.parts
            bases.add(render(base))
    return bases


def _as_intervals(answer: Node) -> Node:
    """Returns inequalities of a symbol as an interval or a union: [0, 1) for 0 <= x < 1. Returns others unchanged."""
    relations = answer.parts if answer.kind == "list" else (answer,)
    union: Node | None = None
    for relation in relations:
        interval = _interval(relation)
        if interval is None:
            return answer
        if union is None:
            union = interval
        else:
            union = Node("operation", (union, interval), "\\cup")
    return union or answer


def _interval(relation: Node) -> Node | None:
    """Returns the interval that an inequality of a symbol describes, None for others."""
    sides = relation.parts
    operators = relation.text.split()
    if relation.kind != "relation" or not set(operators) <= set(_MIRRORED):
        return None

    upper = Node("constant", (), "\\infty")
    lower = Node("negative", (upper,))
    opening = "("
    closing = ")"
    if len(sides) == 2:
        operator = operators[0]
        symbol, bound = sides
        if symbol.kind != "symbol":
            # 3 < x is x > 3
            bound, symbol = sides
            operator = _MIRRORED[operator]
        is_closed = operator in ("\\le", "\\ge")
        if operator in ("<", "\\le"):
            upper = bound
            closing = "]" if is_closed else ")"
        else:
            lower = bound
            opening = "[" if is_closed else "("
    elif len(sides) == 3 and set(operators) <= {"<", "\\le"}:
        lower, symbol, upper = sides
        opening = "[" if operators[0] == "\\le" else "("
        closing = "]" if operators[1] == "\\le" else ")"
    else:
        return None

    # the bounds of an interval are constants
    if symbol.kind != "symbol" or names_of(lower) or names_of(upper):
        return None
    return Node("brackets", (lower, upper), opening + closing)
