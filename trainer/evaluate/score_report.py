"""Saved scores against new ones: the table, the answers whose score changed, and the file with all of them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from rich.table import Table
from rich.text import Text

from trainer.evaluate.sample import is_prediction
from trainer.evaluate.saved_answers import SavedAnswer
from trainer.final_report import printable, titled_table
from verl_lite.rewards import RewardResult

_EQUAL = 1e-6
"""Scores are saved in single precision, so two of them that differ by less are the same."""


def comparison_table(answers: Sequence[SavedAnswer], results: Sequence[RewardResult]) -> Table:
    """A line for each data source, and one for all of them. Of the answers with both scores: how many are the same,
    higher or lower; failed: answers whose reward failed."""
    table = titled_table("Saved scores and new ones")
    table.add_column("data source", no_wrap=True)
    for name in ("answers", "mean before", "mean now", "same", "higher", "lower", "failed before", "failed now"):
        table.add_column(name, justify="right")
    pairs = list(zip(answers, results, strict=True))
    sources = sorted({answer.item.data_source for answer in answers})
    for source in sources:
        table.add_row(source, *_compared([pair for pair in pairs if pair[0].item.data_source == source]))
    if len(sources) > 1:
        table.add_row("all", *_compared(pairs))
    return table


def _compared(pairs: Sequence[tuple[SavedAnswer, RewardResult]]) -> Iterator[str]:
    """The cells of a line."""
    before = [answer.score for answer, _ in pairs if answer.score is not None]
    now = [result.score for _, result in pairs if not result.failed]
    changes = [
        result.score - answer.score for answer, result in pairs if answer.score is not None and not result.failed
    ]
    same = sum(map(_is_same, changes))
    higher = sum(change > 0 and not _is_same(change) for change in changes)
    yield str(len(pairs))
    for scores in (before, now):
        yield f"{_mean(scores):.4f}" if scores else "-"
    yield f"{same} ({same / len(changes):.1%})" if changes else "-"
    yield str(higher)
    yield str(len(changes) - same - higher)
    yield str(sum(answer.is_scored and answer.score is None for answer, _ in pairs))
    yield str(sum(result.failed for _, result in pairs))


def extras_line(results: Sequence[RewardResult]) -> str:
    """The means of what the reward returned besides the score, `acc 0.75, format 0.50`; empty if there is nothing."""
    names = sorted({name for result in results for name in result.extra if not is_prediction(name)})
    values = {name: [result.extra[name] for result in results if name in result.extra] for name in names}
    return ", ".join(
        f"{name} {_mean([float(value) for value in column]):.4f}"
        for name, column in values.items()
        if not any(isinstance(value, str) for value in column)
    )


def changed_table(answers: Sequence[SavedAnswer], results: Sequence[RewardResult], shown: int) -> Table | None:
    """The answers whose score changed most; None if none did. A reward that failed or fails now counts as a change."""
    changes = [
        (math.inf if result.failed else abs(result.score - answer.score), answer, result)
        for answer, result in zip(answers, results, strict=True)
        if answer.score is not None and (result.failed or not _is_same(result.score - answer.score))
    ]
    if not changes or not shown:
        return None
    changes.sort(key=lambda change: -change[0])
    title = f"Changed: {len(changes)} answers" + (f", {shown} of them" if len(changes) > shown else "")
    table = titled_table(title)
    for name in ("data source", "uid", "answer", "expected", "before", "now"):
        table.add_column(name, overflow="fold")
    for _, answer, result in changes[:shown]:
        texts = (answer.item.data_source, answer.uid, answer.item.solution_str, truth_text(answer.item.ground_truth))
        now = Text("failed", style="red") if result.failed else Text(f"{result.score:g}")
        table.add_row(*(printable(text) for text in texts), f"{answer.score:g}", now)
    return table


def write_scores(path: Path, answers: Sequence[SavedAnswer], results: Sequence[RewardResult]) -> None:
    """A parquet file with a row for each answer, in order; there whole or not at all.

    Columns: uid, step, data_source, response, ground_truth (as text), score_before, score, failed, timed_out, error,
    and reward/<name> for what the reward returned besides, as text where one of the values is text.
    """
    columns: dict[str, list[Any]] = {
        "uid": [answer.uid for answer in answers],
        "step": [answer.step for answer in answers],
        "data_source": [answer.item.data_source for answer in answers],
        "response": [answer.item.solution_str for answer in answers],
        "ground_truth": [truth_text(answer.item.ground_truth) for answer in answers],
        "score_before": [answer.score for answer in answers],
        "score": [None if result.failed else result.score for result in results],
        "failed": [result.failed for result in results],
        "timed_out": [result.timed_out for result in results],
        "error": [result.error for result in results],
    }
    for name in sorted({name for result in results for name in result.extra}):
        values = [result.extra.get(name) for result in results]
        is_text = any(isinstance(value, str) for value in values)
        columns[f"reward/{name}"] = [None if value is None else str(value) if is_text else value for value in values]
    columns = {name: [_encodable(value) for value in values] for name, values in columns.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.draft")
    pyarrow.parquet.write_table(pyarrow.table(columns), draft)
    os.replace(draft, path)


def truth_text(ground_truth: Any) -> str:
    """A ground truth as text."""
    return ground_truth if isinstance(ground_truth, str) else json.dumps(ground_truth, default=str)


def _encodable(value: Any) -> Any:
    """Half of a surrogate pair, which json can spell, becomes a question mark: it has no place in UTF-8."""
    return value.encode(errors="replace").decode() if isinstance(value, str) else value


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _is_same(difference: float) -> bool:
    return abs(difference) <= _EQUAL
