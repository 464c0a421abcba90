"""What a disk, a copy or a stranger did to a checkpoint is noticed before it is used; a full disk ends nothing."""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
import resource
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.trainer.checkpoint.written_checkpoint import write_checkpoint
from tests.trainer.validation.test_answers import sample
from trainer.checkpoint.crash_dump import dump_on_failure
from trainer.checkpoint.files import (
    MARKER,
    damage_of,
    find_checkpoint,
    prune,
    read_state,
    saved_steps,
    whole_checkpoint,
    whole_steps,
)
from trainer.cli import failure_text
from trainer.loop.saving import most_checkpoints, require_room_for_checkpoints
from trainer.validation.sample_files import SampleFiles
from verl_lite.config import RunConfig
from verl_lite.errors import UserError
from verl_lite.machine.random_state import get_random_state, set_random_state
from verl_lite.machine.safe_state import read_metadata, write_state
from verl_lite.protocol import DataProto
from workers.engine.checkpoint import _read as read_shards
from workers.engine.checkpoint import load_random_state, save_random_state
from workers.engine.checkpoint import save as write_shards

Usage = namedtuple("Usage", "total used free")


class Runs:
    """A pickle of this touches a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def save(run_dir: Path, step: int) -> Path:
    def models(folder: Path) -> None:
        dcp.save({"model.w": torch.arange(1000.0)}, checkpoint_id=folder / "actor", no_dist=True)

    return write_checkpoint(run_dir, step, models, {"step": step})


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))


def written(name: str, content: bytes) -> Callable[[Path], object]:
    """Replaces a file of a checkpoint."""
    return lambda folder: (folder / name).write_bytes(content)


def in_place_of(name: str, make: Callable[[Path], object]) -> Callable[[Path], object]:
    """Puts something else where a file of a checkpoint was."""

    def harm(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return harm


def drop_from_list(name: str) -> Callable[[Path], object]:
    def harm(folder: Path) -> None:
        manifest = json.loads((folder / "manifest.json").read_text())
        del manifest["sha256"][name]
        (folder / "manifest.json").write_text(json.dumps(manifest))

    return harm


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda folder: flip_a_bit(next(folder.glob("actor/*.distcp"))), "not the bytes that were written: actor/__0_"),
        (lambda folder: next(folder.glob("actor/*.distcp")).unlink(), "missing, or not the bytes"),
        (in_place_of("data.pt", Path.mkdir), "missing, .*: data.pt"),
        (written("manifest.json", b""), "manifest.json cannot be read"),
        (written("manifest.json", b'{"sha256": {}}'), "does not list MODEL/.metadata, actor/.metadata, .*, data.pt"),
        (written("manifest.json", b"[" * 1_000_000), "manifest.json cannot be read .maximum recursion"),
        (written("manifest.json", b'{"sha256": {"\xff'), "manifest.json cannot be read"),
        (written("manifest.json", b'{"sha256": {"' + b"n" * 999 + b'/.metadata": [1, "x"]}}'), "does not list actor/"),
        (lambda folder: os.truncate(folder / "manifest.json", 1 << 30), "manifest.json has more than 16 MiB"),
        (in_place_of("manifest.json", os.mkfifo), "it has no manifest.json"),
        (drop_from_list("actor/.metadata"), "does not list MODEL/.metadata, actor/.metadata"),
        (drop_from_list("data.pt"), "does not list data.pt"),
    ],
)
def test_auto_goes_back_to_the_newest_whole_checkpoint_and_says_so(
    tmp_path: Path, harm: Callable[[Path], object], said: str
) -> None:
    first, second = save(tmp_path, 1), save(tmp_path, 2)
    told: list[str] = []
    assert whole_checkpoint(tmp_path, "auto", None, told.append) == second and told == []
    harm(second)
    assert list(whole_steps(tmp_path, told.append)) == [first], "what only reads leaves it where it is"
    assert re.search(f"{second} is damaged: .*{said}", told.pop()) and second.is_dir()
    assert whole_checkpoint(tmp_path, "auto", None, told.append) == first
    assert len(told) == 1 and re.search(f"global_step_2 is damaged: .*{said}.*global_step_2.damaged", told[0]), told
    assert list(saved_steps(tmp_path)) == [1] and find_checkpoint(tmp_path, "auto", None) == first


def test_exchanged_folders_are_noticed_and_without_a_whole_one_nothing_starts(tmp_path: Path) -> None:
    first, second = save(tmp_path, 9), save(tmp_path, 10)
    first.rename(tmp_path / "kept")
    second.rename(first)
    (tmp_path / "kept").rename(second)
    with pytest.raises(UserError, match="all 2 are damaged"):
        list(whole_steps(tmp_path, lambda _: None))
    told: list[str] = []
    for _ in range(2):  # the same command again does not start from scratch either
        with pytest.raises(UserError, match="no whole one is left .only latest_.*, global_step_10.d.*, global_step_9"):
            whole_checkpoint(tmp_path, "auto", None, told.append)
    assert "its name is not that of the step in data.pt, 9" in told[0] and "in data.pt, 10" in told[1]


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (in_place_of("", Path.mkdir), "it is not a file"),
        (in_place_of("", os.mkfifo), "it is not a file"),
        (written("", b""), "it does not name a step"),
        (written("", b"\xb2"), "it does not name a step"),
        (written("", b"2" * 10_000), "it names step 2222.*, of which no checkpoint is here"),
        (written("", b"3"), "it names step 3, of which no checkpoint is here"),
    ],
)
def test_a_damaged_marker_costs_a_sentence_and_the_next_save_mends_it(
    tmp_path: Path, harm: Callable[[Path], object], said: str
) -> None:
    save(tmp_path, 1), save(tmp_path, 2)
    harm(tmp_path / MARKER)
    told: list[str] = []
    assert whole_checkpoint(tmp_path, "auto", None, told.append) == tmp_path / "global_step_2"
    assert len(told) == 1 and re.search(f"{MARKER}: {said}.*newest whole checkpoint", told[0]), told
    save(tmp_path, 4)
    assert (tmp_path / MARKER).read_text() == "4"


def test_files_and_links_in_place_of_folders_are_passed_over(tmp_path: Path) -> None:
    outside = save(tmp_path / "elsewhere", 5)
    (tmp_path / "run").mkdir()
    run = tmp_path / "run"
    for name in (".global_step_3.draft", ".global_step_4.old", "global_step_7"):
        (run / name).touch()
    (run / ".global_step_5.gone").symlink_to(outside)
    (run / "global_step_8").symlink_to("nowhere")
    (run / "global_step_5").symlink_to(outside)
    assert whole_checkpoint(run, "auto", None, pytest.fail) == run / "global_step_5"
    assert sorted(path.name for path in run.iterdir()) == ["global_step_5", "global_step_7", "global_step_8"]
    (run / ".global_step_7.draft").touch()
    for step in (7, 8):
        save(run, step)
    prune(run, 2)
    assert sorted(saved_steps(run)) == [7, 8] and damage_of(outside) is None, "only the link has gone"


def test_a_damaged_one_that_was_named_is_refused_with_the_others(tmp_path: Path) -> None:
    first, second = save(tmp_path, 1), save(tmp_path, 2)
    flip_a_bit(second / "data.pt")
    with pytest.raises(UserError, match=f"global_step_2 is damaged: .* written: data.pt. Others of its run: {first}"):
        whole_checkpoint(tmp_path, "resume_path", str(second), pytest.fail)
    (second / "manifest.json").write_text("{")
    assert str(damage_of(second)).startswith("manifest.json cannot be read")
    (second / "manifest.json").unlink()
    assert "it has no manifest.json, which lists its files" in str(damage_of(second))


def test_shards_that_cannot_be_read_are_one_sentence(tmp_path: Path) -> None:
    folder = save(tmp_path, 1) / "actor"
    shard = next(folder.glob("*.distcp"))
    for content in (shard.read_bytes()[:200], None):
        shard.unlink() if content is None else shard.write_bytes(content)
        with pytest.raises(UserError, match="damaged or incomplete .* trainer.resume_from_path"):
            read_shards({"model.w": torch.empty(1000)}, folder, no_dist=True)


def test_a_file_that_may_not_grow_is_the_last_line_of_the_error(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(RuntimeError) as caught:
            write_shards(str(tmp_path / "actor"), {"w": torch.ones(10_000)}, None, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    last = failure_text(caught.value).splitlines()[-1]
    assert last == "The run failed: RuntimeError: the checkpoint cannot be written: [Errno 27] File too large"


def test_nothing_in_a_checkpoint_runs_when_it_is_read(tmp_path: Path) -> None:
    folder, witness = save(tmp_path, 1), tmp_path / "ran"
    torch.save({"config": Runs(witness)}, folder / "data.pt")
    with pytest.raises(UserError, match="data.pt was not loaded, .* may run code"):
        read_state(folder)
    torch.save({"python": Runs(witness)}, folder / "actor" / "random_0.pt")
    with pytest.raises(UserError, match="was not loaded"):
        load_random_state(str(folder / "actor"), 0)
    (folder / "actor" / ".metadata").write_bytes(pickle.dumps(Runs(witness)))
    with pytest.raises(UserError, match="was not loaded, .*posix.system"):
        read_metadata(folder / "actor" / ".metadata")
    dcp.save({"scheduler_step": Runs(witness)}, checkpoint_id=tmp_path / "shards", no_dist=True)
    with pytest.raises(UserError, match="damaged or incomplete"):
        read_shards({"scheduler_step": 0}, tmp_path / "shards", no_dist=True)
    assert not witness.exists()


def test_an_index_that_points_outside_its_folder_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 1) / "actor" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    for place in metadata.storage_data.values():
        object.__setattr__(place, "relative_path", "../../../etc/passwd")
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(UserError, match="files outside its folder"):
        read_metadata(path)


def test_states_come_back_and_what_could_not_is_refused_at_the_save(tmp_path: Path) -> None:
    save_random_state(str(tmp_path), 0)
    before = get_random_state()
    drawn = np.random.random(3), torch.rand(3)
    load_random_state(str(tmp_path), 0)
    assert np.array_equal(np.random.random(3), drawn[0]) and torch.equal(torch.rand(3), drawn[1])
    set_random_state(before)
    batch = DataProto.from_dict({"a": torch.ones(2)}, {"chat": np.array([[{"role": "user"}], None], dtype=object)})
    with pytest.raises(TypeError, match="the state has objects of .*; expected tensors"):
        write_state(tmp_path / "x.pt", {"batch": batch})
    assert not (tmp_path / "x.pt").exists()


def test_checkpoints_that_are_there_already_need_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options, size = RunConfig(save_freq=1, max_actor_ckpt_to_keep=2), 4_000_000
    assert most_checkpoints(options, 10) == 3 and most_checkpoints(RunConfig(), 10) == 1
    for step in (1, 2):
        write_checkpoint(tmp_path, step, lambda folder: (folder / "shard").write_bytes(bytes(size)) and None, {})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 0, 5_000_000))  # for one, not for three
    require_room_for_checkpoints(options, tmp_path, 10, size)
    with pytest.raises(UserError, match="need about 0.012 GB"):
        require_room_for_checkpoints(options, tmp_path / "new", 10, size)


def test_samples_that_find_no_room_are_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    told: list[str] = []
    (tmp_path / "file").touch()
    files = SampleFiles(tmp_path, 1 << 20, told.append, rollout_dir=str(tmp_path / "file"))
    with monkeypatch.context() as patched:
        patched.setattr(pyarrow.parquet, "write_table", full)
        for step in (1, 2):
            files.write_training([sample("a", "s")], step)
    assert len(told) == 2 and f"{tmp_path}/samples/train cannot be written: No space left on device; " in told[0]
    assert "GB are free there. The training goes on without these files" in told[0] and f"{tmp_path}/file" in told[1]
    files.write_training([sample("a", "s")], 3)
    assert [path.name for path in tmp_path.glob("samples/train/*.parquet")] == ["000003.parquet"]


def test_a_dump_that_finds_no_room_does_not_become_the_cause(tmp_path: Path) -> None:
    class Steps:
        global_step, epoch = 3, 0

    class Failing:
        steps, saver, step_data, run_dir = Steps(), None, None, tmp_path

    (tmp_path / "crash").touch()  # no folder can be made there
    with pytest.raises(ZeroDivisionError) as caught, dump_on_failure(Failing(), Failing()):
        raise ZeroDivisionError("the cause")
    assert "No crash dump was written" in caught.value.__notes__[0] and "GB are free" in caught.value.__notes__[0]


def test_a_dump_holds_an_error_that_no_encoding_has(tmp_path: Path) -> None:
    class Steps:
        global_step, epoch = 3, 0

    class Failing:
        steps, saver, step_data, run_dir = Steps(), None, None, tmp_path

    with pytest.raises(ArithmeticError), dump_on_failure(Failing(), Failing()):
        raise ArithmeticError("the answer was \ud800")
    assert "the answer was \\ud800" in (tmp_path / "crash" / "step_3" / "error.txt").read_text(encoding="utf-8")
