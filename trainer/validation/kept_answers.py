"""Answers of a long evaluation or generation, kept in files as they come, so that a killed command goes on.

folder / settings.json        what the answers depend on; a command with other settings is refused
       / chunk-000000.jsonl   answers of one chunk of prompts, a line each

A file appears by one rename when all of it is on the disk: a chunk is there whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from trainer.checkpoint import write_atomically
from verl_lite.errors import UserError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

R = TypeVar("R", bound="DataclassInstance")
SETTINGS = "settings.json"
_WHOLE_BYTES = 64 << 20  # of a file that is read in whole; of a larger one, as weights are, only samples
_SAMPLES, _SAMPLE_BYTES = 256, 1 << 16


@dataclass(frozen=True)
class Kept(Generic[R]):
    """One answer. way: how it was asked for, the prefix of its metrics. position: of its prompt in the dataset."""

    way: str
    position: int
    row: R


class KeptAnswers(Generic[R]):
    """The chunks of a folder. row: the dataclass of an answer, of plain values."""

    def __init__(self, folder: Path, row: type[R]) -> None:
        self.folder, self._row = folder, row

    def load(self) -> list[Kept[R]]:
        """All answers, in the order in which they were added."""
        lines = [json.loads(line) for path in self._chunks() for line in path.read_text(encoding="utf-8").splitlines()]
        return [Kept(line["way"], line["position"], self._row(**line["row"])) for line in lines]

    def add(self, answers: list[Kept[R]]) -> None:
        """Keeps the answers of one chunk; when this returns, they survive whatever happens."""
        self.folder.mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(asdict(answer)) + "\n" for answer in answers)
        write_atomically(self.folder / f"chunk-{len(self._chunks()):06d}.jsonl", text)

    def clear(self) -> None:
        """Forgets the answers, which are kept elsewhere now."""
        for path in self._chunks():
            path.unlink()

    def _chunks(self) -> list[Path]:
        return sorted(self.folder.glob("chunk-*.jsonl"))


def plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as a file gives them back."""
    return json.loads(json.dumps(settings, default=str))


def read_settings(folder: Path) -> dict[str, Any] | None:
    """The settings of the answers in a folder; None if it has none."""
    path = folder / SETTINGS
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def claim_folder(folder: Path, settings: Mapping[str, Any], remedy: str) -> None:
    """Makes the folder one of answers under these settings. Raises UserError, which names the keys that differ, if it
    holds answers under others. remedy: what to do then."""
    found, wanted = read_settings(folder), plain(settings)
    if found is None:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / SETTINGS, json.dumps(wanted, indent=1, sort_keys=True))
        return
    differing = [
        f"{name}: {found.get(name)} there, {wanted.get(name)} now"
        for name in sorted({*found, *wanted})
        if found.get(name) != wanted.get(name)
    ]
    if differing:
        raise UserError(f"{folder} holds answers under other settings:\n  " + "\n  ".join(differing) + f"\n{remedy}")


def content_of(path: str | Path) -> str:
    """A short name for what is in a file, or in the files of a folder of weights; "absent" for what is not there.

    Of files beyond 64 MiB size and 256 evenly spread pieces are looked at.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        names = sorted(file for file in path.rglob("*") if file.is_file())
        parts = [f"{file.relative_to(path)} {content_of(file)}" for file in names]
        return hashlib.blake2b("\n".join(parts).encode(), digest_size=8).hexdigest()
    if not path.is_file():
        return "absent"
    size, digest = path.stat().st_size, hashlib.blake2b(digest_size=8)
    digest.update(str(size).encode())
    with path.open("rb") as file:
        if size <= _WHOLE_BYTES:
            digest.update(file.read())
        else:
            for piece in range(_SAMPLES):
                file.seek((size - _SAMPLE_BYTES) * piece // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
