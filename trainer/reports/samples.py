"""What the policy wrote in a run, read from its samples folder (`trainer.evaluate.sample_files`), scores first and only
the rows that are asked for; and which of it to show: the best, the worst, those with a text, those to one prompt, and
the prompts whose answers changed. A run whose samples are no text (reward flow) has none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from trainer.evaluate.sample_files import FOLDER, JSON, REWARD, TRAIN, VAL, step_of


@dataclass(frozen=True)
class Answer:
    """One answer as a person reads it. kind: `train`, `val` or `val greedy`. prompt: (role, content) of its messages.
    score: None where the reward failed. parts: what the reward gave beside its score."""

    kind: str
    step: int
    uid: str
    data_source: str
    prompt: tuple[tuple[str, str], ...]
    output: str
    gts: str
    score: float | None
    parts: dict[str, float | str]
    response_length: int
    finish_reason: str
    policy_version: int
    timed_out: bool


@dataclass(frozen=True)
class Group:
    """The samples of one step and kind. uids, scores: of its rows, None where the reward failed."""

    file: Path
    kind: str
    step: int
    uids: list[str]
    scores: list[float | None]

    def read(self, rows: Sequence[int]) -> list[Answer]:
        """The answers in these rows; none where the run has deleted the file meanwhile."""
        if (table := _table(self.file)) is None:
            return []
        shown = table.select([name for name in table.column_names if not name.endswith(JSON)]).take(list(rows))
        return [_answer(row, self.kind, self.step) for row in shown.to_pylist()]


@dataclass(frozen=True)
class Choice:
    """step: of this step. text: in prompt, answer or ground truth, in any case of letters. uid: to this prompt. order:
    `best`, `worst`, or the latest first for none."""

    step: int | None = None
    text: str | None = None
    uid: str | None = None
    order: str = ""

    def fits(self, answer: Answer) -> bool:
        """Whether it has the text."""
        texts = (answer.output, answer.gts, *(content for _, content in answer.prompt))
        return self.text is None or any(self.text.lower() in found.lower() for found in texts)


def groups(run_dir: Path, step: int | None = None) -> Iterator[Group]:
    """All samples of a run in the order of steps, training first; step: of this step only."""
    files = [(step_of(x), kind, x) for kind in (TRAIN, VAL) for x in (run_dir / FOLDER / kind).glob("*.parquet")]
    for number, kind, file in sorted(files):
        if step in (None, number) and (table := _table(file, ["uid", "score"])) is not None:
            uids, scores = (table[name].to_pylist() for name in ("uid", "score"))
            yield Group(file, f"{kind} {file.stem.partition('-')[2]}".strip(), number, uids, scores)


def chosen(folder: Path, choice: Choice, count: int) -> tuple[list[Answer], int]:
    """`count` answers, and how many fit the choice. Failed rewards come first among the worst."""
    sign = {"best": -1, "worst": 1}.get(choice.order, 0)
    found: list[tuple[float, int, int, Group]] = []
    for group in groups(folder, choice.step):
        rows = [row for row, uid in enumerate(group.uids) if choice.uid in (None, uid)]
        if choice.text is not None:
            rows = [row for row, answer in zip(rows, group.read(rows), strict=False) if choice.fits(answer)]
        for row in rows:
            score = group.scores[row]
            rank = sign * (-math.inf if score is None else score) if sign else 0.0
            found.append((rank, -group.step, row, group))
    found.sort(key=lambda one: one[:3])
    return [answer for *_, row, group in found[:count] for answer in group.read([row])], len(found)


def changed(folder: Path, choice: Choice, count: int) -> list[tuple[Answer, Answer, float]]:
    """`count` prompts whose mean score differs between their first and their last step, the largest change first: an
    answer of each of the two steps, and the change."""
    by_prompt: dict[tuple[str, str], dict[int, tuple[Group, dict[int, float]]]] = {}
    for group in groups(folder):
        for row, (uid, score) in enumerate(zip(group.uids, group.scores, strict=True)):
            if score is not None and choice.uid in (None, uid):
                by_prompt.setdefault((group.kind, uid), {}).setdefault(group.step, (group, {}))[1][row] = score
    found = []
    for by_step in by_prompt.values():
        (first, before), (last, after) = by_step[min(by_step)], by_step[max(by_step)]
        change = sum(after.values()) / len(after) - sum(before.values()) / len(before)
        found += [(change, first, min(before), last, min(after))] if change else []
    found.sort(key=lambda one: (-abs(one[0]), -one[3].step))
    pairs = [
        (one, other, change)
        for change, first, a, last, b in (found if choice.text is not None else found[:count])
        for one, other in zip(first.read([a]), last.read([b]), strict=False)
        if choice.fits(one) or choice.fits(other)
    ]
    return pairs[:count]


def _table(file: Path, columns: list[str] | None = None) -> pyarrow.Table | None:
    try:
        return pyarrow.parquet.read_table(file, columns=columns)
    except FileNotFoundError:
        return None  # the run has deleted it meanwhile


def _answer(row: dict[str, Any], kind: str, step: int) -> Answer:
    messages = tuple((x["role"], x["content"]) for x in row["prompt"]) or (("user", row["input"]),)
    parts = {name.removeprefix(REWARD): x for name, x in row.items() if name.startswith(REWARD) and x is not None}
    names = ("uid", "data_source", "output", "gts", "score", "response_length", "finish_reason", "policy_version")
    own: dict[str, Any] = {name: row[name] for name in (*names, "timed_out")}
    return Answer(kind=kind, step=step, prompt=messages, parts=parts, **own)
