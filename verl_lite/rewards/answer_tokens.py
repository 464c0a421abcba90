r"""Cleans the LaTeX of a final answer from layout, and splits it into tokens."""

# ruff: noqa: E501 (rows of the tables, in which ruff counts wide characters twice)

import math
import re
import unicodedata
from dataclasses import dataclass


class UnknownSyntax(ValueError):
    """The text is no expression that this module can read."""


# ------------------------------------------------------------------------------------------------------------- cleaning

_REPLACED = {
    "−": "-", "–": "-", "—": "-", "﹣": "-", "－": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ",
    "÷": r"\div ", "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ",
    "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "ℝ": r"\mathbb{R}", "°": r"^\circ ", "℃": r"^\circ ", "，": ", ",
    "、": ", ", "；": "; ", "。": ". ", "：": ":", "（": "(", "）": ")", "［": "[", "］": "]", "｛": r"\{", "｝": r"\}",
    "％": r"\%", "＝": "=", "＋": "+", "／": "/", "＊": "*", "．": ".", "＜": "<", "＞": ">", "…": r"\ldots ", "√": r"\sqrt ",
    "\u200b": "", "\ufeff": "", "\u2009": r"\,", "\u202f": r"\,", "\u00a0": r"\,", "€": "", "£": "", "¥": "", "₹": "", "￥": "",
}  # fmt: skip
_SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-", strict=True))
_SUPERSCRIPT = re.compile(f"[{''.join(_SUPERSCRIPTS)}]+")
_ROOT_OF_DIGITS = re.compile(r"√\s*(\d+(?:\.\d+)?)")
_GROUPED = re.compile(r"(?<=\d)(?:\{,\}\s*|,?\\[,!;: ]|,\\!|~)+(?=\d{3}(?!\d))")
"""A mark between groups of three digits, as LaTeX writes it."""
# 12 345 678
_SPACED = re.compile(r"(?<![\d.\w])\d{1,3}(?: \d{3})+(?![\d\w])")
_LAYOUT = re.compile(
    r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|limits|quad|qquad|mathstrut|nonumber|hfill)(?![a-zA-Z])"
    r"|\\(?:underline|large|Large|LARGE|huge|Huge|small|bf|it|(?:text)?color\s*\{[^{}]*\})(?![a-zA-Z])"
    r"|\\[hv]space\*?\{[^{}]*\}|(?<!\\)\\[,;:! ]|(?<!\\)\\[()]|\\?\$|~"
)
_DEGREE = re.compile(r"\^?\s*\{?\\degree(?![a-zA-Z])\}?")
# the end of 4^\text{th}
_ORDINAL = re.compile(r"(?<=\d)\s*\^\s*\{?\s*\\(?:text|mathrm|textrm)\s*\{\s*(?:st|nd|rd|th)\s*\}\s*\}?")
# the beginning of m\angle ABC = 30
_NAMED_ANGLE = re.compile(r"\A(?:m\s*)?\\angle\s*[A-Z]{1,3}\s*=\s*")
_CURRENCY = re.compile(r"\A(?:USD|EUR|GBP|US|Rs\.?)\s*(?=\d)")
_REPEATING = re.compile(r"(?<![\d.])(\d{1,50})\.(\d{0,50})\\overline\s*\{(\d{1,50})\}")
"""A decimal whose digits under the line repeat without end."""

_DISPLAY = re.compile(r"\A\s*\\\[(.*)\\\]\s*\Z", re.DOTALL)
_EMPHASIS = re.compile(r"\A(\*{1,3}|_{1,2}|`+)(.+)\1\Z", re.DOTALL)
_PREFIX = re.compile(r"(?i)\A(?:the\s+)?(?:final\s+)?answer(?:\s+is)?\s*:?\s+")


def clean(text: str) -> str:
    """Removes marks of layout and emphasis from an answer, and writes the characters of other scripts as LaTeX."""
    # before single characters are replaced, because \sqrt would apply to the first digit only
    text = _ROOT_OF_DIGITS.sub(r"\\sqrt{\1}", text)
    text = _SUPERSCRIPT.sub(_exponent_of_superscript, text)
    text = "".join(map(_as_latex, text)).strip()

    # marks around the whole answer, which can be nested; the last group of both patterns is what they enclose
    while match := _EMPHASIS.match(text) or _DISPLAY.match(text):
        content = match[match.lastindex or 0]
        text = content.strip()
    text = _REPEATING.sub(_fraction_of_repeating, text)
    text = _DEGREE.sub(r"^\\circ", text)
    text = _ORDINAL.sub("", text)
    # before _LAYOUT, which would turn LaTeX's spaces between groups of digits to blanks
    text = _GROUPED.sub("", text)
    text = _LAYOUT.sub(" ", text).strip()
    # a second time: marks of emphasis that stood inside dollar signs
    while match := _EMPHASIS.match(text):
        text = match[2].strip()
    text = _SPACED.sub(lambda match: match[0].replace(" ", ""), text)
    text = _PREFIX.sub("", text)
    text = _NAMED_ANGLE.sub("", text)
    text = _CURRENCY.sub("", text)
    return text.rstrip(" .,;:")


