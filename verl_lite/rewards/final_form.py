r"""Comparison of a final answer with the reference: the form of the answer, its value, and bounds on its size.

Strict comparison accepts only final forms: a number, a fraction, a radical, an expression in the symbols of the
reference, a tuple, an interval, a set ... with nothing left to compute. `answer_syntax` parses the answer without
evaluating it, `open_operations` lists what it leaves to compute, and math-verify compares values.
"""

import functools
import logging
import math
import re
from collections import Counter
from fractions import Fraction
from typing import Any

import sympy
from latex2sympy2_extended import NormalizationConfig, is_expr_of_only_symbols
from math_verify import LatexExtractionConfig, parse, verify
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational

from verl_lite.rewards.answer_syntax import Answer, Node, UnknownSyntax, clean, is_integer, parse_answer, render

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limit is off

MOST_BITS = 20_000
MOST_TERMS = 1000
_INTERVAL_TERMS = 50  # a union of n intervals takes time of the order n**2

_PERCENT = sympy.UnevaluatedExpr(sympy.Rational(1, 100))
_WRAPPERS = re.compile(r"\\(?:text|mathrm|mathbf|textbf|textit|textrm|mbox)\b|[{}$~.\s*]")
_TEXT = re.compile(r"\\(?:text|mbox|textbf|textit|textrm|mathrm|mathbf)\s*\{([^{}]*)\}")
_COMMAND = re.compile(r"\\(?!text|left|right|dfrac|tfrac|frac)[a-zA-Z]+")
_UNITS = {
    name: names[0]
    for names in (
        ("m", "meter", "meters", "metre", "metres"), ("cm", "centimeter", "centimeters", "centimetre", "centimetres"),
        ("mm", "millimeter", "millimeters"), ("km", "kilometer", "kilometers", "kilometre", "kilometres"),
        ("g", "gram", "grams"), ("kg", "kilogram", "kilograms"), ("mg", "milligram", "milligrams"),
        ("s", "sec", "second", "seconds"), ("min", "minute", "minutes"), ("h", "hr", "hrs", "hour", "hours"),
        ("day", "days"), ("week", "weeks"), ("month", "months"), ("year", "years"), ("l", "liter", "liters", "litres"),
        ("ml", "milliliter", "milliliters"), ("in", "inch", "inches"), ("ft", "foot", "feet"), ("yd", "yard", "yards"),
        ("mi", "mile", "miles"), ("lb", "lbs", "pound", "pounds"), ("cent", "cents"), ("dollar", "dollars"),
    )
    for name in names
}  # fmt: skip
"""The usual name of each unit that is known."""

_UNIT_FACTOR = re.compile(r"(?P<unit>[a-z]+)(?:\^\(?(?P<power>-?\d)\)?)?")
_POWER_WORD = re.compile(r"\A(?P<power>square|sq|cubic|cu)\.?(?P<unit>[a-z]+)\Z")
_POWERS_OF_WORDS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_SPEEDS = {"mph": "mi/h", "kmh": "km/h", "kph": "km/h"}
_MIRRORED = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}
_WORDS = re.compile(r"(?=.*[a-z]{3})[a-z][a-z,'-]*")
_AS_RENDERED = LatexExtractionConfig(
    boxed_match_priority=0,
    normalization_config=NormalizationConfig(basic_latex=True, units=False, malformed_operators=False, nits=False),
)
"""math-verify reads what `render` writes as it is; by default it drops letters at the end as units."""


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
    if strict:
        answer = text if is_boxed else answer_in_text(text)
        return _compare_strictly(ground_truth, answer)
    gold = read_reference(ground_truth)
    parsed = parse(_boxed(text) if is_boxed else text, parsing_timeout=None)
    pred = str(parsed[-1]) if parsed else ""
    if not parsed or _is_too_large(parsed[0]):
        return False, pred
    return bool(verify(gold, parsed, timeout_seconds=None)), pred


def _boxed(text: str) -> str:
    return f"\\boxed{{{text}}}"


# ---------------------------------------------------------------------------------------------------- strict comparison


def _compare_strictly(ground_truth: str, text: str) -> tuple[bool, str]:
    words = _words(text)
    expected_words = _words(ground_truth)
    if words and expected_words:  # as mathematics, words would be products of letters
        return words == expected_words, text

    if _without_spaces(text) and _without_spaces(text) == _without_spaces(ground_truth):
        return True, text
    reference = _reference_answer(ground_truth)
    has_symbols = reference is None or bool(_symbols(reference.node))
    try:
        answer = parse_answer(text, letters_are_units=not has_symbols)
    except UnknownSyntax:
        return _compare_unknown(ground_truth, reference, text), text

    if reference is not None and reference.node.kind in ("brackets", "operation"):
        answer = Answer(_as_intervals(answer.node), answer.unit)

    pred = answer.latex()
    if reference is not None:
        expected_unit = reference.unit or ("dollar" if r"\$" in ground_truth else "")
        if _are_different_units(expected_unit, answer.unit) or _differ_in_form(reference.node, answer.node):
            return False, pred
    if not _is_final(answer.node, None if reference is None else reference.node):
        return False, pred
    parsed = _parse_rendered(answer)
    gold = read_reference(ground_truth)[0] if reference is None else _parse_rendered(reference)
    return _are_equal(gold, parsed), pred


