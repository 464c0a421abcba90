"""Checkpoints of a run: verl's folder layout, each complete or absent, whatever instant the process dies at.

run folder / latest_checkpointed_iteration.txt    the newest complete step
           / checkpoint_scores.json               validation metric by step, for the retention of the best
           / global_step_N / actor/, critic/      sharded model, optimizer, schedule (torch DCP); huggingface/
                           / data.pt              all else that training continues from
                           / manifest.json        size and SHA-256 of each of these files

A checkpoint is written under a hidden name, its files are brought to the disk and hashed, and one rename makes it
visible; the marker follows. What is to be deleted first gets a hidden name too. So whatever is called global_step_N is
whole, `tidy` clears away what a killed process left under hidden names, and `whole_checkpoint` finds what a disk or a
copy has changed since.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verl_lite.device import cpu_count
from verl_lite.errors import UserError

MARKER = "latest_checkpointed_iteration.txt"
SCORES = "checkpoint_scores.json"
MANIFEST = "manifest.json"
STATE = "data.pt"
SPARE_SHARE = 0.05  # of a checkpoint's size that must be free beyond it: sizes vary, and other files grow meanwhile
LEAST_FREE_BYTES = 1 << 20  # a failed save that leaves less than this failed because the disk is full
MOST_HASHED_AT_ONCE = 8


class CheckpointNotFound(UserError):
    """There is no checkpoint where the configuration says that one is."""


class DiskFull(UserError):
    """A checkpoint does not fit on the disk. Nothing was changed."""


# --- writing --------------------------------------------------------------------------------------------------------


def open_draft(run_dir: Path, step: int, expected_bytes: int = 0) -> Path:
    """The folder in which the checkpoint of `step` is put together, if there is room for it."""
    require_space(run_dir, expected_size(run_dir, expected_bytes))
    draft = _hidden(run_dir, step, "draft")
    shutil.rmtree(draft, ignore_errors=True)  # of a process that was killed
    draft.mkdir(parents=True)
    return draft


@contextmanager
def removed_on_failure(draft: Path, expected_bytes: int = 0) -> Iterator[None]:
    """Whatever goes wrong inside, the draft goes; DiskFull if it went wrong for want of room."""
    try:
        yield
    except BaseException as error:
        run_dir = draft.parent
        written, free = folder_bytes(draft), shutil.disk_usage(run_dir).free
        shutil.rmtree(draft, ignore_errors=True)
        if isinstance(error, Exception) and free < LEAST_FREE_BYTES:  # also where a worker's error hides its errno
            needed = max(written, expected_size(run_dir, expected_bytes))
            raise DiskFull(_no_room(run_dir, needed, free, "The disk filled up while it was written")) from error
        raise


def publish(run_dir: Path, step: int) -> Path:
    """Makes a draft, all of whose files are written, the checkpoint of its step; the marker follows."""
    final, draft, old = run_dir / f"global_step_{step}", _hidden(run_dir, step, "draft"), _hidden(run_dir, step, "old")
    files = {str(path.relative_to(draft)): path for path in sorted(draft.rglob("*")) if path.is_file()}
    began = time.perf_counter()
    entries = {name: [files[name].stat().st_size, digest] for name, digest in hashes(files).items()}
    manifest = {"sha256": entries, "hashing_seconds": round(time.perf_counter() - began, 3)}
    (draft / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    for path in (*draft.rglob("*"), draft):
        _sync(path)
    if final.exists():  # a run that was resumed at an earlier step comes by again
        final.rename(old)
    draft.rename(final)
    _sync(run_dir)
    write_atomically(run_dir / MARKER, str(step))
    if old.exists():
        shutil.rmtree(old)
    return final


def tidy(run_dir: Path) -> None:
    """Brings the folder in order after a process that was killed: drafts go, a replaced checkpoint without successor
    comes back."""
    for old in run_dir.glob(".global_step_*.old"):
        final = run_dir / old.name.removeprefix(".").removesuffix(".old")
        if not final.exists():
            old.rename(final)
    for leftover in (path for kind in ("draft", "old", "gone") for path in run_dir.glob(f".global_step_*.{kind}")):
        shutil.rmtree(leftover)


def prune(run_dir: Path, keep_newest: int | None, keep_best: int = 0, mode: str = "max") -> list[int]:
    """Deletes checkpoints that are neither among the `keep_newest` newest (null = all) nor the `keep_best` best.

    Best by the scores that `note_score` kept; mode max or min; of equal ones the newer. The newest stays always.
    Returns the steps deleted.
    """
    if keep_newest is None:
        return []
    folders, sign = saved_steps(run_dir), 1 if mode == "max" else -1
    scored = sorted(((sign * x, step) for step, x in read_scores(run_dir).items() if step in folders), reverse=True)
    kept = {*sorted(folders)[-max(1, keep_newest) :], *(step for _, step in scored[:keep_best])}
    gone = sorted(set(folders) - kept)
    for step in gone:
        hidden = _hidden(run_dir, step, "gone")
        folders[step].rename(hidden)
        shutil.rmtree(hidden)
    return gone


def _hidden(run_dir: Path, step: int, kind: str) -> Path:
    """kind: draft (being written), old (being replaced) or gone (being deleted)."""
    return run_dir / f".global_step_{step}.{kind}"


def note_score(run_dir: Path, step: int, score: float) -> None:
    """Keeps the validation metric of a step beside the checkpoints."""
    scores = read_scores(run_dir) | {step: score}
    write_atomically(run_dir / SCORES, json.dumps({str(step): x for step, x in sorted(scores.items())}))


def read_scores(run_dir: Path) -> dict[int, float]:
    """Validation metric by step, as far as noted."""
    path = run_dir / SCORES
    return {int(step): x for step, x in json.loads(path.read_text()).items()} if path.exists() else {}


# --- finding and checking -------------------------------------------------------------------------------------------


def saved_steps(run_dir: Path) -> dict[int, Path]:
    """The complete checkpoints of a run folder by step."""
    found = ((re.fullmatch(r"global_step_(\d+)", path.name), path) for path in run_dir.glob("global_step_*"))
    return {int(match[1]): path for match, path in found if match}


def find_checkpoint(run_dir: Path, mode: str, path: str | None) -> Path | None:
    """The checkpoint to start from: none for `disable`, the newest for `auto` (or none), `path` for `resume_path`."""
    if mode == "disable":
        return None
    if mode == "auto":
        tidy(run_dir)
        steps = saved_steps(run_dir)
        marker = run_dir / MARKER
        marked = int(marker.read_text()) if marker.exists() else -1
        return steps.get(marked) or (steps[max(steps)] if steps else None)
    folder = Path(path or "").expanduser().resolve()
    if not (folder / STATE).exists():
        raise CheckpointNotFound(
            f"trainer.resume_from_path={path!r}: no checkpoint there ({folder} has no {STATE}); expected a folder "
            "named global_step_N inside a run folder"
        )
    return folder


def whole_checkpoint(run_dir: Path, mode: str, path: str | None, log: Callable[[str], None]) -> Path | None:
    """What `find_checkpoint` finds, every byte checked. With `auto` a damaged one is set aside, under another name, and
    the newest before it is taken.

    Raises:
        UserError: the one that was named is damaged.
    """
    while (folder := find_checkpoint(run_dir, mode, path)) is not None:
        damage = damage_of(folder, log)
        if damage is None:
            return folder
        if mode != "auto":
            others = [str(other) for _, other in sorted(saved_steps(folder.parent).items()) if other != folder]
            raise UserError(f"{folder} is damaged: {damage}. Others of its run: {', '.join(others) or 'none'}")
        aside = folder.with_name(f"{folder.name}.damaged")
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)
        log(f"{folder} is damaged: {damage}. It is {aside.name} now; the run goes back to the newest whole one")
    return None


def damage_of(folder: Path, log: Callable[[str], None]) -> str | None:
    """What is wrong with the files of a checkpoint; None if they are as they were written, as far as is known."""
    manifest = folder / MANIFEST
    if not manifest.is_file():
        log(f"{folder} has no {MANIFEST}, as older versions wrote them: whether its files are whole is not known")
        return None if (folder / STATE).is_file() else f"it has no {STATE}"
    try:
        expected: Mapping[str, tuple[int, str]] = json.loads(manifest.read_text(encoding="utf-8"))["sha256"]
    except (ValueError, KeyError, TypeError):
        return f"{MANIFEST} cannot be read"
    files = {name: folder / name for name in expected if Path(name).parts and ".." not in Path(name).parts}
    for name, (size, _) in expected.items():
        if name not in files or not files[name].is_file():
            return f"{name} is missing"
        if files[name].stat().st_size != size:
            return f"{name} has {files[name].stat().st_size} bytes, and {size} were written"
    changed = [name for name, digest in hashes(files).items() if digest != expected[name][1]]
    return f"the bytes of {', '.join(changed)} are not those that were written" if changed else None


def hashes(files: Mapping[str, Path]) -> dict[str, str]:
    """SHA-256 of files by name; several at once, since hashing and reading let other threads work."""

    def hashed(path: Path) -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor(min(MOST_HASHED_AT_ONCE, cpu_count())) as pool:
        return dict(zip(files, pool.map(hashed, files.values()), strict=True))


def read_state(folder: Path) -> dict[str, Any]:
    """What the driver put into data.pt. UserError if it is damaged, or names anything that could run."""
    from verl_lite import safe_state  # imports torch, which most callers of this file do without

    state: dict[str, Any] = safe_state.read_state(folder / STATE)
    return state


# --- room on the disk -----------------------------------------------------------------------------------------------


def folder_bytes(folder: Path) -> int:
    """Size of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def expected_size(run_dir: Path, guess: int = 0) -> int:
    """Bytes that the next checkpoint will take: as many as the newest one, or `guess` where there is none."""
    steps = saved_steps(run_dir)
    return folder_bytes(steps[max(steps)]) if steps else guess