def _exponent_of_superscript(match: re.Match[str]) -> str:
    """Returns the LaTeX of superscript characters: ^{12} for ¹²."""
    digits = "".join(_SUPERSCRIPTS[character] for character in match[0])
    return f"^{{{digits}}}"


def _as_latex(character: str) -> str:
    """Returns a character in ASCII or as LaTeX, unchanged if it has no equivalent."""
    if character.isascii():
        return character
    if character.isdecimal():
        return str(unicodedata.decimal(character))
    parts = unicodedata.normalize("NFKC", character).split("⁄")
    is_fraction = "VULGAR FRACTION" in unicodedata.name(character, "")
    if is_fraction and len(parts) == 2:
        above, below = parts
        return rf"\frac{{{above}}}{{{below}}}"
    return _REPLACED.get(character, character)


def _fraction_of_repeating(match: re.Match[str]) -> str:
    r"""Returns the fraction that equals a repeating decimal: \frac{1}{6} for 0.1\overline{6}."""
    whole, first_digits, repeated = match.groups()
    # with d = 0.1666..., 100 d - 10 d = 16 - 1: the difference has no decimals
    above = int(whole + first_digits + repeated) - int(whole + first_digits)
    below = 10 ** len(first_digits) * (10 ** len(repeated) - 1)
    # reduced, because 14/2 would leave a quotient to compute
    divisor = math.gcd(above, below)
    above //= divisor
    below //= divisor
    if below == 1:
        return str(above)
    return rf"\frac{{{above}}}{{{below}}}"


# --------------------------------------------------------------------------------------------------------------- tokens

_TOKEN = re.compile(
    r"(?P<text>\\(?:text|mbox|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mathsf|boldsymbol|bm|rm|operatorname)"
    r"\*?\s*\{(?P<content>[^{}]*)\})"
    r"|(?P<environment>\\begin\s*\{(?P<name>[a-zA-Z]+\*?)\}(?:\{[^{}]*\})?)|(?P<end>\\end\s*\{[a-zA-Z]+\*?\})"
    r"|(?P<literal>\\mathbb\s*(?:\{\s*[A-Z]\s*\}|[A-Z])|\\emptyset|\\varnothing)"
    r"|(?P<number>(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+(?![\w]))?)"
    r"|(?P<command>\\(?:[a-zA-Z]+|.))|(?P<word>[A-Za-z]+)|(?P<space>\s+)|(?P<mark>.)",
    re.DOTALL,
)
_COMMAS = re.compile(r"\d{1,3}(?:,\d{3})+(?![\d])(?:\.\d+)?")

FUNCTIONS = (
    "sin cos tan cot sec csc arcsin arccos arctan arccot sinh cosh tanh coth ln log lg exp arsinh arcosh artanh"
).split()
_COMMANDS_OF_WORDS = {
    "pi": "\\pi",
    "infty": "\\infty",
    "infinity": "\\infty",
    "inf": "\\infty",
    "sqrt": "\\sqrt",
    "oo": "\\infty",
}
_SYNONYMS = {
    "\\dfrac": "\\frac", "\\tfrac": "\\frac", "\\cfrac": "\\frac", "\\leq": "\\le", "\\leqslant": "\\le",
    "\\geq": "\\ge", "\\geqslant": "\\ge", "\\neq": "\\ne", "\\lt": "<", "\\gt": ">", "\\ast": "*", "\\degree": "\\circ",
    "\\lbrace": "\\{", "\\rbrace": "\\}", "\\lbrack": "[", "\\rbrack": "]", "\\mid": "|", "\\vert": "|", "\\lvert": "|",
    "\\rvert": "|", "\\backslash": "\\setminus", "\\%": "%", "\\colon": ":", "\\land": ",",
    "\\lor": ",", "\\langle": "(", "\\rangle": ")", "\\thickapprox": "\\approx", "\\simeq": "\\approx",
}  # fmt: skip
_SEPARATORS = re.compile(r"(?i),?\s*(?:and|or|且|或|和)\s*,?")
_PERCENT = re.compile(r"(?i)percent(?:age)?|per\s+cent|pct|%|\\%")
_MATHEMATICS = re.compile(r"[-+\d.,/ ]+|\\?[A-Za-z]|\([-+\d., ]+\)")
r"""The content of \text{56,088} and \text{(1, 2)}."""
_LETTERS = re.compile(r"[A-Z](?:\s*(?:,|\band\b|\bor\b)+\s*(?:(?:and|or)\s+)?[A-Z])+")
r"""The content of \text{A, C}."""
_VALUE_WITH_UNIT = re.compile(
    r"(?P<value>-?\d+(?:,\d{3})*(?:\.\d+)?(?:/\d+)?)\s+(?P<unit>[A-Za-z]+(?:\s[A-Za-z]+){0,2})"
)
r"""The content of \text{3 hours}."""
_UNIT_BEFORE_NEXT = re.compile(r"(?P<unit>[A-Za-z]+),?\s+(?:and|or)")
r"""The content of \text{ cm and } between two values."""


