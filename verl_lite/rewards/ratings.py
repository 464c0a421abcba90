"""Reads the verdict in a judge's reply: a rating in any usual notation, or yes or no.

A reply that cannot be read, or that can be read in two ways, raises ValueError: its sample fails and is not trained.
The judged answer is hostile: it may contain ratings itself, which the judge may quote.
"""

import json
import re
import unicodedata
from collections.abc import Sequence
from fractions import Fraction

_LABEL = r"\bscore\b(?:(?!\bscore\b)[^\n:=]){0,60}?[:=]"
"""The word and its colon, with words such as "(0 to 10)" between them."""
# at the beginning of a line, after marks and words such as "final"
_LINE_LABEL = re.compile(rf"(?im)^[^\w\n]*(?:(?:final|overall|total|my|the|so)\s+){{0,3}}{_LABEL}")
# a key of JSON
_KEY_LABEL = re.compile(r"""(?i)(?<!\\)["']score["']\s*:""")
# inside a line, but not in quotation marks
_INLINE_LABEL = re.compile(rf"""(?i)(?<!["'`“‘«„])(?<!\*\*){_LABEL}|\*\*{_LABEL}""")
_QUOTED = re.compile(r"""[>"'“‘«„][^"'“‘«„]*\bscore\b[^\n:=]*[:=]$""", re.IGNORECASE)
"""The end of a text whose last label is quoted."""
_MOST_QUOTED = 200
_QUOTATION_MARKS = frozenset(">\"'“‘«„")
_OPENING = " \t*_`\"'$({[\\"
"""Characters between the colon and the rating: white space, marks of emphasis, quotation marks and brackets."""

_GROUP_MARKS = ",'’_\u00a0\u2009\u202f"
_PLAIN = rf"(?:\d{{1,3}}(?:[{_GROUP_MARKS}]\d{{3}})+(?:\.\d+)?|\d{{1,3}}(?:\.\d{{3}})+,\d+|\d+(?:[.,]\d+)?|[.,]\d+)"
_GROUPED = re.compile(rf"\d{{1,3}}([{_GROUP_MARKS}]\d{{3}})+(\.\d+)?")
_POWER = r"(?:[eE][+-]?\d+|\s*(?:×|x|\*|\\times|\\cdot|·)\s*10\s*(?:\^|\*\*)\s*\{?[+-]?\d+\}?)"
_NUMBER = rf"[+-]?\s*{_PLAIN}{_POWER}?"
_RATING = re.compile(
    rf"(?P<number>{_NUMBER})(?:\s*(?:(?P<percent>%|percent\b)|\(?(?:/|out\s+of|of)\s*(?P<whole>{_NUMBER})))?"
)
_EXPONENT = re.compile(r"(?:[eE]|(?:\^|\*\*)\s*\{?)([+-]?\d+)\}?$")
_MOST_READ = 1000
"""Characters after a label that are read."""
_MOST_DIGITS = 300
"""Digits of a rating."""
_LONGEST_EXPONENT = 4
"""Digits. Larger powers are outside of every range, and computing them would take memory and time."""

_CONTINUES = re.compile(
    r"\w|\.*\d|[^\S\n]+[\d.]|\s*[-–—:|~,;&]\s*[\d.]|\s*[+*/×÷^±<>=%‰]\s*[\w.(\\]"
    r"|[^\S\n]*\+|\s+(?:or|to|vs|versus|and|plus|minus|times|hundred|thousand|million|billion|half)\b"
)
"""What follows a number that is only a part of a rating: 7x, 7-8, 7 or 8, 7 thousand."""
_FRACTION = re.compile(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}")
_EMPHASIS = re.compile(r"(?<!10)\*\*|`|\\boxed")
"""Marks around a rating. After 10, two asterisks are a power."""
_PUNCTUATION = str.maketrans("：＝．，／％＋－−﹣⁄∕＊", ":=.,/%+---//*")

_VERDICT = re.compile(r"\b(yes|no)\b", re.IGNORECASE)
_LONE_VERDICT = re.compile(r"(?im)^[^\w\n]*(?:(?:final|verdict|answer|judge?ment)\W+){0,2}(yes|no)[^\w\n]*$")


