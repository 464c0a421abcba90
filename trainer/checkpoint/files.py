"""Checkpoints of a run in verl's folder layout. Each is complete or absent, even if the process is killed while saving.

run folder / latest_checkpointed_iteration.txt    the newest complete step
           / global_step_N / actor/, critic/      sharded model, optimizer, schedule (torch DCP); huggingface/
                           / data.pt              the driver's state: steps, data order, random states, ...
                           / manifest.json        size and SHA-256 of each of these files

A checkpoint is written to a hidden folder, .global_step_N.draft; its files are hashed and synced; one rename makes it
visible; then the marker is updated. Replaced (.old) and deleted (.gone) checkpoints first get hidden names, so that
every folder named global_step_N is complete. `tidy` removes the remains of a killed process. `whole_checkpoint` detects
files that a disk or a copy has changed.
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
SPARE_SHARE = 0.05  # free space required beyond a checkpoint's size, as a share of it: sizes vary, other files grow
LEAST_FREE_BYTES = 1 << 20  # a failed save that leaves less than this failed because the disk is full
MOST_MANIFEST_BYTES = 16 << 20  # size for 100,000 files; this program writes no larger manifest
LOADED = ("*/.metadata", "*/*.distcp", "*/*.pt")  # model files that a resumed run reads


class DiskFull(UserError):
    """A checkpoint does not fit on the disk. Nothing was changed."""


def open_draft(run_dir: Path, step: int, expected_bytes: int = 0) -> Path:
    """Creates the draft folder for the checkpoint of `step`. Raises DiskFull if the disk has no room for it."""
    require_space(run_dir, expected_size(run_dir, expected_bytes))
    draft = run_dir / f".global_step_{step}.draft"
    _remove(draft)  # left by a killed process
    draft.mkdir(parents=True)
    return draft


@contextmanager
def removed_on_failure(draft: Path) -> Iterator[None]:
    """Removes the draft if the block raises. Raises DiskFull instead of the error if the disk is full."""
    try:
        yield
    except BaseException as error:
        needed = expected_size(draft.parent, folder_bytes(draft))
        free = free_bytes(draft.parent)
        _remove(draft)
        if isinstance(error, Exception) and free < LEAST_FREE_BYTES:  # a worker's error has no errno
            raise DiskFull(_no_room(draft.parent, needed, free)) from error
        raise


def publish(draft: Path) -> Path:
    """Turns a completely written draft into the checkpoint of its step, then updates the marker. Returns its folder."""
    run_dir, name = draft.parent, draft.stem[1:]
    final, old = run_dir / name, run_dir / f".{name}.old"
    names = [str(path.relative_to(draft)) for path in sorted(draft.rglob("*")) if path.is_file()]
    entries = {name: [(draft / name).stat().st_size, digest] for name, digest in hashes(draft, names).items()}
    (draft / MANIFEST).write_text(json.dumps({"sha256": entries}, indent=1), encoding="utf-8")
    for path in (*draft.rglob("*"), draft):
        _sync(path)
    if os.path.lexists(final):  # a run resumed at an earlier step saves this step again
        final.rename(old)
    draft.rename(final)
    _sync(run_dir)
    if (run_dir / MARKER).is_dir():  # os.replace cannot put a file in place of a folder
        _set_aside(run_dir / MARKER)
    write_atomically(run_dir / MARKER, name.removeprefix("global_step_"))
    _remove(old)
    return final


def tidy(run_dir: Path) -> None:
    """Removes the drafts and partly deleted checkpoints of a killed process. Restores a checkpoint whose replacement
    was not completed."""
    for old in run_dir.glob(".global_step_*.old"):
        if old.is_dir() and not os.path.lexists(final := run_dir / old.stem[1:]):
            old.rename(final)
    for left in run_dir.glob(".global_step_*"):
        _remove(left)


def prune(run_dir: Path, keep_newest: int | None) -> None:
    """Deletes all checkpoints except the `keep_newest` newest. None keeps all; at least one is kept."""
    folders = saved_steps(run_dir)
    for step in sorted(folders)[: -max(1, keep_newest or len(folders))]:
        _remove(folders[step].rename(run_dir / f".global_step_{step}.gone"))


def saved_steps(run_dir: Path) -> dict[int, Path]:
    """Returns the folders of the complete checkpoints of a run, by step."""
    paths = run_dir.glob("global_step_*")
    found = ((re.fullmatch(r"global_step_(0|[1-9][0-9]{0,17})", path.name), path) for path in paths)
    return {int(match[1]): path for match, path in found if match and path.is_dir()}


def whole_steps(run_dir: Path, log: Callable[[str], None]) -> Iterator[Path]:
    """Yields the undamaged checkpoints of a run folder, newest first, and logs each damaged one. Changes no file.
    Raises UserError if all checkpoints are damaged."""
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
    """Returns the checkpoint for trainer.resume_mode: none, the newest if any, or `path`, which must be one."""
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
    """Returns the step in the marker file, or -1 if this folder lacks its checkpoint, and the problem ("" if none)."""
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
    """Returns the checkpoint of `find_checkpoint` after verifying every file. With `auto` a damaged checkpoint is
    renamed and the next older one is used. Raises UserError if the checkpoint at `path` is damaged, or if all those of
    the folder are, so that a run never restarts from scratch unnoticed."""
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
    """Describes the damage of a checkpoint (its files, its manifest, or the step in its name); None if undamaged."""
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
    """Returns the SHA-256 of files by name. Uses threads, since hashing and reading release the GIL."""

    def hashed(name: str) -> tuple[str, str]:
        with (folder / name).open("rb") as file:
            return name, hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return dict(pool.map(hashed, names))


def read_state(folder: Path) -> dict[str, Any]:
    """Reads the driver's state from data.pt. Raises UserError if the file is damaged or refers to executable code."""
    from verl_lite.machine import safe_state  # imports torch, which most importers of this file do not need

    state: dict[str, Any] = safe_state.read_state(folder / STATE)
    return state


