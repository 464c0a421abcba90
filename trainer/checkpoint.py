"""Checkpoints of a run: verl's folder layout, each complete or absent, whatever instant the process dies at.

run folder / latest_checkpointed_iteration.txt    the newest complete step
           / global_step_N / actor/, critic/      sharded model, optimizer, schedule (torch DCP); huggingface/
                           / data.pt              all else that training continues from
                           / manifest.json        size and SHA-256 of each of these files

A checkpoint is written under a hidden name, .global_step_N.draft, its files are hashed and brought to the disk, and one
rename makes it visible; the marker follows. What is replaced (.old) or deleted (.gone) gets a hidden name first. So
whatever is called global_step_N is whole, `tidy` clears away what a killed process left, and `whole_checkpoint` finds
what a disk or a copy has changed.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verl_lite.errors import UserError, printable

MARKER = "latest_checkpointed_iteration.txt"
MANIFEST = "manifest.json"
STATE = "data.pt"
SPARE_SHARE = 0.05  # of a checkpoint's size that must be free beyond it: sizes vary, and other files grow meanwhile
LEAST_FREE_BYTES = 1 << 20  # a failed save that leaves less than this failed because the disk is full
MOST_MANIFEST_BYTES = 16 << 20  # of 100,000 files; a larger one is not what this program wrote
LOADED = ("*/.metadata", "*/*.distcp", "*/*.pt")  # the files of models that a run reads, beside those for people


class DiskFull(UserError):
    """A checkpoint does not fit on the disk. Nothing was changed."""


def open_draft(run_dir: Path, step: int, expected_bytes: int = 0) -> Path:
    """The folder in which the checkpoint of `step` is put together. Raises DiskFull if there is no room for it."""
    require_space(run_dir, expected_size(run_dir, expected_bytes))
    draft = run_dir / f".global_step_{step}.draft"
    _remove(draft)  # of a process that was killed
    draft.mkdir(parents=True)
    return draft


@contextmanager
def removed_on_failure(draft: Path) -> Iterator[None]:
    """Whatever goes wrong inside, the draft goes; DiskFull if it went wrong for want of room."""
    try:
        yield
    except BaseException as error:
        needed, free = expected_size(draft.parent, folder_bytes(draft)), free_bytes(draft.parent)
        _remove(draft)
        if isinstance(error, Exception) and free < LEAST_FREE_BYTES:  # also where a worker's error hides its errno
            raise DiskFull(_no_room(draft.parent, needed, free)) from error
        raise


def publish(draft: Path) -> Path:
    """Makes a draft, all of whose files are written, the checkpoint of its step; the marker follows."""
    run_dir, name = draft.parent, draft.stem[1:]
    final, old = run_dir / name, run_dir / f".{name}.old"
    names = [str(path.relative_to(draft)) for path in sorted(draft.rglob("*")) if path.is_file()]
    entries = {name: [(draft / name).stat().st_size, digest] for name, digest in hashes(draft, names).items()}
    (draft / MANIFEST).write_text(json.dumps({"sha256": entries}, indent=1), encoding="utf-8")
    for path in (*draft.rglob("*"), draft):
        _sync(path)
    if os.path.lexists(final):  # a run that was resumed at an earlier step comes by again
        final.rename(old)
    draft.rename(final)
    _sync(run_dir)
    if (run_dir / MARKER).is_dir():  # which no file can replace
        _set_aside(run_dir / MARKER)
    write_atomically(run_dir / MARKER, name.removeprefix("global_step_"))
    _remove(old)
    return final


def tidy(run_dir: Path) -> None:
    """Removes what a process that was killed left half written or half deleted; what it had only begun to replace comes
    back."""
    for old in run_dir.glob(".global_step_*.old"):
        if old.is_dir() and not os.path.lexists(final := run_dir / old.stem[1:]):
            old.rename(final)
    for left in run_dir.glob(".global_step_*"):
        _remove(left)


def prune(run_dir: Path, keep_newest: int | None) -> None:
    """Deletes all checkpoints but the `keep_newest` newest (null = all, at least one)."""
    folders = saved_steps(run_dir)
    for step in sorted(folders)[: -max(1, keep_newest or len(folders))]:
        _remove(folders[step].rename(run_dir / f".global_step_{step}.gone"))


def saved_steps(run_dir: Path) -> dict[int, Path]:
    """The complete checkpoints of a run folder by step."""
    paths = run_dir.glob("global_step_*")
    found = ((re.fullmatch(r"global_step_(0|[1-9][0-9]{0,17})", path.name), path) for path in paths)
    return {int(match[1]): path for match, path in found if match and path.is_dir()}


def whole_steps(run_dir: Path, log: Callable[[str], None]) -> Iterator[Path]:
    """The checkpoints of a run folder without damage, the newest first. Changes nothing; logs each damaged one, and
    raises UserError if all are damaged."""
    steps, found = saved_steps(run_dir), False
    for step in sorted(steps, reverse=True):
        if damage := damage_of(steps[step]):
            log(f"{steps[step]} is damaged: {damage}. It is left out")
        else:
            found = True
            yield steps[step]
    if steps and not found:
        raise UserError(f"{run_dir} has no whole checkpoint: all {len(steps)} are damaged, as said above")


def find_checkpoint(run_dir: Path, mode: str, path: str | None) -> Path | None:
    """The checkpoint to start from: none for `disable`, the newest for `auto` (or none), `path` for `resume_path`."""
    if mode == "disable":
        return None
    if mode == "auto":
        tidy(run_dir)
        steps = saved_steps(run_dir)
        return steps.get(marked_step(run_dir)[0]) or (steps[max(steps)] if steps else None)
    folder = Path(path or "").expanduser().resolve()
    if not (folder / STATE).exists():
        raise UserError(
            f"trainer.resume_from_path={path!r}: no checkpoint there ({folder} has no {STATE}); expected a folder "
            "named global_step_N inside a run folder"
        )
    return folder


def marked_step(run_dir: Path) -> tuple[int, str]:
    """The step that the marker names, -1 if it names no checkpoint here, and what is wrong with it (empty: nothing)."""
    marker = run_dir / MARKER
    if not marker.is_file():
        return -1, "it is not a file" if os.path.lexists(marker) else ""
    try:
        with marker.open("rb") as file:
            step = int(file.read(32))
    except (OSError, ValueError) as error:
        return -1, f"it does not name a step ({error})"
    return (step, "") if step in saved_steps(run_dir) else (-1, f"it names step {step}, of which no checkpoint is here")


def whole_checkpoint(run_dir: Path, mode: str, path: str | None, log: Callable[[str], None]) -> Path | None:
    """What `find_checkpoint` finds, every byte checked. With `auto` a damaged one is set aside, under another name, and
    the newest before it is taken. Raises UserError if the one that was named is damaged, or if none is left of those
    that the folder had: nobody asked to start from scratch."""
    if mode == "auto" and (problem := marked_step(run_dir)[1]):
        log(f"{run_dir / MARKER}: {problem}. The newest whole checkpoint is taken; the next one replaces this file")
    while (folder := find_checkpoint(run_dir, mode, path)) and (damage := damage_of(folder)):
        if mode != "auto":
            others = [str(other) for _, other in sorted(saved_steps(folder.parent).items()) if other != folder]
            raise UserError(f"{folder} is damaged: {damage}. Others of its run: {', '.join(others) or 'none'}")
        aside = _set_aside(folder)
        log(f"{folder} is damaged: {damage}. It is {aside.name} now; the run goes back to the newest whole one")
    remains = [path.name for name in (MARKER, "global_step_*.damaged") for path in sorted(run_dir.glob(name))]
    if mode == "auto" and folder is None and remains:
        raise UserError(
            f"trainer.resume_mode=auto: {run_dir} had checkpoints, and no whole one is left (only {', '.join(remains)})"
            ". The run does not start from scratch by itself. Put a whole checkpoint back; or, to start from scratch, "
            "choose another folder (trainer.default_local_dir or trainer.experiment_name)"
        )
    return folder


def damage_of(folder: Path) -> str | None:
    """What is wrong with a checkpoint: its files, the list of them, or the step in its name; None if nothing is."""
    manifest, top, reading = folder / MANIFEST, folder.resolve(), MANIFEST
    if not manifest.is_file():
        return (
            f"it has no {MANIFEST}, which lists its files and their SHA-256 (a copy that left it out, or a folder that "
            "this program did not write), so nothing says whether it is whole"
        )
    try:
        if manifest.stat().st_size > MOST_MANIFEST_BYTES:
            return f"{MANIFEST} has more than {MOST_MANIFEST_BYTES >> 20} MiB"
        written = json.loads(manifest.read_text(encoding="utf-8"))["sha256"]
        expected = {str(name): str(digest) for name, (_, digest) in written.items()}
        needed = {STATE, *(path.relative_to(folder).as_posix() for pattern in LOADED for path in folder.glob(pattern))}
        if not any(name.endswith("/.metadata") for name in expected):
            needed.add("MODEL/.metadata")
        if unlisted := sorted(needed - expected.keys()):
            return f"{MANIFEST} does not list {printable(', '.join(unlisted))[:1000]}"
        reading = "one of its files"
        there = [name for name in expected if (folder / name).is_file() and (top / name).resolve().is_relative_to(top)]
        digests = hashes(folder, there)
        if changed := [name for name, digest in expected.items() if digests.get(name) != digest]:
            return f"missing, or not the bytes that were written: {printable(', '.join(changed))[:1000]}"
        reading = STATE
        inside = read_state(folder)["steps"]["global_step"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        return f"{reading} cannot be read ({printable(str(error))[:1000]})"
    if re.fullmatch(r"global_step_\d+", folder.name) and folder.name != f"global_step_{inside}":
        return f"its name is not that of the step in {STATE}, {printable(str(inside))[:20]}: folders were renamed"
    return None


def hashes(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """SHA-256 of files by name; several at once, since hashing and reading let other threads work."""

    def hashed(name: str) -> tuple[str, str]:
        with (folder / name).open("rb") as file:
            return name, hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return dict(pool.map(hashed, names))


def read_state(folder: Path) -> dict[str, Any]:
    """What the driver put into data.pt. UserError if it is damaged, or names anything that could run."""
    from verl_lite import safe_state  # imports torch, which most callers of this file do without

    state: dict[str, Any] = safe_state.read_state(folder / STATE)
    return state


def folder_bytes(folder: Path) -> int:
    """Size of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def expected_size(run_dir: Path, guess: int = 0) -> int:
    """Bytes that the next checkpoint will take: as many as the newest one, or `guess` where there is none."""
    steps = saved_steps(run_dir)
    return folder_bytes(steps[max(steps)]) if steps else guess


