"""How validation prompts are answered: with which sampling, in which chunks, for how long, and what is kept of it.

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
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np

from trainer.checkpoint import write_atomically
from trainer.evaluate.sample import Sample
from verl_lite.config import PPOConfig
from verl_lite.errors import UserError
from verl_lite.protocol import DataProto
from workers.rollout.base import SamplingParams

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

R = TypeVar("R", bound="DataclassInstance")

CHUNKS_OF_BUDGET = 16
"""With a time budget the set is cut into so many chunks: the last one may overdraw by a sixteenth of the whole set."""

_SETTINGS = "settings.json"
_WHOLE_BYTES = 64 << 20  # of a file that is read in whole; of a larger one, as weights are, only samples
_PIECES, _PIECE_BYTES = 256, 1 << 16


class Prompts(Protocol):
    """A dataset of prompts, see `trainer.data.prompts.PromptDataset`."""

    def __len__(self) -> int: ...

    def __getitems__(self, positions: Sequence[int]) -> DataProto: ...


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


@dataclass(frozen=True)
class Chunks:
    """How a set of prompts is cut. size: prompts at one time. budget_s: no chunk begins after so many seconds. seed: of
    the order, which matters only where time may run out: then the prompts asked are a random sample, the same in every
    validation of the run."""

    size: int
    budget_s: float | None = None
    seed: int = 0

    def order(self, prompts: int) -> np.ndarray:
        """Places in the dataset, in the order in which they are asked."""
        if self.budget_s is None:
            return np.arange(prompts)
        return np.random.default_rng([self.seed, prompts]).permutation(prompts)


def chunks_of(config: PPOConfig, prompts: int, engines: int, are_kept: bool) -> Chunks:
    """data.val_batch_size prompts at one time. Where it is null: with a time budget a sixteenth of the set; where
    answers are kept chunk by chunk, as many as fill the engines once; else all."""
    size, budget = config.data.val_batch_size, config.trainer.val_time_budget_s
    if size is None and budget is not None:
        size = math.ceil(prompts / CHUNKS_OF_BUDGET)
    elif size is None and are_kept:
        size = math.ceil(config.rollout.max_num_seqs * engines / config.rollout.val_kwargs.n)
    return Chunks(size or prompts, budget, config.trainer.seed)


def generate_in_chunks(
    prompts: Prompts,
    samplings: Sequence[ValSampling],
    chunks: Chunks,
    generate: Callable[[DataProto, ValSampling], DataProto],
    finish: Callable[[DataProto], list[R]],
    kept: KeptAnswers[R] | None = None,
    log: Callable[[str], None] = lambda text: None,
) -> dict[ValSampling, list[R]]:
    """A row for each answer, by sampling, in the order of the dataset.

    Args:
        generate: gives `n` rows for each prompt, those of one prompt together.
        finish: makes rows of what it gave, one for each; it may wait for rewards, so that the next chunk is generated
            before the last one is finished.
        kept: answers of an earlier try, which are not generated again, and where new ones go as soon as their chunk is
            finished; without it all chunks are generated before the first is finished.
        log: gets a line about each chunk that is kept.
    """
    rows: list[Kept[R]] = kept.load() if kept is not None else []
    done = {each: {row.position for row in rows if row.prefix == each.prefix} for each in samplings}
    left = [place for place in chunks.order(len(prompts)) if any(place not in done[each] for each in samplings)]
    if len(left) < len(prompts):
        log(f"{len(prompts) - len(left)} of {len(prompts)} prompts are answered already")
    waiting: deque[tuple[ValSampling, list[int], DataProto]] = deque()

    def finish_first() -> None:
        sampling, places, batch = waiting.popleft()
        found = [Kept(sampling.prefix, places[i // sampling.n], row) for i, row in enumerate(finish(batch))]
        rows.extend(found)
        if kept is not None:
            kept.add(found)

    began = time.monotonic()
    for number, start in enumerate(range(0, len(left), chunks.size)):
        if number and chunks.budget_s is not None and time.monotonic() - began >= chunks.budget_s:
            log(f"trainer.val_time_budget_s={chunks.budget_s:g} is over: {len(left) - start} prompts are not asked")
            break
        for sampling in samplings:
            places = [int(place) for place in left[start : start + chunks.size] if place not in done[sampling]]
            if places:
                waiting.append((sampling, places, generate(prompts.__getitems__(places), sampling)))
            if kept is not None and len(waiting) > 1:
                finish_first()
        if kept is not None:
            log(f"answered {len(prompts) - len(left) + min(start + chunks.size, len(left))} of {len(prompts)} prompts")
    while waiting:
        finish_first()
    rows.sort(key=lambda each: each.position)  # stable: the answers to one prompt stay as they came
    return {each: [row.row for row in rows if row.prefix == each.prefix] for each in samplings}


def share_scored(samples: Sequence[Sample], prompts: int, prefix: str = "") -> dict[str, float]:
    """How many of the `prompts` were asked, where time may have run out: val/{prefix}scored_frac, and their number by
    source, val-aux/{source}/{prefix}prompts."""
    asked = {sample.uid: sample.data_source for sample in samples}
    by_source = {f"val-aux/{name}/{prefix}prompts": float(n) for name, n in sorted(Counter(asked.values()).items())}
    return {f"val/{prefix}scored_frac": len(asked) / prompts} | by_source


class TimeShare:
    """The part of a run's time that its validations take. The run begins when this is made."""

    def __init__(self) -> None:
        self._began, self._spent = time.monotonic(), 0.0

    @contextmanager
    def spent(self) -> Iterator[None]:
        """The block's time counts."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._spent += time.monotonic() - began

    def metrics(self) -> dict[str, float]:
        """timing_share/testing: 0 to 1, over the time up to now."""
        passed = max(time.monotonic() - self._began, self._spent)
        return {"timing_share/testing": self._spent / passed} if passed else {}


# --------------------------------------------------------------------------------------------------- what is kept of it


@dataclass(frozen=True)
class Kept(Generic[R]):
    """One answer. prefix: of its sampling. position: of its prompt in the dataset."""

    prefix: str
    position: int
    row: R


class KeptAnswers(Generic[R]):
    """The chunks of a folder, each there whole or not at all. row: the dataclass of an answer, of plain values."""

    def __init__(self, folder: Path, row: type[R]) -> None:
        self.folder, self._row = folder, row

    def load(self) -> list[Kept[R]]:
        """All answers, in the order in which they were added."""
        lines = [json.loads(line) for path in self._chunks() for line in path.read_text(encoding="utf-8").splitlines()]
        return [Kept(line["prefix"], line["position"], self._row(**line["row"])) for line in lines]

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
    path = folder / _SETTINGS
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def claim_folder(folder: Path, settings: Mapping[str, Any], remedy: str) -> None:
    """Makes the folder one of answers under these settings. Raises UserError, which names the keys that differ, if it
    holds answers under others. remedy: what to do then."""
    found, wanted = read_settings(folder), plain(settings)
    if found is None:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / _SETTINGS, json.dumps(wanted, indent=1, sort_keys=True))
        return
    names = [name for name in sorted({*found, *wanted}) if found.get(name) != wanted.get(name)]
    if names:
        differing = "\n  ".join(f"{name}: {found.get(name)} there, {wanted.get(name)} now" for name in names)
        raise UserError(f"{folder} holds answers under other settings:\n  {differing}\n{remedy}")


def content_of(path: str | Path) -> str:
    """A short name for what is in a file, or in the files of a folder of weights; "absent" for what is not there.

    Of files beyond 64 MiB size and 256 evenly spread pieces are looked at.
    """
    path, digest = Path(path).expanduser(), hashlib.blake2b(digest_size=8)
    if path.is_dir():
        for each in sorted(each for each in path.rglob("*") if each.is_file()):
            digest.update(f"{each.relative_to(path)} {content_of(each)}\n".encode())
        return digest.hexdigest()
    if not path.is_file():
        return "absent"
    size = path.stat().st_size
    digest.update(str(size).encode())
    with path.open("rb") as file:
        if size <= _WHOLE_BYTES:
            digest.update(file.read())
        else:
            for piece in range(_PIECES):
                file.seek((size - _PIECE_BYTES) * piece // (_PIECES - 1))
                digest.update(file.read(_PIECE_BYTES))
    return digest.hexdigest()