def folder_bytes(folder: Path) -> int:
    """Returns the total size of all files below a folder, in bytes."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def expected_size(run_dir: Path, guess: int = 0) -> int:
    """Estimates the size of the next checkpoint in bytes: that of the newest one, or `guess` if there is none."""
    steps = saved_steps(run_dir)
    return folder_bytes(steps[max(steps)]) if steps else guess


def require_space(run_dir: Path, needed: int) -> None:
    """Raises DiskFull unless `needed` bytes plus SPARE_SHARE of them are free at the run folder."""
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
    """Returns a sentence about a file that could not be written: its path, the reason and the free space there."""
    return f"{path} cannot be written: {error.strerror or error}; {free_bytes(path) / 1e9:.3g} GB are free there"


def free_bytes(path: Path) -> int:
    """Returns the free bytes on the disk of `path`, which need not exist yet."""
    return shutil.disk_usage(next(folder for folder in (path, *path.parents) if folder.exists())).free


_REPORTED_PATHS: set[Path] = set()


@contextmanager
def beside_training(path: Path, log: Callable[[str], None]) -> Iterator[None]:
    """Guards the writing of optional files such as samples. If it fails with OSError, logs the reason once per path and
    lets the training continue."""
    try:
        yield
    except OSError as error:
        if path not in _REPORTED_PATHS:
            _REPORTED_PATHS.add(path)
            log(f"{why_not_written(path, error)}. The training goes on without these files, until there is room")


def write_atomically(path: Path, text: str) -> None:
    """Replaces a small file atomically: readers see the old or the new text, also after a crash."""
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(text, encoding="utf-8")
    _sync(draft)
    os.replace(draft, path)
    _sync(path.parent)


def _remove(path: Path) -> None:
    """Deletes a folder, a file or a link; the target of a link is kept."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _set_aside(path: Path) -> Path:
    """Renames a damaged file or folder to NAME.damaged and returns the new path."""
    aside = path.with_name(f"{path.name}.damaged")
    _remove(aside)
    return path.rename(aside)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
