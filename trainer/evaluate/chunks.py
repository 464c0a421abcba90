"""How validation prompts are answered: with which sampling, in which chunks, and what is kept of it.

`generate_in_chunks` serves the validation of a run, `main_eval` and `main_generate` alike: they differ in what becomes
of a generated chunk. An answer depends on weights, prompt, sampling and seed alone, so neither the chunks nor the order
matter to it (EVALUATION.md has the measurement). Answers of a long evaluation are kept in files as they come:

    folder / settings.json        what the answers depend on; a command with other settings is refused
           / chunk-000000.jsonl   answers of one chunk of prompts, a line each
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
    """One sampling of the validation prompts, `n` answers each. prefix: of its metrics' names. purpose: begins the
    sample ids."""

    prefix: str
    purpose: str
    n: int
    params: SamplingParams


def val_samplings(config: PPOConfig) -> list[ValSampling]:
    """As rollout.val_kwargs says: sampled or greedy, and greedy besides."""
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
    """data.val_batch_size prompts at one time. Where it is null: as many as fill the engines once where answers are
    kept chunk by chunk; else all."""
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
    """A row for each answer, by sampling, in the order of the dataset.

    Args:
        size: prompts at one time.
        generate: gives `n` rows for each prompt, those of one prompt together.
        finish: makes rows of what it gave, one for each; it may wait for rewards, so that the next chunk is generated
            before the last one is finished.
        kept: answers of an earlier try, which are not generated again, and where new ones go as soon as their chunk is
            finished; without it all chunks are generated before the first is finished.
        log: receives a line at the start and after each chunk that is kept.
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
    rows.sort(key=lambda each: each.position)  # stable: the answers to one prompt stay as they came
    return {each: [row.row for row in rows if row.prefix == each.prefix] for each in samplings}


@dataclass(frozen=True)
class Kept:
    """One answer. prefix: of its sampling. position: of its prompt in the dataset."""

    prefix: str
    position: int
    row: Sample


class KeptAnswers:
    """The chunks of a folder, each there whole or not at all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self) -> list[Kept]:
        """All answers, in the order in which they were added."""
        lines = [json.loads(line) for path in self._chunks() for line in path.read_text(encoding="utf-8").splitlines()]
        return [Kept(line["prefix"], line["position"], Sample(**line["row"])) for line in lines]

    def add(self, answers: list[Kept]) -> None:
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


def read_settings(folder: Path) -> dict[str, Any] | None:
    """The settings of the answers in a folder; None if it has none."""
    path = folder / _SETTINGS
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def claim_folder(folder: Path, settings: dict[str, Any]) -> None:
    """Makes the folder one of answers under these settings (of json). Raises UserError, which names the keys that
    differ, if it holds answers under others."""
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
    """A short name for what is in a file, or in the files of a folder of weights; "absent" for what is not there.

    A change anywhere in a file of up to 64 MiB gives another name: all of it is read. Of a larger one size and 256
    evenly spread pieces of 256 KiB are looked at, its end among them.
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
