"""Supervised fine-tuning: which tokens are learnt, what the loss is, what is refused, and what a run leaves behind."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from tests.tiny_model import tiny_qwen2, tiny_tokenizer
from tests.tiny_run import permitting
from tests.trainer.prompt_rows import write
from trainer import export, main_sft, report
from trainer.checkpoint.files import saved_steps
from trainer.data.sft_dataset import Example, collate, encode_chat, load_examples
from trainer.observe.console import Console
from trainer.supervised.loop import SupervisedTrainer, Trained, train_within
from trainer.supervised.sft import SFTJob
from verl_lite.config import ModelConfig, OptimConfig, SFTConfig, SFTDataConfig, SFTTrainerConfig
from verl_lite.errors import UserError
from verl_lite.protocol import DataProto
from workers.supervised.sft import sft_loss

PLAIN = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<|im_end|>{% endif %}{% endfor %}"


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_qwen2(tmp_path_factory.mktemp("model") / "tiny")


def learnt_text(example: Example, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The runs of learnt tokens as text."""
    runs: list[list[int]] = []
    before = 0
    for token, mask in zip(example.response, example.mask, strict=True):
        if mask and not before:
            runs.append([])
        if mask:
            runs[-1].append(token)
        before = mask
    return [tokenizer.decode(run) for run in runs]


