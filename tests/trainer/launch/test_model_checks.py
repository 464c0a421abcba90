"""Models that cannot be used, trained or exported are reported before the data are read, by every command."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.tiny_model import tiny_qwen2, tiny_reward_model
from tests.trainer.prompt_rows import write
from trainer import export, main_ppo, main_rm, main_sft
from trainer.launch.model_checks import check_models, model_notes
from trainer.supervised import loop
from verl_lite.config import ActorConfig, ModelConfig, PPOConfig
from verl_lite.errors import UserError

COMMANDS = {
    "main_ppo": (
        main_ppo.main,
        ["reward.custom_reward_function.path={folder}/reward.py", "rollout.name=hf", "rollout.n=2"],
    ),
    "main_sft": (main_sft.main, []),
    "main_sft loss=dpo": (main_sft.main, ["loss=dpo"]),
    "main_rm": (main_rm.main, []),
}


def unreadable_data(folder: Path) -> str:
    (folder / "data.jsonl").write_text("no row")
    return f"data.train_files={folder}/data.jsonl"


def break_weights(folder: str) -> str:
    file = f"{folder}/model.safetensors"
    weights = load_file(file)
    del weights["model.norm.weight"]
    save_file(weights, file)
    return folder


def break_generation_config(folder: str) -> str:
    (Path(folder) / "generation_config.json").write_text('{"max_new_tokens": 0}')
    return folder


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("spoil", "problem"),
    [(break_weights, "also needs model.norm.weight"), (break_generation_config, "generation_config.json is invalid")],
)
@pytest.mark.parametrize("dry", [True, False])
def test_a_broken_model_is_reported_before_the_data(
    command: str, spoil: Callable[[str], str], problem: str, dry: bool, tmp_path: Path, capsys: Any
) -> None:
    main, given = COMMANDS[command]
    path = spoil(tiny_qwen2(tmp_path / "model", hidden=32, heads=4))
    (tmp_path / "reward.py").write_text("raise RuntimeError")
    options = [f"model.path={path}", unreadable_data(tmp_path), "trainer.device=cpu"]
    options += [option.format(folder=tmp_path) for option in given]
    options += [f"trainer.dry_run={str(dry).lower()}", f"trainer.default_local_dir={tmp_path}/run"]
    assert main(options) == 2
    message = capsys.readouterr().err
    assert problem in message and "data.jsonl" not in message and "RuntimeError" not in message
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_critics_teachers_and_reward_models_are_checked_like_the_policy(tmp_path: Path) -> None:
    good = tiny_qwen2(tmp_path / "good", hidden=32, heads=4)
    broken = break_weights(tiny_qwen2(tmp_path / "broken", hidden=32, heads=4))
    broken_scorer = break_weights(tiny_reward_model(tmp_path / "scorer"))

    def config() -> PPOConfig:
        return PPOConfig(model=ModelConfig(path=good))

    check_models(config(), trains=True, scores=True)
    critic = config()
    critic.algorithm.adv_estimator = "gae"
    critic.critic.model.path = broken
    scorer = config()
    scorer.reward_model.enable = True
    scorer.reward_model.model.path = broken_scorer
    for each, path in ((critic, broken), (scorer, broken_scorer)):
        with pytest.raises(UserError, match=f"{path}.*also needs model.norm.weight"):
            check_models(each, trains=True, scores=True)
    check_models(critic, trains=False, scores=True)
    check_models(scorer, trains=True, scores=False)


def test_the_reference_of_a_kl_term_is_named_if_the_adapter_is_not_new(tmp_path: Path) -> None:
    path = tiny_qwen2(tmp_path, hidden=32, heads=4)
    (tmp_path / "adapter_config.json").write_text("{}")
    model = ModelConfig(path=f"{path}/.", lora_rank=2, lora_adapter_path=str(tmp_path))
    (tmp_path / "model").mkdir()
    model.path = tiny_qwen2(tmp_path / "model", hidden=32, heads=4)
    notes = list(model_notes(PPOConfig(model=model, actor=ActorConfig(use_kl_loss=True))))
    assert any("the reference is the base model without an adapter, as in verl" in note for note in notes)
    assert list(model_notes(PPOConfig(model=model, actor=ActorConfig(use_kl_loss=False)))) == []


def sft_options(folder: Path, *more: str) -> list[str]:
    path = tiny_qwen2(folder / "model", hidden=32, layers=1, heads=1)
    rows = write(folder / "rows.jsonl", [{"prompt": "1+1=", "response": "2"}] * 4)
    options = [f"model.path={path}", f"data.train_files={rows}", "data.train_batch_size=4", "trainer.device=cpu"]
    options += ["trainer.total_epochs=1", "trainer.backend=inline", f"trainer.default_local_dir={folder}/run", *more]
    return options


def test_an_export_that_fails_after_training_leaves_the_weights_and_the_command_that_exports_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError("no room")

    options = sft_options(tmp_path, "trainer.save_freq=0")
    with monkeypatch.context() as patch:
        patch.setattr(loop, "export", fail)
        with pytest.raises(OSError, match="no room") as caught:
            main_sft.main(options)
    [note] = [note for note in caught.value.__notes__ if "The trained weights are in" in note]
    command = note.splitlines()[-1].split()
    assert command[:3] == ["python", "-m", "trainer.export"]
    assert export.main(command[3:]) == 0
    with torch.no_grad():
        tokens = torch.tensor([[3, 9]])
        logits = [AutoModelForCausalLM.from_pretrained(tmp_path / each)(tokens).logits for each in ("model", "run/hf")]
    assert not torch.equal(*logits)


def test_a_target_of_the_export_that_is_no_folder_is_refused_before_training(tmp_path: Path, capsys: Any) -> None:
    options = sft_options(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "hf").write_text("notes")
    assert main_sft.main(options) == 2
    assert f"{tmp_path}/run/hf is not a folder" in capsys.readouterr().err


def test_a_path_to_export_that_does_not_exist_is_named_as_such(tmp_path: Path, capsys: Any) -> None:
    assert export.main(["/nope", "--out", str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    assert "/nope does not exist: give the folder of a run" in message and "checkpoint '" not in message


def test_texts_of_a_model_folder_cannot_control_the_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tiny_qwen2(tmp_path / "model", hidden=32, heads=4)
    file = tmp_path / "model" / "config.json"
    evil = "\x1b[2J\x1b]0;owned\x07"
    entries = json.loads(file.read_text())
    spoilt = (
        {"model_type": f"qwen2{evil}"},
        {"architectures": [evil]},
        {"rope_parameters": {"rope_type": evil, "rope_theta": 1.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1.0, evil: 1}},
        {"hidden_act": evil},
        {evil: evil},
    )
    for change in spoilt:
        file.write_text(json.dumps(entries | change))
        main_sft.main([f"model.path={path}", unreadable_data(tmp_path), "trainer.device=cpu", "trainer.dry_run=true"])
        printed = capfd.readouterr()
        assert "\x1b]0;owned" not in printed.out + printed.err, change
