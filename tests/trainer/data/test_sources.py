"""Where rows may come from: folders, folders of `datasets`, hub names from the cache without network, a class."""

from __future__ import annotations

import base64
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from datasets.packaged_modules.parquet.parquet import Parquet

from tests.trainer.prompt_rows import contents, load, make_row, truths, write
from trainer.data.sources import RowTable, read_data_file, read_rows
from verl_lite.errors import UserError

SIMPLE = {"prompt": "question", "ground_truth": "answer"}


def questions(*numbers: int) -> list[dict[str, Any]]:
    return [{"question": f"{n}", "answer": f"so #### {n}"} for n in numbers]


def numbered(*numbers: int) -> list[dict[str, Any]]:
    return [make_row(str(number)) for number in numbers]


# --- folders -------------------------------------------------------------------------------------------------------


def test_a_folder_gives_the_files_of_the_split_by_their_names(tmp_path: Path) -> None:
    write(tmp_path / "sums" / "data" / "sums_train-00000-of-00002.parquet", numbered(1))
    write(tmp_path / "sums" / "data" / "sums_train-00001-of-00002.parquet", numbered(2))
    write(tmp_path / "sums" / "data" / "test.jsonl", numbered(3))
    folder = str(tmp_path / "sums")
    assert contents(load(folder)) == ["1", "2"] and contents(load(folder, "val")) == ["3"]
    assert contents(load(folder + "@test")) == ["3"]
    with pytest.raises(UserError, match="data.train_files=.*no split called dev; splits found: test, train. Add"):
        load(folder + "@dev")
    write(tmp_path / "sums" / "data" / "more.jsonl", numbered(4))
    with pytest.raises(UserError, match="named after a split, but more.jsonl is not"):
        load(folder)
    for place in ("nowhere", "owner/name.parquet"):
        with pytest.raises(UserError, match="no such file .*"):
            load(place)


def test_a_folder_whose_files_name_no_split_gives_them_all(tmp_path: Path) -> None:
    write(tmp_path / "b.json", numbered(2))
    write(tmp_path / "a.jsonl", numbered(1))
    (tmp_path / "notes.txt").write_text("not rows")
    assert contents(load(str(tmp_path))) == ["1", "2"] and contents(load(str(tmp_path), "val")) == ["1", "2"]


# --- folders of datasets.save_to_disk ------------------------------------------------------------------------------


def test_a_saved_dataset_is_read_from_its_folder_in_any_order(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_list(numbered(0, 1, 2, 3)).select([3, 1])  # with indices, as a shuffled one
    rows.save_to_disk(str(tmp_path / "saved"))
    data = load(str(tmp_path / "saved"))
    assert contents(data) == ["3", "1"]
    assert data.__getitems__([1, 0]).non_tensor_batch["reward_model"].tolist() == [
        {"style": "rule", "ground_truth": "1"},
        {"style": "rule", "ground_truth": "3"},
    ]
    with pytest.raises(UserError, match="the folder contains one dataset without splits; remove @test"):
        load(str(tmp_path / "saved") + "@test")


def test_a_saved_dict_of_splits_gives_the_one_that_fits(tmp_path: Path) -> None:
    made = {name: datasets.Dataset.from_list(numbered(n)) for n, name in enumerate(("train", "validation", "hard"))}
    datasets.DatasetDict(made).save_to_disk(str(tmp_path / "saved"))
    place = str(tmp_path / "saved")
    for given, split, number in ((place, "train", "0"), (place, "val", "1"), (place + "@hard", "train", "2")):
        assert contents(load(given, split)) == [number]


# --- the hub -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cached_gsm8k(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of `datasets` as one leaves it that has loaded openai/gsm8k once: two configs, two splits."""
    root = tmp_path_factory.mktemp("hub")
    cache = root / "cache"
    for config, first in (("main", 10), ("socratic", 20)):
        files = {
            split: [write(root / config / f"{split}.parquet", questions(first + place, first + place + 1))]
            for place, split in enumerate(("train", "test"))
        }
        made = Parquet(cache_dir=str(cache), dataset_name="gsm8k", config_name=config, hash="0123abc", data_files=files)
        made.download_and_prepare()
        wanted = cache / "openai___gsm8k" / config  # where a download has it
        wanted.parent.mkdir(exist_ok=True)
        shutil.move(str(Path(made.cache_dir).parents[1]), wanted)
    return cache


@pytest.fixture
def offline(cached_gsm8k: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cached_gsm8k)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    yield


@pytest.mark.usefixtures("offline")
def test_a_hub_name_is_read_from_the_cache_and_is_the_data_source() -> None:
    regex = "#### (-?[0-9.,]+)"
    data = load("openai/gsm8k:main", columns=SIMPLE, ground_truth_regex=regex)
    assert contents(data) == ["10", "11"] and truths(data) == ["10", "11"]
    assert data.data_sources() == ["openai/gsm8k"] and "2 prompts" in data.report
    assert contents(load("openai/gsm8k:main", "val", columns=SIMPLE)) == ["11", "12"]
    assert contents(load("openai/gsm8k:socratic@test", columns=SIMPLE)) == ["21", "22"]


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("openai/gsm8k", "(main|socratic).*Add a config after a colon: openai/gsm8k:NAME"),
        ("openai/gsm8k:hard", "config 'hard'.*main.*socratic"),
        ("openai/gsm8k:main@dev", "no split called dev; splits found: test, train. Add the split"),
        ("nobody/nothing", r"_files='nobody/nothing': not a file, .* from the Hugging Face hub .*to_parquet\(FILE\)"),
    ],
)
def test_hub_names_that_lead_nowhere_are_explained(place: str, message: str) -> None:
    with pytest.raises(UserError, match=f"(?s){message}"):
        load(place, columns=SIMPLE)


