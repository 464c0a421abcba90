"""From what an agent wrote to the action it means.

`ActionParser` takes the last words of a turn, "<answer>Right</answer>", and gives the action of that name (ROLL's
default parser: pattern, lookup, thoughts and action as two groups). Calls of tools: `tool_calls.py`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_lite.errors import UserError

ANSWER_PATTERN = r"\A(?>.*?<answer>)(.*?)</answer>"
"""The first <answer>...</answer>. It is anchored: if the first <answer> is not closed, the later ones are not tried."""

SPECIAL_TOKENS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")

Lookup = Mapping[Any, str] | Sequence[str]
"""Names of actions by action: {0: "Left", 1: "Down"}, or a list whose places are the actions."""


@dataclass(frozen=True)
class ParsedAction:
    """action: the key of the lookup, or the text itself where there is no lookup; None if nothing was understood.
    action_content: the text of the pattern's last group; all of the text where the pattern is not found."""

    action: Any
    action_content: str


class ActionParser:
    """Finds the action in a text.

    pattern: a regular expression in which `.` is also a line end; one group is the action, of two groups the first is
    what the agent thought. lookup: names of the actions, compared without regard to case; None = any text is an action.
    special_tokens: taken out of the text before.
    Raises UserError for a pattern with no group or more than two.
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
            raise UserError(f"action_pattern={pattern!r} is no regular expression: {error}") from error
        if self.pattern.groups not in (1, 2):
            raise UserError(
                f"action_pattern={pattern!r} has {self.pattern.groups} groups: expected one, (action), or two, "
                "(thoughts)(action)"
            )
        pairs = lookup.items() if isinstance(lookup, Mapping) else enumerate(lookup or ())
        # keys that came as text from a file, "0", are numbers again
        names = {int(key) if isinstance(key, str) and key.isdecimal() else key: str(name) for key, name in pairs}
        self.names = None if lookup is None else names
        self.special_tokens = tuple(special_tokens)
        self._by_name = {name.strip().lower(): action for action, name in names.items()}
        if len(self._by_name) < len(names):
            raise UserError(f"action_lookup={names!r}: two actions have one name")

    def __call__(self, text: str) -> ParsedAction:
        for token in self.special_tokens:
            text = text.replace(token, "")
        text = text.strip()
        match = self.pattern.search(text)
        if match is None:
            return ParsedAction(None, text)
        content = (match.group(match.lastindex or 1) or "").strip()
        return ParsedAction(content if self.names is None else self._by_name.get(content.lower()), content)
