"""The chat template of a run is part of every folder that it exports, so that later commands have the same prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.tiny_model import tiny_qwen2, tiny_tokenizer
from tests.tiny_run import write_rows
from tests.trainer.tiny_run import options_of, write_files
from trainer import export, main_sft
from trainer.launch.ppo_data import ending_note
from trainer.launch.ppo_job import run_ppo
from verl_lite.config import ModelConfig, PPOConfig
from workers.policy.tokenizer import load_tokenizer, stop_token_ids

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}"
)


def template_in(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder).chat_template


def sft_options(folder: Path, name: str, *more: str, model: str | None = None) -> list[str]:
    rows = [{"prompt": str(number), "response": "1", "chosen": "1", "rejected": "2"} for number in range(4)]
    write_rows(folder / "rows.jsonl", rows)
    return [
        f"model.path={model or tiny_qwen2(folder / 'model')}",
        f"data.train_files={folder}/rows.jsonl",
        "data.train_batch_size=4",
        "trainer.total_training_steps=1",
        "trainer.device=cpu",
        "trainer.logger=[jsonl]",
        f"trainer.default_local_dir={folder}/{name}",
        *more,
    ]


@pytest.mark.parametrize("as_file", [True, False])
@pytest.mark.parametrize("loss", ["sft", "dpo"])
def test_a_supervised_run_exports_the_template_that_it_trained_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], loss: str, as_file: bool
) -> None:
    template = TEMPLATE
    if as_file:
        (tmp_path / "mine.jinja").write_text(TEMPLATE)
        template = str(tmp_path / "mine.jinja")
    arguments = ["data.apply_chat_template_kwargs={style: brief}", f"data.chat_template={template}", f"loss={loss}"]
    assert main_sft.main(sft_options(tmp_path, "run", *arguments)) == 0
    assert template_in(tmp_path / "run" / "hf") == TEMPLATE
    shown = capsys.readouterr().out
    assert f"""data.apply_chat_template_kwargs='{json.dumps({"style": "brief"})}'""" in shown


def test_without_the_option_the_template_of_the_model_is_exported(tmp_path: Path) -> None:
    assert main_sft.main(sft_options(tmp_path, "run")) == 0
    assert template_in(tmp_path / "run" / "hf") == tiny_tokenizer().chat_template


@pytest.mark.parametrize("loss", ["sft", "dpo"])
@pytest.mark.parametrize("generation", [{"eos_token_id": 0, "temperature": 0.5}, None])
def test_the_exported_model_ends_its_answers_as_it_has_learnt(
    tmp_path: Path, loss: str, generation: dict[str, Any] | None
) -> None:
    """A base model ends texts with another token than the chats of its template end with."""
    model = Path(tiny_qwen2(tmp_path / "model"))
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.save_pretrained(model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"eos_token_id": 0}))
    (model / "generation_config.json").unlink()
    if generation is not None:
        (model / "generation_config.json").write_text(json.dumps(generation))
    base = ModelConfig(path=str(model))
    assert "ends an answer with '<|im_end|>'" in ending_note(PPOConfig(model=base), load_tokenizer(base))

    assert main_sft.main(sft_options(tmp_path, "run", f"loss={loss}", model=str(model))) == 0
    exported = json.loads((tmp_path / "run" / "hf" / "generation_config.json").read_text())
    assert exported == (generation or {}) | {"eos_token_id": [0, 2]}
    trained = ModelConfig(path=str(tmp_path / "run" / "hf"))
    tokenizer = load_tokenizer(trained)
    assert stop_token_ids(trained, tokenizer) == (0, 2) and ending_note(PPOConfig(model=trained), tokenizer) == ""


@pytest.mark.parametrize("adapter", [False, True])
def test_a_run_of_main_ppo_exports_the_template_that_it_sampled_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], adapter: bool
) -> None:
    write_files(tmp_path, ["one", "two", "three", "four"])
    (tmp_path / "mine.jinja").write_text(TEMPLATE)
    options = [f"data.chat_template={tmp_path}/mine.jinja", "trainer.total_training_steps=1", "trainer.save_freq=-1"]
    if adapter:
        options += ["model.lora_rank=2", "model.lora_alpha=4"]
    assert run_ppo([*options_of(tmp_path), *options]) == 0
    (tmp_path / "mine.jinja").unlink()  # the export needs only the checkpoint
    form = ["--adapter"] if adapter else []
    assert export.main([str(tmp_path / "run"), "--out", str(tmp_path / "out"), *form]) == 0
    assert template_in(tmp_path / "out") == TEMPLATE

    # nothing that the user needs is replaced
    model = tmp_path / "policy"
    weights = (model / "model.safetensors").read_bytes()
    assert export.main([str(tmp_path / "run"), "--out", str(model), *form]) == 2
    assert "the run has read this model (model.path)" in capsys.readouterr().err
    assert (model / "model.safetensors").read_bytes() == weights
    (tmp_path / "notes").write_text("mine")
    assert export.main([str(tmp_path / "run"), "--out", str(tmp_path / "notes"), *form]) == 2
    assert "it is a file; expected a folder" in capsys.readouterr().err
