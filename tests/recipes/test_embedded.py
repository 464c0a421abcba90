"""What recipes with a model of their own share: a cache that holds whole folders or none, a tokenizer, a warm start."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.embedded import byte_tokenizer, cache_folder, make_once, make_where_wanted, publish, warm_start_settings
from verl_lite.config import PPOConfig, SFTConfig


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VERL_LITE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_folder_is_named_after_the_code_that_decides_it(cache: Path, tmp_path: Path) -> None:
    source = tmp_path / "source.py"
    source.write_text("1")
    folder = cache_folder("name", [source])
    assert folder.parent == cache and folder.name.startswith("name-") and cache_folder("name", [source]) == folder
    source.write_text("2")
    assert cache_folder("name", [source]) != folder


def test_it_is_made_once_or_not_at_all(cache: Path) -> None:
    built: list[Path] = []

    def build(path: Path) -> None:
        built.append(path)
        (path / "model").mkdir()
        if len(built) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_once(cache / "it", "name", build)
    assert list(cache.iterdir()) == []  # nothing half done
    make_once(cache / "it", "name", build)
    make_once(cache / "it", "name", build)
    assert len(built) == 2 and (cache / "it" / "model").is_dir()
    assert [path.name for path in cache.iterdir()] == ["it"]


def test_the_folder_of_a_faster_process_stays(cache: Path) -> None:
    for name in ("it", "mine"):
        (cache / name).mkdir(parents=True)
        (cache / name / "name").write_text(name)
    publish(cache / "mine", cache / "it")
    assert (cache / "it" / "name").read_text() == "it"
    with pytest.raises(OSError):  # something else is wrong: there is no folder that could stay
        publish(cache / "nowhere", cache / "other")


@pytest.mark.parametrize(
    ("model", "train", "val", "wants"),
    [("it/model", [], [], True), ("m", ["it/a"], [], True), ("m", [], ["it/a"], True), ("m", ["a"], ["b"], False)],
)
def test_it_is_made_where_the_run_takes_model_or_data_from_it(
    model: str, train: list[str], val: list[str], wants: bool, cache: Path
) -> None:
    config = PPOConfig()
    config.model.path, config.data.train_files, config.data.val_files = (
        str(cache / model),
        [str(cache / file) for file in train],
        [str(cache / file) for file in val],
    )
    make_where_wanted(config, cache / "it", "name", lambda folder: None)
    assert (cache / "it").is_dir() is wants


def test_words_are_one_token_and_nothing_is_lost() -> None:
    tokenizer = byte_tokenizer(("Left",))
    assert len(tokenizer("Left")["input_ids"]) == 1 and len(tokenizer("Lef")["input_ids"]) == 3
    for text in ("Left, Grüße", "sort 1\n\x00"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_warm_start_has_the_settings_it_means(tmp_path: Path) -> None:
    config = warm_start_settings(tmp_path, steps=3, rows=5, max_length=7, lr=0.5)
    assert isinstance(config, SFTConfig)
    assert (config.trainer.total_training_steps, config.data.train_batch_size, config.data.max_length) == (3, 5, 7)
    assert config.optim.lr == 0.5