def test_a_folder_laid_out_like_a_repository_of_the_hub_has_configs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    repository = tmp_path / "sums"
    write(repository / "easy" / "train.parquet", questions(1))
    write(repository / "hard" / "train.parquet", questions(2))
    (repository / "README.md").write_text(
        "---\nconfigs:\n- config_name: easy\n  data_files: easy/*.parquet\n"
        "- config_name: hard\n  data_files: hard/*.parquet\n---\n"
    )
    assert contents(load(f"{repository}:hard", columns=SIMPLE, data_source="sums")) == ["2"]
    assert contents(load(f"{repository}:easy@train", columns=SIMPLE, data_source="sums")) == ["1"]


# --- the user's class ----------------------------------------------------------------------------------------------

CLASSES = '''
import torch


class Sums:
    """Questions made on the spot."""

    def __init__(self, data_files, tokenizer, config):
        self.files, self.limit = data_files, config.max_prompt_length
        assert tokenizer.pad_token_id == 0

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return {"data_source": self.files[0], "prompt": [{"role": "user", "content": str(index)}],
                "reward_model": {"ground_truth": str(self.limit)}}


class LikeVerl(Sums):
    def __init__(self, data_files, tokenizer, processor, config, max_samples=-1):
        super().__init__(data_files, tokenizer, config)
        assert processor is None
        self.most = max_samples

    def __len__(self):
        return 3 if self.most < 0 else self.most


class Processed(Sums):
    def __getitem__(self, index):
        return {**super().__getitem__(index), "input_ids": torch.zeros(3)}


class Lazy:
    def __iter__(self):
        return iter(())


class Texts(Sums):
    def __getitem__(self, index):
        return "a text"
'''


@pytest.fixture
def classes(tmp_path: Path) -> str:
    (tmp_path / "classes.py").write_text(CLASSES)
    return str(tmp_path / "classes.py")


def custom(path: str, name: str | None) -> Any:
    from verl_lite.config import CustomClassConfig

    return CustomClassConfig(path=path, name=name)


