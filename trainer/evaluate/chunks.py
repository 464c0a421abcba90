"""Generates answers to the validation prompts in chunks, and stores the answers of long evaluations.

The validation of a run, `main_eval` and `main_generate` share `generate_in_chunks` and differ in their use of a
generated chunk. An answer depends only on weights, prompt, sampling parameters and seed, so chunks and order do not
affect it (measured in EVALUATION.md). The answers of a long evaluation are stored in files as they are generated:

    folder / settings.json        everything that the answers depend on; commands with other settings are refused
           / chunk-000000.jsonl   answers to one chunk of prompts, one per line
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.checkpoint import write_atomically
from trainer.evaluate.sample import Sample
from verl_lite.config import PPOConfig
from verl_lite.errors import UserError
from verl_lite.protocol import DataProto
from workers.rollout.base import SamplingParams

if TYPE_CHECKING:
    from trainer.data.prompts import PromptDataset

_SETTINGS = "settings.json"
_PIECES, _PIECE_BYTES = 256, 1 << 18


@dataclass(frozen=True)
class ValSampling:
    """Sampling of the validation prompts with `n` answers each. prefix: prefix of the metric names. purpose: prefix of
    the sample ids."""

    prefix: str
    purpose: str
    n: int
    params: SamplingParams


def val_samplings(config: PPOConfig) -> list[ValSampling]:
    """Returns the samplings of rollout.val_kwargs: sampled or greedy answers, and optionally greedy ones as well."""
    kwargs = config.rollout.val_kwargs

    def sampling(prefix: str, greedy: bool) -> ValSampling:
        params = SamplingParams(
            temperature=0.0 if greedy else kwargs.temperature,
            top_p=kwargs.top_p,
            top_k=kwargs.top_k,
            max_tokens=config.data.max_response_length,
        )
        return ValSampling(prefix, f"val{greedy:d}", 1 if greedy else kwargs.n, params)

    return [sampling("", not kwargs.do_sample)] + ([sampling("greedy/", True)] if kwargs.greedy_too else [])


def chunk_size(config: PPOConfig, prompts: int, engines: int, are_kept: bool) -> int:
    """Returns the number of prompts per chunk: data.val_batch_size; if it is null, all prompts, or as many as fill the
    engines once if answers are stored by chunk."""
    size = config.data.val_batch_size
    if size is None and are_kept:
        size = math.ceil(config.rollout.max_num_seqs * engines / config.rollout.val_kwargs.n)
    return size or prompts


def generate_in_chunks(
    prompts: PromptDataset,
    samplings: Sequence[ValSampling],
    size: int,
    generate: Callable[[DataProto, ValSampling], DataProto],
    finish: Callable[[DataProto], list[Sample]],
    kept: KeptAnswers | None = None,
    log: Callable[[str], None] = lambda text: None,
) -> dict[ValSampling, list[Sample]]:
    """Returns one row per answer, by sampling, in the order of the dataset.

    Args:
        size: number of prompts per chunk.
        generate: returns `n` rows per prompt; the rows of a prompt are adjacent.
        finish: turns the result of `generate` into one row per answer. It may wait for rewards, so the next chunk is
            generated before the previous one is finished.
        kept: store of answers. Stored answers are not generated again, and new ones are added as soon as their chunk is
            finished. Without a store, all chunks are generated before the first one is finished.
        log: receives a line at the start and after each stored chunk.
    """
    rows: list[Kept] = kept.load() if kept is not None else []
    done = {each: {row.position for row in rows if row.prefix == each.prefix} for each in samplings}
    left = [place for place in range(len(prompts)) if any(place not in done[each] for each in samplings)]
    waiting: deque[tuple[ValSampling, list[int], DataProto]] = deque()

    def finish_first() -> None:
        sampling, places, batch = waiting.popleft()
        found = [Kept(sampling.prefix, places[i // sampling.n], row) for i, row in enumerate(finish(batch))]
        rows.extend(found)
        if kept is not None:
            kept.add(found)
            done[sampling].update(places)
            answered = set.intersection(*done.values())
            if answered.issuperset(places):
                log(f"{len(answered)} of {len(prompts)} prompts are answered")

    if kept is not None and left:
        log(f"answering {len(left)} of {len(prompts)} prompts, {min(size, len(left))} at a time")
    for start in range(0, len(left), size):
        for sampling in samplings:
            places = [place for place in left[start : start + size] if place not in done[sampling]]
            if places:
                waiting.append((sampling, places, generate(prompts.__getitems__(places), sampling)))
            if kept is not None and len(waiting) > 1:
                finish_first()
    while waiting:
        finish_first()
    rows.sort(key=lambda each: each.position)  # stable: keeps the order of the answers to one prompt
    return {each: [row.row for row in rows if row.prefix == each.prefix] for each in samplings}


@dataclass(frozen=True)
class Kept:
    """A stored answer. prefix: prefix of its sampling. position: position of its prompt in the dataset."""

    prefix: str
    position: int
    row: Sample


class KeptAnswers:
    """Stores answers by chunk in a folder. A chunk is stored completely or not at all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self) -> list[Kept]:
        """Returns all answers in the order in which they were added."""
        lines = [json.loads(line) for path in self._chunks() for line in path.read_text(encoding="utf-8").splitlines()]
        return [Kept(line["prefix"], line["position"], Sample(**line["row"])) for line in lines]

    def add(self, answers: list[Kept]) -> None:
        """Stores the answers of one chunk durably."""
        self.folder.mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(asdict(answer)) + "\n" for answer in answers)
        write_atomically(self.folder / f"chunk-{len(self._chunks()):06d}.jsonl", text)

    def clear(self) -> None:
        """Removes all answers."""
        for path in self._chunks():
            path.unlink()

    def _chunks(self) -> list[Path]:
        return sorted(self.folder.glob("chunk-*.jsonl"))