@dataclass(frozen=True)
class Token:
    """A sign of an expression.

    Attributes:
        kind: number, letter, word, text, command, literal, begin, end or mark.
        text: the sign, with synonyms replaced.
        follows_space: True if white space precedes the token, which distinguishes the unit of "3 m" from the symbol
            of "3m".
    """

    kind: str
    text: str
    follows_space: bool = False


def tokens_of(text: str) -> list[Token]:
    """Splits an expression into tokens. Raises UnknownSyntax if a character is no part of one."""
    tokens: list[Token] = []
    position = 0
    depth = 0
    follows_space = False
    while position < len(text):
        # inside brackets a comma separates items: 12,345 is a number, and (12,345) a pair
        grouped = _COMMAS.match(text, position) if depth == 0 else None
        if grouped is not None:
            digits = grouped[0].replace(",", "")
            tokens.append(Token("number", digits, follows_space))
            position = grouped.end()
            follows_space = False
            continue

        match = _TOKEN.match(text, position)
        if match is None:
            raise UnknownSyntax(f"{text[position]!r} is no part of an expression")
        position = match.end()
        if match["space"]:
            follows_space = True
            continue
        new_tokens = _converted(match, follows_space)
        follows_space = False
        tokens += new_tokens
        # a \text{} can have no tokens, or both brackets of a pair
        depth += sum(map(_change_of_depth, new_tokens))
    return tokens


def _change_of_depth(token: Token) -> int:
    """Returns 1 for an opening bracket, -1 for a closing one, and 0 for other tokens."""
    if token.kind not in ("mark", "command"):
        return 0
    if token.text in ("(", "[", "{", "\\{"):
        return 1
    return -1 if token.text in (")", "]", "}", "\\}") else 0


def _converted(match: re.Match[str], follows_space: bool) -> list[Token]:
    """Returns the tokens of a match of `_TOKEN`."""
    if match["text"]:
        return _text_tokens(match["content"].strip(), follows_space)
    if match["environment"]:
        return [Token("begin", match["name"].rstrip("*"))]
    if match["end"]:
        return [Token("end", "")]
    if match["literal"]:
        name = re.sub(r"[\s{}]", "", match[0])
        if name == "\\varnothing":
            name = "\\emptyset"
        elif name.startswith("\\mathbb"):
            letter = name[-1]
            name = f"\\mathbb{{{letter}}}"
        return [Token("literal", name)]
    if match["number"]:
        return [Token("number", match[0], follows_space)]
    if match["command"]:
        # some synonyms are marks: \lt is <
        name = _SYNONYMS.get(match[0], match[0])
        kind = "command" if name.startswith("\\") else "mark"
        return [Token(kind, name, follows_space)]
    if match["word"]:
        return _word_tokens(match[0], follows_space)
    return [Token("mark", match[0], follows_space)]


def _text_tokens(content: str, follows_space: bool) -> list[Token]:
    r"""Returns the tokens of the content of a \text{}: a separator, mathematics, or the text itself."""
    if not content:
        return []
    if _SEPARATORS.fullmatch(content):
        return [Token("mark", ",")]
    if _PERCENT.fullmatch(content):
        return [Token("mark", "%")]
    inner = content.strip("()")
    if len(inner) == 1:  # the choice in \text{(B)}
        return tokens_of(inner)
    if _MATHEMATICS.fullmatch(content) or _LETTERS.fullmatch(content):
        return tokens_of(content)
    if match := _VALUE_WITH_UNIT.fullmatch(content):
        value = tokens_of(match["value"])
        return [*value, Token("text", match["unit"], follows_space=True)]
    if match := _UNIT_BEFORE_NEXT.fullmatch(content):
        return [Token("text", match["unit"], follows_space), Token("mark", ",")]
    return [Token("text", content, follows_space)]


def _word_tokens(word: str, follows_space: bool) -> list[Token]:
    """Returns the token of letters outside of commands, some of which are names of functions, constants or signs."""
    if word in _COMMANDS_OF_WORDS:
        return [Token("command", _COMMANDS_OF_WORDS[word], follows_space)]
    if word in FUNCTIONS:
        return [Token("command", f"\\{word}", follows_space)]
    if _SEPARATORS.fullmatch(word):
        return [Token("mark", ",")]
    if _PERCENT.fullmatch(word):
        return [Token("mark", "%")]
    kind = "letter" if len(word) == 1 else "word"
    return [Token(kind, word, follows_space)]
