"""Which answers of a run to show: the best, the worst, those with a text, those to one prompt, and the changed prompts.

Takes a run folder and a `Choice`; reads scores first and only the rows that are shown.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trainer.reports.run_samples import Answer, Group, groups


@dataclass(frozen=True)
class Choice:
    """step: of this step. text: in prompt, answer or ground truth, in any case of letters. uid: to this prompt. order:
    `best`, `worst`, or the latest first for none. is_mixed: one answer to each prompt, without a text."""

    step: int | None = None
    text: str | None = None
    uid: str | None = None
    order: str = ""
    is_mixed: bool = False


@dataclass(frozen=True)
class Changed:
    """A prompt that was answered at several steps: an answer of the first and of the last, and the change of the mean
    score of the answers."""

    first: Answer
    last: Answer
    change: float


def chosen(folder: Path, choice: Choice, count: int) -> tuple[list[Answer], int]:
    """`count` answers, and how many fit the choice. Failed rewards come first among the worst."""
    if choice.text is not None:
        fitting = [answer for group in groups(folder, choice.step) for answer in _matching(group, choice)]
        ordered = sorted(fitting, key=lambda answer: _rank(answer.score, answer.step, choice.order))
        return ordered[:count], len(fitting)
    ranked, kept = [], []
    for group in groups(folder, choice.step):
        rows = [row for row, uid in enumerate(group.uids) if choice.uid in (None, uid)]
        kept.append(group)
        ranked += [(_rank(group.scores[row], group.step, choice.order), len(kept) - 1, row) for row in rows]
    ranked.sort()
    total = len(ranked)
    if choice.is_mixed:
        first = {kept[place].uids[row]: found for found in reversed(ranked) for _, place, row in [found]}
        ranked = sorted(first.values())
    return [answer for _, place, row in ranked[:count] for answer in kept[place].read([row])], total


def changed(folder: Path, choice: Choice, count: int) -> list[Changed]:
    """`count` prompts whose mean score differs between their first and their last step, the largest change first."""
    scores: dict[tuple[str, str], dict[int, tuple[Group, dict[int, float]]]] = {}
    for group in groups(folder, choice.step):
        for row, (uid, score) in enumerate(zip(group.uids, group.scores, strict=True)):
            if score is not None and choice.uid in (None, uid):
                scores.setdefault((group.kind, uid), {}).setdefault(group.step, (group, {}))[1][row] = score
    differing = []
    for by_step in scores.values():
        (first, before), (last, after) = by_step[min(by_step)], by_step[max(by_step)]
        change = sum(after.values()) / len(after) - sum(before.values()) / len(before)
        if change:
            differing.append((change, first, min(before), last, min(after)))
    differing.sort(key=lambda found: (-abs(found[0]), -found[3].step))
    pairs: list[Changed] = []
    for change, first, a, last, b in differing:
        if len(pairs) == count:
            break
        for one, other in zip(first.read([a]), last.read([b]), strict=False):
            if choice.text is None or _has(one, choice.text) or _has(other, choice.text):
                pairs.append(Changed(one, other, change))
    return pairs


def _matching(group: Group, choice: Choice) -> list[Answer]:
    assert choice.text is not None
    rows = [row for row, uid in enumerate(group.uids) if choice.uid in (None, uid)]
    return [answer for answer in group.read(rows) if _has(answer, choice.text)]


def _has(answer: Answer, text: str) -> bool:
    texts = (answer.output, answer.gts, *(content for _, content in answer.prompt))
    return any(text.lower() in found.lower() for found in texts)


def _rank(score: float | None, step: int, order: str) -> tuple[float, int]:
    """To sort by: smaller comes first."""
    if order == "best":
        return (-score if score is not None else float("inf"), -step)
    if order == "worst":
        return (score if score is not None else float("-inf"), -step)
    return (0.0, -step)
