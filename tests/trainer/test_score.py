"""Saved answers scored anew: what is read, what is asked for, what is compared, and what files lack."""

from __future__ import annotations

import io
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from rich.console import Console

from trainer.evaluate.rescoring import SavedAnswer, comparison_table, read_saved, truth_text
from trainer.evaluate.sample import Sample, plain_value
from trainer.evaluate.sample_files import SampleFiles
from trainer.score import main, run_config, score
from verl_lite.config import ConfigError, ScoreConfig, load_config, save_config
from verl_lite.errors import UserError
from verl_lite.rewards import RewardItem, RewardResult

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


def parquet_of(path: Path) -> list[dict[str, Any]]:
    return pyarrow.parquet.read_table(path).to_pylist()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return jsonl(tmp_path / "1.jsonl", [asdict(each) for each in SAMPLES])


def make_run(folder: Path, *options: str) -> Path:
    folder.mkdir()
    kept = folder / "kept"
    save_config(
        load_config(["recipe=null", "model.path=m", f"trainer.rollout_data_dir={kept}", *options]),
        folder / "config.yaml",
    )
    writer = SampleFiles(folder, 0, print, rollout_dir=str(kept))
    for step in (2, 10):
        writer.write_training([sample(place, "#### 72", 1.0, step=step) for place in range(2)], step)
    return folder


# ------------------------------------------------------------------------------------------------------------- scoring


