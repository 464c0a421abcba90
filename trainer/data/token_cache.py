"""Tokens of whole datasets on disk, so that a second run need not make them again.

One file for each dataset under VERL_LITE_CACHE (or ~/.cache/verl_lite), in `tokens/`, named after the content of what
it was made from; nothing needs to be told when that changes. Any file may be deleted at any time, and those used least
lately go when all together take more than `LIMIT_BYTES`. A file appears whole or not at all, whoever else writes it,
and one that is not what was written is made anew.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

LIMIT_BYTES = 4 * 2**30
_MAGIC = b"verl_lite tokens 1\n"
_DIGEST_BYTES = 32

logger = logging.getLogger(__name__)


def digest_of(*parts: Iterable[str]) -> str:
    """A name for texts, in their order and grouping."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        for text in part:
            encoded = text.encode()
            digest.update(len(encoded).to_bytes(8, "little") + encoded)
        digest.update(b"|")
    return digest.hexdigest()


class TokenCache:
    """The files. folder: None = where the environment says."""

    def __init__(self, folder: Path | None = None) -> None:
        root = Path(os.environ.get("VERL_LITE_CACHE") or "~/.cache/verl_lite").expanduser()
        self.folder = root.absolute() / "tokens" if folder is None else folder

    def read(self, name: str, rows: int) -> list[np.ndarray] | None:
        """The tokens of each row, int32; None where there is no file, or none that can be trusted (it is removed)."""
        file = self.folder / f"{name}.bin"
        try:
            content = file.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.warning("%s cannot be read (%s): the prompts are tokenised again", file, error)
            return None
        found = _unpack(content, rows)
        try:
            if found is None:
                logger.warning("%s is damaged: the prompts are tokenised again", file)
                file.unlink()
            else:
                os.utime(file)  # used last now
        except OSError as error:  # another process was faster, or the folder is read-only
            logger.info("%s: %s", file, error)
        return found

    def write(self, name: str, tokens: Sequence[np.ndarray]) -> None:
        """Keeps the tokens of each row, and drops files beyond the limit. Where nothing can be written, says so."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.folder, prefix=f"{name}.", suffix=".tmp", delete=False) as file:
                try:
                    file.write(_pack(tokens))
                    file.close()
                    os.replace(file.name, self.folder / f"{name}.bin")
                except OSError:
                    Path(file.name).unlink(missing_ok=True)
                    raise
            self._drop_oldest()
        except OSError as error:
            logger.warning("the tokens of the prompts cannot be kept in %s (%s)", self.folder, error)

    def _drop_oldest(self) -> None:
        """Files used least lately, until the others fit; with them what writers that were killed have left."""
        files = sorted((stat.st_mtime, stat.st_size, path) for path, stat in self._files())
        total = sum(size for _, size, _ in files)
        for _, size, path in files[:-1]:
            if total <= LIMIT_BYTES:
                return
            path.unlink(missing_ok=True)
            total -= size

    def _files(self) -> Iterable[tuple[Path, os.stat_result]]:
        for entry in os.scandir(self.folder):
            if entry.name.endswith((".bin", ".tmp")):
                try:
                    yield Path(entry.path), entry.stat()
                except FileNotFoundError:  # removed meanwhile by another process
                    continue


def _pack(tokens: Sequence[np.ndarray]) -> bytes:
    """A mark, a digest of the rest, the number of rows, their lengths, their tokens one after another."""
    lengths = np.array([len(row) for row in tokens], dtype="<i4")
    flat = np.concatenate(tokens).astype("<i4")
    body = len(tokens).to_bytes(8, "little") + lengths.tobytes() + flat.tobytes()
    return _MAGIC + hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest() + body


def _unpack(content: bytes, rows: int) -> list[np.ndarray] | None:
    start = len(_MAGIC) + _DIGEST_BYTES
    body = memoryview(content)[start:]
    digest = hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest()
    if not content.startswith(_MAGIC) or content[len(_MAGIC) : start] != digest:
        return None
    if int.from_bytes(body[:8], "little") != rows:
        return None
    lengths = np.frombuffer(body, dtype="<i4", count=rows, offset=8)
    flat = np.frombuffer(body, dtype="<i4", offset=8 + 4 * rows)
    ends = np.cumsum(lengths, dtype=np.int64)
    return [flat[end - length : end] for end, length in zip(ends.tolist(), lengths.tolist(), strict=True)]
