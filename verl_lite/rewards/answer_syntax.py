r"""Parses the LaTeX of a final answer into a tree (`answer_tree`), without evaluating anything.

math-verify's parser evaluates while it parses: `\frac{14}{2}` becomes 7, `3(4)` becomes 7, and a trailing `\text{...}`
is dropped with everything before it that looks like a unit. So the form of an answer is judged by this tree, and
math-verify compares the values of what is rendered from it.
"""

import re
from dataclasses import dataclass

from verl_lite.rewards.answer_tokens import FUNCTIONS, Token, UnknownSyntax, clean, tokens_of
from verl_lite.rewards.answer_tree import Node, is_integer, names_of, render

_GREEK = (
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau "
    "upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega ell"
).split()
_RELATIONS = {"=", "<", ">", "\\le", "\\ge", "\\ne", "\\approx", "\\in"}
_REVERSED = {">": "<", "\\ge": "\\le"}
_OPERATIONS = {"\\cup", "\\cap", "\\setminus"}
_INFIX_COMMANDS = {"\\cdot", "\\times", "\\div", "\\pm", "\\mp", "\\}", "\\\\"}
"""Commands that stand after an operand: they end a product of factors without signs between them."""
_OPERAND_COMMANDS = {"\\frac", "\\sqrt", "\\pi", "\\infty", "\\{"}
_UNIT_TEXT = re.compile(r"(?i)[a-zµμΩåéèü.\s/²³^·\-]*[a-zµμΩ][a-zµμΩåéèü.\s/²³^·\-]*")
_NO_UNITS = re.compile(r"(?i)\b(?:or|and|if|for|when|not|but|to|than|if)\b")
_SHORT_UNITS = (
    "m g s h l L N J W V A K C F m cm mm km dm nm kg mg ml mL cl dl in ft yd mi lb oz kN kJ kW MW Hz Pa mol hr hrs min "
    "sec ms mph kmh kph rad deg sq cu ha pts pt yr yrs am pm USD EUR units"
).split()
_LONGEST_UNIT = 40


@dataclass(frozen=True)
class Answer:
    """A parsed answer.

    Attributes:
        node: the expression, without its unit.
        unit: the words of the unit, "" without one.
    """

    node: Node
    unit: str = ""

    def latex(self) -> str:
        return render(self.node)


# -------------------------------------------------------------------------------------------------------------- parser


def parse_answer(text: str, letters_are_units: bool = False) -> Answer:
    """Parses an answer.

    Args:
        text: LaTeX of the answer.
        letters_are_units: True to read a single letter after a number, such as m, as a unit also without a space
            between.

    Raises:
        UnknownSyntax: if the text is no expression that this module can read.
    """
    parser = _Parser(tokens_of(clean(text)), letters_are_units)
    node = parser.items()
    if parser.token is not None:
        raise UnknownSyntax(f"{parser.token.text!r} is not expected")
    return Answer(node, parser.unit)


