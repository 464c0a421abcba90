"""Saved answers scored anew: what is read, what is asked for, what is compared, and what files lack."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from trainer.evaluate import scoring
from trainer.evaluate.saved_answers import read_saved
from trainer.evaluate.scoring import score
from trainer.score import main
from trainer.validation.sample import Sample, plain_value
from trainer.validation.sample_files import SampleFiles
from verl_lite.config import ConfigError, ScoreConfig, load_config, save_config
from verl_lite.errors import UserError
from verl_lite.rewards import RewardItem

PROMPT = [{"role": "user", "content": "What is 70 + 2?"}]
INLINE = "reward.num_workers=0"
MINE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, prompt=None):
    if solution_str == "boom": raise KeyError("no such answer")
    return {"score": 2.0 * (ground_truth == "72"), "index": extra_info["index"], "asked": prompt[0]["content"]}
"""


def sample(place: int, output: str, score: float | None, **changes: Any) -> Sample:
    given: dict[str, Any] = {
        "step": 1, "uid": f"p{place}", "data_source": "openai/gsm8k", "input": PROMPT[0]["content"], "output": output,
        "gts": "72", "score": score, "response_length": 3, "finish_reason": "stop", "policy_version": 0, "extra": {},
        "prompt": PROMPT, "ground_truth": "72", "extra_info": {"index": place},
    }  # fmt: skip
    return Sample(**{**given, **changes})


SAMPLES = [sample(0, "#### 72", 1.0), sample(1, "72", 1.0), sample(2, "#### 72", 0.0), sample(3, "#### 72", None)]


def jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def scored(target: Path, *options: str, status: int = 0) -> list[dict[str, Any]]:
    """The rows of the file that the command writes beside."""
    out = target.parent / f"{len(list(target.parent.iterdir()))}-new.parquet"
    assert main([str(target), *options, "--out", str(out)]) == status
    return pyarrow.parquet.read_table(out).to_pylist()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return jsonl(tmp_path / "1.jsonl", [asdict(each) for each in SAMPLES])


