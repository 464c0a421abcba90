"""What main_eval and main_generate may be pointed at, and what their folders of results depend on."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from tests.trainer.answering import task
from trainer.evaluate.evaluation import (
    Evaluation,
    answer_settings,
    find_targets,
    finished_metrics,
    split_arguments,
    write_results,
)
from trainer.evaluate.generation import Generation
from trainer.main_eval import eval_arguments
from trainer.main_eval import main as main_eval
from trainer.main_generate import main as main_generate
from trainer.main_generate import output_file
from verl_lite.config import PPOConfig, load_config
from verl_lite.errors import UserError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with the checkpoints 2 and 10."""
    folder = tmp_path / "run"
    for step in (2, 10):
        (folder / f"global_step_{step}").mkdir(parents=True)
        (folder / f"global_step_{step}" / "data.pt").write_bytes(b"state")
    (folder / "config.yaml").write_text("data:\n  train_files: [gone.parquet]\n  sources: {s: {weight: 1.0}}\n")
    return folder


def test_a_run_is_its_newest_checkpoint_or_all_of_them(run: Path) -> None:
    [newest] = find_targets(str(run))
    assert newest.name == "global_step_10" and newest.folder == run / "eval" and not newest.is_model
    assert f"trainer.resume_from_path={run / 'global_step_10'}" in newest.arguments
    names = [target.name for target in find_targets(str(run), all_checkpoints=True)]
    assert names == ["global_step_2", "global_step_10"], "in the order of steps"
    assert [target.name for target in find_targets(f"{run}/global_step_*")] == names
    [one] = find_targets(str(run / "global_step_2"))
    assert one.name == "global_step_2"


def test_nothing_of_the_training_is_needed_to_look_at_a_checkpoint(run: Path) -> None:
    [target] = find_targets(str(run))
    config = load_config(list(target.arguments)).config
    assert config.data.train_files == [] and config.data.sources == {} and config.trainer.val_only


def test_a_model_is_a_folder_or_a_hub_name_and_needs_data(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for text, path in ((str(tmp_path), str(tmp_path)), ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B")):
        [target] = find_targets(text)
        assert target.is_model and f"model.path={path}" in target.arguments and "/" not in target.name
        with pytest.raises(UserError, match="name what to validate on, data.val_files=PATH"):
            eval_arguments(target, [])
        assert "data.val_files=x.jsonl" in eval_arguments(target, ["data.val_files=x.jsonl"])


def test_wrong_targets_say_what_was_expected(tmp_path: Path, run: Path) -> None:
    (tmp_path / "config.yaml").touch()
    for text, told in (
        (str(tmp_path / "none"), r"neither a run folder \(config.yaml\), a checkpoint \(data.pt\) nor a model"),
        (str(tmp_path / "no*ne"), "nothing matches this pattern"),
        (str(tmp_path), "a run without a checkpoint"),
    ):
        with pytest.raises(UserError, match=told):
            find_targets(text)
    (tmp_path / "config.json").touch()
    (tmp_path / "config.yaml").unlink()
    with pytest.raises(UserError, match="--all-checkpoints is for a run folder"):
        find_targets(str(tmp_path), all_checkpoints=True)


def test_targets_come_before_options() -> None:
    assert split_arguments(["a", "b", "data.val_files=c", "d"]) == (["a", "b"], ["data.val_files=c", "d"])
    assert split_arguments(["a", "--config", "c.yaml"]) == (["a"], ["--config", "c.yaml"])
    assert split_arguments(["~reward"]) == ([], ["~reward"]) and split_arguments([]) == ([], [])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ([], "0 times output="),
        (["output=a.parquet", "output=b.parquet"], "2 times output="),
        (["output=a.csv"], "expected a file named .parquet or .jsonl"),
    ],
)
def test_the_file_to_write_is_named_once(options: list[str], told: str) -> None:
    with pytest.raises(UserError, match=told):
        output_file(options)


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("rollout.val_kwargs.greedy_too=true", "one way of answering"),
        ("trainer.val_time_budget_s=5", "has all answers or is not written"),
        ("reward.timeout_s=5", "reward.timeout_s=5 has no effect here"),
        ("trainer.default_local_dir=x", "has no effect here"),
        ("output=out.parquet", "2 times output="),
    ],
)
def test_generation_refuses_what_it_would_not_do(
    tmp_path: Path, option: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = task(tmp_path, prompts=1)
    argv = [str(config.model.path), f"data.val_files={config.data.val_files[0]}", f"output={tmp_path}/out.parquet"]
    assert main_generate([*argv, option]) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "out.parquet.run").exists()


