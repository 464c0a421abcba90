"""The kinds of rewards that cost processor time alone: a thousand answers for each, and how long they take here.

Each answer is about a thousand characters of reasoning and an end in the form that the reward reads; half are right.
`python -m tests.bench rewards` prints what `cpu_seconds` measures; rewards that wait for others are its own part.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from verl_lite.config import RewardConfig
from verl_lite.rewards import RewardItem, load_scorer

ANSWERS = 1000
REASONING = ("Since 3 x + 4 = 16, we have 3 x = 12, which means that x is 4. Let me check this again. " * 11)[:960]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "tags": {"type": "array", "items": {"type": "string"}}},
    "required": ["name", "tags"],
}


@dataclass(frozen=True)
class RuleCase:
    """A reward and answers to it. name: as the table shows it. right: how many of the answers are."""

    name: str
    config: RewardConfig
    items: list[RewardItem]
    right: int = ANSWERS // 2


def rule_cases() -> list[RuleCase]:
    """Every reward that is a rule, and three of them together."""
    functions: dict[str, dict[str, Any]] = {
        "accuracy": {"reward": "math_dapo"},
        "format": {"reward": "format", "weight": 0.1},
        "length": {"reward": "regex", "weight": 0.1, "kwargs": {"pattern": r"(?s).{,2000}", "mode": "fullmatch"}},
    }
    return [
        _case("exact_match", lambda number: str(number), str, bare=True),
        _case("gsm8k", lambda number: f"#### {number}", str),
        _case("gsm8k_lenient", lambda number: f"####{number}.", str),
        _case("math_dapo", lambda number: f"Answer: ${number}$", str),
        _case(
            "math_verify",
            lambda number: rf"\boxed{{\frac{{{number}}}{{7}}}}",
            lambda number: rf"\frac{{{number}}}{{7}}",
        ),
        _case("exact_answer", lambda number: f"<answer>The {number}.</answer>", str),
        _case("multiple_choice", lambda number: f"The answer is ({'ABCD'[number % 4]}).", lambda number: number % 4),
        _case("format", lambda number: f"</think><answer>{number}</answer>", str, start="<think>"),
        _case("regex", lambda number: f"x = {number}", str, kwargs={"pattern": r"x = (\d+)", "group": 1}),
        _case("json_schema", _fenced, lambda number: SCHEMA),
        RuleCase("math_dapo + format + regex", RewardConfig(functions=functions), _items(_tagged, str, "<think>")),
    ]


def cpu_seconds(case: RuleCase) -> float:
    """Processor seconds of scoring all answers once in this process, imports done before. Checks that the right answers
    are found."""
    scorer: Any = load_scorer(case.config)
    scorer.score_all(case.items[:2])
    started = time.process_time()
    results = scorer.score_all(case.items)
    seconds = time.process_time() - started
    found = sum(result.extra.get("acc", result.score) > 0 for result in results)
    assert not any(result.failed for result in results) and found == case.right, (case.name, found)
    return seconds


def _case(
    name: str,
    ending: Callable[[int], str],
    truth: Callable[[int], Any],
    *,
    start: str = "",
    bare: bool = False,
    kwargs: dict[str, Any] | None = None,
) -> RuleCase:
    items = _items(ending, truth, start, bare)
    return RuleCase(name, RewardConfig(functions={name: {"reward": name, "kwargs": kwargs or {}}}), items)


def _items(
    ending: Callable[[int], str], truth: Callable[[int], Any], start: str = "", bare: bool = False
) -> list[RewardItem]:
    """Answers of which every second one is wrong: it ends as the one after it should, and the tags of one with a format
    are torn."""
    items = []
    for number in range(ANSWERS):
        is_wrong = number % 2
        end = ending(number + is_wrong)
        if is_wrong and start:
            end = end.replace("</think>", "")
        if is_wrong and "```" in end:
            end = end.replace('"tags"', '"tag"')
        text = end if bare else f"{start}{REASONING}\n{end}"
        items.append(RewardItem(number, "bench", text, truth(number), {"index": number}))
    return items


def _fenced(number: int) -> str:
    return f"```json\n{json.dumps({'name': str(number), 'tags': ['a', 'b', str(number)]})}\n```"


def _tagged(number: int) -> str:
    return f"</think><answer>Answer: {number}\n</answer>"