def test_saved_scores_and_new_ones_of_any_reward(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = scored(saved, INLINE)
    assert [row["score"] for row in rows] == [1.0, 0.0, 1.0, 1.0]
    assert [row["score_before"] for row in rows] == [1.0, 1.0, 0.0, None]
    assert [row["uid"] for row in rows] == ["p0", "p1", "p2", "p3"]
    assert "openai/gsm8k 4 0.6667 0.7500 1 (33.3%) 1 1 1 0" in " ".join(capsys.readouterr().out.split())
    functions = "reward.functions={accuracy: {weight: 2}, format: {reward: format, weight: 0.5}}"
    assert [row["reward/accuracy"] for row in scored(saved, functions, INLINE)] == [1.0, 0.0, 1.0, 1.0]
    assert [row["score"] for row in scored(saved, "reward=rule/exact_match", INLINE)] == [0.0, 1.0, 0.0, 0.0]


def test_a_function_of_ones_own_gets_what_it_got_in_training_and_failures_are_counted(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (saved.parent / "mine.py").write_text(MINE)
    with saved.open("a") as file:  # and a line that a killed run cut off
        file.write(json.dumps(asdict(sample(4, "boom", 0.0))) + '\n{"step": 1, "out')
    rows = scored(saved, f"reward={saved.parent / 'mine.py'}", "reward.max_error_rate=0.1", status=1)
    assert [row["score"] for row in rows] == [2.0] * 4 + [None]
    assert [row["reward/index"] for row in rows] == [0.0, 1.0, 2.0, 3.0, None]
    assert rows[0]["reward/asked"] == PROMPT[0]["content"]
    assert rows[4]["failed"] and "no such answer" in rows[4]["error"]
    assert "1 of 5 rewards failed. The first one:" in capsys.readouterr().err
    scored(saved, f"reward={saved.parent / 'mine.py'}:compute_score", INLINE, "reward.max_error_rate=0.2")


def test_a_run_is_scored_by_its_own_reward_in_the_order_of_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    run, kept = tmp_path / "run", tmp_path / "kept"
    options = [f"reward.custom_reward_function.path={tmp_path / 'mine.py'}", f"trainer.rollout_data_dir={kept}"]
    options += ["reward.overlong_buffer.enable=true", "reward.overlong_buffer.len=4"]
    run.mkdir()
    save_config(load_config(["recipe=null", "model.path=m", *options]), run / "config.yaml")
    with pytest.raises(UserError, match="no saved answers.*trainer.rollout_data_dir=FOLDER"):
        score(run, [INLINE])
    for writer in (SampleFiles(run, 1 << 20, print), SampleFiles(run, 0, print, rollout_dir=str(kept))):
        for step in (2, 10):
            writer.write_training([sample(place, "#### 72", 1.0, step=step) for place in range(2)], step)
        assert [(row["step"], row["score"]) for row in scored(run, INLINE)] == [(2, 2.0)] * 2 + [(10, 2.0)] * 2
    assert "penalty for long answers" in " ".join(capsys.readouterr().out.split())
    assert {row["score"] for row in scored(run, INLINE, "reward=gsm8k")} == {1.0}


def test_a_run_of_agents_cannot_be_scored(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("agentic:\n  train_env_manager:\n    tags: [FrozenLake]\n")
    with pytest.raises(UserError, match="the rewards of this run belong to episodes"):
        score(tmp_path, [])


def test_what_is_read_of_other_files(tmp_path: Path) -> None:
    row = {"uid": "a", "data_source": "s", "prompt": PROMPT, "responses": ["x", "y", "z"],
           "reward_model": {"style": "rule", "ground_truth": "72"}, "extra_info": {"index": 7}}  # fmt: skip
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row, row]), tmp_path / "a.parquet")
    answers = read_saved(tmp_path / "a.parquet", None, ScoreConfig())
    assert [(answer.item.key, answer.item.solution_str) for answer in answers] == list(enumerate("xyzxyz"))
    assert answers[0].item == RewardItem(0, "s", "x", "72", {"index": 7}, PROMPT)
    file = jsonl(tmp_path / "1.jsonl", [{"input": "q", "output": "#### 72\ud800", "gts": "72", "score": 1.0}])  # verl's
    with pytest.raises(UserError, match="row 0 of .*1.jsonl has no data_source: .*data_source=NAME"):
        read_saved(file, None, ScoreConfig())
    assert scored(file, "data_source=openai/gsm8k", INLINE)[0]["response"] == "#### 72?"
    name = f"{1:016x}-0.jpg"
    shown: dict[str, Any] = {"data_source": "s", "output": "x", "images": ["../x.png", name]}
    for folder in ("images", "train"):
        (tmp_path / folder).mkdir()
    (tmp_path / "images" / name).write_bytes(b"a")
    (tmp_path / "x.png").write_bytes(b"b")
    file = jsonl(tmp_path / "train" / "i.jsonl", [shown, shown | {"images": [{"bytes": "x"}]}])
    assert [answer.item.images for answer in read_saved(file, None, ScoreConfig())] == [(b"a",), ()]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([shown]), tmp_path / "train" / "i.parquet")
    assert read_saved(tmp_path / "train" / "i.parquet", None, ScoreConfig())[0].item.images == (b"a",)
    file = jsonl(tmp_path / "b.jsonl", [{"data_source": "s", "response": "<think>a</think><answer>b</answer>"}])
    assert scored(file, "reward=format", INLINE)[0]["score"] == 1.0, "without a ground truth"


