"""What recipes with a model of their own share: a cache that holds whole folders or none, a tokenizer, a warm start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.embedded import Made, Start, byte_tokenizer
from recipes.quickstart import data
from recipes.quickstart.recipe import START
from verl_lite.config import PPOConfig, load_config


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VERL_LITE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_folder_is_named_after_the_code_that_decides_it(cache: Path, tmp_path: Path) -> None:
    source = tmp_path / "source.py"
    source.write_text("1")
    made = Made("name", Path.mkdir, [source])
    folder = made.folder
    assert folder.parent == cache and folder.name.startswith("name-") and made.folder == folder
    assert replace(made, sizes="2").folder != folder
    source.write_text("2")
    assert made.folder != folder


def test_it_is_made_once_or_not_at_all(cache: Path) -> None:
    built: list[Path] = []

    def build(path: Path) -> None:
        built.append(path)
        (path / "model").mkdir()
        if len(built) == 1:
            raise KeyboardInterrupt

    made = Made("it", build, [])
    with pytest.raises(KeyboardInterrupt):
        made.make()
    assert list(cache.iterdir()) == []  # nothing half done
    made.make()
    made.make()
    assert len(built) == 2 and (made.folder / "model").is_dir() and list(cache.iterdir()) == [made.folder]


def test_the_folder_of_a_faster_process_stays(cache: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "mine").mkdir()
        (made.folder / "theirs").mkdir(parents=True)

    made = Made("it", build, [])
    made.make()
    assert list(cache.iterdir()) == [made.folder] and (made.folder / "theirs").is_dir()


@pytest.mark.parametrize(
    ("model", "train", "val", "wants"),
    [("it/model", [], [], True), ("m", ["it/a"], [], True), ("m", [], ["it/a"], True), ("m", ["a"], ["b"], False)],
)
def test_it_is_made_where_the_run_takes_model_or_data_from_it(
    model: str, train: list[str], val: list[str], wants: bool, cache: Path
) -> None:
    config, made = PPOConfig(), Made("it", lambda folder: None, [])
    model, *files = (str(cache / name.replace("it", made.folder.name)) for name in (model, *train, *val))
    config.model.path, config.data.train_files, config.data.val_files = model, files[: len(train)], files[len(train) :]
    made.prepare(config)
    assert made.folder.is_dir() is wants


def test_a_start_has_a_folder_for_each_version_and_makes_it_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = Start("it", data, hidden=32, steps=1, max_length=32, lr=1e-3)
    assert start.folder == Start("it", data, hidden=32, steps=1, max_length=32, lr=1e-3).folder
    assert start.folder not in (replace(start, steps=2).folder, replace(start, words=("a",)).folder)
    built: list[Path] = []
    monkeypatch.setattr(Start, "write_files", lambda start, folder: built.append(folder))
    for _ in range(2):
        start.prepare(load_config([], recipe_loader=lambda name: start.settings()).config)
    assert len(built) == 1 and start.folder.is_dir()


def test_the_random_model_is_a_hugging_face_folder_with_the_same_bytes_each_time(tmp_path: Path) -> None:
    for name in ("one", "two"):
        START.write_random_model(tmp_path / name)
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes(), file.name
    network = AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    assert 1e6 < sum(parameter.numel() for parameter in network.parameters()) < 2e6
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "one")
    assert tokenizer("reverse crane")["input_ids"] == byte_tokenizer()("reverse crane")["input_ids"]
    chat = [{"role": "user", "content": "1+2="}, {"role": "assistant", "content": "3"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<|user|>1+2=<|assistant|>3<|im_end|>"
