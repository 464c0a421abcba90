"""What the policy wrote in a run, read from its folder: file by file, and only the rows that are asked for.

samples/{train,val}/*.parquet (`trainer.evaluate.sample_files`); where there are none, samples.jsonl
from validations. A run whose samples are no text (reward flow) has neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from trainer.evaluate.sample_files import FOLDER, JSON, REWARD, TRAIN, VAL, step_of
from trainer.tracking.record import SAMPLES, messages


@dataclass(frozen=True)
class Answer:
    """One answer as a person reads it. kind: `train`, `val` or `val greedy`. prompt: (role, content) of its messages.
    score: None where the reward failed. parts: what the reward gave beside its score."""

    kind: str
    step: int
    uid: str
    sample: int
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

    @property
    def last_message(self) -> str:
        return self.prompt[-1][1] if self.prompt else ""


@dataclass(frozen=True)
class Group:
    """The samples of one step and kind. uids, scores: of its rows, None where the reward failed."""

    kind: str
    step: int
    uids: list[str]
    scores: list[float | None]
    _read: Callable[[Sequence[int]], list[Answer]]

    def read(self, rows: Sequence[int] | None = None) -> list[Answer]:
        """These rows, all for None; nothing where the run has deleted the file meanwhile."""
        return self._read(range(len(self.uids)) if rows is None else rows)


def groups(run_dir: Path, step: int | None = None) -> Iterator[Group]:
    """All samples of a run in the order of steps, training first; a file that the run deletes meanwhile is left out.

    step: of this step only.
    """
    files = [
        (step_of(file), kind, file) for kind in (TRAIN, VAL) for file in (run_dir / FOLDER / kind).glob("*.parquet")
    ]
    for number, kind, file in sorted(files):
        if step is None or number == step:
            try:
                judged = pyarrow.parquet.read_table(file, columns=["uid", "score"])
            except FileNotFoundError:
                continue
            yield _of_table(judged, kind, number, file)
    if not files:
        yield from (group for group in _of_lines(run_dir / SAMPLES) if step is None or group.step == step)


def _of_table(judged: pyarrow.Table, kind: str, step: int, file: Path) -> Group:
    """judged: uid and score of the file; the rest is read when it is asked for."""
    way = file.stem.partition("-")[2]

    def read(rows: Sequence[int]) -> list[Answer]:
        try:
            table = pyarrow.parquet.read_table(file)
        except FileNotFoundError:
            return []
        shown = table.select([name for name in table.column_names if not name.endswith(JSON)]).take(list(rows))
        return [_answer(row, f"{kind} {way}".strip(), step) for row in shown.to_pylist()]

    uids, scores = judged.column("uid").to_pylist(), judged.column("score").to_pylist()
    return Group(f"{kind} {way}".strip(), step, uids, scores, read)


def _of_lines(path: Path) -> Iterator[Group]:
    for message in messages(path):
        step = message.step
        answers = [_answer(asdict(sample), VAL, step) for sample in message.samples]

        def read(chosen: Sequence[int], answers: list[Answer] = answers) -> list[Answer]:
            return [answers[row] for row in chosen]

        yield Group(VAL, step, [answer.uid for answer in answers], [answer.score for answer in answers], read)


def _answer(row: dict[str, Any], kind: str, step: int) -> Answer:
    messages = tuple((str(x.get("role", "")), str(x.get("content", ""))) for x in row.get("prompt") or ())
    parts = {name.removeprefix(REWARD): x for name, x in row.items() if name.startswith(REWARD) and x is not None}
    return Answer(
        kind=kind,
        step=step,
        uid=str(row["uid"]),
        sample=int(row.get("sample") or 0),
        data_source=str(row["data_source"]),
        prompt=messages or (("user", str(row["input"])),),
        output=str(row["output"]),
        gts=str(row["gts"]),
        score=None if row["score"] is None else float(row["score"]),
        parts=parts | dict(row.get("extra") or {}),
        response_length=int(row["response_length"]),
        finish_reason=str(row["finish_reason"]),
        policy_version=int(row["policy_version"]),
        timed_out=bool(row.get("timed_out")),
    )