def read_rating(reply: str, lowest: float, highest: float, answer: str = "") -> float:
    """Returns the rating in a reply, ignoring the text before </think>.

    The rating follows "Score:" at the beginning of a line or JSON's "score":, and the last one counts. Without such a
    label it may follow "score:" inside a line, but not in quotation marks. A fraction ("7/10", "7 out of 10") and a
    percentage are shares of `highest`.

    Args:
        reply: the judge's reply.
        lowest, highest: bounds of the rating.
        answer: the judged answer. If it contains a rating itself, the reply has to end with the rating, at the
            beginning of its line and without quotation marks, and must not have lower ones: a higher one may be quoted.

    Raises:
        ValueError: if there is no rating, several that contradict each other, or one outside the bounds.
    """
    conclusion = reply.rpartition("</think>")[2]
    text = _ascii(conclusion).rstrip()
    may_quote_answer = bool(_labelled(_ascii(answer), with_inline=True))

    # each candidate is a text that begins with a rating
    candidates = _json_rating(text) or _labelled(text, with_inline=not may_quote_answer)
    if not candidates:
        raise ValueError("there is no rating")
    last = candidates[-1]
    if may_quote_answer:
        # the template asks for a rating at the end; ratings before the end may be quotations
        before_rating = text[: -len(last)].rpartition("\n")[2]
        if "\n" in last or _QUOTED.search(before_rating[-_MOST_QUOTED:]):
            raise ValueError("it does not end with a rating, and the answer contains ratings that it may quote")
        ratings = {_rating_at(candidate, highest) for candidate in candidates}
        # an answer gains by a quotation only if the judge's own rating is lower. To fail whenever the two differ would
        # let an answer escape low ratings by being quoted
        if _rating_at(last, highest) > min(ratings):
            raise ValueError("it has several ratings, and the answer contains ratings that it may quote")

    rating = _rating_at(last, highest)
    if not lowest <= rating <= highest:
        raise ValueError(f"its rating {_as_text(rating)} is not between {lowest:g} and {highest:g}")
    return float(rating)


def read_yes_no(reply: str, answer: str = "") -> float:
    """Returns 1.0 for yes and 0.0 for no, ignoring the text before </think>.

    The last line that consists of one of these words counts, else the last line that contains one.

    Args:
        reply: the judge's reply.
        answer: the judged answer. If a line of it is a verdict itself, only the last line of the reply counts. It is
            "yes" only if it consists of this word, without quotation marks, and no other line is "no".

    Raises:
        ValueError: without such a line, and if the line contains both words and neither begins or ends it.
    """
    text = reply.rpartition("</think>")[2].rstrip()
    verdicts_of_lines = [word.lower() for word in _LONE_VERDICT.findall(text)]
    if _LONE_VERDICT.search(answer):
        return _last_verdict(text.rpartition("\n")[2], verdicts_of_lines)
    if verdicts_of_lines:
        return float(verdicts_of_lines[-1] == "yes")

    lines = [line for line in text.splitlines() if _VERDICT.search(line)]
    return _verdict_of_line(lines[-1] if lines else "")


def _last_verdict(last_line: str, verdicts_of_lines: Sequence[str]) -> float:
    """Returns the verdict in the last line of a reply that may quote verdicts of the answer.

    Args:
        last_line: the line.
        verdicts_of_lines: the verdicts of all lines that consist of one.
    """
    verdict = _verdict_of_line(last_line)
    if verdict == 0:
        return verdict
    is_lone = _LONE_VERDICT.match(last_line) is not None
    is_quoted = not _QUOTATION_MARKS.isdisjoint(last_line)
    if not is_lone or is_quoted or "no" in verdicts_of_lines:
        raise ValueError("its yes may be a quotation, because the answer contains verdicts itself")
    return verdict


