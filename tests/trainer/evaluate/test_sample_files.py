"""The samples folder of a run: what a file holds, that it stays below its limit, and what a resumed run forgets."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet

from trainer.evaluate.sample import Sample
from trainer.evaluate.sample_files import SampleFiles, step_of

PROMPT = [{"role": "user", "content": "What is 70 + 2?"}]
SAMPLE = Sample(
    step=1, uid="p0", data_source="sums", input="What is 70 + 2?", output="72", gts="72", score=1.0, response_length=2,
    finish_reason="stop", policy_version=0, extra={"acc": 1.0, "pred": "72"}, prompt=PROMPT, ground_truth={"value": 72},
    extra_info={"index": 0, "tags": ["easy"]},
)  # fmt: skip
FAILED = replace(SAMPLE, uid="p1", score=None, extra={}, timed_out=True)


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_a_file_has_a_row_for_each_sample_with_the_parts_of_its_reward(tmp_path: Path) -> None:
    SampleFiles(tmp_path, 1 << 20, print).write_training([SAMPLE, FAILED], 12)
    rows = pyarrow.parquet.read_table(tmp_path / "samples" / "train" / "000012.parquet").to_pylist()
    assert [row["score"] for row in rows] == [1.0, None] and [row["timed_out"] for row in rows] == [False, True]
    assert [row["reward/acc"] for row in rows] == [1.0, None] and rows[0]["reward/pred"] == "72"
    assert rows[0]["prompt"] == PROMPT and json.loads(rows[0]["extra_info_json"]) == {"index": 0, "tags": ["easy"]}


def test_only_files_with_an_episode_of_a_program_have_its_requests(tmp_path: Path) -> None:
    requests = [
        {"parent": None, "row": 0, "text": "a \ud800 </script>", "messages": [{"role": "user", "content": "x"}]}
    ]
    files = SampleFiles(tmp_path, 1 << 20, print, rollout_dir=str(tmp_path / "lines"))
    files.write_training([SAMPLE], 1)
    files.write_training([SAMPLE, replace(SAMPLE, requests=requests)], 2)
    tables = [pyarrow.parquet.read_table(tmp_path / "samples" / "train" / f"00000{step}.parquet") for step in (1, 2)]
    assert set(tables[1].column_names) - set(tables[0].column_names) == {"requests_json"}
    assert [json.loads(text) for text in tables[1]["requests_json"].to_pylist()] == [[], requests]
    lines = [json.loads(x) for step in (1, 2) for x in (tmp_path / "lines" / f"{step}.jsonl").read_text().splitlines()]
    assert [line.get("requests") for line in lines] == [None, None, requests] and "requests" not in lines[1]
    assert [Sample(**line) for line in lines] == [SAMPLE, SAMPLE, replace(SAMPLE, requests=requests)]


def test_a_step_that_is_gone_through_again_is_there_once_and_later_ones_are_forgotten(tmp_path: Path) -> None:
    files = SampleFiles(tmp_path, 1 << 20, print)
    for step in (1, 2, 3):
        files.write_training([SAMPLE], step)
        files.write_validation([SAMPLE], step)
        files.write_validation([SAMPLE], step, "greedy")
    files.rewind(2)
    files.write_training([SAMPLE, SAMPLE], 2)
    assert names(tmp_path / "samples" / "train") == ["000001.parquet", "000002.parquet"]
    assert "000003-greedy.parquet" not in names(tmp_path / "samples" / "val")
    assert pyarrow.parquet.read_metadata(tmp_path / "samples" / "train" / "000002.parquet").num_rows == 2


def test_a_full_folder_keeps_every_second_step_and_the_newest_and_says_so_once(tmp_path: Path) -> None:
    told, steps = list[str](), 40
    SampleFiles(tmp_path / "one", 1 << 20, print).write_training([SAMPLE], 1)
    [one] = (tmp_path / "one" / "samples" / "train").iterdir()
    files = SampleFiles(tmp_path, 8 * one.stat().st_size + 100, told.append)
    for step in range(1, steps + 1):
        files.write_training([SAMPLE], step)
    kept = sorted((tmp_path / "samples" / "train").iterdir())
    assert sum(file.stat().st_size for file in kept) <= files.max_bytes
    assert step_of(kept[-1]) == steps and len(kept) >= 4 and len(told) == 1
    assert step_of(kept[0]) <= steps // 4, "the beginning of the run is still there"