def _compare_unknown(ground_truth: str, reference: Answer | None, text: str) -> bool:
    """Compares an answer that `answer_syntax` cannot read, if it cannot read the reference either.

    The answer may use only the commands of the reference: both may be binomial coefficients, for example.
    """
    if reference is not None or not set(_COMMAND.findall(text)) <= set(_COMMAND.findall(ground_truth)):
        return False
    parsed = parse(
        _boxed(clean(text)),
        extraction_config=[LatexExtractionConfig(boxed_match_priority=0)],
        fallback_mode="no_fallback",
        extraction_mode="first_match",
        parsing_timeout=None,
    )
    return bool(parsed) and _are_equal(read_reference(ground_truth)[0], parsed[0])


@functools.lru_cache(maxsize=4096)
def _reference_answer(ground_truth: str) -> Answer | None:
    """Returns the reference as a tree, None if `answer_syntax` cannot read it."""
    start = ground_truth.rfind("\\boxed{")
    text = ground_truth if start < 0 else ground_truth[start + len("\\boxed{") :].rstrip().removesuffix("}")
    try:
        answer = parse_answer(text)
    except UnknownSyntax:
        return None
    return answer if _parse_rendered(answer) is not None else None


def _parse_rendered(answer: Answer) -> Any:
    """Returns the expression as math-verify parses it, None if it cannot."""
    parsed = parse(
        _boxed(answer.latex()),
        extraction_config=[_AS_RENDERED],
        fallback_mode="no_fallback",
        extraction_mode="first_match",
        parsing_timeout=None,
    )
    return parsed[0] if parsed else None


def _words(text: str) -> str:
    r"""Returns the letters of a text that consists of words, such as `\text{No solution}`; "" for mathematics."""
    letters = _WRAPPERS.sub("", text).lower()
    return letters if _WORDS.fullmatch(letters) else ""


def _without_spaces(text: str) -> str:
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", _TEXT.sub(r"\1", clean(text)))


def _are_different_units(unit: str, other: str) -> bool:
    """Returns True if two units are known and differ. A missing unit differs from none."""
    known, other_known = _unit_factors(unit), _unit_factors(other)
    return bool(known and other_known) and known != other_known


def _unit_factors(unit: str) -> Counter[str]:
    """Returns the exponent of each unit in a product or quotient of units; nothing if a unit is not known."""
    exponents: Counter[str] = Counter()
    text = _POWER_WORD.sub(lambda match: f"{match['unit']}^{_POWERS_OF_WORDS[match['power']]}", unit.rstrip("."))
    text = _SPEEDS.get(text, text).replace("per", "/")
    sign = 1
    for part in re.split(r"(/|\\cdot)", text):
        if part in ("/", "\\cdot"):
            sign = -1 if part == "/" else sign
            continue
        match = _UNIT_FACTOR.fullmatch(part)
        if match is None or match["unit"] not in _UNITS:
            return Counter()
        exponents[_UNITS[match["unit"]]] += sign * int(match["power"] or 1)
    return exponents


def _differ_in_form(reference: Node, answer: Node) -> bool:
    """Returns True for forms that math-verify takes for equal: a set and a pair, and numerals of different bases."""
    if reference.kind == "brackets" and reference.text == "()" and answer.kind == "set":
        return True
    bases = _bases_of_numerals(answer)
    return bool(bases) and bases != _bases_of_numerals(reference)


def _bases_of_numerals(node: Node) -> set[str]:
    return {render(part.parts[1]) for part in node.walk() if part.kind == "command" and part.text == "_"}


def _as_intervals(answer: Node) -> Node:
    """Returns inequalities of a symbol as an interval or a union: [0, 1) for 0 <= x < 1. Returns others unchanged."""
    relations = answer.parts if answer.kind == "list" else (answer,)
    intervals = [_interval(relation) for relation in relations]
    union = intervals[0]
    for interval in intervals[1:]:
        if union is None or interval is None:
            return answer
        union = Node("operation", (union, interval), "\\cup")
    return answer if union is None else union


