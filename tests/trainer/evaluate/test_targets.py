"""What main_eval and main_generate may be pointed at, what their results depend on, and the file of answers."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from tests.set_keys import set_keys
from tests.trainer.answering import answering, task
from tests.trainer.checkpoint.written_checkpoint import write_checkpoint
from trainer.evaluate.answering import answer_settings
from trainer.evaluate.evaluation import RESULTS, Evaluation, eval_arguments, finished_metrics
from trainer.evaluate.generation import Generation, folder_of
from trainer.evaluate.targets import Target, find_targets, titles
from trainer.main_eval import main as main_eval
from trainer.main_generate import main as main_generate
from verl_lite.config import PPOConfig, load_config
from verl_lite.errors import UserError


def write_index(folder: Path) -> None:
    (folder / "actor").mkdir()
    (folder / "actor" / ".metadata").touch()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with checkpoints of steps 2 and 10."""
    folder = tmp_path / "run"
    folder.mkdir()
    for step in (2, 10):
        write_checkpoint(folder, step, write_index, {})
    (folder / "config.yaml").write_text("trainer:\n  seed: 5\n")
    return folder


def test_a_run_is_its_newest_checkpoint_or_all_in_order(run: Path) -> None:
    [newest] = find_targets(str(run))
    assert newest.name == "global_step_10" and newest.folder == run / "eval" and not newest.is_model
    assert [target.name for target in find_targets(str(run), all_checkpoints=True)] == [
        "global_step_2", "global_step_10",
    ]  # fmt: skip
    assert [target.name for target in find_targets(str(run / "global_step_2"))] == ["global_step_2"]
    config = load_config([*newest.arguments, "model.path=m", "data.val_files=v"]).config
    assert config.trainer.seed == 5 and config.trainer.val_only and config.data.train_files == []
    assert config.trainer.resume_from_path == str(run / "global_step_10")
    (run / "global_step_10" / "actor" / ".metadata").write_text("damage")
    for all_checkpoints in (False, True):
        assert [each.name for each in find_targets(str(run), all_checkpoints=all_checkpoints)] == ["global_step_2"]


def test_a_table_tells_targets_of_one_name_apart() -> None:
    paths = ("runs/a/x/global_step_2", "runs/b/x/global_step_2", "runs/a/x/global_step_4", "me/hf", "you/hf", "Qwen/Q")
    targets = [Target(path.rpartition("/")[2], path, Path("eval"), ()) for path in paths]
    assert titles([*targets, targets[0]]) == [
        "a/x/global_step_2", "b/x/global_step_2", "global_step_4", "me/hf", "you/hf", "Q", "a/x/global_step_2",
    ]  # fmt: skip


def test_the_same_step_of_two_runs_has_two_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    accuracy = {str(tmp_path / "a" / "global_step_2"): 0.125, str(tmp_path / "b" / "global_step_2"): 0.25}
    for step in map(Path, accuracy):
        step.mkdir(parents=True)
        (step / "data.pt").touch()
    found = lambda target, _: (0, {"val-core/s/acc/mean@1": accuracy[target.path]})  # noqa: E731
    monkeypatch.setattr("trainer.evaluate.evaluation.evaluate", found)
    assert main_eval(list(accuracy)) == 0
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("a/global_step_2", "b/global_step_2", "0.125", "0.25")), shown


