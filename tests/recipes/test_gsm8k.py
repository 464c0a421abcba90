"""The recipe of grade-school problems: GSM8K prepared from copies of all kinds, problems made by rule, settings."""

from __future__ import annotations

import json
import random
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recipes.gsm8k import prepare, problems
from verl_lite.rewards import default_compute_score

# ---------------------------------------------------------------------------------------------------- GSM8K prepared

ROWS = [  # of the form of GSM8K, with its calculator annotations
    {"question": "Tom had 3 eggs and ate 1. How many are left?", "answer": "He has 3-1=<<3-1=2>>2 eggs.\n#### 2"},
    {"question": "A car costs $1,000 and a bike a tenth. Both?", "answer": "100 and 1,000 are $1,100.\n#### 1,100"},
    {"question": "How deep?", "answer": "Below the sea.\n#### -5"},
]


def expected(index: int, split: str, truth: str) -> dict[str, Any]:
    """verl's row."""
    question, answer = ROWS[index]["question"], ROWS[index]["answer"]
    asked = f'{question} Let\'s think step by step and output the final answer after "####".'
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": asked}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": split, "index": index, "question": question, "answer": answer},
    }


def write_jsonl(folder: Path, rows: list[dict[str, Any]]) -> None:
    """As in OpenAI's repository, beside the socratic version, which is not taken."""
    folder.mkdir(parents=True)
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        (folder / f"{split}_socratic.jsonl").write_text("\n".join(map(json.dumps, rows[:1])))


def write_hub(folder: Path, rows: list[dict[str, Any]]) -> None:
    """As a copy of the hub's folder."""
    for name in ("main", "socratic"):
        (folder / name).mkdir(parents=True)
        for split in ("train", "test"):
            pq.write_table(pa.Table.from_pylist(rows), folder / name / f"{split}-00000-of-00001.parquet")


def write_dataset(folder: Path, rows: list[dict[str, Any]]) -> None:
    """As `datasets` saves it."""
    split = datasets.Dataset.from_list(rows)
    datasets.DatasetDict({"train": split, "test": split}).save_to_disk(folder)


@pytest.mark.parametrize("write", [write_jsonl, write_hub, write_dataset])
def test_gsm8k_becomes_verls_rows_from_any_copy(write: Any, tmp_path: Path) -> None:
    write(tmp_path / "copy", ROWS)
    assert prepare.main(["--from", str(tmp_path / "copy"), "--to", str(tmp_path / "out")]) == 0
    for split in ("train", "test"):
        rows = pq.read_table(tmp_path / "out" / f"{split}.parquet").to_pylist()
        assert rows == [expected(index, split, truth) for index, truth in enumerate(("2", "1100", "-5"))]
        for row in rows:
            source, truth = row["data_source"], row["reward_model"]["ground_truth"]
            assert default_compute_score(source, row["extra_info"]["answer"], truth) == 1
            assert default_compute_score(source, f"#### {truth}1", truth) == 0


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"question": "1+1?", "answer": "two"}], "train.jsonl: the answer 'two' has no number after ####"),
        ([*ROWS, {"question": "1+1?", "solution": "#### 2"}], "train row 3 of"),
    ],
)
def test_a_wrong_row_is_named(
    rows: list[dict[str, Any]], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_jsonl(tmp_path / "copy", rows)
    assert prepare.main(["--from", str(tmp_path / "copy"), "--to", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err


def test_what_cannot_be_found_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prepare.main(["--from", str(tmp_path), "--to", str(tmp_path / "out")]) == 2
    assert "no file with 'train' in its name" in capsys.readouterr().err
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    assert prepare.main(["--from", "openai/gsm8k", "--to", str(tmp_path / "out")]) == 2
    assert "--from='openai/gsm8k:main@train'" in capsys.readouterr().err


# -------------------------------------------------------------------------------------------------- problems by rule


def made(number: int, seed: int = 0) -> list[problems.Problem]:
    return list(islice(problems.draw(random.Random(seed)), number))


def test_solutions_are_right_and_their_lines_are_true() -> None:
    for problem in made(300):
        *lines, last = problems.solution(problem).split("\n")
        value = problem.start
        for line, (sign, number) in zip(lines, problem.steps, strict=True):
            left, result = line.split("=")
            assert left == f"{value}{sign}{number}" and eval(left) == int(result) >= 0
            value = int(result)
        assert last == f"#### {value}" and 1 <= len(lines) <= 2
    assert len({problem.steps[0][0] for problem in made(300)}) == 3
