"""What the policy wrote in a run, read from its samples folder (`trainer.evaluate.sample_files`), scores first and only
the rows that are asked for; and which of it to show. A run whose samples are no text (reward flow) has none.
"""

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


def groups(run_dir: Path) -> Iterator[Group]:
    """All samples of a run in the order of steps, training first."""
    files = [(step_of(x), kind, x) for kind in (TRAIN, VAL) for x in (run_dir / FOLDER / kind).glob("*.parquet")]
    for number, kind, file in sorted(files):
        if (table := _table(file, ["uid", "score"])) is not None:
            uids, scores = (table[name].to_pylist() for name in ("uid", "score"))
            yield Group(file, f"{kind} {file.stem.partition('-')[2]}".strip(), number, uids, scores)


def chosen(folder: Path, order: str, text: str, count: int) -> tuple[list[Answer], int]:
    """`count` answers, and how many fit. order: `best`, `worst` with failed rewards first, else the latest first.
    text: in prompt, answer, ground truth or uid, in any case of letters."""
    sign, word = {"best": -1, "worst": 1}.get(order, 0), text.lower()
    found: list[tuple[float, int, int, Group]] = []
    for group in groups(folder):
        rows: Sequence[int] = range(len(group.uids))
        if word:
            told = [[x.output, x.gts, x.uid, *(said for _, said in x.prompt)] for x in group.read(rows)]
            rows = [row for row, texts in enumerate(told) if word in "\n".join(texts).lower()]
        for row in rows:
            score = group.scores[row]
            rank = sign * (-math.inf if score is None else score) if sign else 0.0
            found.append((rank, -group.step, row, group))
    found.sort(key=lambda one: one[:3])
    return [answer for *_, row, group in found[:count] for answer in group.read([row])], len(found)


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
