"""Answers that were saved, read back to be scored: from a run folder, a folder of samples, or a file.

A row is what `trainer.evaluate.sample_files` or `trainer.main_generate` wrote, or anything with an answer (`output`,
`response`, or a list `responses`), `data_source`, and a ground truth (`ground_truth`, `reward_model` with one, or
`gts`). Also read where they are: prompt, extra_info, uid, step, score.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from trainer.evaluate.sample_files import FOLDER, JSON, TRAIN, VAL
from verl_lite.config import PPOConfig, ScoreConfig
from verl_lite.errors import UserError
from verl_lite.rewards import RewardItem

SUFFIXES = (".jsonl", ".parquet")
_SAVES_ALL = (
    "a run keeps its answers in its folder unless trainer.samples_max_mb=0; trainer.rollout_data_dir=FOLDER (training) "
    "and trainer.validation_data_dir=FOLDER keep all of them as jsonl"
)


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


def read_saved(target: Path, run: PPOConfig | None, config: ScoreConfig) -> SavedAnswers:
    """The saved answers of `target`. run: the configuration of a run folder, None of anything else.

    Raises UserError for files that cannot be read, and for rows without what the reward needs, with the row.
    """
    files, origin = _files(target, run)
    answers: list[SavedAnswer] = []
    lacking_prompt = as_text = 0
    for file in files:
        for number, row in _rows(file):
            if 0 <= config.rows <= len(answers):
                break
            where = f"row {number} of {file}"
            texts = _responses(row, where)
            lacking_prompt += not isinstance(row.get("prompt"), list)
            as_text += "gts" in row and "ground_truth" not in row and "reward_model" not in row
            answers += [_answer(row, text, len(answers) + i, where, config) for i, text in enumerate(texts)]
    if not answers:
        raise UserError(f"{origin}: there are no answers in it")
    notes = []
    if lacking_prompt:
        notes.append(f"{lacking_prompt} rows have no prompt as chat messages: a reward that asks for it gets None")
    if as_text:
        notes.append(f"{as_text} rows have their ground truth as text alone (gts): a reward gets that text")
    return SavedAnswers(answers, origin, notes)


def _files(target: Path, run: PPOConfig | None) -> tuple[list[Path], str]:
    """The files to read, and what they are in words."""
    if run is not None:
        for name, folder in (
            ("trainer.rollout_data_dir", run.trainer.rollout_data_dir),
            ("trainer.validation_data_dir", run.trainer.validation_data_dir),
        ):
            found = _in_folder(Path(folder).expanduser()) if folder else []
            if found:
                return found, f"{folder} ({name} of the run)"
        for kind in (TRAIN, VAL):
            found = _in_folder(target / FOLDER / kind)
            if found:
                return found, f"{target / FOLDER / kind}"
        if (target / "samples.jsonl").exists():
            return [target / "samples.jsonl"], f"{target / 'samples.jsonl'} (what its validations showed)"
        raise UserError(f"{target}: this run saved no answers: {_SAVES_ALL}")
    if target.is_dir():
        found = _in_folder(target)
        if not found:
            raise UserError(f"{target}: neither a run folder (config.yaml) nor a folder with .jsonl or .parquet files")
        return found, str(target)
    if not target.is_file() or target.suffix not in SUFFIXES:
        why = "expected a .jsonl or .parquet file" if target.is_file() else "there is no such file or folder"
        raise UserError(f"{target}: {why}; give a run folder, a folder of saved samples, or a file of answers")
    return [target], str(target)


def _in_folder(folder: Path) -> list[Path]:
    """Its files of answers; those that are named by step in the order of steps."""
    found = [file for file in folder.glob("*") if file.suffix in SUFFIXES and "-scored-" not in file.name]
    return sorted(found, key=lambda file: (int(file.stem) if file.stem.isdigit() else -1, file.name))


def _rows(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of a file, numbered from 0."""
    if file.suffix == ".parquet":
        try:
            with pyarrow.parquet.ParquetFile(file) as reader:
                rows = (row for part in reader.iter_batches() for row in part.to_pylist(maps_as_pydicts="lossy"))
                yield from enumerate(map(_unpacked, rows))
        except (pyarrow.ArrowException, OSError) as error:
            raise UserError(f"{file}: not a readable parquet file ({error})") from error
        return
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                if not line.endswith("\n"):  # cut off when the run was killed
                    return
                raise UserError(f"{file}, line {number + 1}: not valid json ({error})") from error
            if not isinstance(row, dict):
                raise UserError(f"{file}, line {number + 1}: found {row!r:.100}, expected an object with named entries")
            yield number, row


def _unpacked(row: dict[str, Any]) -> dict[str, Any]:
    """With NAME for each NAME_json, as `trainer.evaluate.sample_files` packs what has any shape."""
    packed = {name: text for name, text in row.items() if name.endswith(JSON) and isinstance(text, str)}
    return row | {name.removesuffix(JSON): json.loads(text) for name, text in packed.items()}


def _responses(row: dict[str, Any], where: str) -> list[str]:
    found = next((row[name] for name in ("response", "output", "responses") if row.get(name) is not None), None)
    texts = [text for text in (found if isinstance(found, list) else [found]) if isinstance(text, str)]
    if not texts or (isinstance(found, list) and len(texts) < len(found)):
        raise UserError(
            f"{where} has no answer: a text `response` (or `output`), or a list of them `responses`, is expected; its "
            f"entries are {', '.join(row)}"
        )
    return texts


def _answer(row: dict[str, Any], text: str, key: int, where: str, config: ScoreConfig) -> SavedAnswer:
    source = row.get("data_source") or config.data_source
    if not isinstance(source, str):
        raise UserError(f"{where} has no data_source: give one for all rows that have none, data_source=NAME")
    prompt, info, score = row.get("prompt"), row.get("extra_info"), row.get("score")
    return SavedAnswer(
        RewardItem(
            key,
            source,
            text,
            _ground_truth(row, where, config),
            info if isinstance(info, dict) else None,
            prompt if isinstance(prompt, list) and prompt else None,
        ),
        uid=str(row.get("uid", where)),
        step=row["step"] if isinstance(row.get("step"), int) else None,
        score=float(score) if isinstance(score, int | float) else None,
        is_scored="score" in row,
    )


def _ground_truth(row: dict[str, Any], where: str, config: ScoreConfig) -> Any:
    style = row.get("reward_model")
    nested = style.get("ground_truth") if isinstance(style, dict) else None
    found = next((value for value in (row.get("ground_truth"), nested, row.get("gts")) if value is not None), None)
    if found is None and not config.without_ground_truth:
        raise UserError(
            f"{where} has no ground truth (ground_truth, reward_model.ground_truth, gts): {_SAVES_ALL}, and "
            "trainer.main_generate keeps that of the data. For a reward that looks at the answer alone: "
            "without_ground_truth=true"
        )
    return found