def test_a_model_is_a_folder_or_a_hub_name_and_needs_data(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for text, path in ((str(tmp_path), str(tmp_path)), ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B")):
        [target] = find_targets(text)
        assert target.is_model and f"model.path={path}" in target.arguments and "/" not in target.name
        with pytest.raises(UserError, match="name what to validate on, data.val_files=PATH"):
            eval_arguments(target, [])
        assert "data.val_files=x.jsonl" in eval_arguments(target, ["data.val_files=x.jsonl"])


def test_wrong_targets_say_what_was_expected(tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").touch()
    for text, told in (
        (str(tmp_path / "none"), r"neither a run folder \(config.yaml\), a checkpoint \(data.pt\) nor a model"),
        (str(tmp_path), "a run without a checkpoint"),
    ):
        with pytest.raises(UserError, match=told):
            find_targets(text)
    (tmp_path / "config.json").touch()
    (tmp_path / "config.yaml").unlink()
    with pytest.raises(UserError, match="--all-checkpoints requires a run folder"):
        find_targets(str(tmp_path), all_checkpoints=True)
    assert main_eval([str(run), "--all-checkpoints", "trainer.default_local_dir=x"]) == 2
    assert "each of the 2 targets gets its own folder" in capsys.readouterr().err
    for command in (main_eval, main_generate):
        assert command(["data.val_files=x"]) == 2
        assert "usage: python -m trainer.main_" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("rollout.val_kwargs.greedy_too=true", "no greedy baseline"),
        ("reward.timeout_s=5", "reward.timeout_s=5 has no effect here"),
        ("trainer.default_local_dir=x", "has no effect here"),
        ("output=b.parquet", "expected exactly one output file"),
        ("", "there.parquet exists"),
    ],
)
def test_generation_refuses_what_it_would_not_do(
    tmp_path: Path, options: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = task(tmp_path, prompts=1)
    (tmp_path / "there.parquet").write_text("somebody's")
    argv = [str(config.model.path), f"data.val_files={config.data.val_files[0]}", "--out", f"{tmp_path}/there.parquet"]
    assert main_generate([*argv, *options.split()]) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "there.parquet.run").exists() and (tmp_path / "there.parquet").read_text() == "somebody's"


SAME = (
    ("data.val_batch_size", 3), ("trainer.n_gpus_per_node", 4), ("trainer.backend", "inline"), ("rollout.n", 9),
    ("rollout.max_num_seqs", 2), ("actor.optim.lr", 1.0), ("data.train_batch_size", 2), ("reward.num_workers", 5),
    ("trainer.default_local_dir", "x"), ("data.shuffle", False),
)  # fmt: skip
OTHER = (
    ("rollout.val_kwargs.n", 3), ("rollout.val_kwargs.temperature", 0.5), ("trainer.seed", 2), ("rollout.name", "vllm"),
    ("data.max_response_length", 9), ("data.val_max_samples", 1), ("reward.reward_kwargs", {"a": 1}),
    ("data.apply_chat_template_kwargs", {"a": 1}), ("rollout.dtype", "bf16"),
)  # fmt: skip


def test_settings_are_what_answers_depend_on_and_no_more(tmp_path: Path) -> None:
    config = task(tmp_path, prompts=2)
    settings = answer_settings(config)
    for name, value in SAME + OTHER:
        other = set_keys(copy.deepcopy(config), **{name.replace(".", "__"): value})
        assert (answer_settings(other) != settings) == ((name, value) in OTHER), name
    assert answer_settings(config, are_scored=False).keys() < settings.keys()
    for file in ("reward.py", "val.jsonl", "model/model.safetensors"):
        before = answer_settings(config)
        (tmp_path / file).write_bytes((tmp_path / file).read_bytes() + b"\n")
        assert answer_settings(config) != before, file


def test_a_folder_is_of_one_setting_and_finished_when_its_results_are_there(tmp_path: Path) -> None:
    config = task(tmp_path, prompts=2)
    for kind in (Evaluation, Generation):
        folder = tmp_path / f"{kind.__name__}.parquet.run"
        for _ in range(2):
            kind.check_folder(config, None, folder)
        config.rollout.val_kwargs.n += 1
        with pytest.raises(UserError, match=r"rollout\.val_kwargs\.n: 1 there, 2 now"):
            kind.check_folder(config, None, folder)
        config.rollout.val_kwargs.n = 1
    folder, settings = tmp_path / "Evaluation.parquet.run", answer_settings(config)
    assert finished_metrics(folder, settings) is None, "killed before its end"
    (folder / RESULTS).write_text(json.dumps({"step": 3, "metrics": {"val-core/s/acc/mean@1": 0.5}}))
    assert finished_metrics(folder, settings) == {"val-core/s/acc/mean@1": 0.5}
    assert finished_metrics(folder, settings | {"trainer.seed": 2}) is None


# -------------------------------------------------------------------------------------------------- the file of answers


def generated(config: PPOConfig, output: Path, ranks: int, kind: type[Generation] = Generation) -> None:
    folder = folder_of(output)
    folder.mkdir(exist_ok=True)
    with answering(config, folder, ranks, kind) as trainer:
        trainer.fit()


def test_a_killed_generation_goes_on_and_gives_the_same_file(tmp_path: Path) -> None:
    config = task(tmp_path, prompts=7)
    config.rollout.val_kwargs.do_sample, config.rollout.val_kwargs.temperature = True, 1.0
    config.rollout.val_kwargs.n, config.data.val_batch_size = 2, 3
    generated(copy.deepcopy(config), tmp_path / "whole.parquet", ranks=1)
    rows = pyarrow.parquet.read_table(tmp_path / "whole.parquet").to_pylist()
    assert [(row["uid"], row["sample"]) for row in rows] == [(f"val-{i}", k) for i in range(7) for k in range(2)]
    first = rows[2]
    assert first["prompt"] == [{"role": "user", "content": "1+1+1"}] and first["data_source"] == "sums"
    assert json.loads(first["ground_truth_json"]) == "1" and first["score"] is None
    assert 0 < first["response_length"] <= 8 and first["finish_reason"] in ("stop", "length")

    class Killed(Generation):
        chunks = 0

        def generate_for_validation(self, prompts: Any, way: Any) -> Any:
            Killed.chunks += 1
            if Killed.chunks == 3:  # as Ctrl-C does, which asks the run to end after the chunk at hand
                self.steps.stop_asked = True
            return super().generate_for_validation(prompts, way)

    output = tmp_path / "killed.parquet"
    with pytest.raises(KeyboardInterrupt):
        generated(config, output, 1, Killed)
    assert not output.exists() and len(list(folder_of(output).glob("answers/chunk-*"))) == 1
    config.data.val_batch_size = None
    generated(config, output, ranks=2)
    assert output.read_bytes() == (tmp_path / "whole.parquet").read_bytes()
    assert not list(folder_of(output).glob("answers/chunk-*")), "what is in the file is not kept twice"