def read_settings(folder: Path) -> dict[str, Any] | None:
    """Returns the settings of the answers in a folder, or None if it has none."""
    path = folder / _SETTINGS
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def claim_folder(folder: Path, settings: dict[str, Any]) -> None:
    """Reserves the folder for answers with these settings, which must be JSON values. Raises UserError with the
    differing keys if it holds answers with other settings."""
    found = read_settings(folder)
    if found is None:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / _SETTINGS, json.dumps(settings, indent=1, sort_keys=True))
        return
    names = [name for name in sorted({*found, *settings}) if found.get(name) != settings.get(name)]
    if names:
        differing = "\n  ".join(f"{name}: {found.get(name)} there, {settings.get(name)} now" for name in names)
        raise UserError(
            f"{folder} holds answers under other settings:\n  {differing}\nGive the old values, or another folder "
            "(trainer.default_local_dir; of main_generate --out)"
        )


def content_of(path: str | Path) -> str:
    """Returns a hash of the content of a file, or of all files of a folder; "absent" if the path does not exist.

    Files of up to 64 MiB are hashed completely. Of larger files, the size and 256 evenly spaced pieces of 256 KiB
    are hashed, including the end.
    """
    path, digest = Path(path).expanduser(), hashlib.blake2b(digest_size=8)
    if path.is_dir():
        for each in sorted(each for each in path.rglob("*") if each.is_file()):
            digest.update(f"{each.relative_to(path)} {content_of(each)}\n".encode())
        return digest.hexdigest()
    if not path.is_file():
        return "absent"
    size = path.stat().st_size
    pieces = min(_PIECES, -(-size // _PIECE_BYTES))
    digest.update(str(size).encode())
    with path.open("rb") as file:
        for place in ((size - _PIECE_BYTES) * piece // max(1, pieces - 1) for piece in range(pieces)):
            file.seek(place)
            digest.update(file.read(_PIECE_BYTES))
    return digest.hexdigest()
