"""Finds the mathematics of an answer that is not boxed: after "the answer is", between dollar signs, or a number."""

import re

from verl_lite.rewards.answer_syntax import parse_answer
from verl_lite.rewards.answer_tokens import UnknownSyntax

# emphasis and code: **7**, _7_ and `7`
_MARKS = re.compile(r"(?<![\w*])(\*{1,3}|_{1,2}|`)(?=\S)(.+?)(?<=\S)\1(?![\w*])")
_ANSWER_IS = re.compile(r"(?i)(?:\banswer\b[^.\n:=]{0,60}?(?:\bis\b|:|=)|答案(?:是|为|：|:))\s*(?:\bis\b|:|：)?\s*")
_MATHEMATICS = re.compile(r"\$\$(.+?)\$\$|\\\[(.+?)\\\]|\$([^$\n]+)\$|\\\((.+?)\\\)", re.DOTALL)
_NUMBER = re.compile(r"-?\$?\s?-?\d+(?:,\d{3})*(?:\.\d+)?(?:\s*/\s*\d+)?\s*(?:\\?%)?|-?\\frac\{[^{}]+\}\{[^{}]+\}")
# letters in a row that are no command of LaTeX
_PROSE = re.compile(r"(?<![\\\w{])[A-Za-z]{2,}")
# what separates the items of a list: 7, 8 or 9
_NEXT_ITEM = re.compile(r"\s*(?:,\s*(?:or|and)\b|,|;|/|\bor\b|\band\b|或|和|、|，)\s*(?=[-$\\\d(])")


def answer_in_text(text: str) -> str:
    """Returns the mathematics of an answer that is not boxed, without marks of emphasis.

    It follows the last "answer is", "answer:" or 答案; else it is the last mathematics between dollar signs, else the
    last number. Items of a list belong together: the answer of "it is 7 or 8" is "7, 8".
    """
    # twice, because marks can be nested: **_7_**
    without_outer_marks = _MARKS.sub(r"\2", text.strip())
    plain = _MARKS.sub(r"\2", without_outer_marks)
    starts = [match.end() for match in _ANSWER_IS.finditer(plain)]
    if starts:
        rest = plain[starts[-1] :]
        # the end of the sentence, but not the point of a decimal
        sentence, *_ = re.split(r"\n|[.。](?=\s|$)", rest, maxsplit=1)
        sentence = sentence.strip()
        if _can_be_parsed(sentence):
            return sentence
        return _items_from(rest, _first_start(rest))

    items = list(_MATHEMATICS.finditer(plain))
    if not items:
        if _can_be_parsed(plain):
            return plain
        items = list(_NUMBER.finditer(plain))
    if not items:
        return ""
    return _items_from(plain, _first_of_list(plain, items))


def _can_be_parsed(text: str) -> bool:
    """Returns True if a whole text is mathematics that contains a number or a constant."""
    if _PROSE.search(text):
        return False
    try:
        node = parse_answer(text).node
    except (UnknownSyntax, RecursionError):
        return False
    # "I" is a symbol, too
    return any(part.kind in ("number", "constant") for part in node.walk())


def _first_start(text: str) -> int:
    """Returns the position of the first mathematics or number in a text; the length of the text without any."""
    start = len(text)
    for pattern in (_MATHEMATICS, _NUMBER):
        match = pattern.search(text)
        if match is not None:
            start = min(start, match.start())
    return start


def _first_of_list(text: str, matches: list[re.Match[str]]) -> int:
    """Returns where the list begins whose last item is the last match."""
    first = matches[-1]
    for match in reversed(matches[:-1]):
        separator = _NEXT_ITEM.match(text, match.end())
        if separator is None or separator.end() != first.start():
            break
        first = match
    return first.start()


def _items_from(text: str, start: int) -> str:
    """Returns the items of a list, separated by commas, that begins at position `start`."""
    items = []
    while True:
        match = _MATHEMATICS.match(text, start) or _NUMBER.match(text, start)
        if match is None:
            break
        # the group inside the dollar signs; a number has no groups
        item = match[match.lastindex or 0]
        items.append(item.strip().rstrip(","))
        separator = _NEXT_ITEM.match(text, match.end())
        if separator is None:
            break
        start = separator.end()
    return ", ".join(items)