def test_saved_scores_and_new_ones(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = saved.with_name("new.parquet")
    assert score(saved, [INLINE, f"out={out}"]) == 0
    rows = parquet_of(out)
    assert [row["score"] for row in rows] == [1.0, 0.0, 1.0, 1.0]
    assert [row["score_before"] for row in rows] == [1.0, 1.0, 0.0, None]
    assert [row["uid"] for row in rows] == ["p0", "p1", "p2", "p3"]
    text = " ".join(capsys.readouterr().out.split())
    assert "openai/gsm8k 4 0.6667 0.7500 1 (33.3%) 1 1 1 0" in text
    assert "Changed: 2 answers" in text


def test_numbers_of_the_comparison() -> None:
    def answer(score: float | None, is_scored: bool = True) -> SavedAnswer:
        return SavedAnswer(RewardItem(0, "s", "a", "t"), "u", None, score, is_scored)

    answers = [answer(1.0), answer(0.1), answer(0.5), answer(0.5), answer(None), answer(None, False)]
    results = [RewardResult(1.0), RewardResult(np.float32(0.1).item()), RewardResult(0.75), RewardResult.failure("x"),
               RewardResult(0.0), RewardResult(1.0)]  # fmt: skip
    shown = io.StringIO()
    Console(file=shown, width=200).print(comparison_table(answers, results))
    # the means of four saved scores and of five new ones; two of the three that have both are the same
    assert shown.getvalue().split()[-10:] == "s 6 0.5250 0.5700 2 (66.7%) 1 0 1 1".split()


def test_a_function_of_ones_own_gets_what_it_got_in_training_and_failures_are_counted(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (saved.parent / "mine.py").write_text(MINE)
    with saved.open("a") as file:
        file.write(json.dumps(asdict(sample(4, "boom", 0.0))) + "\n")
    out = saved.with_name("new.parquet")
    assert score(saved, [f"reward={saved.parent / 'mine.py'}", f"out={out}", "reward.max_error_rate=0.1"]) == 1
    rows = parquet_of(out)
    assert [row["score"] for row in rows] == [2.0] * 4 + [None]
    assert [row["reward/index"] for row in rows] == [0.0, 1.0, 2.0, 3.0, None]
    assert rows[0]["reward/asked"] == PROMPT[0]["content"]
    assert rows[4]["failed"] and "no such answer" in rows[4]["error"]
    assert "1 of 5 rewards failed. The first one:" in capsys.readouterr().err
    assert score(saved, [f"reward={saved.parent / 'mine.py'}:compute_score", INLINE, "reward.max_error_rate=0.2"]) == 0


def test_several_rewards_and_a_registered_one_by_name(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = saved.with_name("new.parquet")
    functions = "reward.functions={accuracy: {weight: 2}, format: {reward: format, weight: 0.5}}"
    assert score(saved, [functions, INLINE, f"out={out}"]) == 0
    assert [row["reward/accuracy"] for row in parquet_of(out)] == [1.0, 0.0, 1.0, 1.0]
    assert "new means: acc 0.7500, accuracy 0.7500, format 0.0000" in " ".join(capsys.readouterr().out.split())
    out = saved.with_name("newer.parquet")
    assert score(saved, ["reward=rule/exact_match", INLINE, f"out={out}"]) == 0
    assert [row["score"] for row in parquet_of(out)] == [0.0, 1.0, 0.0, 0.0]


def test_the_file_beside_is_never_read_back_and_never_overwritten(saved: Path) -> None:
    for _ in range(2):
        assert score(saved.parent, [INLINE, "rows=1"]) == 0
    assert len(list(saved.parent.glob("answers-scored-*.parquet"))) == 2
    assert read_saved(saved.parent, None, ScoreConfig()).answers == read_saved(saved, None, ScoreConfig()).answers
    (saved.parent / "there.parquet").write_text("")
    for name in ("there.parquet", "new.jsonl"):
        with pytest.raises(ConfigError, match=f"out=.*{name}: the name of a new .parquet file is expected"):
            score(saved, [INLINE, f"out={saved.parent / name}"])


# ------------------------------------------------------------------------------------------------------------- sources


def test_a_run_is_scored_by_its_own_reward_in_the_order_of_steps(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    run = make_run(tmp_path / "run", f"reward.custom_reward_function.path={tmp_path / 'mine.py'}")
    out = tmp_path / "new.parquet"
    assert score(run, [INLINE, f"out={out}"]) == 0
    assert [(row["step"], row["score"]) for row in parquet_of(out)] == [(2, 2.0), (2, 2.0), (10, 2.0), (10, 2.0)]
    assert score(run, [INLINE, "reward=gsm8k", f"out={tmp_path / 'other.parquet'}"]) == 0
    assert {row["score"] for row in parquet_of(tmp_path / "other.parquet")} == {1.0}


def test_what_else_was_in_the_saved_scores_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", "reward.overlong_buffer.enable=true", "reward.overlong_buffer.len=4")
    assert score(run, [INLINE]) == 0
    assert "penalty of long answers" in " ".join(capsys.readouterr().out.split())


def test_a_run_that_kept_nothing_says_which_option_keeps_answers(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for file in (run / "kept").glob("*"):
        file.unlink()
    jsonl(run / "samples.jsonl", [asdict(SAMPLES[0])])
    assert len(read_saved(run, run_config(run), ScoreConfig()).answers) == 1
    (run / "samples.jsonl").unlink()
    with pytest.raises(UserError, match="saved no answers: .*trainer.rollout_data_dir=FOLDER"):
        score(run, [INLINE])


def test_a_run_of_agents_cannot_be_scored(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("agentic:\n  train_env_manager:\n    tags: [FrozenLake]\n")
    with pytest.raises(UserError, match="environments gave the rewards of this run"):
        score(tmp_path, [])


def test_generated_answers_and_several_answers_to_a_row(tmp_path: Path) -> None:
    generated = {"uid": "a", "sample": 1, "data_source": "s", "prompt": PROMPT, "response": "x",
                 "reward_model": {"style": "rule", "ground_truth": "72"}, "extra_info": {"index": 7}}  # fmt: skip
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([generated]), tmp_path / "a.parquet")
    [answer] = read_saved(tmp_path / "a.parquet", None, ScoreConfig()).answers
    assert answer.item == RewardItem(0, "s", "x", "72", {"index": 7}, PROMPT) and not answer.is_scored
    row = {**generated, "responses": ["x", "y", "z"]}
    del row["response"]
    answers = read_saved(jsonl(tmp_path / "b.jsonl", [row, row]), None, ScoreConfig()).answers
    assert [(answer.item.key, answer.item.solution_str) for answer in answers] == list(enumerate("xyzxyz"))


def test_rows_of_verl_have_text_for_the_ground_truth_and_no_source(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "1.jsonl", [{"input": "q", "output": "#### 72", "gts": "72", "score": 1.0, "step": 1}])
    with pytest.raises(UserError, match="row 0 of .*1.jsonl has no data_source: .*data_source=NAME"):
        read_saved(file, None, ScoreConfig())
    found = read_saved(file, None, ScoreConfig(data_source="openai/gsm8k"))
    assert found.answers[0].item == RewardItem(0, "openai/gsm8k", "#### 72", "72")
    assert "1 rows have no prompt as chat messages" in found.notes[0] and "as text alone (gts)" in found.notes[1]


def test_a_line_that_a_killed_run_cut_off_is_left_out(saved: Path) -> None:
    with saved.open("a") as file:
        file.write('{"step": 1, "out')
    assert len(read_saved(saved, None, ScoreConfig()).answers) == 4
    assert len(read_saved(saved, None, ScoreConfig(rows=2)).answers) == 2


# ------------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"data_source": "s", "ground_truth": "t"}, "has no answer: a text `response`"),
        ({"data_source": "s", "ground_truth": "t", "responses": ["a", 3]}, "has no answer"),
        ({"data_source": "s", "response": "a"}, "row 0 of .* has no ground truth .*trainer.rollout_data_dir=FOLDER"),
        ({"data_source": "s", "response": "a", "reward_model": {"style": "model"}}, "without_ground_truth=true"),
        ([1], r"row 0 of .*: found \[1\], expected an object"),
    ],
)
def test_what_a_file_lacks_is_said_with_the_row(tmp_path: Path, row: Any, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        read_saved(jsonl(tmp_path / "a.jsonl", [row]), None, ScoreConfig())


def test_half_of_a_surrogate_pair_in_an_answer_is_written_as_a_question_mark(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", [{"data_source": "exact_match", "response": "a\ud800", "ground_truth": "a"}])
    assert score(file, [INLINE, f"out={tmp_path / 'new.parquet'}"]) == 0
    assert parquet_of(tmp_path / "new.parquet")[0]["response"] == "a?"


def test_rewards_of_the_answer_alone_need_no_ground_truth(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", [{"data_source": "s", "response": "<think>a</think><answer>b</answer>"}])
    out = tmp_path / "new.parquet"
    assert score(file, ["reward=format", "without_ground_truth=true", INLINE, f"out={out}"]) == 0
    assert parquet_of(out)[0]["score"] == 1.0 and parquet_of(out)[0]["score_before"] is None


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("none.jsonl", None, "there is no such file or folder"),
        ("a.csv", "x", "expected a .jsonl or .parquet file"),
        ("a.parquet", "x", "not a readable parquet file"),
        ("a.jsonl", "{\n", "line 1: not valid json"),
        ("a.jsonl", "", "there are no answers in it"),
    ],
)
def test_what_is_no_file_of_answers(tmp_path: Path, name: str, content: str | None, reason: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=reason):
        score(tmp_path / name, [])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["reward=regx"], "reward.functions.regx.reward=regx: no reward has this name; did you mean regex"),
        (["reward=none.py"], "reward.custom_reward_function.path=none.py: there is no file"),
        (["rows=0"], "rows=0: -1 .all. or at least 1"),
        (["reward.fuctions={}"], "there is no such key; did you mean reward.functions"),
        (["data_source=nobody/knows"], "No reward function for data_source='nobody/knows'"),
    ],
)
def test_wrong_options_are_told_before_anything_is_scored(tmp_path: Path, options: list[str], reason: str) -> None:
    file = jsonl(tmp_path / "a.jsonl", [{"response": "a", "ground_truth": "t", "data_source": None}])
    given = options if options[0].startswith("data_source") else [*options, "data_source=openai/gsm8k"]
    with pytest.raises((ConfigError, UserError), match=reason.replace("?", r"\?").replace(r"'\?none", "'?none")):
        score(file, given)
    assert list(tmp_path.glob("*.parquet")) == []


def test_the_command_tells_how_it_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == main(["reward=format"]) == 2
    assert "usage: python -m trainer.score RUN_OR_FILE" in capsys.readouterr().err
    assert main(["--help-config"]) == 0
    assert "reward.functions" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------------- what is saved


def test_values_of_a_dataset_as_json_has_them() -> None:
    value = {
        "a": np.array([1, 2]),
        "b": (np.float32(0.5), float("nan")),
        3: [None, True, b"x"],
        "n": {"m": np.int64(4)},
    }
    assert plain_value(value) == {"a": [1, 2], "b": [0.5, None], "3": [None, True, "b'x'"], "n": {"m": 4}}
    assert json.loads(json.dumps(plain_value(value))) == plain_value(value)


def test_a_ground_truth_as_text() -> None:
    assert truth_text("72") == "72" and truth_text({"target": ["a"]}) == '{"target": ["a"]}'