def require_space(run_dir: Path, needed: int, count: int = 1) -> None:
    """Raises DiskFull unless `needed` bytes, for `count` checkpoints, and a little more are free at the run folder."""
    free = shutil.disk_usage(run_dir).free
    if free < needed * (1 + SPARE_SHARE):
        raise DiskFull(_no_room(run_dir, needed, free, "Nothing was written", count))


def _no_room(run_dir: Path, needed: int, free: int, what: str, count: int = 1) -> str:
    wanted = "a checkpoint needs" if count == 1 else f"the {count} checkpoints that this run still writes need"
    return (
        f"trainer.default_local_dir={run_dir}: {wanted} about {needed / 1e9:.3g} GB there, and "
        f"{free / 1e9:.3g} GB are free. {what}; earlier checkpoints are as they were. Free some space, keep fewer "
        "(trainer.max_actor_ckpt_to_keep), save more rarely (trainer.save_freq), or choose another folder"
    )


def why_not_written(path: Path, error: OSError) -> str:
    """A sentence on a file beside the training that could not be written: where, why, and how much room is left."""
    place = next(folder for folder in (path, *path.parents) if folder.exists())
    free = shutil.disk_usage(place).free
    return f"{path} cannot be written: {error.strerror or error}; {free / 1e9:.3g} GB are free there"


@contextmanager
def beside_training(path: Path, log: Callable[[str], None]) -> Iterator[None]:
    """Inside, files are written that the training does without, such as samples: where that fails, a sentence, once for
    each path, and the training goes on."""
    try:
        yield
    except OSError as error:
        if path not in _TOLD:
            _TOLD.add(path)
            log(f"{why_not_written(path, error)}. The training goes on without these files, until there is room")


_TOLD: set[Path] = set()


# --- what survives a power cut --------------------------------------------------------------------------------------


def write_atomically(path: Path, text: str) -> None:
    """Replaces a small file: readers see the old text or the new one, also after a crash."""
    draft = path.with_name(f".{path.name}.draft")
    with draft.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