class _Parser:
    """A parser by recursive descent. `token` is the next token, None at the end."""

    def __init__(self, tokens: list[Token], letters_are_units: bool) -> None:
        # the next token is last, so that taking it costs nothing
        self._rest = tokens[::-1]
        self._letters_are_units = letters_are_units
        self.unit = ""

    @property
    def token(self) -> Token | None:
        """The next token, None at the end."""
        return self._rest[-1] if self._rest else None

    def _next(self) -> Token:
        """Takes the next token. Raises UnknownSyntax at the end."""
        if not self._rest:
            raise UnknownSyntax("the expression ends early")
        return self._rest.pop()

    def _is(self, *texts: str) -> bool:
        """Returns True if the next token is one of these marks or commands."""
        token = self.token
        if token is None:
            return False
        return token.kind in ("mark", "command") and token.text in texts

    def _accept(self, *texts: str) -> bool:
        """Takes the next token if it is one of these marks or commands. Returns True if it did."""
        if not self._is(*texts):
            return False
        self._rest.pop()
        return True

    def _expect(self, text: str) -> None:
        if not self._accept(text):
            raise UnknownSyntax(f"{text!r} is expected")

    def items(self) -> Node:
        """Parses items between commas, semicolons and the words and, or."""
        items = [self._relation()]
        while self._accept(",", ";"):
            # "1, 2, and 3" has two separators in a row
            while self._accept(",", ";"):
                pass
            items.append(self._relation())
        return _one_or_all("list", items)

    def _relation(self) -> Node:
        """Parses sides between relation signs: x = 7, 0 < x <= 1."""
        sides = [self._set_operation()]
        operators = []
        while self.token is not None and self.token.text in _RELATIONS:
            operators.append(self._next().text)
            sides.append(self._set_operation())
        if not operators:
            return sides[0]

        # 3 > x > -3 becomes -3 < x < 3, the only direction that is compared as an interval
        is_descending = len(operators) > 1 and set(operators) <= set(_REVERSED)
        if is_descending:
            sides.reverse()
            operators = [_REVERSED[operator] for operator in reversed(operators)]
        return Node("relation", tuple(sides), " ".join(operators))

    def _set_operation(self) -> Node:
        """Parses sets with unions, intersections and differences between them."""
        node = self._sum()
        while self.token is not None and self.token.text in _OPERATIONS:
            operator = self._next().text
            node = Node("operation", (node, self._sum()), operator)
        return node

    def _sum(self) -> Node:
        """Parses terms between + and -, or a value with a plus-minus sign. Takes the unit after it."""
        if self._accept("\\pm", "\\mp"):
            return Node("plus_minus", (self._signed_term(),))
        terms = [self._signed_term()]
        while True:
            if self._accept("+"):
                terms.append(self._signed_term())
            elif self._accept("-"):
                terms.append(Node("negative", (self._signed_term(),)))
            elif self._accept("\\pm", "\\mp"):
                before = _one_or_all("sum", terms)
                terms = [Node("plus_minus", (before, self._signed_term()))]
            else:
                break
        node = _one_or_all("sum", terms)
        self._take_unit(node)
        return node

    def _signed_term(self) -> Node:
        """Parses a term with any number of signs before it."""
        if self._accept("+"):
            return self._signed_term()
        if self._accept("-"):
            return Node("negative", (self._signed_term(),))
        return self._term()

    def _term(self) -> Node:
        """Parses factors between signs of multiplication and division."""
        node = self._adjacent()
        while True:
            if self._accept("*", "\\cdot", "\\times"):
                node = Node("product", (node, self._signed_factor()))
            elif self._accept("/", "\\div", ":"):
                # the slash of 5/min begins a unit, which `_take_unit` reads
                is_unit = self.token is not None and self.token.kind in ("word", "text")
                if is_unit:
                    self._rest.append(Token("mark", "/"))
                    return node
                node = Node("quotient", (node, self._signed_factor()))
            else:
                return node

    def _signed_factor(self) -> Node:
        """Parses a factor after a sign of multiplication or division, where it may be negative."""
        if self._accept("-"):
            return Node("negative", (self._signed_factor(),))
        return self._adjacent()

    def _adjacent(self, in_function: bool = False) -> Node:
        """Parses factors without signs between them.

        Args:
            in_function: True for the argument of a function without brackets, which ends before the next function.
        """
        factors = [self._power()]
        while self._begins_factor(in_function):
            if self._at_unit(factors):
                break
            factor = self._power()
            # an integer before a fraction forms a mixed number with it
            mixed = self._mixed(factors[-1], factor)
            if mixed is None:
                factors.append(factor)
            else:
                factors[-1] = mixed
        return _one_or_all("product", factors)

    def _mixed(self, whole: Node, following: Node) -> Node | None:
        r"""Returns the mixed number that an integer and what follows it are (2\frac{1}{2}, 2 1/2), else None."""
        if not is_integer(whole):
            return None
        if following.kind == "quotient":
            above, below = following.parts
        elif is_integer(following):
            denominator = self._take_denominator()
            if denominator is None:
                return None
            above = following
            below = Node("number", (), denominator)
        else:
            return None

        # an integer next to any other fraction could be a sum (a mixed number) or a product
        are_integers = is_integer(above) and is_integer(below)
        is_proper = are_integers and 0 < int(above.text) < int(below.text)
        if not is_proper:
            raise UnknownSyntax("an integer stands beside a fraction that is not proper")
        return Node("mixed", (whole, above, below))

    def _take_denominator(self) -> str | None:
        """Takes a slash and an integer, and returns the integer; takes nothing and returns None otherwise."""
        if len(self._rest) < 2:
            return None
        mark = self._rest[-1]
        number = self._rest[-2]
        # a mark such as ① is a digit too, but no number
        if mark.text != "/" or number.kind != "number" or not number.text.isdigit():
            return None
        del self._rest[-2:]
        return number.text

    def _begins_factor(self, in_function: bool) -> bool:
        """Returns True if the next token can follow a factor without a sign. For `in_function` see `_adjacent`."""
        token = self.token
        if token is None:
            return False
        if token.kind in ("number", "letter", "word", "text", "literal", "begin"):
            return True
        if token.kind != "command":
            # a bar may close an absolute value as well
            return token.text in ("(", "[", "{")
        if token.text in _OPERAND_COMMANDS:
            return True
        if token.text in _RELATIONS | _OPERATIONS | _INFIX_COMMANDS:
            return False
        is_function = token.text[1:] in FUNCTIONS
        # \sin x \cos x is a product of two functions
        return not (in_function and is_function)

    def _at_unit(self, factors: list[Node]) -> bool:
        """Returns True if the next token begins a unit of the value before it."""
        token = self.token
        if token is None:
            return False
        if token.kind == "text":
            return _is_unit(token.text)
        # in 2ab, b is a symbol rather than a unit
        if any(map(names_of, factors)):
            return False
        if token.kind == "word":
            is_long = len(token.text) > 2 and token.text.isascii()
            return token.text in _SHORT_UNITS or is_long
        if token.kind != "letter" or token.text not in _SHORT_UNITS:
            return False
        if not token.follows_space and not self._letters_are_units:
            return False
        # in "3 m + 2", m is a symbol
        if len(self._rest) == 1:
            return True
        following = self._rest[-2]
        return following.text in (",", ";", "/", "^")

    def _take_unit(self, value: Node) -> None:
        """Takes the unit of a value: words, with exponents, and products and quotients of them."""
        is_rate = self._is("/") and self._is_unit_next()
        if not is_rate and not self._at_unit([value]):
            return

        words = []
        while self.token is not None:
            if self.token.kind in ("text", "word", "letter"):
                word = self._next().text
                if not _is_unit(word):
                    raise UnknownSyntax(f"{word!r} is no unit")
                words.append(word)
            elif self._is("^"):
                self._next()
                exponent = self._argument()
                if exponent.kind not in ("number", "negative"):
                    raise UnknownSyntax("a unit has an exponent that is no number")
                words.append(f"^{render(exponent)}")
            elif self._is("/", "\\cdot") and self._is_unit_next():
                words.append(self._next().text)
            else:
                break

        letters = "".join(words).lower()
        # without spaces: "square cm" and "squarecm" are the same unit
        unit = "".join(letters.split())
        if len(unit) > _LONGEST_UNIT:
            raise UnknownSyntax("a unit is too long")
        self.unit = self.unit or unit  # the first one of "7 cm, 8 cm"

    def _is_unit_next(self) -> bool:
        """Returns True if letters follow the next token, which is the sign of a product or quotient."""
        return len(self._rest) > 1 and self._rest[-2].kind in ("text", "word", "letter")

    def _power(self) -> Node:
        """Parses an operand with an exponent. A degree sign is dropped."""
        node = self._postfix(self._atom())
        if not self._accept("^"):
            return node

        # degrees are a unit that answers may leave out: 30^\circ and 30^{\circ} are 30
        if self._accept("\\circ"):
            return node
        next_texts = [token.text for token in reversed(self._rest[-3:])]
        if next_texts == ["{", "\\circ", "}"]:
            del self._rest[-3:]
            return node
        exponent = self._argument(takes_number=True)
        return self._postfix(Node("power", (node, exponent)))

    def _postfix(self, node: Node) -> Node:
        """Takes the percent signs, factorials and indices behind an operand."""
        while True:
            if self._accept("%"):
                node = Node("percent", (node,))
            elif self._accept("!"):
                node = Node("command", (node,), "!")
            elif self._is("_"):
                self._next()
                index = self._argument(takes_number=True)
                # x_1 is another symbol than x, and 101_2 a numeral with its base
                if node.kind == "symbol":
                    node = Node("symbol", (), f"{node.text}_{{{render(index)}}}")
                else:
                    node = Node("command", (node, index), "_")
            else:
                return node

    def _argument(self, takes_number: bool = False) -> Node:
        """Parses what a command applies to: a group in braces, or the next sign, as TeX reads it.

        takes_number: True to take a whole number as one sign, for exponents (10^12).
        """
        if self._accept("{"):
            node = self.items()
            self._expect("}")
            return node
        if self._accept("-"):
            return Node("negative", (self._argument(takes_number),))

        # TeX takes one sign: \frac12 is 1/2 and \sqrt ab is \sqrt{a} b, so the rest of the token stays to be read
        token = self.token
        if token is not None and token.kind == "number" and len(token.text) > 1 and not takes_number:
            self._next()
            self._rest.append(Token("number", token.text[1:]))
            return Node("number", (), token.text[0])
        if token is not None and token.kind == "word":
            self._next()
            kind_of_rest = "letter" if len(token.text) == 2 else "word"
            self._rest.append(Token(kind_of_rest, token.text[1:]))
            return _symbol(token.text[0])
        return self._atom()

    def _atom(self) -> Node:
        """Parses a single operand: a numeral, a letter, a word, a command, or an expression in brackets."""
        token = self._next()
        if token.kind == "number":
            return _number(token.text)
        if token.kind == "letter":
            return self._letter(token.text)
        if token.kind == "word":
            if len(token.text) > 3:
                return Node("word", (), token.text.lower())
            # ab and abc are products of symbols
            symbols = tuple(map(_symbol, token.text))
            return Node("product", symbols)
        if token.kind == "text":
            return Node("word", (), token.text.lower())
        if token.kind == "literal":
            return Node("constant", (), token.text)
        if token.kind == "begin":
            return self._environment(token.text)
        if token.kind == "command":
            return self._command(token.text)
        if token.text in ("(", "["):
            return self._brackets(token.text)
        if token.text == "{":
            node = self.items()
            self._expect("}")
            return node
        if token.text == "|":
            node = self._sum()
            self._expect("|")
            return Node("absolute", (node,))
        raise UnknownSyntax(f"{token.text!r} is not expected")

    def _letter(self, letter: str) -> Node:
        """Returns a symbol, or a call of f, g or h with arguments in brackets."""
        # f(3) is the value of a function, and x(3) a product
        if letter in "fgh" and self._accept("("):
            arguments = self.items()
            self._expect(")")
            return Node("call", (arguments,), letter)
        return _symbol(letter)

    def _brackets(self, opening: str) -> Node:
        """Parses the content of brackets after the opening one: an expression, a tuple or an interval."""
        content = self.items()
        closing = self._next().text
        # the brackets of a half-open interval differ
        if closing not in (")", "]"):
            raise UnknownSyntax(f"{closing!r} does not close {opening!r}")
        # brackets around an expression only group it
        if content.kind != "list":
            return content
        return Node("brackets", content.parts, opening + closing)

    def _environment(self, name: str) -> Node:
        r"""Parses a matrix or a determinant after its \begin."""
        if "matrix" not in name:
            raise UnknownSyntax(f"the environment {name!r} is not known")
        rows: list[list[Node]] = [[self._sum()]]
        while self.token is not None and self.token.kind != "end":
            if self._accept("&"):
                rows[-1].append(self._sum())
            elif self._accept("\\\\"):
                # a line may end with \\
                is_last_row = self.token is None or self.token.kind == "end"
                if not is_last_row:
                    rows.append([self._sum()])
            else:
                raise UnknownSyntax(f"{self.token.text!r} is not expected in a matrix")
        self._next()

        row_nodes = tuple(Node("list", tuple(row)) for row in rows)
        # a determinant, which is to be computed
        if name == "vmatrix":
            return Node("command", row_nodes, name)
        return Node("matrix", row_nodes, "pmatrix")

    def _command(self, name: str) -> Node:
        """Parses what follows a command, as far as this module knows it."""
        if name == "\\frac":
            return Node("quotient", (self._argument(), self._argument()))
        if name == "\\sqrt":
            return self._root()
        if name[1:] in FUNCTIONS:
            return self._function(name)
        if name == "\\{":
            # a set without elements
            if self._accept("\\}"):
                return Node("constant", (), r"\emptyset")
            content = self.items()
            self._expect("\\}")
            elements = content.parts if content.kind == "list" else (content,)
            return Node("set", elements)
        if name in ("\\pi", "\\infty"):
            return Node("constant", (), name)
        if name[1:] in _GREEK:
            return Node("symbol", (), name)
        if name in ("\\overline", "\\bar", "\\vec", "\\hat", "\\tilde"):
            return Node("command", (self._argument(),), name)
        raise UnknownSyntax(f"the command {name} is not known")

    def _root(self) -> Node:
        """Parses the index, if there is one, and the radicand of a root."""
        index = None
        if self._accept("["):
            index = self._sum()
            self._expect("]")
        # TeX would draw the root over the bracket alone, but \sqrt(2) means the root of 2
        if self._accept("("):
            radicand = self._brackets("(")
        else:
            radicand = self._argument()
        if index is None:
            return Node("root", (radicand,))
        return Node("root", (radicand, index))

    def _function(self, name: str) -> Node:
        """Parses a function after its name: a base or an exponent in any order, then the argument."""
        base: Node | None = None
        exponent: Node | None = None
        while self._is("_", "^"):
            if self._next().text == "_":
                base = self._argument()
            else:
                exponent = self._argument()
        if self._accept("("):
            argument = self._brackets("(")
        else:
            argument = self._adjacent(in_function=True)

        if name == "\\exp" and base is None and exponent is None:
            return Node("power", (Node("constant", (), "e"), argument))

        # \sin^{-1} x is the inverse function, unlike \sin^2 x
        minus_one = Node("negative", (Node("number", (), "1"),))
        if exponent == minus_one and name in ("\\sin", "\\cos", "\\tan"):
            return Node("function", (argument,), f"\\arc{name[1:]}")

        operands = (argument,) if base is None else (argument, base)
        value = Node("function", operands, name)
        if exponent is None:
            return value
        return Node("power", (value, exponent))