def test_every_turn_of_the_assistant_is_learnt_with_its_end_and_nothing_else(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    chat = [user("1+1="), assistant("2"), user("2+2="), assistant("4")]
    example = encode_chat(chat, tokenizer, "row 0")
    assert tokenizer.decode(example.prompt) == "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n"
    assert learnt_text(example, tokenizer) == ["2<|im_end|>", "4<|im_end|>"]  # not the newline behind it
    assert tokenizer.decode(example.response).endswith("4<|im_end|>\n")


@pytest.mark.parametrize("template", ["{% for m in messages %}{{ m.content }}{% endfor %}", None])
def test_a_template_without_an_end_of_turn_gets_one_and_without_a_template_text_is_text(template: str | None) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    example = encode_chat([user("12="), assistant("34")], tokenizer, "row 0")
    assert (tokenizer.decode(example.prompt), tokenizer.decode(example.response)) == ("12=", "34<|im_end|>")
    assert example.mask == [1, 1, 1]
    if template is None:
        with pytest.raises(UserError, match="chats of several messages need.*data.chat_template"):
            encode_chat([user("12="), assistant("34"), user("5")] * 2, tokenizer, "row 0")


def test_the_rows_of_the_guide_are_read_alike(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    page = (Path(main_sft.__file__).parent / "SFT.md").read_text(encoding="utf-8")
    rows = [json.loads(text) for text in re.findall(r"^\|.*\| `(\{.*\})` \|$", page, flags=re.MULTILINE)]
    paths = [write(tmp_path / f"{number}.jsonl", [row]) for number, row in enumerate(rows)]
    examples = load_examples(paths, tokenizer, SFTDataConfig(), option="data.train_files")
    assert len(rows) == 4 and examples.count(examples[0]) == 4
    assert set(re.findall(r"\bdata\.(\w+)", page)) <= vars(SFTDataConfig()).keys()


def test_collate_pads_questions_left_and_answers_right() -> None:
    batch = collate([Example([5, 6], [7], [1]), Example([8], [9, 10, 11], [1, 0, 1])], pad_token_id=0)
    assert batch.batch["input_ids"].tolist() == [[5, 6, 7, 0, 0], [0, 8, 9, 10, 11]]
    assert batch.batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [0, 1, 1, 1, 1]]
    assert batch.batch["position_ids"].tolist() == [[0, 1, 2, 2, 2], [0, 0, 1, 2, 3]]
    assert batch.batch["responses"].tolist() == [[7, 0, 0], [9, 10, 11]]
    assert batch.batch["response_mask"].tolist() == [[1, 0, 0], [1, 0, 1]]


def test_the_loss_is_the_sum_over_learnt_tokens_by_the_global_number() -> None:
    data = DataProto.from_dict({"response_mask": torch.tensor([[1, 1, 0], [1, 0, 0]])}, meta_info={"num_tokens": 8})
    log_probs = torch.tensor([[-1.0, -2.0, -50.0], [-5.0, -50.0, -50.0]])
    loss, metrics = sft_loss(data, {"log_probs": log_probs})
    assert loss.item() == pytest.approx(8 / 8)  # (1 + 2 + 5) / 8: five more tokens are on other ranks
    assert metrics["loss"].value == pytest.approx(8 / 3)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "1", "answer": "2"}, "neither a chat in column 'messages' .* found: question, answer"),
        ({"prompt": "1", "answer": "2"}, r"in 'response' \(data.response_key\) or .*; columns found: prompt, answer"),
        ({"prompt": "1", "response": 2}, "column 'response': found 2, expected an answer: text or messages"),
        ({"prompt": "1", "response": None}, r"columns found: prompt \(without a value in this row: response\)"),
        (
            {"prompt": "[{'content': '1', 'role': 'user'}]", "response": "2"},
            "column 'prompt': found .* not messages written as text: convert the column to lists of messages",
        ),
        (
            {"prompt": "1", "response": json.dumps([assistant("2")])},
            "column 'response': found .* not messages written as text",
        ),
        ({"prompt": "1", "completion": [user("2")]}, "column 'completion': there is no assistant message"),
        ({"prompt": "1", "chosen": "2", "rejected": "3"}, "found a pair of answers .*loss=dpo trains on pairs"),
        ({"messages": [user("1")]}, "there is no assistant message"),
        ({"messages": "1"}, "found '1', expected a list of chat messages"),
    ],
)
def test_a_wrong_row_is_named(
    row: dict[str, Any], message: str, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = write(tmp_path / "rows.parquet", [row])
    with pytest.raises(UserError, match=f"data.train_files: row 0 of {path}.*{message}"):
        load_examples([path], tokenizer, SFTDataConfig(), option="data.train_files")


def test_an_answer_may_itself_be_json(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(120)  # with quotes and brackets
    for answer in ('[{"role": "hamlet"}]', '["role", "content"]', '{"role": "user", "content": "1"}'):
        path = write(tmp_path / "rows.jsonl", [{"prompt": "1", "response": answer}])
        [example] = load_examples([path], tokenizer, SFTDataConfig(), option="data.train_files")
        assert learnt_text(example, tokenizer) == [f"{answer}<|im_end|>"]


def test_a_question_and_its_answer_may_be_entries_of_a_column(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = write(tmp_path / "rows.parquet", [{"extra_info": {"question": "1+1=", "answer": "2"}}])
    config = SFTDataConfig(prompt_key="extra_info.question", response_key="extra_info.answer")
    [example] = load_examples([path], tokenizer, config, option="data.train_files")
    assert "1+1=" in tokenizer.decode(example.prompt) and learnt_text(example, tokenizer) == ["2<|im_end|>"]


@pytest.mark.parametrize(
    ("row", "learnt"),
    [
        ({"prompt": "1+1=", "completion": "2"}, ["2<|im_end|>"]),  # TRL, standard
        ({"prompt": [user("1+1=")], "completion": [assistant("2")]}, ["2<|im_end|>"]),  # TRL, conversational
        ({"prompt": [user("1"), assistant("2"), user("3")], "completion": [assistant("4")]}, ["4<|im_end|>"]),
        ({"prompt": [user("1")], "completion": [assistant("2"), user("3"), assistant("4")]},
         ["2<|im_end|>", "4<|im_end|>"]),
        ({"prompt": [user("1"), assistant("2"), user("3")], "response": "4"}, ["4<|im_end|>"]),
        ({"messages": [user("1"), assistant("2"), user("3"), assistant("4")]}, ["2<|im_end|>", "4<|im_end|>"]),
    ],
)  # fmt: skip
def test_of_a_prompt_nothing_is_learnt_and_of_an_answer_what_the_assistant_says(
    row: dict[str, Any], learnt: list[str], tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = write(tmp_path / "rows.parquet", [row])
    [example] = load_examples([path], tokenizer, SFTDataConfig(), option="data.train_files")
    assert learnt_text(example, tokenizer) == learnt
    chat = row.get("messages") or [
        *(row["prompt"] if isinstance(row["prompt"], list) else [user(row["prompt"])]),
        *(row["completion"] if isinstance(row.get("completion"), list) else [assistant(row.get("completion", "4"))]),
    ]
    whole = tokenizer.apply_chat_template(chat, tokenize=False)
    assert tokenizer.decode([*example.prompt, *example.response]) == whole


def test_the_command_answers_wrong_input_in_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert main_sft.main(["model.path=x", "data.train_files=absent.parquet", "optim.lrr=1"]) == 2
    assert "did you mean optim.lr" in capsys.readouterr().err
    assert main_sft.main(["model.path=x"]) == 2
    assert "data.train_files and model.path: give" in capsys.readouterr().err
    assert main_sft.main(["model.path=x", "data.train_files=a.parquet", "trainer.n_gpus_per_node=2"]) == 2
    assert "set trainer.backend=ray" in capsys.readouterr().err


def config_of(model: str, folder: Path, **data: Any) -> SFTConfig:
    rows = [{"prompt": f"{a}+{b}=", "response": str(a + b)} for a in range(6) for b in range(6)]
    train, val = write(folder / "train.parquet", rows[6:]), write(folder / "val.parquet", rows[:6])
    return SFTConfig(
        data=SFTDataConfig(train_files=[train], val_files=[val], train_batch_size=10, **data),
        model=ModelConfig(path=model, enable_gradient_checkpointing=False),
        optim=OptimConfig(lr=5e-3),
        trainer=SFTTrainerConfig(
            total_epochs=4,
            default_local_dir=str(folder / "sft"),
            device="cpu",
            logger=["console", "jsonl"],
            save_freq=0,
        ),
    )


def test_a_run_learns_and_leaves_a_hugging_face_folder(model: str, tmp_path: Path) -> None:
    config = config_of(model, tmp_path)
    lines: list[str] = []
    folder, result = train_within(SFTJob, config, lines.append)
    log = [json.loads(line) for line in (tmp_path / "sft" / "metrics.jsonl").read_text().splitlines()]
    losses = [entry["data"]["train/loss"] for entry in log if "train/loss" in entry["data"]]
    assert len(losses) == result.steps == 12
    assert losses[-1] < 0.6 * losses[0]
    assert any(line.startswith("validation after step 12: loss") for line in lines)
    assert sorted(path.name for path in folder.parent.iterdir()) == ["hf", "metrics.jsonl"]

    network = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = type(tiny_tokenizer()).from_pretrained(folder)
    total = count = 0.0
    for example in load_examples(config.data.val_files, tokenizer, config.data, option="data.val_files"):
        with torch.no_grad():
            logits = network(torch.tensor([example.prompt + example.response])).logits[0].log_softmax(-1)
        for place, (token, mask) in enumerate(zip(example.response, example.mask, strict=True)):
            total -= mask * logits[len(example.prompt) + place - 1, token].item()
            count += mask
    assert result.after["val/loss"] == pytest.approx(total / count, rel=1e-4)
    assert log[-1]["data"]["val/loss"] == result.after["val/loss"]


@pytest.mark.slow
def test_a_stopped_command_goes_on_to_the_same_weights(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(model, tmp_path)
    arguments = [
        f"data.train_files={config.data.train_files[0]}", f"model.path={model}", "data.train_batch_size=10",
        "optim.lr=5e-3", "trainer.device=cpu", "trainer.logger=[jsonl]", "trainer.save_freq=2",
        "trainer.total_training_steps=4", "model.enable_gradient_checkpointing=false",
    ]  # fmt: skip
    whole, parts = f"trainer.default_local_dir={tmp_path}/whole", f"trainer.default_local_dir={tmp_path}/parts"
    assert main_sft.main([*arguments, whole]) == 0
    assert not permitting(tmp_path / "whole", 0o077), "its user's alone"
    shown = capsys.readouterr().out
    assert (tmp_path / "whole" / "curve.png").stat().st_size > 0 and "curve.png" in shown.partition("Where things")[2]
    look, begin = (shlex.split(line)[-1 - more :] for line, more in zip(shown.splitlines()[-2:], (0, 2), strict=True))
    assert report.main(look) == 0 and begin[0] == f"model.path={tmp_path}/whole/hf"
    assert export.main([str(tmp_path / "whole"), "--out", str(tmp_path / "out")]) == 0
    exported = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert exported == (tmp_path / "whole" / "hf" / "model.safetensors").read_bytes()
    assert main_sft.main([*arguments, parts, "trainer.total_training_steps=2", "trainer.resume_mode=auto"]) == 0
    assert f"{tmp_path}/parts has no checkpoint; the run starts at step 1" in capsys.readouterr().out
    assert main_sft.main([*arguments, parts]) == 2, "the folder holds a run"
    assert main_sft.main([*arguments, parts, "trainer.resume_mode=auto"]) == 0
    said = f"The run continues after step 2 of 4, from {tmp_path}/parts/global_step_2"
    assert said in " ".join(capsys.readouterr().out.split())
    one, other = (
        dict(AutoModelForCausalLM.from_pretrained(tmp_path / name / "hf").named_parameters())
        for name in ("whole", "parts")
    )
    assert all(torch.equal(one[name], other[name]) for name in one)
    written = (tmp_path / "parts" / "metrics.jsonl").read_bytes()
    for folder in saved_steps(tmp_path / "parts").values():
        next(folder.glob("model/*.distcp")).write_bytes(b"damage")
    for _ in range(2):  # with all checkpoints damaged nothing starts from scratch, however often it is tried
        assert main_sft.main([*arguments, parts, "trainer.resume_mode=auto", "trainer.total_training_steps=6"]) == 2
        assert "had checkpoints, and no whole one is left" in capsys.readouterr().err
    assert (tmp_path / "parts" / "metrics.jsonl").read_bytes() == written


def test_a_long_sequence_is_refused_cut_or_dropped(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = PLAIN
    path = write(tmp_path / "rows.parquet", [{"prompt": "12", "response": "345"}, {"prompt": "1", "response": "2"}])

    def lengths(truncation: str) -> list[int]:
        config = SFTDataConfig(max_length=4, truncation=truncation)
        return [len(example) for example in load_examples([path], tokenizer, config, option="data.train_files")]

    with pytest.raises(UserError, match="row 0 of .* has 6 tokens, more than data.max_length=4"):
        lengths("error")
    assert lengths("right") == [4, 3]
    assert lengths("drop") == [3]
    with pytest.raises(UserError, match="data.train_files=.*: no rows are left"):
        load_examples([write(tmp_path / "none.parquet", [])], tokenizer, SFTDataConfig(), option="data.train_files")


def test_a_template_that_rewrites_earlier_turns_is_refused() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages | length }}" + PLAIN
    with pytest.raises(UserError, match="row 7: the chat template renders earlier turns differently"):
        encode_chat([user("1"), assistant("2"), user("3"), assistant("4")], tokenizer, "row 7")


def test_means_over_steps_of_which_the_first_alone_validated() -> None:
    trainer: Any = object.__new__(SupervisedTrainer)
    trainer.steps, trainer.result = SimpleNamespace(global_step=4, epoch=0), Trained()
    trainer.unlogged = [{"train/loss": 1.0, "perf/idle_frac/testing": 0.5}, {"train/loss": 3.0}]
    means = trainer.means_since_last_line()
    assert means["train/loss"] == trainer.result.loss == 2.0
    assert means["perf/idle_frac/testing"] == 0.5 and trainer.unlogged == []


def sft_job(folder: Path, rows: list[dict[str, Any]], model: str, **trainer: Any) -> SFTJob:
    path = write(folder / "rows.jsonl", rows)
    options = SFTTrainerConfig(default_local_dir=str(folder / "sft"), device="cpu", **trainer)
    data = SFTDataConfig(train_files=[path], train_batch_size=2)
    return SFTJob(SFTConfig(data=data, model=ModelConfig(path=model), trainer=options), 1, Console())


def test_a_resumed_run_refuses_other_rows_of_the_same_number(model: str, tmp_path: Path) -> None:
    rows = [{"prompt": f"{number}+1=", "response": str(number + 1)} for number in range(4)]
    fingerprints = []
    for number, changed in enumerate((rows, rows, [*rows[:3], rows[3] | {"response": "7"}], rows[::-1])):
        (tmp_path / str(number)).mkdir()
        job = sft_job(tmp_path / str(number), changed, model)
        job.read_data()
        fingerprints.append(job.steps.dataset)
    assert fingerprints[0] == fingerprints[1] and len(set(fingerprints)) == 3
    assert all(fingerprint.startswith("4 rows, ") for fingerprint in fingerprints)


def test_a_row_longer_than_the_models_positions_is_refused_before_training(tmp_path: Path) -> None:
    short = tiny_qwen2(tmp_path / "short", max_positions=32)
    fitting, long = [{"prompt": "1", "response": "2" * length} for length in (4, 40)]
    sft_job(tmp_path, [fitting], short).read_data()
    message = r"data.train_files: .* row has \d+ tokens, more than the 32 positions of model.path=.*data.max_length=32"
    with pytest.raises(UserError, match=message):
        sft_job(tmp_path, [fitting, long], short).read_data()


def test_a_token_without_an_embedding_is_refused_before_training(tmp_path: Path) -> None:
    model = tiny_qwen2(tmp_path / "model")  # 64 tokens
    tiny_tokenizer(96).save_pretrained(model)  # knows capital letters, tokens 64 and above
    job = sft_job(tmp_path, [{"prompt": "a", "response": "Z"}, {"prompt": "b", "response": "b"}], model)
    with pytest.raises(UserError, match=r"data\.train_files: the tokenizer writes token \d+, .*embedding of 64 tokens"):
        job.read_data()