def require_space(run_dir: Path, needed: int) -> None:
    """Raises DiskFull unless `needed` bytes and a little more are free at the run folder."""
    free = free_bytes(run_dir)
    if free < needed * (1 + SPARE_SHARE):
        raise DiskFull(_no_room(run_dir, needed, free))


def _no_room(run_dir: Path, needed: int, free: int) -> str:
    return (
        f"trainer.default_local_dir={run_dir}: the disk is full: checkpoints need about {needed / 1e9:.3g} GB there, "
        f"and {free / 1e9:.3g} GB are free. Earlier checkpoints are as they were. Free some space, keep fewer "
        "(trainer.max_actor_ckpt_to_keep), save more rarely (trainer.save_freq), or choose another folder"
    )


def why_not_written(path: Path, error: OSError) -> str:
    """A sentence on a file beside the training that could not be written: where, why, and how much room is left."""
    return f"{path} cannot be written: {error.strerror or error}; {free_bytes(path) / 1e9:.3g} GB are free there"


def free_bytes(path: Path) -> int:
    """Bytes that are free at a place, or where it would be made."""
    return shutil.disk_usage(next(folder for folder in (path, *path.parents) if folder.exists())).free


_TOLD: set[Path] = set()


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


def write_atomically(path: Path, text: str) -> None:
    """Replaces a small file: readers see the old text or the new one, also after a crash."""
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(text, encoding="utf-8")
    _sync(draft)
    os.replace(draft, path)
    _sync(path.parent)


def _remove(path: Path) -> None:
    """Deletes a folder; a file or a link of that name as well, whose target stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _set_aside(path: Path) -> Path:
    """Renames what is damaged to NAME.damaged; returns its new place."""
    aside = path.with_name(f"{path.name}.damaged")
    _remove(aside)
    return path.rename(aside)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