def _interval(relation: Node) -> Node | None:
    """Returns the interval that an inequality of a symbol describes, None for others."""
    sides, operators = relation.parts, relation.text.split()
    if relation.kind != "relation" or not set(operators) <= set(_MIRRORED):
        return None
    infinity = Node("constant", (), "\\infty")
    lower, upper = Node("negative", (infinity,)), infinity
    opening, closing = "(", ")"
    if len(sides) == 2:
        operator = operators[0]
        symbol, bound = sides
        if symbol.kind != "symbol":
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
    if symbol.kind != "symbol" or _names_of(lower) or _names_of(upper):
        return None
    return Node("brackets", (lower, upper), opening + closing)


# ------------------------------------------------------------------------------------------------------- answer in text

_MARKS = re.compile(r"(?<![\w*])(\*{1,3}|_{1,2}|`)(?=\S)(.+?)(?<=\S)\1(?![\w*])")
_ANSWER_IS = re.compile(r"(?i)(?:\banswer\b[^.\n:=]{0,60}?(?:\bis\b|:|=)|答案(?:是|为|：|:))\s*(?:\bis\b|:|：)?\s*")
_MATHEMATICS = re.compile(r"\$\$(.+?)\$\$|\\\[(.+?)\\\]|\$([^$\n]+)\$|\\\((.+?)\\\)", re.DOTALL)
_NUMBER = re.compile(r"-?\$?\s?-?\d+(?:,\d{3})*(?:\.\d+)?(?:\s*/\s*\d+)?\s*(?:\\?%)?|-?\\frac\{[^{}]+\}\{[^{}]+\}")
_PROSE = re.compile(r"(?<![\\\w{])[A-Za-z]{2,}")
_NEXT_ITEM = re.compile(r"\s*(?:,\s*(?:or|and)\b|,|;|/|\bor\b|\band\b|或|和|、|，)\s*(?=[-$\\\d(])")


def answer_in_text(text: str) -> str:
    """Returns the mathematics of an answer that is not boxed, without marks of emphasis.

    It follows the last "answer is", "answer:" or 答案; else it is the last mathematics between dollar signs, else the
    last number. Items of a list belong together: the answer of "it is 7 or 8" is "7, 8".
    """
    plain = _MARKS.sub(r"\2", _MARKS.sub(r"\2", text.strip()))
    starts = [match.end() for match in _ANSWER_IS.finditer(plain)]
    if starts:
        rest = plain[starts[-1] :]
        sentence = re.split(r"\n|[.。](?=\s|$)", rest, maxsplit=1)[0].strip()
        if _can_be_parsed(sentence):
            return sentence
        return _items_from(rest, _first_place(rest))
    formulas = list(_MATHEMATICS.finditer(plain))
    if formulas:
        return _items_from(plain, _first_of_list(plain, formulas))
    if _can_be_parsed(plain):
        return plain
    numbers = list(_NUMBER.finditer(plain))
    return _items_from(plain, _first_of_list(plain, numbers)) if numbers else ""


def _can_be_parsed(text: str) -> bool:
    if _PROSE.search(text):
        return False
    try:
        node = parse_answer(text).node
    except (UnknownSyntax, RecursionError):
        return False
    return node.kind != "word" and bool(text) and any(part.kind in ("number", "constant") for part in node.walk())


def _first_place(text: str) -> int:
    places = [match.start() for pattern in (_MATHEMATICS, _NUMBER) if (match := pattern.search(text))]
    return min(places, default=len(text))


def _first_of_list(text: str, matches: list[re.Match[str]]) -> int:
    """Returns where the list begins whose last item is the last match."""
    first = matches[-1]
    for match in reversed(matches[:-1]):
        separator = _NEXT_ITEM.match(text, match.end())
        if separator is None or separator.end() != first.start():
            break
        first = match
    return first.start()


def _items_from(text: str, place: int) -> str:
    """Returns the items of a list, separated by commas, that begins at a place."""
    items = []
    while True:
        match = _MATHEMATICS.match(text, place) or _NUMBER.match(text, place)
        if match is None:
            break
        items.append(next((group for group in match.groups() if group), match[0]).strip().rstrip(","))
        separator = _NEXT_ITEM.match(text, match.end())
        if separator is None:
            break
        place = separator.end()
    return ", ".join(items)


# ------------------------------------------------------------------------------------------------------- bounds on size


def _is_too_large(node: Any) -> bool:
    bits, terms = _measure(node)
    return bits > MOST_BITS or terms > MOST_TERMS


