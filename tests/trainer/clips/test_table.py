"""metadata.csv: rows with their place, and a sentence for each thing that can be wrong with a csv."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.made_clips import options, write_table
from trainer.clips.table import read_tables
from verl_lite.errors import UserError


def test_rows_of_several_files_with_paths_beside_each(tmp_path: Path) -> None:
    first = write_table(tmp_path / "one", [["a.mp4", "a cat, asleep"], ["sub/b", "a dog"]])
    second = write_table(tmp_path / "two", [[str(tmp_path / "c.gif"), " a bird "]])
    rows = read_tables(options(first, second.parent))  # a folder stands for its metadata.csv
    assert [row.path for row in rows] == [tmp_path / "one/a.mp4", tmp_path / "one/sub/b", tmp_path / "c.gif"]
    assert [row.prompt for row in rows] == ["a cat, asleep", "a dog", "a bird"]
    assert rows[1].place == f"data.train_files: row 1 (line 3) of {first}" and "row 0 (line 2)" in rows[2].place
    assert [row.prompt for row in read_tables(options(first, second, train_max_samples=1))] == ["a cat, asleep"]


def test_other_columns_are_kept_and_names_can_be_chosen(tmp_path: Path) -> None:
    table = write_table(tmp_path, [["x", "a.mp4", "3"]], ["caption", "clip", "person"])
    row = read_tables(options(table, video_key="clip", prompt_key="caption"))[0]
    assert (row.path.name, row.prompt, row.extra) == ("a.mp4", "x", {"person": "3"})


def test_a_byte_order_mark_and_prompts_of_several_lines(tmp_path: Path) -> None:
    table = tmp_path / "m.csv"
    table.write_bytes('\ufeffvideo,prompt\r\na.mp4,"one\r\ntwo"\r\nb.mp4,é\r\n'.encode())
    rows = read_tables(options(table))
    assert [row.prompt for row in rows] == ["one\r\ntwo", "é"]
    assert rows[1].place == f"data.train_files: row 1 (line 4) of {table}"  # as an editor counts


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["its first line gives nothing", "video,prompt"]),
        ("video,prompt\n", ["no rows"]),
        ("file,prompt\na,b\n", ["no column 'video' (data.video_key)", "file, prompt", "data.video_key='file'"]),
        ("Video,prompt\na,b\n", ["data.video_key='Video'"]),
        ("video,text\na,b\n", ["no column 'prompt' (data.prompt_key)", "data.prompt_key='text'"]),
        ("video,promt\na,b\n", ["data.prompt_key='promt'"]),
        ("a.mp4,a cat\nb.mp4,a dog\n", ["its first line gives a.mp4, a cat", "should name the columns"]),
        ("video;prompt\na;b\n", ["separated by commas"]),
        ("video,prompt,prompt\na,b,c\n", ["a column twice"]),
        ("video,prompt\na,b\nc,a cat, asleep\n", ["row 1 (line 3)", "3 values for the 2 columns", "double quotes"]),
        ("video,prompt\na\n", ["row 0 (line 2)", "1 values for the 2 columns"]),
        ("video,prompt\n ,b\n", ["row 0 (line 2)", "'video' is empty"]),
        ("video,prompt\na,\n", ["'prompt' is empty"]),
        ('video,prompt\na,"b\n', ["cannot be read as csv"]),
    ],
)
def test_what_can_be_wrong_with_a_csv(tmp_path: Path, text: str, words: list[str]) -> None:
    table = tmp_path / "metadata.csv"
    table.write_text(text)
    with pytest.raises(UserError) as error:
        read_tables(options(table))
    for word in [str(table), *words]:
        assert word in str(error.value)


def test_a_file_that_is_not_there_or_no_text(tmp_path: Path) -> None:
    table = write_table(tmp_path / "clips", [["a", "b"]]).rename(tmp_path / "clips" / "train.csv")
    with pytest.raises(UserError, match=r"no file .*clips/trian.csv \(did you mean train.csv\?\)"):
        read_tables(options(tmp_path / "clips" / "trian.csv"))
    with pytest.raises(UserError, match=r"no file .*clips/metadata.csv"):
        read_tables(options(tmp_path / "clips"))
    table.write_bytes("video,prompt\na.mp4,é\n".encode("latin-1"))
    with pytest.raises(UserError, match="cannot be read as csv in UTF-8"):
        read_tables(options(table))
