"""`trainer.train` and its result: rows, rewards of all kinds, metrics, answers, an interrupt and a continued run."""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pandas
import pytest
from transformers import AutoModelForCausalLM

from tests.tiny_model import tiny_qwen2
from trainer import TrainResult, train
from trainer.api_inputs import reward_settings
from trainer.callbacks import Callback, RunControl, RunState
from verl_lite.config import load_config
from verl_lite.errors import UserError

ROWS = [{"prompt": f"{number}+{number}=", "ground_truth": str(2 * number)} for number in range(6)]
CYCLE: list[Any] = []
CYCLE.append(CYCLE)
SMALL: dict[str, Any] = {
    "trainer": {"backend": "inline", "n_gpus_per_node": 1, "device": "cpu", "total_training_steps": 2},
    "data__max_prompt_length": 32,
    "data__max_response_length": 4,
    "rollout__name": "hf",
    "rollout__n": 2,
    "reward__num_workers": 0,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_qwen2(tmp_path_factory.mktemp("model"))


def test_five_lines_train_generate_and_evaluate(model: str, tmp_path: Path) -> None:
    bonus = 0.25  # a closure is copied too

    def reward(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
        return bonus + float(solution_str == ground_truth)

    result = train(model, ROWS, reward, val_data=ROWS[:2], run_dir=tmp_path / "run", **SMALL)
    assert isinstance(result, TrainResult) and not result.is_stopped
    assert result.metrics.loc[[1, 2], "critic/score/mean"].ge(bonus).all() and result.metrics.index.name == "step"
    assert AutoModelForCausalLM.from_pretrained(result.model_path).config.model_type == "qwen2"
    prompts: list[Any] = ["1+1=", [{"role": "user", "content": "2+2="}]]
    greedy, sampled = result.generate(prompts), result.generate(prompts, n=3)
    assert result.generate("1+1=") == greedy[:1], "one text is one prompt"
    assert result.generate(prompts[1]) == greedy[1:], "one chat is one prompt"
    assert list(map(len, greedy)) == [1, 1] and list(map(len, sampled)) == [3, 3]
    assert greedy == result.generate(prompts), "the same answers from the file of the first call"
    assert result.evaluate()["val-core/data/reward/mean@1"] >= bonus
    assert result.evaluate(ROWS[3:])["val-core/data/reward/mean@1"] >= bonus


def test_the_example_of_the_readme_runs(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As written, but with a tiny model and few steps."""
    readme = (Path(__file__).resolve().parents[2] / "README.md").read_text()
    example = re.search(r"```python\n(from trainer import train\n.*?)```", readme, re.DOTALL)
    assert example is not None

    def small_train(_: str, rows: Any, reward: Any) -> TrainResult:
        return train(model, rows[:8], reward, run_dir=tmp_path / "run", **SMALL | {"data__max_prompt_length": 64})

    monkeypatch.setattr("trainer.train", small_train)
    exec(example[1], {})
    assert "critic/score/mean" in capsys.readouterr().out


def test_samples_are_the_answers_of_a_step_and_findings_those_of_the_report(model: str, tmp_path: Path) -> None:
    def reward(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> dict[str, Any]:
        if ground_truth == "4" != solution_str:  # the reward is tried with ground truths before the training
            raise ValueError("this answer fails")
        return {"score": 0.5, "letters": len(solution_str)}

    rows = [row for row in ROWS if row["ground_truth"] != "4"] + [{"prompt": "2+2=", "ground_truth": "4"}] * 3
    options = {"data.train_batch_size": 8, "reward.max_error_rate": 1.0, "trainer.save_freq": 0}
    result = train(model, rows, reward, run_dir=tmp_path / "run", options=options, **SMALL)

    samples = result.samples(step=1)
    assert len(samples) == 2 * len(rows), "each question has rollout.n answers"
    failed = samples["ground_truth"] == "4"
    assert failed.sum() == 6 and samples["score"][failed].isna().all()
    assert samples["score"][~failed].eq(0.5).all()
    assert samples["letters"][~failed].eq(samples["answer"][~failed].str.len()).all()
    assert set(samples["prompt"]) == {row["prompt"] for row in rows}
    last = result.samples()
    assert last.equals(result.samples(step=2)) and not last.equals(samples)
    with pytest.raises(UserError, match=r"step: found 3, but .* has samples of the steps 1 to 2"):
        result.samples(step=3)

    texts = [str(finding) for finding in result.findings]
    assert any(text.startswith("bad: reward/error_rate is above 0 in 2 of 2 steps") for text in texts)
    [equal] = [text for text in texts if "frac_reward_zero_std is above" in text]
    first, cause, advice = equal.split("\n")
    assert first.startswith(("bad: ", "look: ")) and cause.startswith("  likely: most prompts give no gradient")
    assert advice.startswith("  to do:  ") and "rollout.n=2" in advice


def trl_reward(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    return [float(len(completion[0]["content"]) > 1) for completion in completions]


@pytest.mark.parametrize("reward", [trl_reward, "exact_match"])
def test_rewards_of_trl_and_built_in_ones(model: str, tmp_path: Path, reward: Any) -> None:
    data = pandas.DataFrame(ROWS)
    result = train(model, data, reward, run_dir=tmp_path / "run", options={"trainer.save_freq": 0}, **SMALL)
    assert result.metrics["reward/error_rate"].eq(0).all()
    with pytest.raises(UserError, match="has no checkpoint; train with trainer.save_freq=-1"):
        result.model_path.exists()


def test_an_interrupted_run_has_a_checkpoint_and_continues(model: str, tmp_path: Path) -> None:
    folder = str(tmp_path)

    def reward(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
        scored = len(list(Path(folder).glob("scored-*")))
        (Path(folder) / f"scored-{scored}").touch()
        if scored == 20:  # in the second step, after the trial of the reward on two rows
            os.kill(os.getpid(), signal.SIGTERM)  # a shell may have made children ignore SIGINT
        return scored % 2

    small = SMALL | {"trainer": SMALL["trainer"] | {"total_training_steps": 4, "total_epochs": 9}}

    def run() -> TrainResult:
        return train(model, ROWS, reward, run_dir=tmp_path / "run", **small)

    first = run()
    assert first.is_stopped and first.metrics.index.max() < 4 and first.model_path.is_dir()
    second = run()
    assert not second.is_stopped and second.metrics.index.max() == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"data": []}, "train: there are no rows"),
        ({"data": ["x.jsonl", 3]}, "train: row 0 is 'x.jsonl', expected a dict of columns such as"),
        ({"data": [{"question": "a"}]}, "there is no prompt"),
        ({"reward": "exact_mtach"}, "no reward has this name; did you mean exact_match"),
        ({"data": {"prompt": ["a"]}}, "train: found a dictionary with the keys prompt; expected rows"),
        ({"data": 3}, "train: found 3, expected rows"),
        ({"reward": 3}, "reward: found 3; expected a function"),
        ({"reward": partial(max, threading.Lock())}, "cannot be copied to the reward processes"),
        ({"callbacks": [3]}, "callbacks: 3 is not a callback"),
        ({"callbacks": ["nowhere.py:A"]}, "trainer.callbacks='nowhere.py'"),
        ({"train_dataset": ROWS}, r"train\(\) has no argument train_dataset; here it is data$"),
        ({"reward_funcs": len}, r"train\(\) has no argument reward_funcs; here it is reward$"),
        ({"rollout__m": 3}, "rollout.m=3"),
    ],
)
def test_wrong_arguments(model: str, tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    given = {"model": model, "data": ROWS, "reward": "exact_match", "run_dir": tmp_path / "runs" / "run", **SMALL}
    with pytest.raises(UserError, match=message) as refused:
        train(**given | arguments)
    assert "command line" not in str(refused.value)
    assert not (tmp_path / "runs").exists(), "a refused call leaves no folder"


def test_a_message_names_the_argument_that_set_an_option(model: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"(?s)model\.path=.*model\.path comes from model"):
        train(tmp_path / "nowhere", ROWS, "exact_match", run_dir=tmp_path / "run", **SMALL)


def test_options_reach_the_run_as_they_are(model: str, tmp_path: Path) -> None:
    prompt = 'Say {"a":{"b":1}} \U0001f600 \x85'
    options = {
        "data": {"system_prompt": prompt},
        "data.apply_chat_template_kwargs": {"a.b": "\U0001f600", "c__d": 1},
        "reward": {"reward_kwargs": {}},
    }
    dry = {**SMALL, "trainer": {**SMALL["trainer"], "dry_run": True}, "data__max_prompt_length": 64}
    folder = tmp_path / "\U0001f600"
    result = train(model, ROWS, trl_reward, run_dir=folder, options=options, **dry)
    config = load_config(["--config", str(result.run_dir / "dry_run.yaml")]).config
    assert config.data.system_prompt == prompt
    assert config.data.apply_chat_template_kwargs == {"a.b": "\U0001f600", "c__d": 1}
    assert config.data.train_files == [str(folder / "inputs" / "train.jsonl")]


def test_a_long_value_is_not_printed(model: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.rows=.*\.\.\. \(\d+ characters\)") as refused:
        train(model, ROWS, "exact_match", run_dir=tmp_path / "run", data__rows=ROWS * 1000, **SMALL)
    assert len(str(refused.value)) < 2000


class Names(Callback):
    """Notes the names of its hooks."""

    def __init__(self) -> None:
        self.hooks: list[str] = []

    def on_step_end(self, state: RunState, control: RunControl) -> None:
        self.hooks.append("step")

    def on_run_end(self, state: RunState, control: RunControl) -> None:
        self.hooks.append("end")


def test_a_finished_call_returns_its_result_and_the_process_stays_as_it_was(model: str, tmp_path: Path) -> None:
    names = Names()
    arguments: Any = {"model": model, "data": ROWS, "reward": "exact_match", "run_dir": tmp_path / "run"}
    arguments |= SMALL | {"callbacks": [names]}
    hook, environment = sys.excepthook, dict(os.environ)
    random.seed(5)
    expected = random.Random(5).random()
    first = train(**arguments)
    assert sys.excepthook is hook
    assert dict(os.environ) == environment
    assert random.random() == expected
    assert names.hooks == ["step", "step", "end"]

    again = train(**arguments)
    assert again == first and not again.is_stopped
    assert names.hooks == ["step", "step", "end"], "nothing was trained"

    rows = Path(tmp_path / "run" / "inputs" / "train.jsonl").read_text()
    with pytest.raises(UserError, match=r"data\.train_files"):
        train(**arguments | {"data": ROWS[:3] + ROWS[:3]})
    files = sorted(path.name for path in (tmp_path / "run" / "inputs").iterdir() if path.is_file())
    assert files == ["train.jsonl"] and Path(tmp_path / "run" / "inputs" / "train.jsonl").read_text() == rows


@pytest.mark.parametrize("prompts", [3, {"role": "user"}, [["1+1="]], [{"content": "1+1="}], [None]])
def test_prompts_that_are_none(tmp_path: Path, prompts: Any) -> None:
    with pytest.raises(UserError, match="prompts.*expected a text, a chat"):
        TrainResult(tmp_path, is_stopped=False).generate(prompts)


def test_the_examples_of_the_guide_run_one_after_the_other(model: str) -> None:
    page = (Path(__file__).parents[2] / "trainer" / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page.partition("## From Python")[2], flags=re.DOTALL)
    names: dict[str, Any] = {"MODEL": model}
    for block in blocks:
        assert len([line for line in block.splitlines() if line.strip()]) <= 15
        exec(block, names)
    assert len(blocks) == 3 and names["loss"].isfinite() and names["log_probs"].shape == (2, 2)
    assert names["metrics"]["grad_norm"].value > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"callbacks": None}, "callbacks: found None; expected a list"),
        ({"callbacks": "file.py:Watch"}, "callbacks: found 'file.py:Watch'; expected a list"),
        ({"callbacks": [Callback]}, "Callback is a class; expected an object of it"),
        ({"options": ["rollout.n=2"]}, r"options: found \['rollout.n=2'\]; expected a dictionary"),
        ({"options": {1: 2}}, "options: found the key 1"),
        ({"run_dir": 5}, "run_dir: found 5; expected the path of a folder"),
        ({"reward": Callback}, "reward: Callback is a class"),
        ({"reward": len}, r"len\(obj, /\) cannot be called as needed"),
        ({"data": [{"prompt": "a", "ground_truth": "1"}, {"prompt": "b", "ground_truth": None}]}, "row 1 has a column"),
        ({"data": [{"prompt": "a", "ground_truth": {1, 2}}]}, r"column 'ground_truth': found \{1, 2\} of type set"),
        ({"data": [{"prompt": "a", "ground_truth": object()}]}, "of type object; expected text, numbers"),
        ({"data": [{"prompt": "a", "ground_truth": {1: "b"}}]}, "found the key 1 of a dictionary; expected text"),
        ({"data": [{"prompt": "a", "ground_truth": 10**5000}]}, "found a number of 16610 bits; write it as text"),
        ({"data": [{"prompt": "a", "ground_truth": CYCLE}]}, "nested more than 100 levels deep"),
        ({"data": pandas.DataFrame({"prompt": ["a"], "ground_truth": [pandas.NA]})}, "row 0 has a column ground_truth"),
        ({"data": [[{"role": "user", "content": "a"}]]}, r"row 0 is .* such as \{'prompt': "),
        ({"data": (text for text in ["1+1="])}, r"prompts are rows such as \{'prompt': "),
        ({"rolout__n": 2}, "there is no such key"),
    ],
)
def test_wrong_arguments_are_named_and_leave_no_files(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    call: dict[str, Any] = {"data": ROWS, "reward": trl_reward} | SMALL | arguments
    with pytest.raises(UserError, match=message):
        train(model, **call)
    assert list(tmp_path.iterdir()) == []


def test_a_run_dir_that_is_a_file_is_an_error_of_the_user(model: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for run_dir in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(UserError, match="run_dir=.*/file.* cannot be written to"):
            train(model, ROWS, trl_reward, run_dir=run_dir, **SMALL)
    assert (tmp_path / "file").read_text() == "mine"


def test_an_error_of_the_callers_rows_leaves_no_files(model: str, tmp_path: Path) -> None:
    rows = ({"prompt": str(1 / number)} for number in (1, 0))
    with pytest.raises(ZeroDivisionError):
        train(model, ROWS, trl_reward, val_data=rows, run_dir=tmp_path / "run", **SMALL)
    assert list(tmp_path.iterdir()) == []


def test_a_partial_function_is_a_reward(tmp_path: Path) -> None:
    settings = reward_settings(partial(trl_reward), tmp_path)
    assert settings["reward.custom_reward_function.style"] == "trl"


def test_a_finished_run_keeps_its_reward(model: str, tmp_path: Path) -> None:
    first = train(model, ROWS, trl_reward, run_dir=tmp_path, **SMALL)
    stored = (tmp_path / "inputs" / "reward.pkl").read_bytes()
    again = train(model, ROWS, lambda completions, **columns: [0.5] * len(completions), run_dir=tmp_path, **SMALL)
    assert again == first
    assert (tmp_path / "inputs" / "reward.pkl").read_bytes() == stored, "evaluate() calls it"
    with pytest.raises(UserError, match="n: found '2'; expected the number of answers"):
        first.generate("1+1=", n="2")  # type: ignore[arg-type]