def _measure(node: Any) -> tuple[float, float]:
    """Returns upper bounds of an unevaluated expression: binary digits of its values, and terms after expansion."""
    if isinstance(node, sympy.Rational):
        return max(node.p.bit_length(), node.q.bit_length()), 1
    if isinstance(node, sympy.Float):
        return 53 + abs(node._mpf_[2]), 1

    bits: list[float] = [1.0]
    terms: list[float] = [1.0]
    parts = _parts(node)
    if parts:
        measures = [_measure(part) for part in parts]
        bits = [part_bits for part_bits, _ in measures]
        terms = [part_terms for _, part_terms in measures]

    most_bits, most_terms = max(bits), max(terms)
    value = _largest_value(parts[-1], bits[-1]) if parts else 2.0
    match node:
        case sympy.Add():
            return most_bits + len(bits), sum(terms)
        case sympy.Mul():
            return sum(bits), math.prod(terms)
        case sympy.Pow():
            is_expanded = node.exp.is_Integer and value < MOST_BITS and terms[0] < MOST_TERMS
            if not is_expanded:
                return bits[0] * value, most_terms
            further_terms = int(terms[0] - 1)
            return bits[0] * value, math.comb(int(value) + further_terms, further_terms)
        case sympy.Sum() | sympy.Product():
            return bits[0] * value if value < MOST_TERMS else math.inf, most_terms
        case sympy.factorial() | sympy.exp():
            return (bits[-1] + 2) * value, most_terms
        case sympy.Interval():
            return most_bits, _INTERVAL_TERMS
    return most_bits, sum(terms)


def _largest_value(part: Any, bits: float) -> float:
    """Returns a bound of an exponent, an argument or the limit of a sum. bits: its binary digits."""
    if isinstance(part, sympy.Float):  # 1.5 has 53 digits and is small; at most 2, so that the bound of 0.5 is one
        return max(2.0, abs(float(part)))
    return 2.0**bits if bits < 64 else math.inf


def _parts(node: Any) -> tuple[Any, ...]:
    return tuple(node.flat()) if isinstance(node, sympy.MatrixBase) else getattr(node, "args", ())


# ----------------------------------------------------------------------------------------------------------- final form

_POLYNOMIAL = {"number", "symbol", "sum", "negative", "product", "power", "quotient", "mixed", "constant", "root"}
_COLLECTIONS = ("matrix", "brackets", "set")
_SETS = {"\\cup", "\\setminus", "interval"}
_LARGEST_RADICAND = 10**6


def _is_final(answer: Node, reference: Node | None) -> bool:
    """Returns True if the answer leaves nothing to compute and has no symbols that the reference does not have."""
    open_in_reference = set() if reference is None else open_operations(reference)
    allowed = set(open_in_reference)
    if reference is not None:
        kinds = {node.kind for node in reference.walk()}
        relations = " ".join(node.text for node in reference.walk() if node.kind == "relation")
        if "brackets" in kinds or "operation" in kinds or re.search(r"[<>]|\\[lgn]e", relations):
            allowed |= _SETS
        if "function" in allowed:
            allowed |= {"denominator", "mixed form"}
        if "relation" in kinds:
            allowed.add("mixed form")
        known = _symbols(reference)
        if reference.kind == "relation":
            known |= _names_of(reference.parts[0])
        if not _symbols(answer) <= known:
            return False
    return open_operations(answer) <= allowed


def _symbols(node: Node) -> set[str]:
    """Returns the symbols and words of an expression in lower case, without the name that a solved relation defines."""
    if node.kind == "relation" and _is_name(node.parts[0]) and set(node.text.split()) <= {"=", "\\in"}:
        return set().union(*map(_symbols, node.parts[1:]))
    if node.kind in ("list", "set"):
        return set().union(*map(_symbols, node.parts))
    return _names_of(node)


def _names_of(node: Node) -> set[str]:
    return {part.text.lower() for part in node.walk() if part.kind in ("symbol", "word")}


def _is_name(node: Node) -> bool:
    return node.kind in ("symbol", "call", "word") or (node.kind == "brackets" and all(map(_is_name, node.parts)))


def open_operations(node: Node) -> set[str]:
    """Returns the names of the operations that an expression leaves to be computed."""
    names: set[str] = set()
    if node.kind == "relation" and node.parts[0].kind == "call":  # f(3) = 7
        parts = node.parts[1:]
    else:
        parts = node.parts
    for part in parts:
        names |= open_operations(part)
    match node.kind:
        case "sum" | "plus_minus":
            names |= _open_sum(node)
        case "product" | "quotient":
            names |= _open_product(node)
        case "negative" if node.parts[0].kind == "negative":  # -(-42)
            names.add("sum")
        case "power":
            names |= _open_power(node)
        case "root":
            if len(node.parts) > 1 and not is_integer(node.parts[1]):
                names.add("root")
            elif _is_rational_power(node.parts[0], Fraction(1, int(node.parts[1].text) if len(node.parts) > 1 else 2)):
                names.add("root")
        case "function" | "call" | "absolute":
            names.add(node.kind)
        case "operation" | "command":
            names.add(node.text)
        case "brackets" if node.text != "()":
            names.add("interval")
    return names