def _verdict_of_line(line: str) -> float:
    """Returns the verdict in a line. Raises ValueError if it has none, or both words and neither begins or ends it."""
    if not _VERDICT.search(line):
        raise ValueError("there is neither yes nor no")
    words = [word.lower() for word in _VERDICT.findall(line)]
    verdicts = set(words)
    if len(verdicts) > 1:
        # "Yes: there is no error." and "There is no error, so yes.", but not "Yes for the first part, for the rest no."
        verdicts = set()
        if re.match(r"\W*(?:yes|no)\b", line, re.IGNORECASE):
            verdicts.add(words[0])
        if re.search(r"\b(?:yes|no)\W*$", line, re.IGNORECASE):
            verdicts.add(words[-1])
    if len(verdicts) != 1:
        raise ValueError("its last verdict contains both yes and no")
    return float(verdicts == {"yes"})


def _ascii(text: str) -> str:
    """Replaces the decimal digits and the punctuation of other scripts by those of ASCII."""
    characters = []
    for character in text.translate(_PUNCTUATION):
        if character.isdecimal():
            character = str(unicodedata.decimal(character))
        characters.append(character)
    return "".join(characters)


def _json_rating(text: str) -> list[str]:
    """Returns the value of "score" as text, if the whole reply is a JSON object (also in a fenced block)."""
    body = text.strip().removeprefix("```json").removeprefix("```")
    body = body.removesuffix("```").strip()
    if not body.startswith("{"):
        return []
    try:
        # numbers stay text, so that they are read like all other ratings
        entries = json.loads(body, parse_int=str, parse_float=str, parse_constant=str)
    except (ValueError, RecursionError):
        return []
    ratings = []
    for name, value in entries.items():
        if name.lower() == "score":
            # an empty text cannot be read as a rating, so true, null and objects are refused
            ratings.append(value if isinstance(value, str) else "")
    return ratings


def _labelled(text: str, with_inline: bool) -> list[str]:
    """Returns the texts after the labels of ratings, in the order of the text.

    Args:
        text: the text.
        with_inline: True to accept labels inside lines as well, if there are no others.
    """
    labels = [*_LINE_LABEL.finditer(text), *_KEY_LABEL.finditer(text)]
    if not labels and with_inline:
        labels = list(_INLINE_LABEL.finditer(text))
    # a set, because a key at the beginning of a line matches both patterns
    ends = {label.end() for label in labels}
    return [text[end : end + _MOST_READ] for end in sorted(ends)]


def _rating_at(text: str, highest: float) -> Fraction:
    """Returns the rating at the beginning of a text. Raises ValueError if there is none."""
    without_emphasis = _EMPHASIS.sub("", text)
    plain = _FRACTION.sub(r"\1/\2", without_emphasis).lstrip(_OPENING)
    match = _RATING.match(plain)
    if match is None or _CONTINUES.match(plain, match.end()):
        raise ValueError("the text after its label is no rating")

    # fractions, so that no rounding moves a rating across a bound
    number = _value(match["number"])
    if match["percent"]:
        return number / 100 * Fraction(highest)
    if match["whole"] is None:
        return number
    whole = _value(match["whole"])
    if whole <= 0:
        raise ValueError("its rating is a share of nothing")
    return number / whole * Fraction(highest)


def _as_text(rating: Fraction) -> str:
    try:
        return f"{float(rating):g}"
    except OverflowError:
        return "beyond the range of numbers"


def _value(number: str) -> Fraction:
    """Returns the value of a text that matches `_NUMBER`."""
    factor = Fraction(1)
    match = _EXPONENT.search(number)
    if match is not None:
        exponent = match[1]
        if len(exponent.lstrip("+-0")) > _LONGEST_EXPONENT:
            raise ValueError("its rating has too large an exponent")
        factor = Fraction(10) ** int(exponent)
        number = re.split(r"[eE×x*\\·]", number, maxsplit=1)[0]

    if number.lstrip().startswith("-"):
        factor = -factor
    digits = re.sub(r"[\s+-]", "", number)
    # 0,500 is a half, and 7,500 seven thousand five hundred
    if _GROUPED.fullmatch(digits) and not digits.startswith("0"):
        digits = re.sub(f"[{_GROUP_MARKS}]", "", digits)
    elif "," in digits:
        # a comma as decimal point, and points between groups
        digits = digits.replace(".", "").replace(",", ".")
    if len(digits) > _MOST_DIGITS:
        raise ValueError("its rating has too many digits")
    return Fraction(digits) * factor
