"""The samples folder of a run: what a file holds, that it stays below its limit, and what a resumed run forgets."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet
import torch

from tests.tiny_run import REWARD, good_row, write_rows
from tests.tiny_vision import image_file, tiny_vision_model
from tests.trainer import tiny_run
from trainer.observe.recorded_answers import chosen
from trainer.validation.sample import Sample, valid_image_names
from trainer.validation.sample_files import SampleFiles, step_of
from verl_lite.images import open_image
from verl_lite.protocol import DataProto, as_column
from workers.policy.vision import ImageInputs

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


def test_half_a_surrogate_pair_in_the_data_costs_no_file(tmp_path: Path) -> None:
    """JSON can contain one, where a text was cut inside an emoji."""
    half = "a\udfff"
    sample = replace(SAMPLE, gts=half, input=half, output=half, ground_truth=half, extra={"pred": half})
    SampleFiles(tmp_path, 1 << 20, print).write_training([sample], 1)
    [row] = pyarrow.parquet.read_table(tmp_path / "samples" / "train" / "000001.parquet").to_pylist()
    assert row["gts"] == row["input"] == row["output"] == row["reward/pred"] == "a?"
    assert json.loads(row["ground_truth_json"]) == half


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


def test_the_newest_files_stay_if_they_alone_exceed_the_limit(tmp_path: Path) -> None:
    """Of both kinds: a loop that waited until the folder is small enough would not end."""
    files = SampleFiles(tmp_path, 1, lambda text: None)
    for step in (1, 2):
        files.write_training([SAMPLE], step)
        files.write_validation([SAMPLE], step)
    assert names(tmp_path / "samples" / "train") == names(tmp_path / "samples" / "val") == ["000002.parquet"]


# --------------------------------------------------------------------------------------------- images of prompts


def batch_of(*digests: int, side: int = 16) -> DataProto:
    """Two rows per prompt, each prompt with an image that depends on its digest, and two rows without image."""
    inputs = []
    for digest in digests:
        files = (image_file(digest, height=side, width=2 * side),)
        inputs.append(ImageInputs(torch.zeros(0), torch.zeros(0), torch.zeros(0), 0, digest, files))
    column = as_column([each for each in inputs for _ in range(2)] + [None, None])
    return DataProto.from_dict(non_tensors={"multi_modal_inputs": column})


def names_of(*digests: int) -> list[str]:
    return [f"{digest:016x}-0.jpg" for digest in digests]


def test_an_image_is_written_once_for_all_answers_steps_and_resumed_runs(tmp_path: Path) -> None:
    folder, files = tmp_path / "samples" / "images", SampleFiles(tmp_path, 1 << 24, print)
    files.write_images(batch_of())
    assert not folder.exists(), "a run without images has no folder for them"
    files.write_images(batch_of(1, 2, side=600))
    with open_image((folder / names_of(1)[0]).read_bytes()) as image:
        assert image.size == (512, 256)
    written = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    for later in (files, SampleFiles(tmp_path, 1 << 24, print)):
        later.write_images(batch_of(2, 1, 3))
        later.rewind(0)
        assert names(folder) == names_of(1, 2, 3)
        assert all((folder / name).stat().st_mtime_ns == time for name, time in written.items())
    SampleFiles(tmp_path / "none", 0, print).write_images(batch_of(1))
    assert not (tmp_path / "none").exists()


def test_images_take_half_of_the_folder_and_those_not_used_for_the_longest_time_are_deleted(tmp_path: Path) -> None:
    SampleFiles(tmp_path / "one", 1 << 24, print).write_images(batch_of(1))
    [one] = (tmp_path / "one" / "samples" / "images").iterdir()
    folder, files = tmp_path / "samples", SampleFiles(tmp_path, 9 * one.stat().st_size, print)
    for digests in ((1, 2, 3), (1, 4), (5,)):  # room for four
        files.write_images(batch_of(*digests))
    assert names(folder / "images") == names_of(1, 3, 4, 5)
    for step in range(1, 9):
        files.write_training([replace(SAMPLE, images=names_of(1))] * 9, step)
        sizes = {file: file.stat().st_size for file in folder.rglob("*.*")}
        assert sum(sizes.values()) <= files.max_bytes or len(names(folder / "train")) == 1
    assert names(folder / "images") == names_of(1, 3, 4, 5)


def test_only_files_with_images_name_them_and_records_contain_no_bytes(tmp_path: Path) -> None:
    shown = replace(SAMPLE, images=names_of(7))
    files = SampleFiles(tmp_path, 1 << 20, print, rollout_dir=str(tmp_path / "lines"))
    files.write_training([SAMPLE], 1)
    files.write_training([SAMPLE, shown], 2)
    tables = [pyarrow.parquet.read_table(tmp_path / "samples" / "train" / f"00000{step}.parquet") for step in (1, 2)]
    assert "images" not in tables[0].column_names and tables[1]["images"].to_pylist() == [[], names_of(7)]
    lines = [json.loads(line) for line in (tmp_path / "lines" / "2.jsonl").read_text().splitlines()]
    assert "images" not in lines[0] and [Sample(**line) for line in lines] == [SAMPLE, shown]


def test_names_of_another_form_are_left_out() -> None:
    good = names_of(7)
    wrong: list[Any] = ["../../etc/passwd", "/etc/passwd", f"../{good[0]}", f"x/{good[0]}", f"{good[0]}\n", "", 7, None]
    assert valid_image_names([*wrong, *good]) == good
    for value in (None, good[0], 7, {"a": 1}):
        assert valid_image_names(value) == []


def test_the_images_of_a_run_are_in_its_folder_under_the_names_in_its_samples(tmp_path: Path) -> None:
    tiny_vision_model(tmp_path / "policy")
    texts = ("a <image> b", "<image> and <image>", "no image", "z<image>z")
    files: list[list[int]] = [[0], [1, 2], [], [0]]
    for number in range(3):
        (tmp_path / f"{number}.png").write_bytes(image_file(number))
    prompts = [{"prompt": [{"role": "user", "content": text}], "reward_model": {"ground_truth": "x"}} for text in texts]
    images = [{"images": [f"{number}.png" for number in numbers]} for numbers in files]
    rows = [good_row(row, "talk") | prompts[row] | images[row] for row in range(4)]
    write_rows(tmp_path / "prompts.jsonl", rows)
    (tmp_path / "reward.py").write_text(REWARD)
    options = ["trainer.total_training_steps=1", f"data.val_files={tmp_path}/prompts.jsonl", "rollout.n=2"]
    tiny_run.run(tmp_path, "run", *options, f"data.image_folder={tmp_path}", "trainer.val_before_train=true")
    found, total = chosen(tmp_path / "run", "", "", 99)
    assert total == 4 * (2 + 2) and len(names(tmp_path / "run" / "samples" / "images")) == 3
    by_text = {answer.prompt[-1][1]: answer.images for answer in found}
    assert {text: len(paths) for text, paths in by_text.items()} == dict(zip(texts, (1, 2, 0, 1), strict=True))
    assert by_text[texts[0]] == by_text[texts[3]] and all(
        answer.images == by_text[answer.prompt[-1][1]] for answer in found
    )