def _open_sum(node: Node) -> set[str]:
    """Returns what a sum leaves to compute: several numbers, equal terms, and products that are not expanded."""
    names = set()
    terms = list(_terms(node))
    numerals = [term for term in terms if _is_numeral(term)]
    others = [term for term in terms if not _is_numeral(term)]

    # with one of these terms a sum can restate the exercise: 2^101 - 2^100, ln 6 - ln 2
    operation_terms = [term for term in others if _contains_operation(term)]
    has_zero = any(term.text == "0" for term in numerals)
    if len(numerals) > 1 or len(operation_terms) > 1 or has_zero:
        names.add("sum")

    keys = Counter(_term_key(term) for term in others)
    is_repeated = any(count > 1 for count in keys.values())
    is_entrywise = any(term.kind in _COLLECTIONS for term in others)
    if is_repeated or is_entrywise:
        names.add("sum")

    has_symbols = any(map(_names_of, terms))
    has_factored_term = any(map(_contains_sum, terms))
    is_polynomial = all(part.kind in _POLYNOMIAL for part in node.walk())
    if has_symbols and has_factored_term and is_polynomial:
        names.add("mixed form")
    return names


def _contains_operation(node: Node) -> bool:
    """Returns True if a constant contains a function, a factorial or a power of an integer."""
    return not _names_of(node) and any(map(_is_operation, node.walk()))


def _is_operation(node: Node) -> bool:
    """Returns True for ln 2, 10! and 2^100, which are final only if the reference has the same operation."""
    if node.kind == "power":
        base, exponent = node.parts
        return _is_numeral(base) and is_integer(exponent) and not _is_numeral(node)
    return node.kind == "function" or (node.kind == "command" and node.text == "!")


def _terms(node: Node) -> Any:
    """Yields the terms of a sum and of the sums in it, without their signs."""
    if node.kind in ("sum", "plus_minus", "negative"):
        for part in node.parts:
            yield from _terms(part)
    else:
        yield node


def _contains_sum(term: Node) -> bool:
    """Returns True for a product or a power that contains a sum with symbols."""
    if term.kind not in ("product", "power"):
        return False
    return any(part.kind == "sum" and _names_of(part) for part in term.walk())


def _term_key(term: Node) -> str:
    """Returns a text that is the same for terms that can be added: those that differ in a number only."""
    above, below = _factors(term)
    rest = [_radical_key(factor) for factor in above if not _is_numeral(factor)]
    rest += [f"/{_radical_key(factor)}" for factor in below if not _is_numeral(factor)]
    return " ".join(sorted(rest))


def _radical_key(node: Node) -> str:
    """Returns the LaTeX of a factor, in which a square root has the largest square taken out."""
    if node.kind == "root" and len(node.parts) == 1 and is_integer(node.parts[0]) and len(node.parts[0].text) < 7:
        radicand = int(node.parts[0].text)
        for root in range(math.isqrt(radicand), 1, -1):
            if radicand % root**2 == 0:
                return f"root {radicand // root**2}"
        return f"root {radicand}"
    return render(node)


def _open_product(node: Node) -> set[str]:
    """Returns what a product or a quotient leaves to compute: several numbers, and factors that cancel."""
    if node.kind == "product" and _is_scientific(node):
        return set()
    above, below = _factors(node)
    names = set()
    if any(map(_names_of, below)):
        names.add("denominator")
    if any(part.kind in ("quotient", "mixed", "percent") for part in below) or any(map(_is_fraction, below)):
        names.add("quotient")

    names |= _open_numbers(above, below)
    for group in (above, below):
        if _has_open_constants(group):
            names.add("product")
    has_collection = any(factor.kind in _COLLECTIONS for factor in above + below)
    if has_collection and len(above) + len(below) > 1:
        names.add("product")
    if _has_cancelling_factors(above, below):
        names.add("cancelling")
    return names


def _open_numbers(above: list[Node], below: list[Node]) -> set[str]:
    """Returns what the numbers among the factors above and below the line leave to compute."""
    names = set()
    numbers_above = [factor for factor in above if _is_numeral(factor)]
    numbers_below = [factor for factor in below if _is_numeral(factor)]
    if len(numbers_above) > 1 or len(numbers_below) > 1:
        names.add("product")

    if len(numbers_above) == 1 and len(numbers_below) == 1:
        number, divisor = numbers_above[0], numbers_below[0]
        if not is_integer(number) or not is_integer(divisor) or _divides(divisor, number):
            names.add("quotient")
    elif len(numbers_below) == 1 and numbers_below[0].text in ("0", "1"):
        names.add("quotient")

    # factorials and powers beside a number they may share a factor with: 10 * 9!, 2^101 / 2
    has_operation_above = any(map(_is_factor_of_integers, above))
    if has_operation_above and numbers_above:
        names.add("product")
    if has_operation_above and numbers_below:
        names.add("quotient")
    return names


