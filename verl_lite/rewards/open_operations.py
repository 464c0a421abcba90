r"""Decides whether an expression is in its final form: what it leaves to compute, by its tree.

`14/2`, `2^3`, `\sqrt{8}\sqrt{2}` and `x + x` leave operations open. An answer may leave those open that the reference
leaves open, too.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from fractions import Fraction

from sympy import integer_nthroot

from verl_lite.rewards.answer_tree import Node, is_integer, names_of, render

_POLYNOMIAL = {"number", "symbol", "sum", "negative", "product", "power", "quotient", "mixed", "constant", "root"}
_COLLECTIONS = ("matrix", "brackets", "set")
_SETS = {"\\cup", "\\setminus", "interval"}
_INEQUALITY = re.compile(r"[<>]|\\[lgn]e")
_LARGEST_ROOT = 20_000
_MOST_RADICAND_DIGITS = 6


def is_final(answer: Node, reference: Node | None) -> bool:
    """Returns True if the answer leaves nothing to compute and has no symbols that the reference does not have."""
    if reference is None:
        return not open_operations(answer)
    symbols = symbols_of(reference)
    # y is a symbol of y = x^2 as well
    if reference.kind == "relation":
        symbols |= names_of(reference.parts[0])
    if not symbols_of(answer) <= symbols:
        return False
    return open_operations(answer) <= _allowed_operations(reference)


def _allowed_operations(reference: Node) -> set[str]:
    """Returns the operations that an answer may leave open: those of the reference, and those of its equal forms."""
    allowed = open_operations(reference)
    kinds = {node.kind for node in reference.walk()}
    relations = [node.text for node in reference.walk() if node.kind == "relation"]

    # a set has several notations: R \ {2} is right for (-oo, 2) u (2, oo), and [-1, 2) for -1 <= x < 2
    if "brackets" in kinds or "operation" in kinds or _INEQUALITY.search(" ".join(relations)):
        allowed |= _SETS
    # identities and equivalent equations have other forms of products and quotients
    if "function" in allowed:
        allowed |= {"denominator", "mixed form"}
    if "relation" in kinds:
        allowed.add("mixed form")
    return allowed


def symbols_of(node: Node) -> set[str]:
    """Returns the symbols and words of an expression in lower case, without the name that a solved relation defines."""
    if node.kind == "relation" and _is_name(node.parts[0]) and set(node.text.split()) <= {"=", "\\in"}:
        # y = x^2 is right for x^2
        parts = node.parts[1:]
    elif node.kind in ("list", "set"):
        # each may be a solved relation
        parts = node.parts
    else:
        return names_of(node)

    symbols: set[str] = set()
    for part in parts:
        symbols |= symbols_of(part)
    return symbols


def _is_name(node: Node) -> bool:
    """Returns True for what an equation can define: x, f(x) and (x, y)."""
    if node.kind == "brackets":
        return all(map(_is_name, node.parts))
    return node.kind in ("symbol", "call", "word")


def open_operations(node: Node) -> set[str]:
    """Returns the names of the operations that an expression leaves to be computed."""
    parts = node.parts
    # the call on the left of f(3) = 7 is computed on the right
    if node.kind == "relation" and parts[0].kind == "call":
        parts = parts[1:]
    names: set[str] = set()
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
        case "root" if _is_open_root(node):
            names.add("root")
        case "function" | "call" | "absolute":
            names.add(node.kind)
        case "operation" | "command":
            names.add(node.text)
        case "brackets" if node.text != "()":
            names.add("interval")
    return names


def _is_open_root(node: Node) -> bool:
    """Returns True if a root has a rational value, or an index that is no positive integer."""
    radicand = node.parts[0]
    if len(node.parts) == 1:
        return _is_rational_power(radicand, Fraction(1, 2))
    index = node.parts[1]
    if not is_integer(index) or int(index.text) == 0:
        return True
    return _is_rational_power(radicand, Fraction(1, int(index.text)))


def _open_sum(node: Node) -> set[str]:
    """Returns what a sum leaves to compute: several numbers, equal terms, and products that are not expanded."""
    names = set()
    terms = list(_terms(node))
    numerals = [term for term in terms if _is_numeral(term)]
    others = [term for term in terms if not _is_numeral(term)]
    has_zero = any(term.text == "0" for term in numerals)
    if len(numerals) > 1 or has_zero:
        names.add("sum")

    # with several of these terms a sum can restate the exercise: 2^101 - 2^100, ln 6 - ln 2
    operation_terms = [term for term in others if _contains_operation(term)]
    if len(operation_terms) > 1 or _has_repeated(map(_term_key, others)):
        names.add("sum")
    # a sum of tuples or matrices is one of their entries
    if any(term.kind in _COLLECTIONS for term in others):
        names.add("sum")

    # x(x + 1) + 1 is neither expanded nor factored
    has_symbols = any(map(names_of, terms))
    has_factored_term = any(map(_contains_sum, terms))
    is_polynomial = all(part.kind in _POLYNOMIAL for part in node.walk())
    if has_symbols and has_factored_term and is_polynomial:
        names.add("mixed form")
    return names


def _has_repeated(keys: Iterable[str]) -> bool:
    return any(count > 1 for count in Counter(keys).values())


def _contains_operation(node: Node) -> bool:
    """Returns True if a constant contains a function, a factorial or a power of an integer."""
    return not names_of(node) and any(map(_is_operation, node.walk()))


def _is_operation(node: Node) -> bool:
    """Returns True for ln 2, 10! and 2^100, which are final only if the reference has the same operation."""
    if node.kind == "power":
        base, exponent = node.parts
        is_power_of_ten = _is_numeral(node)
        return _is_numeral(base) and is_integer(exponent) and not is_power_of_ten
    is_factorial = node.kind == "command" and node.text == "!"
    return node.kind == "function" or is_factorial


def _terms(node: Node) -> Iterator[Node]:
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
    return any(part.kind == "sum" and names_of(part) for part in term.walk())


def _term_key(term: Node) -> str:
    """Returns a text that is the same for terms that can be added: those that differ in a number only."""
    above, below = _factors(term)
    keys = []
    for factor in above:
        if not _is_numeral(factor):
            keys.append(_radical_key(factor))
    for factor in below:
        if not _is_numeral(factor):
            keys.append(f"/{_radical_key(factor)}")
    return " ".join(sorted(keys))


def _radical_key(node: Node) -> str:
    """Returns the LaTeX of a factor, in which a square root has the largest square taken out: root 3 for root 12."""
    if not _is_square_root_of_integer(node):
        return render(node)
    digits = node.parts[0].text
    # the loop below would take long
    if len(digits) > _MOST_RADICAND_DIGITS:
        return render(node)
    radicand = int(digits)
    for root in range(math.isqrt(radicand), 1, -1):
        square = root**2
        if radicand % square == 0:
            return f"root {radicand // square}"
    return f"root {radicand}"


def _open_product(node: Node) -> set[str]:
    """Returns what a product or a quotient leaves to compute: several numbers, and factors that cancel."""
    if node.kind == "product" and _is_scientific(node):
        return set()
    above, below = _factors(node)
    names = _open_numbers(above, below)
    if _has_open_constants(above) or _has_open_constants(below):
        names.add("product")
    if any(map(_is_fraction, below)):
        names.add("quotient")
    # (x^2 - 1) / (x - 1): whether it can be simplified is not decided, so the reference must have one, too
    if any(map(names_of, below)):
        names.add("denominator")
    if _has_cancelling_factors(above, below):
        names.add("cancelling")
    # a multiple of a tuple or a matrix
    factors = above + below
    has_collection = any(factor.kind in _COLLECTIONS for factor in factors)
    if has_collection and len(factors) > 1:
        names.add("product")
    return names


def _open_numbers(above: list[Node], below: list[Node]) -> set[str]:
    """Returns what the numbers among the factors above and below the line leave to compute."""
    names = set()
    numbers_above = [factor for factor in above if _is_numeral(factor)]
    numbers_below = [factor for factor in below if _is_numeral(factor)]
    if len(numbers_above) > 1 or len(numbers_below) > 1:
        names.add("product")

    if len(numbers_above) == 1 and len(numbers_below) == 1:
        [number] = numbers_above
        [divisor] = numbers_below
        # 14/2 and 1.5/3 are to be computed; 14/4, a fraction that can be reduced, is accepted
        if not is_integer(number) or not is_integer(divisor) or _divides(divisor, number):
            names.add("quotient")
    elif len(numbers_below) == 1 and numbers_below[0].text in ("0", "1"):
        names.add("quotient")

    # a factorial or a power may share a factor with the number next to it: 10 * 9!, 2^101 / 2
    has_operation_above = any(map(_is_factor_of_integers, above))
    if has_operation_above and numbers_above:
        names.add("product")
    if has_operation_above and numbers_below:
        names.add("quotient")
    return names


def _is_factor_of_integers(factor: Node) -> bool:
    """Returns True for a factorial or a power of an integer."""
    return factor.kind != "function" and not names_of(factor) and _is_operation(factor)


def _has_open_constants(factors: list[Node]) -> bool:
    """Returns True if constants among the factors on one side of the line can be multiplied."""
    constants = [factor for factor in factors if not _is_numeral(factor) and not names_of(factor)]
    kinds = Counter(factor.kind for factor in constants)
    num_operations = sum(map(_is_operation, constants))
    if kinds["root"] > 1 or kinds["sum"] > 1 or num_operations > 1:
        return True
    # pi * pi^2
    return _has_repeated(map(_base_key, constants))


def _has_cancelling_factors(above: list[Node], below: list[Node]) -> bool:
    """Returns True if a factor above the line and one below have the same base, or radicands that divide."""
    keys_above = {_base_key(factor) for factor in above if not _is_numeral(factor)}
    keys_below = {_base_key(factor) for factor in below}
    if keys_above & keys_below:
        return True
    for factor in above:
        for divisor in below:
            if _divide_radicands(factor, divisor):
                return True
    return False


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
        divisors, nested_divisors = _factors(second)
        # a quotient below the line remains one, so that `_open_product` sees it: 1 / (2/3); its value does not matter
        nested_quotients = [Node("quotient", (factor, factor)) for factor in nested_divisors]
        return above, below + divisors + nested_quotients
    return [node], []


def _base_key(node: Node) -> str:
    """Returns the LaTeX of the base of a power, or of another factor itself."""
    base = node.parts[0] if node.kind == "power" else node
    return render(base)


def _divides(divisor: Node, number: Node) -> bool:
    """Returns True if one integer divides another; also for a divisor of 0, which leaves a quotient without a value."""
    divisor_value = int(divisor.text)
    return divisor_value == 0 or int(number.text) % divisor_value == 0


def _divide_radicands(above: Node, below: Node) -> bool:
    """Returns True for two square roots of integers of which the lower divides the upper, such as root 6 / root 2."""
    if not _is_square_root_of_integer(above) or not _is_square_root_of_integer(below):
        return False
    return _divides(below.parts[0], above.parts[0])


def _is_square_root_of_integer(node: Node) -> bool:
    return node.kind == "root" and len(node.parts) == 1 and is_integer(node.parts[0])


def _open_power(node: Node) -> set[str]:
    """Returns what a power leaves to compute: a power of a number, and of constants that have a simpler form."""
    base, exponent = node.parts
    if names_of(base):
        # x^{-1} is 1/x
        return {"denominator"} if exponent.kind == "negative" else set()
    if base.kind == "power":  # (2^50)^2
        return {"power", "power of a power"}

    exponent_value = _rational(exponent)
    if _is_numeral(base):
        return _open_power_of_number(node, exponent_value)
    is_pi_or_e = base.kind == "constant" and base.text in ("\\pi", "e")
    if not is_pi_or_e:
        return {"power"}
    # Euler's formula gives it a simpler form: e^{i pi} is -1
    has_imaginary_exponent = any(part.kind == "constant" and part.text == "i" for part in exponent.walk())
    if exponent_value in (0, 1) or has_imaginary_exponent:
        return {"power"}
    return set()


def _open_power_of_number(node: Node, exponent: Fraction | None) -> set[str]:
    """Returns what a power of a number leaves to compute. A power of ten is a number as it is written."""
    base = node.parts[0]
    if exponent is None:
        return set()
    # a fraction as exponent is a root: 4^{1/2}
    if exponent.denominator > 1:
        return {"root"} if _is_rational_power(base, exponent) else set()
    is_power_of_ten = base.text == "10" and _is_numeral(node)
    return set() if is_power_of_ten else {"power"}


def _is_numeral(node: Node) -> bool:
    """Returns True for a number as it is written: 7, 0.5, 2 1/2, 10^6, 6.02 x 10^23. A fraction is a quotient."""
    if node.kind in ("number", "mixed"):
        return True
    if node.kind in ("negative", "percent"):
        return _is_numeral(node.parts[0])
    if node.kind == "power":
        base, exponent = node.parts
        magnitude = exponent.parts[0] if exponent.kind == "negative" else exponent
        return base == Node("number", (), "10") and is_integer(magnitude)
    if node.kind == "quotient":
        above, below = node.parts
        # 14/2 is a quotient to be computed
        return is_integer(above) and is_integer(below) and not _divides(below, above)
    return _is_scientific(node)


def _is_scientific(node: Node) -> bool:
    """Returns True for a number in scientific notation. 10 x 10^2 is a product that is to be computed."""
    if node.kind != "product" or len(node.parts) != 2:
        return False
    number, power = node.parts
    if number.kind != "number" or power.kind != "power":
        return False
    # 10 or 100 before a power of ten
    is_power_of_ten = is_integer(number) and number.text.rstrip("0") == "1" and number.text != "1"
    return not is_power_of_ten and _is_numeral(power)


def _is_fraction(node: Node) -> bool:
    """Returns True for a number that is written as a fraction, a decimal or a percentage."""
    if node.kind == "number":
        return not is_integer(node)
    return node.kind in ("quotient", "mixed", "percent")


def _rational(node: Node) -> Fraction | None:
    """Returns the value of a number or a fraction of integers; None for others."""
    match node.kind:
        case "negative":
            value = _rational(node.parts[0])
            return None if value is None else -value
        case "number":
            return Fraction(node.text)
        case "quotient" if all(map(is_integer, node.parts)):
            above, below = (int(part.text) for part in node.parts)
            return Fraction(above, below) if below else None
    return None


def _is_rational_power(base: Node, exponent: Fraction) -> bool:
    """Returns True if a power of a rational number is rational, such as the square root of 49."""
    value = _rational(base)
    if value is None or exponent.denominator > _LARGEST_ROOT:
        return False
    _, is_root_of_numerator = integer_nthroot(abs(value.numerator), exponent.denominator)
    _, is_root_of_denominator = integer_nthroot(value.denominator, exponent.denominator)
    return is_root_of_numerator and is_root_of_denominator