def _one_or_all(kind: str, parts: list[Node]) -> Node:
    """Returns the only part itself, or a node of this kind with all parts."""
    return parts[0] if len(parts) == 1 else Node(kind, tuple(parts))


def _symbol(letter: str) -> Node:
    """Returns the node of a letter. e and i are always the constants."""
    kind = "constant" if letter in "ei" else "symbol"
    return Node(kind, (), letter)


def _number(text: str) -> Node:
    """Returns a numeral, which is a product with a power of ten for 1.6e-19."""
    digits, mark, exponent_text = text.lower().partition("e")
    # 007 is 7, and .5 is 0.5
    digits = digits.lstrip("0") or "0"
    if digits.startswith("."):
        digits = f"0{digits}"
    number = Node("number", (), digits)
    if not mark:
        return number

    exponent_digits = exponent_text.lstrip("+-").lstrip("0") or "0"
    exponent = Node("number", (), exponent_digits)
    if "-" in exponent_text:
        exponent = Node("negative", (exponent,))
    ten = Node("number", (), "10")
    power_of_ten = Node("power", (ten, exponent))
    return Node("product", (number, power_of_ten))


def _is_unit(text: str) -> bool:
    """Returns True for letters that can be a unit; "3 or 4" has none."""
    if _NO_UNITS.search(text):
        return False
    return _UNIT_TEXT.fullmatch(text) is not None