def _is_factor_of_integers(factor: Node) -> bool:
    return factor.kind != "function" and not _names_of(factor) and _is_operation(factor)


def _has_open_constants(factors: list[Node]) -> bool:
    """Returns True if constants among the factors on one side of the line can be multiplied."""
    constants = [factor for factor in factors if not _is_numeral(factor) and not _names_of(factor)]
    radicals = [factor for factor in constants if factor.kind == "root"]
    sums = [factor for factor in constants if factor.kind == "sum"]
    operations = [factor for factor in constants if _is_operation(factor)]
    if len(radicals) > 1 or len(sums) > 1 or len(operations) > 1:
        return True
    keys = Counter(_base_key(factor) for factor in constants)
    return any(count > 1 for count in keys.values())


def _has_cancelling_factors(above: list[Node], below: list[Node]) -> bool:
    """Returns True if a factor above the line and one below have the same base, or radicands that divide."""
    keys_above = {_base_key(factor) for factor in above if not _is_numeral(factor)}
    keys_below = {_base_key(factor) for factor in below}
    if keys_above & keys_below:
        return True
    radicals = [factor for factor in above if factor.kind == "root"]
    return any(_divide_radicands(radical, divisor) for radical in radicals for divisor in below)


def _factors(node: Node) -> tuple[list[Node], list[Node]]:
    """Returns the factors above and below the line, without signs. A numeral and a fraction of integers are factors."""
    if node.kind == "negative":
        return _factors(node.parts[0])
    if node.kind == "product" and not _is_scientific(node):
        above: list[Node] = []
        below: list[Node] = []
        for part in node.parts:
            part_above, part_below = _factors(part)
            above += part_above
            below += part_below
        return above, below
    if node.kind == "quotient":
        first, second = node.parts
        above, below = _factors(first)
        divisors, inverse = _factors(second)
        return above, below + divisors + [Node("quotient", (factor, factor)) for factor in inverse]
    return [node], []


def _base_key(node: Node) -> str:
    return render(node.parts[0]) if node.kind == "power" else render(node)


def _divides(divisor: Node, number: Node) -> bool:
    return int(divisor.text) == 0 or int(number.text) % int(divisor.text) == 0


def _divide_radicands(above: Node, below: Node) -> bool:
    radicands = [node.parts[0] for node in (above, below) if node.kind == "root" and len(node.parts) == 1]
    return len(radicands) == 2 and all(map(is_integer, radicands)) and _divides(radicands[1], radicands[0])


def _open_power(node: Node) -> set[str]:
    """Returns what a power leaves to compute: a power of a number, and of constants that have a simpler form."""
    base, exponent = node.parts
    if _names_of(base):
        return {"denominator"} if exponent.kind == "negative" else set()
    if base.kind == "power":  # (2^50)^2
        return {"power", "power of a power"}

    exponent_value = _rational(exponent)
    if _is_numeral(base):
        return _open_power_of_number(node, exponent_value)
    if base.kind == "constant" and base.text in ("\\pi", "e"):
        has_imaginary_exponent = any(part.kind == "constant" and part.text == "i" for part in exponent.walk())
        return {"power"} if exponent_value in (0, 1) or has_imaginary_exponent else set()
    return {"power"}


def _open_power_of_number(node: Node, exponent: Fraction | None) -> set[str]:
    """Returns what a power of a number leaves to compute. A power of ten is a number as it is written."""
    base = node.parts[0]
    if exponent is None:
        return set()
    if exponent.denominator > 1:
        return {"root"} if _is_rational_power(base, exponent) else set()
    is_power_of_ten = base.text == "10" and _is_numeral(node)
    return set() if is_power_of_ten else {"power"}


def _is_numeral(node: Node) -> bool:
    """Returns True for a number as it is written: 7, 0.5, 2 1/2, 10^6, 6.02 x 10^23. A fraction is a quotient."""
    if node.kind == "number" or node.kind == "mixed":
        return True
    if node.kind in ("negative", "percent"):
        return _is_numeral(node.parts[0])
    if node.kind == "power":
        base, exponent = node.parts
        magnitude = exponent.parts[0] if exponent.kind == "negative" else exponent
        return base == Node("number", (), "10") and is_integer(magnitude)
    if node.kind == "quotient":
        above, below = node.parts
        return is_integer(above) and is_integer(below) and not _divides(below, above)
    return _is_scientific(node)


