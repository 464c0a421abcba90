"""Saved answers read back, and their saved scores beside new ones: table, answers that changed, file with all of them.

A row is what `trainer.evaluate.sample_files` or `trainer.main_generate` wrote, or anything with an answer (`output`,
`response`, or a list `responses`), `data_source`, and a ground truth (`ground_truth`, `reward_model` with one, or
`gts`). Also read where they are: prompt, extra_info, uid, step, score.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow
import pyarrow.parquet
from rich.table import Table
from rich.text import Text

from trainer.data.sources import parse_json, read_rows
from trainer.evaluate.sample import is_prediction
from trainer.evaluate.sample_files import FOLDER, JSON, REWARD, TRAIN, VAL
from trainer.final_report import printable, titled_table
from verl_lite.config import PPOConfig, ScoreConfig
from verl_lite.errors import UserError
from verl_lite.rewards import RewardItem, RewardResult

SUFFIXES = (".jsonl", ".parquet")
_SAVES_ALL = (
    "a run keeps its answers in its folder unless trainer.samples_max_mb=0; trainer.rollout_data_dir=FOLDER (training) "
    "and trainer.validation_data_dir=FOLDER keep all of them as jsonl"
)
_EQUAL = 1e-6
"""Scores are saved in single precision, so two of them that differ by less are the same."""


@dataclass(frozen=True)
class SavedAnswer:
    """One answer to be scored. item: what the reward gets; its key is the row's place. score: the one that was saved,
    None if there is none. is_scored: whether the row has one, or says that its reward failed."""

    item: RewardItem
    uid: str
    step: int | None
    score: float | None
    is_scored: bool


@dataclass
class SavedAnswers:
    """What was read, and from where. notes: what the files lack, in sentences."""

    answers: list[SavedAnswer]
    origin: str
    notes: list[str] = field(default_factory=list)


# -------------------------------------------------------------------------------------------------------------- reading


def read_saved(target: Path, run: PPOConfig | None, config: ScoreConfig) -> SavedAnswers:
    """The saved answers of `target`. run: the configuration of a run folder, None of anything else.

    Raises UserError for files that cannot be read, and for rows without what the reward needs, with the row.
    """
    files, origin = _files(target, run)
    found = SavedAnswers([], origin)
    lacking_prompt = as_text = 0
    for file in files:
        for number, row in enumerate(_rows(file)):
            if 0 <= config.rows <= len(found.answers):
                break
            where = f"row {number} of {file}"
            lacking_prompt += not isinstance(row.get("prompt"), list)
            as_text += "gts" in row and "ground_truth" not in row and "reward_model" not in row
            for text in _responses(row, where):
                found.answers.append(_answer(row, text, len(found.answers), where, config))
    if not found.answers:
        raise UserError(f"{origin}: there are no answers in it")
    if lacking_prompt:
        found.notes.append(
            f"{lacking_prompt} rows have no prompt as chat messages: a reward that asks for it gets None"
        )
    if as_text:
        found.notes.append(f"{as_text} rows have their ground truth as text alone (gts): a reward gets that text")
    return found


def _files(target: Path, run: PPOConfig | None) -> tuple[list[Path], str]:
    """The files to read, and what they are in words."""
    if run is not None:
        dirs = {name: getattr(run.trainer, name) for name in ("rollout_data_dir", "validation_data_dir")}
        places = [
            (Path(folder).expanduser(), f"{folder} (trainer.{name} of the run)")
            for name, folder in dirs.items()
            if folder
        ]
        places += [(target / FOLDER / kind, str(target / FOLDER / kind)) for kind in (TRAIN, VAL)]
        for folder, origin in places:
            if found := _in_folder(folder):
                return found, origin
        if (target / "samples.jsonl").exists():
            return [target / "samples.jsonl"], f"{target / 'samples.jsonl'} (what its validations showed)"
        raise UserError(f"{target}: this run saved no answers: {_SAVES_ALL}")
    if target.is_dir():
        if found := _in_folder(target):
            return found, str(target)
        raise UserError(f"{target}: neither a run folder (config.yaml) nor a folder with .jsonl or .parquet files")
    if not target.is_file() or target.suffix not in SUFFIXES:
        why = "expected a .jsonl or .parquet file" if target.is_file() else "there is no such file or folder"
        raise UserError(f"{target}: {why}; give a run folder, a folder of saved samples, or a file of answers")
    return [target], str(target)


def _in_folder(folder: Path) -> list[Path]:
    """Its files of answers; those that are named by step in the order of steps."""
    found = [file for file in folder.glob("*") if file.suffix in SUFFIXES and "-scored-" not in file.name]
    return sorted(found, key=lambda file: (int(file.stem) if file.stem.isdigit() else -1, file.name))


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file, with NAME for each NAME_json, as `trainer.evaluate.sample_files` packs what has any shape."""
    if file.suffix == ".parquet":
        rows = iter(read_rows(str(file), "RUN_OR_FILE"))
    else:
        *lines, last = file.read_text(encoding="utf-8").split("\n")  # the last one was cut off when the run was killed
        if last.strip().endswith("}"):
            lines.append(last)
        named = enumerate(lines, start=1)
        rows = (parse_json(line, f"{file}, line {number}", "an answer per line") for number, line in named if line)
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise UserError(f"row {index} of {file}: found {row!r:.100}, expected an object with named entries")
        packed = {name: text for name, text in row.items() if name.endswith(JSON) and isinstance(text, str)}
        yield row | {name.removesuffix(JSON): json.loads(text) for name, text in packed.items()}