def test_generation_overwrites_no_file_of_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = task(tmp_path, prompts=1)
    (tmp_path / "out.parquet").write_text("somebody's")
    argv = [str(config.model.path), f"data.val_files={config.data.val_files[0]}", f"output={tmp_path}/out.parquet"]
    assert main_generate(argv) == 2
    assert "out.parquet exists, and" in capsys.readouterr().err
    assert (tmp_path / "out.parquet").read_text() == "somebody's"


def test_commands_without_a_target_say_how_they_are_called(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (main_eval, main_generate):
        assert command(["data.val_files=x"]) == 2
        assert "usage: python -m trainer.main_" in capsys.readouterr().err


def test_several_targets_do_not_share_a_folder(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main_eval([str(run), "--all-checkpoints", "trainer.default_local_dir=x"]) == 2
    assert "each of the 2 targets has a folder of its own" in capsys.readouterr().err


def test_settings_are_what_answers_depend_on_and_no_more(tmp_path: Path) -> None:
    config = task(tmp_path, prompts=2)

    def changed(name: str, value: object) -> bool:
        other: PPOConfig = copy.deepcopy(config)
        *path, leaf = name.split(".")
        section = other
        for part in path:
            section = getattr(section, part)
        setattr(section, leaf, value)
        return answer_settings(other) != answer_settings(config)

    for name, value in (
        ("data.val_batch_size", 3), ("trainer.n_gpus_per_node", 4), ("trainer.backend", "inline"), ("rollout.n", 9),
        ("rollout.max_num_seqs", 2), ("actor.optim.lr", 1.0), ("data.train_batch_size", 2), ("reward.num_workers", 5),
        ("trainer.default_local_dir", "x"), ("trainer.val_time_budget_s", 5.0), ("data.shuffle", False),
    ):  # fmt: skip
        assert not changed(name, value), name
    for name, value in (
        ("rollout.val_kwargs.n", 3), ("rollout.val_kwargs.temperature", 0.5), ("trainer.seed", 2),
        ("rollout.name", "vllm"), ("data.max_response_length", 9), ("data.val_max_samples", 1),
        ("reward.reward_kwargs", {"a": 1}),
        ("data.apply_chat_template_kwargs", {"a": 1}), ("rollout.dtype", "bf16"),
    ):  # fmt: skip
        assert changed(name, value), name
    before = answer_settings(config)
    (tmp_path / "reward.py").write_text("other")
    assert answer_settings(config) != before and answer_settings(config, are_scored=False).keys() < before.keys()
    for file in ("val.jsonl", "model/model.safetensors"):
        before = answer_settings(config)
        (tmp_path / file).write_bytes((tmp_path / file).read_bytes() + b"\n")
        assert answer_settings(config) != before, file


def test_a_finished_evaluation_is_known_only_under_its_settings(tmp_path: Path) -> None:
    settings = {"trainer.seed": 1}
    assert finished_metrics(tmp_path, settings) is None
    (tmp_path / "answers").mkdir()
    (tmp_path / "answers" / "settings.json").write_text('{"trainer.seed": 1}')
    assert finished_metrics(tmp_path, settings) is None, "killed before its end"
    write_results(tmp_path, 3, {"val-core/s/acc/mean@1": 0.5})
    assert finished_metrics(tmp_path, settings) == {"val-core/s/acc/mean@1": 0.5}
    assert finished_metrics(tmp_path, {"trainer.seed": 2}) is None
    write_results(tmp_path, 3, {"val/scored_frac": 0.25})
    assert finished_metrics(tmp_path, settings) is None, "time ran out, and there is more to ask"


def test_a_folder_of_other_answers_is_refused_before_anything_heavy(tmp_path: Path) -> None:
    config = task(tmp_path, prompts=2)
    for kind in (Evaluation, Generation):
        folder = tmp_path / f"{kind.__name__}.parquet.run"
        kind.claim(config, None, folder)
        kind.claim(config, None, folder)
        config.rollout.val_kwargs.n += 1
        with pytest.raises(UserError, match=r"rollout\.val_kwargs\.n: 1 there, 2 now"):
            kind.claim(config, None, folder)
        config.rollout.val_kwargs.n = 1