def _is_scientific(node: Node) -> bool:
    if node.kind != "product" or len(node.parts) != 2:
        return False
    number, power = node.parts
    is_power_of_ten = is_integer(number) and number.text.rstrip("0") == "1" and number.text != "1"
    return number.kind == "number" and not is_power_of_ten and power.kind == "power" and _is_numeral(power)


def _is_fraction(node: Node) -> bool:
    return node.kind == "number" and not is_integer(node)


def _rational(node: Node) -> Fraction | None:
    """Returns the value of a number or a fraction of integers; None for others."""
    if node.kind == "negative":
        value = _rational(node.parts[0])
        return None if value is None else -value
    if node.kind == "number":
        return Fraction(node.text)
    if node.kind == "quotient" and all(map(is_integer, node.parts)) and int(node.parts[1].text):
        return Fraction(int(node.parts[0].text), int(node.parts[1].text))
    return None


def _is_rational_power(base: Node, exponent: Fraction) -> bool:
    """Returns True if a power of a rational number is rational, such as the square root of 49."""
    value = _rational(base)
    if value is None or exponent.denominator > MOST_BITS:
        return False
    return all(sympy.integer_nthroot(abs(x), exponent.denominator)[1] for x in (value.numerator, value.denominator))


# ------------------------------------------------------------------------------------------------------------- equality

_TOLERANCE = sympy.Rational(1, 10**6)
_ROUNDED_DIGITS = 6
"""A decimal with at least this many digits may be a rounded value."""
_PRECISION = 40
_EQUAL = sympy.Float("1e-25")
_POINTS = (sympy.Rational(7, 5), sympy.Rational(23, 11), sympy.Rational(31, 17), sympy.Rational(2, 7))


def _are_equal(gold: Any, answer: Any) -> bool:
    """Returns True if two expressions are equal: exactly, or to one millionth of a constant that a decimal rounds."""
    if answer is None or gold is None or _is_too_large(answer) or _is_too_large(gold):
        return False
    if not _are_relations_solved(answer, gold):
        return False
    exact_gold, exact_answer = _exact(gold), _exact(answer)
    exact_answer = _snapped(exact_answer, answer, exact_gold)
    exact_gold = _snapped(exact_gold, gold, exact_answer)
    if not verify([exact_gold], [exact_answer], timeout_seconds=None):
        return False
    return not _is_contradicted(exact_gold, exact_answer)


def _exact(node: Any) -> Any:
    """Returns an expression without percent signs, which are units here, with decimals as fractions."""
    if isinstance(node, sympy.MatrixBase):
        return node.applyfunc(_exact)
    if not isinstance(node, sympy.Basic):
        return node
    if node == _PERCENT:
        return sympy.S.One
    if isinstance(node, sympy.Float):
        return sympy.Rational(str(node))
    if not node.args:
        return node
    args = [_exact(arg) for arg in node.args]
    if isinstance(node, sympy.Expr) and all(isinstance(arg, sympy.Rational) for arg in args):
        return node.func(*args)  # evaluates powers, products and sums of numbers, whose size is bounded
    is_changed = any(arg is not old for arg, old in zip(args, node.args, strict=True))
    return (
        node.func(*args, evaluate=False)
        if is_changed and isinstance(node, sympy.Expr | Relational)
        else (node.func(*args) if is_changed else node)
    )


def _constants(node: Any) -> set[Any]:
    """Returns the largest parts of an expression that are constants."""
    if isinstance(node, sympy.MatrixBase):
        return set().union(*map(_constants, node.flat()))
    if isinstance(node, sympy.Expr) and not node.free_symbols:
        return {node}
    return set().union(*map(_constants, getattr(node, "args", ())))


def _snapped(exact: Any, written: Any, other: Any) -> Any:
    """Replaces rounded decimals by the constants of the other expression that they round.

    Args:
        exact: the expression with decimals as fractions.
        written: the same expression with its decimals.
        other: the other expression, with decimals as fractions. A constant with a finite decimal expansion is rounded
            only by decimals if it is one with many digits itself.
    """
    if not isinstance(exact, sympy.Basic | sympy.MatrixBase):
        return exact
    decimals = {
        sympy.Rational(str(number)) for number in _atoms(written, sympy.Float) if _digits(number) >= _ROUNDED_DIGITS
    }
    if not decimals:
        return exact
    constants = [constant for constant in _constants(other) if constant.is_real]
    replaced = {}
    for number in decimals:
        for constant in constants:
            if constant != number and not _is_short_decimal(constant) and _is_close(number, constant):
                replaced[number] = constant
                replaced[-number] = -constant
    return exact.xreplace(replaced) if replaced else exact