def _responses(row: dict[str, Any], where: str) -> list[str]:
    found = next((row[name] for name in ("response", "output", "responses") if row.get(name) is not None), None)
    texts: list[Any] = found if isinstance(found, list) else [found]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise UserError(
            f"{where} has no answer: a text `response` (or `output`), or a list of them `responses`, is expected; its "
            f"entries are {', '.join(row)}"
        )
    return texts


def _answer(row: dict[str, Any], text: str, key: int, where: str, config: ScoreConfig) -> SavedAnswer:
    source = row.get("data_source") or config.data_source
    if not isinstance(source, str):
        raise UserError(f"{where} has no data_source: give one for all rows that have none, data_source=NAME")
    style = row.get("reward_model")
    nested = style.get("ground_truth") if isinstance(style, dict) else None
    truth = next((value for value in (row.get("ground_truth"), nested, row.get("gts")) if value is not None), None)
    if truth is None and not config.without_ground_truth:
        raise UserError(
            f"{where} has no ground truth (ground_truth, reward_model.ground_truth, gts): {_SAVES_ALL}, and "
            "trainer.main_generate keeps that of the data. For a reward that looks at the answer alone: "
            "without_ground_truth=true"
        )
    prompt, info, score, step = (row.get(name) for name in ("prompt", "extra_info", "score", "step"))
    info, prompt = info if isinstance(info, dict) else None, prompt if isinstance(prompt, list) and prompt else None
    return SavedAnswer(
        RewardItem(key, source, text, truth, info, prompt),
        uid=str(row.get("uid", where)),
        step=step if isinstance(step, int) else None,
        score=float(score) if isinstance(score, int | float) else None,
        is_scored="score" in row,
    )


# ------------------------------------------------------------------------------------------------------------ comparing

Pair = tuple[SavedAnswer, RewardResult]


def comparison_table(answers: Sequence[SavedAnswer], results: Sequence[RewardResult]) -> Table:
    """A line for each data source, and one for all of them. Of the answers with both scores: how many are the same,
    higher or lower; failed: answers whose reward failed."""
    table = titled_table("Saved scores and new ones")
    table.add_column("data source", no_wrap=True)
    for name in ("answers", "mean before", "mean now", "same", "higher", "lower", "failed before", "failed now"):
        table.add_column(name, justify="right")
    by_source: dict[str, list[Pair]] = {}
    for pair in zip(answers, results, strict=True):
        by_source.setdefault(pair[0].item.data_source, []).append(pair)
    for source in sorted(by_source):
        table.add_row(source, *_compared(by_source[source]))
    if len(by_source) > 1:
        table.add_row("all", *_compared([pair for pairs in by_source.values() for pair in pairs]))
    return table


def _compared(pairs: Sequence[Pair]) -> list[str]:
    """The cells of a line."""
    before = [answer.score for answer, _ in pairs if answer.score is not None]
    now = [result.score for _, result in pairs if not result.failed]
    changes = [change for change in map(_change, pairs) if change is not None and math.isfinite(change)]
    same = sum(abs(change) <= _EQUAL for change in changes)
    higher = sum(change > _EQUAL for change in changes)
    failed = sum(answer.is_scored and answer.score is None for answer, _ in pairs)
    return [
        str(len(pairs)),
        *(f"{fmean(scores):.4f}" if scores else "-" for scores in (before, now)),
        f"{same} ({same / len(changes):.1%})" if changes else "-",
        *map(str, (higher, len(changes) - same - higher, failed, sum(result.failed for _, result in pairs))),
    ]


def _change(pair: Pair) -> float | None:
    """New score less the saved one, which may not be there; infinite if the reward fails now."""
    answer, result = pair
    if answer.score is None:
        return None
    return math.inf if result.failed else result.score - answer.score


def extras_line(results: Sequence[RewardResult]) -> str:
    """The means of what the reward returned besides the score, `acc 0.75, format 0.50`; empty if there is nothing."""
    means = []
    for name in sorted({name for result in results for name in result.extra if not is_prediction(name)}):
        values = [result.extra[name] for result in results if name in result.extra]
        if not any(isinstance(value, str) for value in values):
            means.append(f"{name} {fmean(map(float, values)):.4f}")
    return ", ".join(means)


def changed_table(answers: Sequence[SavedAnswer], results: Sequence[RewardResult], shown: int) -> Table | None:
    """The answers whose score changed most; None if none did. A reward that failed or fails now counts as a change."""
    pairs = zip(answers, results, strict=True)
    changes = [(abs(change), pair) for pair in pairs if (change := _change(pair)) is not None and abs(change) > _EQUAL]
    if not changes or not shown:
        return None
    changes.sort(key=lambda change: -change[0])
    title = f"Changed: {len(changes)} answers" + (f", {shown} of them" if len(changes) > shown else "")
    table = titled_table(title)
    for name in ("data source", "uid", "answer", "expected", "before", "now"):
        table.add_column(name, overflow="fold")
    for _, (answer, result) in changes[:shown]:
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
        columns[f"{REWARD}{name}"] = [None if value is None else str(value) if is_text else value for value in values]
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
