"""Answers kept in files: whole chunks only, under their own settings only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from trainer import checkpoint
from trainer.evaluate.chunks import Kept, KeptAnswers, claim_folder, content_of
from verl_lite.errors import UserError


@dataclass(frozen=True)
class Row:
    text: str
    score: float | None
    ids: list[int]


FIRST = [Kept("", 3, Row("a\nb\u2028é", 0.1 + 0.2, [1, 2])), Kept("greedy/", 3, Row("", None, []))]
SECOND = [Kept("", 0, Row("c", 1 / 3, [7]))]


def test_what_is_added_comes_back_bit_for_bit_and_in_order(tmp_path: Path) -> None:
    kept = KeptAnswers(tmp_path / "answers", Row)
    assert kept.load() == []
    kept.add(FIRST)
    kept.add(SECOND)
    assert KeptAnswers(tmp_path / "answers", Row).load() == FIRST + SECOND
    kept.clear()
    assert kept.load() == []


def test_a_chunk_that_was_being_written_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = KeptAnswers(tmp_path, Row)
    kept.add(FIRST)

    def killed(*paths: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            kept.add(SECOND)
    assert kept.load() == FIRST
    kept.add(SECOND)
    assert kept.load() == FIRST + SECOND


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    settings = {"rollout.val_kwargs.n": 8, "trainer.seed": 1, "data.val_files": ["a.jsonl"]}
    claim_folder(tmp_path / "answers", settings, "Do this.")
    claim_folder(tmp_path / "answers", dict(reversed(settings.items())), "Do this.")
    with pytest.raises(UserError) as error:
        claim_folder(tmp_path / "answers", settings | {"rollout.val_kwargs.n": 4, "new": True}, "Do this.")
    lines = str(error.value).splitlines()
    assert lines[1:] == ["  new: None there, True now", "  rollout.val_kwargs.n: 8 there, 4 now", "Do this."]


def test_contents_tell_files_and_folders_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(bytes(range(256)) * 64)
    first = content_of(path)
    assert content_of(tmp_path / "none") == "absent" and content_of(tmp_path) != first
    path.write_bytes(bytes(range(256)) * 63 + bytes(255) + b"x")
    assert content_of(path) != first
    monkeypatch.setattr("trainer.evaluate.chunks._WHOLE_BYTES", 100)
    monkeypatch.setattr("trainer.evaluate.chunks._PIECE_BYTES", 16)
    sampled = content_of(path)
    path.write_bytes(bytes(range(256)) * 63 + bytes(256))
    assert content_of(path) != sampled, "the last bytes are always looked at"
    folder = content_of(tmp_path)
    path.rename(tmp_path / "other.bin")
    assert content_of(tmp_path) != folder