def _atoms(node: Any, kind: type) -> set[Any]:
    return node.atoms(kind) if isinstance(node, sympy.Basic | sympy.MatrixBase) else set()


def _digits(number: Any) -> int:
    """Returns the number of significant digits of a decimal, without zeros at its end."""
    mantissa = str(number).lower().partition("e")[0]
    return len(mantissa.lstrip("-").replace(".", "").strip("0"))


def _is_short_decimal(constant: Any) -> bool:
    """Returns True for a rational number with a finite decimal expansion of few digits, such as 0.5 or 7."""
    if not isinstance(constant, sympy.Rational):
        return False
    denominator = int(constant.q)
    for prime in (2, 5):
        while denominator % prime == 0:
            denominator //= prime
    return denominator == 1 and len(str(abs(constant.p)).strip("0")) < _ROUNDED_DIGITS


def _is_close(one: Any, other: Any) -> bool:
    difference = sympy.Abs(one - other).evalf(_PRECISION)
    size = sympy.Abs(other).evalf(_PRECISION)
    return bool(difference.is_number and size.is_number and difference <= _TOLERANCE * size)


def _is_contradicted(gold: Any, answer: Any) -> bool:
    """Returns True if values show that two expressions differ, which math-verify takes for equal.

    math-verify compares absolutely: 1e-19 times the root of 2 and of 3 are equal to it.
    """
    if isinstance(gold, sympy.MatrixBase) and isinstance(answer, sympy.MatrixBase):
        pairs = zip(gold.flat(), answer.flat(), strict=False)
        return any(_is_contradicted(*pair) for pair in pairs)
    if isinstance(gold, sympy.Tuple) and isinstance(answer, sympy.Tuple) and len(gold) == len(answer):
        return any(_is_contradicted(*pair) for pair in zip(gold, answer, strict=True))
    if isinstance(gold, sympy.FiniteSet) and isinstance(answer, sympy.FiniteSet):
        return not all(any(not _is_contradicted(one, other) for other in answer) for one in gold)
    if isinstance(gold, sympy.Interval) and isinstance(answer, sympy.Interval):
        return _is_contradicted(gold.start, answer.start) or _is_contradicted(gold.end, answer.end)
    if not isinstance(gold, sympy.Expr) or not isinstance(answer, sympy.Expr):
        return False
    if gold == answer:
        return False
    symbols = sorted(gold.free_symbols | answer.free_symbols, key=str)
    for shift in range(len(_POINTS) if symbols else 1):
        values = {symbol: _POINTS[(place + shift) % len(_POINTS)] for place, symbol in enumerate(symbols)}
        if _differ(gold.xreplace(values), answer.xreplace(values)):
            return True
    return False


def _differ(one: Any, other: Any) -> bool:
    """Returns True if the values of two constants differ relatively."""
    one_value, other_value = (complex_value(value) for value in (one, other))
    if one_value is None or other_value is None:
        return False
    difference = sympy.Abs(one_value - other_value).evalf(_PRECISION)
    size = sympy.Max(sympy.Abs(one_value).evalf(_PRECISION), sympy.Abs(other_value).evalf(_PRECISION))
    return bool(difference > _EQUAL * size)


def complex_value(constant: Any) -> Any:
    """Returns the value of a constant with many digits, None if it has none."""
    try:
        value = constant.doit().evalf(_PRECISION)
    except (TypeError, ValueError, ArithmeticError, AttributeError, NotImplementedError):
        return None
    return value if value.is_number and value.is_finite else None


# ------------------------------------------------------------------------------------------------------------ relations


def _are_relations_solved(answer: Any, gold: Any) -> bool:
    """Returns True if the answer leaves no relation unsolved that the reference does not leave unsolved."""
    relations, gold_relations = _relations(answer), _relations(gold)
    is_value = not gold_relations and bool(getattr(gold, "free_symbols", None))  # accepts f(x) = 2x for 2x
    is_solved = all(_is_solved(x) or (is_value and _is_defined_name(x.lhs)) for x in relations)
    return is_solved or not all(map(_is_solved, gold_relations))


def _relations(node: Any) -> set[Relational]:
    return node.atoms(Relational) if isinstance(node, sympy.Basic) else set()


def _is_solved(relation: Relational) -> bool:
    sides = ((relation.lhs, relation.rhs), (relation.rhs, relation.lhs))
    return any(_is_defined_name(name) and not value.free_symbols for name, value in sides)


def _is_defined_name(node: Any) -> bool:
    return isinstance(node, AppliedUndef) or is_expr_of_only_symbols(node)
