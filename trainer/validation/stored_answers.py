"""The store of the answers of a long evaluation: files that are written as the answers are generated.

folder / settings.json        everything that the answers depend on; commands with other settings are refused
       / chunk-000000.jsonl   answers to one chunk of prompts, one per line
"""

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from trainer.checkpoint.files import write_atomically
from trainer.validation.sample import Sample
from verl_lite.errors import UserError
from verl_lite.json_types import JsonObject

_SETTINGS = "settings.json"
# the pieces of a file that `content_of` hashes: files of up to 256 x 256 KiB = 64 MiB completely
_PIECES = 256
_PIECE_BYTES = 1 << 18


@dataclass(frozen=True)
class StoredAnswer:
    """An answer of a store.

    Attributes:
        prefix: Prefix of its sampling, see `trainer.validation.answers.ValSampling`.
        position: Position of its prompt in the dataset.
        row: The answer.
    """

    prefix: str
    position: int
    row: Sample


class AnswerStore:
    """Stores answers by chunk in a folder. A chunk is stored completely or not at all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self) -> list[StoredAnswer]:
        """Returns all answers in the order in which they were added."""
        answers = []
        for path in self._chunks():
            for line in path.read_text(encoding="utf-8").splitlines():
                entry = json.loads(line)
                sample = Sample(**entry["row"])
                answer = StoredAnswer(entry["prefix"], entry["position"], sample)
                answers.append(answer)
        return answers

    def add(self, answers: list[StoredAnswer]) -> None:
        """Stores the answers of one chunk durably."""
        self.folder.mkdir(parents=True, exist_ok=True)
        text = ""
        for answer in answers:
            # the fields of a sample are json values, see `samples_of`
            text += json.dumps(asdict(answer)) + "\n"
        # an interrupted evaluation continues after its last chunk
        number = len(self._chunks())
        write_atomically(self.folder / f"chunk-{number:06d}.jsonl", text)

    def clear(self) -> None:
        """Removes all answers."""
        for path in self._chunks():
            path.unlink()

    def _chunks(self) -> list[Path]:
        return sorted(self.folder.glob("chunk-*.jsonl"))


def read_settings(folder: Path) -> JsonObject | None:
    """Returns the settings of the answers in a folder, or None if it has none."""
    path = folder / _SETTINGS
    if not path.exists():
        return None
    return json.loads(path.read_text(encoding="utf-8"))


def claim_folder(folder: Path, settings: JsonObject) -> None:
    """Reserves a folder for answers with these settings.

    Args:
        folder: folder of the answers.
        settings: everything that the answers depend on, as JSON values.

    Raises:
        UserError: if the folder holds answers with other settings. The message lists the differing keys.
    """
    existing = read_settings(folder)
    if existing is None:
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(settings, indent=1, sort_keys=True)
        write_atomically(folder / _SETTINGS, text)
        return
    # of both, because a setting that only one of them has differs, too
    lines = []
    for name in sorted({*existing, *settings}):
        if existing.get(name) != settings.get(name):
            lines.append(f"{name}: {existing.get(name)} there, {settings.get(name)} now")
    if lines:
        differing = "\n  ".join(lines)
        raise UserError(
            f"{folder} holds answers under other settings:\n  {differing}\nGive the old values, or another folder "
            "(trainer.default_local_dir; of main_generate --out)"
        )


def content_of(path: str | Path) -> str:
    """Returns a hash of the content of a file, or of all files of a folder; "absent" if the path does not exist.

    Files of up to 64 MiB are hashed completely. Of larger files, the size and 256 evenly spaced pieces of 256 KiB
    are hashed, including the end.
    """
    path = Path(path).expanduser()
    digest = hashlib.blake2b(digest_size=8)
    if path.is_dir():
        files = [file for file in path.rglob("*") if file.is_file()]
        # sorted, because a file system lists files in any order
        for file in sorted(files):
            line = f"{file.relative_to(path)} {content_of(file)}\n"
            digest.update(line.encode())
        return digest.hexdigest()
    if not path.is_file():
        return "absent"

    # a large file, such as a checkpoint, is not read completely
    size = path.stat().st_size
    num_pieces = min(_PIECES, math.ceil(size / _PIECE_BYTES))
    digest.update(str(size).encode())
    with path.open("rb") as opened:
        # The last piece ends at the end of the file, and the others are evenly spaced before it. A file of one piece is
        # read from its beginning.
        last_start = size - _PIECE_BYTES
        gaps = max(1, num_pieces - 1)
        for piece in range(num_pieces):
            opened.seek(last_start * piece // gaps)
            digest.update(opened.read(_PIECE_BYTES))
    return digest.hexdigest()