@pytest.mark.parametrize(("name", "most", "count"), [("Sums", -1, 3), ("LikeVerl", 2, 2)])
def test_a_class_of_rows_is_a_dataset(classes: str, name: str, most: int, count: int) -> None:
    data = load(["made up"], custom_cls=custom(classes, name), train_max_samples=most)
    assert contents(data) == ["0", "1", "2"][:count] and truths(data) == ["32"] * count
    assert data.data_sources() == ["made up"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Processed", "row 0 of Processed .* expected a dict of columns without tensors"),
        ("Lazy", "expected a sequence of rows, found Lazy"),
        ("Texts", "row 0 of Texts of .* is 'a text', expected a dict"),
        ("Nobody", "data.custom_cls.name='Nobody': .*it defines: Lazy, LikeVerl"),
    ],
)
def test_a_class_that_gives_something_else_is_explained(classes: str, name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load(["x"], custom_cls=custom(classes, name))


@pytest.mark.parametrize("form", ["jsonl", "json"])
def test_a_row_that_is_nested_too_deep_is_named(form: str, tmp_path: Path) -> None:
    def row(levels: int) -> str:
        return '{"prompt": "1+1=", "extra_info": ' + '{"a": ' * levels + "1" + "}" * levels + "}"

    path = tmp_path / f"rows.{form}"
    flat, deep = row(90), row(800)
    path.write_text(f"[{flat}, {deep}]" if form == "json" else f"{flat}\n{deep}\n", encoding="utf-8")
    where = "" if form == "json" else ", line 2"
    with pytest.raises(UserError, match=f"data.train_files='{path}'{where}: nested more than 100 levels deep"):
        read_rows(str(path), "data.train_files")
    path.write_text(f"[{flat}]" if form == "json" else f"{flat}\n", encoding="utf-8")
    assert len(read_rows(str(path), "data.train_files")) == 1


# --- parquet -------------------------------------------------------------------------------------------------------


def test_rows_of_columns_above_2_gib_are_read() -> None:
    # 40 times the same 64 MiB, which an array of texts cannot hold
    long_text = "x" * (64 << 20)
    chunk = pyarrow.array([long_text, "a"])
    messages = pyarrow.ListArray.from_arrays([0, 1, 2], pyarrow.StructArray.from_arrays([chunk], ["content"]))
    columns = {"text": [chunk] * 40, "messages": [messages] * 40}
    table = pyarrow.table({name: pyarrow.chunked_array(chunks) for name, chunks in columns.items()})
    rows = RowTable("large", table).rows([79, 1, 3, 5], ["text", "messages"])
    assert rows == [{"text": "a", "messages": [{"content": "a"}]}] * 4


def test_a_row_group_above_2_gib_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"messages": [{"role": "user", "content": f"{number}"}]} for number in range(600)]
    file = write(tmp_path / "rows.parquet", rows)

    def read_at_once(*_: object, **__: object) -> None:
        raise pyarrow.ArrowNotImplementedError("Nested data conversions not implemented for chunked array outputs")

    # what pyarrow does with 2 GiB of texts inside lists
    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "read", read_at_once)
    assert read_rows(file, "data.train_files") == rows


def test_a_file_of_polars_is_read_in_any_order(tmp_path: Path) -> None:
    # Polars stores texts as string_view, which most functions of pyarrow do not know
    message = [("role", pyarrow.string_view()), ("content", pyarrow.string_view())]
    schema = pyarrow.schema(
        {"question": pyarrow.string_view(), "messages": pyarrow.large_list(pyarrow.struct(message))}
    )
    stored_schema = base64.b64encode(schema.serialize().to_pybytes()).decode()
    rows = [{"question": text, "messages": [{"role": "user", "content": text}]} for text in "abc"]
    table = pyarrow.Table.from_pylist(rows)
    with pyarrow.parquet.ParquetWriter(tmp_path / "polars.parquet", table.schema, store_schema=False) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({"ARROW:schema": stored_schema})
    read = read_data_file(str(tmp_path / "polars.parquet"), "data.train_files")
    assert read.rows([2, 0], read.columns) == [rows[2], rows[0]]


def test_a_date_that_python_does_not_have_is_named_with_its_column(tmp_path: Path) -> None:
    late = pyarrow.array([2**62], pyarrow.timestamp("us"))
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"], "created": late}), tmp_path / "rows.parquet")
    file = str(tmp_path / "rows.parquet")
    assert read_data_file(file, "data.train_files").rows([0], ["text"]) == [{"text": "a"}]
    with pytest.raises(UserError, match=r"rows.parquet, column 'created': a value of type timestamp\[us\] cannot be"):
        read_rows(file, "data.train_files")