def test_files_of_other_editors_are_read_and_other_encodings_are_named(tmp_path: Path) -> None:
    line = '{"data_source": "s", "response": "é", "ground_truth": "1"}'
    file = tmp_path / "a.jsonl"
    file.write_bytes(f"\ufeff{line}\r\n  \r\n{line}\r\n".encode())
    assert [answer.item.solution_str for answer in read_saved(file, None, ScoreConfig())] == ["é", "é"]
    file.write_bytes(line.encode("latin-1"))
    with pytest.raises(UserError, match=r"a.jsonl: cannot be read \(.*utf-8.*\); expected .* UTF-8"):
        read_saved(file, None, ScoreConfig())


def test_files_that_are_named_by_step_are_read_in_its_order_after_the_others(tmp_path: Path) -> None:
    # int() does not accept the superscript, although it is a digit
    for name in ("10", "9", "²"):
        jsonl(tmp_path / f"{name}.jsonl", [{"data_source": "s", "response": name, "ground_truth": "1"}])
    answers = read_saved(tmp_path, None, ScoreConfig())
    assert [answer.item.solution_str for answer in answers] == ["²", "9", "10"]


def test_a_file_that_cannot_be_written_is_an_error_before_any_answer_is_scored(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "_score_all", lambda *arguments: pytest.fail("scored"))
    with pytest.raises(UserError, match="--out /proc/self/fdinfo/x/y.parquet cannot be written"):
        score(saved, [INLINE, "out=/proc/self/fdinfo/x/y.parquet"])


def test_the_file_beside_is_never_read_back_and_never_overwritten(saved: Path) -> None:
    for _ in range(2):
        assert score(saved.parent, [INLINE]) == 0
    assert len(list(saved.parent.glob("answers-scored-*.parquet"))) == 2
    assert read_saved(saved.parent, None, ScoreConfig()) == read_saved(saved, None, ScoreConfig())
    with pytest.raises(ConfigError, match="--out .*1.jsonl: expected the name of a new .parquet file"):
        score(saved, [INLINE, f"out={saved}"])


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("none.jsonl", None, "no saved answers"),
        ("a.csv", "x", "no saved answers"),
        ("a.parquet", "x", "not a readable parquet file"),
        ("a.jsonl", "{\n", "line 1: not valid json"),
        ("a.jsonl", "", "contains no answers"),
        ("a.jsonl", "[1]}\n", "not valid json"),
        ("a.jsonl", "[1]\n", r"row 0 of .*: found \[1\], expected an object"),
        ("a.jsonl", '{"data_source": "s", "ground_truth": "t"}\n', "has no answer: expected a text `response`"),
        ("a.jsonl", '{"data_source": "s", "responses": ["a", 3]}\n', "has no answer"),
    ],
)
def test_what_is_no_file_of_answers(tmp_path: Path, name: str, content: str | None, reason: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=reason):
        score(tmp_path / name, [])


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("reward=regx", "no reward has this name; did you mean regex"),
        ("reward=none.py", "reward.custom_reward_function.path=none.py: there is no file"),
        ("reward.fuctions={}", "there is no such key; did you mean reward.functions"),
        ("data_source=nobody/knows", "No reward function for data_source='nobody/knows'"),
    ],
)
def test_wrong_options_are_told_before_anything_is_scored(tmp_path: Path, option: str, reason: str) -> None:
    file = jsonl(tmp_path / "a.jsonl", [{"response": "a", "ground_truth": "t"}])
    with pytest.raises((ConfigError, UserError), match=reason):
        score(file, ["data_source=openai/gsm8k", option])
    assert list(tmp_path.glob("*.parquet")) == []


def test_the_command_tells_how_it_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == main(["reward=format"]) == 2
    assert "usage: python -m trainer.score RUN_OR_FILE" in capsys.readouterr().err
    assert main(["--help-config"]) == 0 and "reward.functions" in capsys.readouterr().out


def test_values_of_a_dataset_as_json_has_them() -> None:
    value = {"a": np.array([1, 2]), "b": (np.float32(0.5), float("nan")), 3: [None, True, b"x"], "n": np.int64(4)}
    assert plain_value(value) == {"a": [1, 2], "b": [0.5, None], "3": [None, True, "b'x'"], "n": 4}
