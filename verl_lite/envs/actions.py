"""Parses the action in an agent's text.

`ActionParser` finds "<answer>Right</answer>" in a turn and returns the action of that name, like ROLL's default parser
(pattern, lookup, thoughts and action as two groups). `tool_calls.py` parses tool calls.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from verl_lite.errors import UserError

ANSWER_PATTERN = r"\A(?>.*?</think>|(?!\s*<think>))(?>.*?<answer>)(.*?)</answer>"
"""Matches the first <answer>...</answer> behind the thinking of a turn, in which an answer is a draft. Thinking that is
not closed extends to the end. If the first <answer> is not closed, later tags are not tried."""

SPECIAL_TOKENS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")

Action: TypeAlias = int | str
"""An action of an environment: a number with a name, or the agent's text itself."""

Lookup: TypeAlias = Mapping[int, str] | Mapping[str, str] | Sequence[str]
"""Names by action: {0: "Left", 1: "Down"}, or a list whose indices are the actions."""


@dataclass(frozen=True)
class ParsedAction:
    """The result of `ActionParser`.

    Attributes:
        action: key of the lookup, or the text itself without a lookup; None if the text contains no action.
        action_content: text of the pattern's last group; the whole text if the pattern does not match.
    """

    action: Action | None
    action_content: str


class ActionParser:
    """Finds the action in a text.

    Args:
        pattern: regular expression in which `.` matches line ends. Its last group is the action; the first of two
            groups contains the agent's thoughts.
        lookup: names of the actions, compared without regard to case; None = any text is an action.
        special_tokens: removed from the text first.

    Raises:
        UserError: if the pattern does not have one or two groups, or two actions have the same name.
    """

    def __init__(
        self,
        pattern: str = ANSWER_PATTERN,
        lookup: Lookup | None = None,
        special_tokens: Sequence[str] = SPECIAL_TOKENS,
    ) -> None:
        try:
            self.pattern = re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise UserError(f"action_pattern={pattern!r} is not a regular expression: {error}") from error
        if self.pattern.groups not in (1, 2):
            raise UserError(
                f"action_pattern={pattern!r} has {self.pattern.groups} groups: expected one, (action), or two, "
                "(thoughts)(action)"
            )
        names = _names_by_action(lookup or ())
        self.names: dict[Action, str] | None = None
        if lookup is not None:
            self.names = names
        self.special_tokens = tuple(special_tokens)
        # compared without case and blanks, because agents vary both
        self._by_name = {name.strip().lower(): action for action, name in names.items()}
        if len(self._by_name) < len(names):
            raise UserError(f"action_lookup={names!r}: two actions have the same name")

    def __call__(self, text: str) -> ParsedAction:
        # a decoded text can contain the tokens that end a turn
        for token in self.special_tokens:
            text = text.replace(token, "")
        text = text.strip()
        match = self.pattern.search(text)
        if match is None:
            return ParsedAction(None, text)
        # the last group that took part in the match; a pattern may make its action optional
        group = match.group(match.lastindex or 1) or ""
        content = group.strip()
        if self.names is None:
            return ParsedAction(content, content)
        action = self._by_name.get(content.lower())
        return ParsedAction(action, content)


def _names_by_action(lookup: Lookup) -> dict[Action, str]:
    """Returns the names of a lookup by their actions, with numbers as actions where a key or an index is a number."""
    if not isinstance(lookup, Mapping):
        lookup = dict(enumerate(lookup))
    names: dict[Action, str] = {}
    for key, name in lookup.items():
        # keys such as "0", read from a file, become numbers
        if isinstance(key, str) and key.isdecimal():
            key = int(key)
        names[key] = str(name)
    return names
