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

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from verl_lite.errors import UserError, printable

MARKER = "latest_checkpointed_iteration.txt"
MANIFEST = "manifest.json"
STATE = "data.pt"
SPARE_SHARE = 0.05  # free space required beyond a checkpoint's size, as a share of it: sizes vary, other files grow
PROBE_BYTES = 1 << 20  # a save failed because the disk is full if these cannot be written afterwards
MOST_MANIFEST_BYTES = 16 << 20  # size for 100,000 files; this program writes no larger manifest
LOADED = ("*/.metadata", "*/*.distcp", "*/*.pt")  # model files that a resumed run reads
_FULL = (errno.ENOSPC, errno.EDQUOT)  # no bytes or no files are left: on the disk, or in the quota of its user
# errors of file systems that cannot sync folders, such as shared folders of virtual machines
_FOLDERS_ARE_NOT_SYNCED = (errno.EINVAL, errno.EBADF, errno.ENOTSUP)
# what reading a file of any content can raise; UserError of `read_state` is a ValueError
_UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)


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
        # measured before the draft is removed, which frees its space
        needed = expected_size(draft.parent, folder_bytes(draft))
        free = free_bytes(draft.parent)
        # an interrupt stays an interrupt, also on a full disk
        is_full = isinstance(error, Exception) and _is_full(draft.parent)
        _remove(draft)
        if is_full:
            raise DiskFull(_no_room(draft.parent, needed, free)) from error
        raise


def _is_full(folder: Path) -> bool:
    """Tries to write PROBE_BYTES into a folder. Returns True if the disk, or a quota of it, has no room for them.

    The error of a failed save does not tell, because an error from a worker has no errno. Nor do the free bytes of the
    disk, of which a quota may allow fewer.
    """
    probe = folder / ".probe.draft"
    try:
        with probe.open("wb") as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
            # network file systems report some errors only here
            os.fsync(file.fileno())
    except OSError as error:
        return error.errno in _FULL
    finally:
        with suppress(OSError):
            probe.unlink(missing_ok=True)
    return False


def publish(draft: Path) -> Path:
    """Turns a completely written draft into the checkpoint of its step, then updates the marker. Returns its folder."""
    run_dir = draft.parent
    # global_step_N, from .global_step_N.draft
    name = draft.stem[1:]
    final = run_dir / name
    replaced = run_dir / f".{name}.old"

    files = []
    for path in sorted(draft.rglob("*")):
        if path.is_file():
            files.append(str(path.relative_to(draft)))
    entries = {}
    for file, digest in hashes(draft, files).items():
        size = (draft / file).stat().st_size
        entries[file] = [size, digest]
    manifest = json.dumps({"sha256": entries}, indent=1)
    (draft / MANIFEST).write_text(manifest, encoding="utf-8")

    # before the rename: a visible checkpoint has all its bytes on the disk, also after a power failure
    for path in (*draft.rglob("*"), draft):
        _sync(path)

    # written before the renames, which need no room: on a full disk, the marker and the checkpoints stay as they are
    marker = run_dir / MARKER
    marker_draft = _write_draft(marker, name.removeprefix("global_step_"))

    # A run resumed at an earlier step saves this step again. If the process is killed between the two renames, `tidy`
    # restores the replaced checkpoint. lexists: a broken link would prevent the rename, too
    if os.path.lexists(final):
        final.rename(replaced)
    draft.rename(final)
    _sync(run_dir)

    # the marker follows the folder, so that it never names a step that is not there
    if marker.is_dir():  # os.replace cannot put a file in place of a folder
        _set_aside(marker)
    os.replace(marker_draft, marker)
    _sync(run_dir)
    _remove(replaced)
    return final


def tidy(run_dir: Path) -> None:
    """Removes the drafts and partly deleted checkpoints of a killed process.

    Restores a checkpoint whose replacement was not completed.
    """
    for replaced in run_dir.glob(".global_step_*.old"):
        final = run_dir / replaced.stem[1:]
        if replaced.is_dir() and not os.path.lexists(final):
            replaced.rename(final)
    for remains in run_dir.glob(".global_step_*"):
        _remove(remains)


def prune(run_dir: Path, keep_newest: int | None) -> None:
    """Deletes all checkpoints except the `keep_newest` newest, which is at least 1. None keeps all."""
    if keep_newest is None:
        return
    folders = saved_steps(run_dir)
    for step in sorted(folders)[:-keep_newest]:
        # deleting takes time: if the process is killed meanwhile, the rest must not pass for a checkpoint
        hidden = folders[step].rename(run_dir / f".global_step_{step}.gone")
        _remove(hidden)


def saved_steps(run_dir: Path) -> dict[int, Path]:
    """Returns the folders of the complete checkpoints of a run, by step."""
    folders = {}
    for path in run_dir.glob("global_step_*"):
        # as `publish` writes numbers: global_step_07 would be a second folder of step 7
        match = re.fullmatch(r"global_step_(0|[1-9][0-9]{0,17})", path.name)
        if match and path.is_dir():
            folders[int(match[1])] = path
    return folders


def whole_steps(run_dir: Path, log: Callable[[str], None]) -> Iterator[Path]:
    """Yields the undamaged checkpoints of a run folder, newest first, and logs each damaged one. Changes no file.

    Raises:
        UserError: if all checkpoints are damaged.
    """
    steps = saved_steps(run_dir)
    has_whole = False
    for step in sorted(steps, reverse=True):
        folder = steps[step]
        damage = damage_of(folder)
        if damage is None:
            has_whole = True
            yield folder
        else:
            log(f"{folder} is damaged: {damage}. It is left out")
    if steps and not has_whole:
        raise UserError(f"{run_dir} has no whole checkpoint: all {len(steps)} are damaged, as said above")


def find_checkpoint(run_dir: Path, mode: str, path: str | None) -> Path | None:
    """Returns the checkpoint that trainer.resume_mode selects.

    Args:
        run_dir: the run folder.
        mode: `disable` for none, `auto` for the newest of the run folder if there is one, `resume_path` for `path`.
        path: trainer.resume_from_path.

    Raises:
        UserError: if `path` is no checkpoint.
    """
    if mode == "disable":
        return None
    if mode == "auto":
        tidy(run_dir)
        steps = saved_steps(run_dir)
        # a run that was resumed at an earlier step writes steps below the highest one; the marker names the last write
        marked, _ = marked_step(run_dir)
        if marked in steps:
            return steps[marked]
        return steps[max(steps)] if steps else None
    folder = Path(path or "").expanduser().resolve()
    if not (folder / STATE).exists():
        raise UserError(
            f"trainer.resume_from_path={path!r}: no checkpoint there ({folder} has no {STATE}); expected a folder "
            "named global_step_N inside a run folder"
        )
    return folder


def marked_step(run_dir: Path) -> tuple[int, str]:
    """Reads the marker file.

    Returns:
        The step in it, or -1 if the folder has no checkpoint of this step, and the problem of the marker; empty if it
        has none or does not exist.
    """
    marker = run_dir / MARKER
    if not marker.is_file():
        return -1, "it is not a file" if os.path.lexists(marker) else ""
    try:
        with marker.open("rb") as file:
            step = int(file.read(32))  # a damaged file can have any length
    except (OSError, ValueError) as error:
        return -1, f"it does not name a step ({error})"
    if step not in saved_steps(run_dir):
        return -1, f"it names step {step}, of which no checkpoint is here"
    return step, ""


def whole_checkpoint(run_dir: Path, mode: str, path: str | None, log: Callable[[str], None]) -> Path | None:
    """Returns the checkpoint of `find_checkpoint` after verifying every file.

    With `auto`, a damaged checkpoint is renamed and the next older one is used.

    Raises:
        UserError: if the checkpoint at `path` is damaged, or if all those of the run folder are, so that a run never
            restarts from scratch unnoticed.
    """
    if mode == "auto":
        _, problem = marked_step(run_dir)
        if problem:
            log(f"{run_dir / MARKER}: {problem}. The newest whole checkpoint is taken; the next one replaces this file")

    folder = find_checkpoint(run_dir, mode, path)
    while folder is not None:
        damage = damage_of(folder)
        if damage is None:
            return folder
        if mode != "auto":
            # not another one without the user's consent, who has named this one
            saved = saved_steps(folder.parent)
            others = [str(saved[step]) for step in sorted(saved) if saved[step] != folder]
            raise UserError(f"{folder} is damaged: {damage}. Others of its run: {', '.join(others) or 'none'}")

        # under another name, the next search does not find it, and the user can still look at it
        aside = _set_aside(folder)
        log(f"{folder} is damaged: {damage}. It is {aside.name} now; the run goes back to the newest whole one")
        folder = find_checkpoint(run_dir, mode, path)

    if mode == "auto":
        _refuse_remains(run_dir)
    return None


def _refuse_remains(run_dir: Path) -> None:
    """Raises UserError if a run folder without checkpoints has traces of some: a marker, or damaged checkpoints."""
    remains: list[str] = []
    for pattern in (MARKER, "global_step_*.damaged"):
        remains += [path.name for path in sorted(run_dir.glob(pattern))]
    if remains:
        raise UserError(
            f"trainer.resume_mode=auto: {run_dir} had checkpoints, and no whole one is left (only {', '.join(remains)})"
            ". The run does not start from scratch by itself. Put a whole checkpoint back; or, to start from scratch, "
            "choose another folder (trainer.default_local_dir or trainer.experiment_name)"
        )


def damage_of(folder: Path) -> str | None:
    """Describes the damage of a checkpoint (its files, its manifest, or the step in its name); None if undamaged."""
    manifest = folder / MANIFEST
    if not manifest.is_file():  # nor a pipe, which would never end
        return (
            f"it has no {MANIFEST}, which lists its files and their SHA-256 (a copy that left it out, or a folder that "
            "this program did not write), so nothing says whether it is whole"
        )

    reading = MANIFEST
    try:
        if manifest.stat().st_size > MOST_MANIFEST_BYTES:
            return f"{MANIFEST} has more than {MOST_MANIFEST_BYTES >> 20} MiB"
        content = json.loads(manifest.read_text(encoding="utf-8"))
        expected = {}
        for name, (_, digest) in content["sha256"].items():
            expected[str(name)] = str(digest)
        unlisted = _unlisted_files(folder, expected)
        if unlisted:
            return f"{MANIFEST} does not list {printable(', '.join(unlisted))[:1000]}"

        reading = "one of its files"
        changed = _changed_files(folder, expected)
        if changed:
            return f"missing, or not the bytes that were written: {printable(', '.join(changed))[:1000]}"

        # after the digests, so that a changed file is reported as changed and not as unreadable
        reading = STATE
        step_inside = read_state(folder)["steps"]["global_step"]
    except _UNREADABLE as error:
        return f"{reading} cannot be read ({printable(str(error))[:1000]})"
    # a copy of a checkpoint may have any other name
    if re.fullmatch(r"global_step_\d+", folder.name) and folder.name != f"global_step_{step_inside}":
        return f"its name is not that of the step in {STATE}, {printable(str(step_inside))[:20]}: folders were renamed"
    return None


def _unlisted_files(folder: Path, expected: Mapping[str, str]) -> list[str]:
    """Returns the files that a resumed run needs and the manifest does not list. expected: its digests by name."""
    needed = {STATE}
    for pattern in LOADED:
        for path in folder.glob(pattern):
            needed.add(path.relative_to(folder).as_posix())
    # every checkpoint has at least one model, whose files can be missing together with their entries
    if not any(name.endswith("/.metadata") for name in expected):
        needed.add("MODEL/.metadata")
    return sorted(needed - expected.keys())


def _changed_files(folder: Path, expected: Mapping[str, str]) -> list[str]:
    """Returns the files that are missing or have another digest than `expected`, by name."""
    top = folder.resolve()
    # a name in the manifest must not lead to a file outside the checkpoint
    inside = []
    for name in expected:
        file = top / name
        if file.is_file() and file.resolve().is_relative_to(top):
            inside.append(name)
    digests = hashes(folder, inside)
    return [name for name, digest in expected.items() if digests.get(name) != digest]


def hashes(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """Returns the SHA-256 of files by name. Uses threads, since hashing and reading release the GIL."""

    def digest_of(name: str) -> str:
        with (folder / name).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256")
        return digest.hexdigest()

    num_threads = min(8, os.cpu_count() or 1)
    with ThreadPoolExecutor(num_threads) as pool:
        digests = pool.map(digest_of, names)
        return dict(zip(names, digests, strict=True))


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
    if not steps:
        return guess
    return folder_bytes(steps[max(steps)])


def require_space(run_dir: Path, needed: int) -> None:
    """Raises DiskFull unless `needed` bytes plus SPARE_SHARE of them are free at the run folder."""
    free = free_bytes(run_dir)
    if free < needed * (1 + SPARE_SHARE):
        raise DiskFull(_no_room(run_dir, needed, free))


def _no_room(run_dir: Path, needed: int, free: int) -> str:
    problem = "the disk is full"
    if free >= needed * (1 + SPARE_SHARE):
        problem = "nothing more can be written, because a quota or the number of files is exhausted (quota -s; df -i)"
    return (
        f"trainer.default_local_dir={run_dir}: {problem}: checkpoints need about {needed / 1e9:.3g} GB there, "
        f"and {free / 1e9:.3g} GB are free. Earlier checkpoints are as they were. Free some space, keep fewer "
        "(trainer.max_actor_ckpt_to_keep), save more rarely (trainer.save_freq), or choose another folder"
    )


def why_not_written(path: Path, error: OSError) -> str:
    """Returns a sentence about a file that could not be written: its path, the reason and the free space there."""
    return f"{path} cannot be written: {error.strerror or error}; {free_bytes(path) / 1e9:.3g} GB are free there"


def free_bytes(path: Path) -> int:
    """Returns the free bytes on the disk of `path`, which need not exist yet."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


_REPORTED_PATHS: set[Path] = set()
"""The paths of `beside_training` whose failure this process has reported."""


@contextmanager
def beside_training(path: Path, log: Callable[[str], None]) -> Iterator[None]:
    """Guards the writing of optional files such as samples.

    If it fails with OSError, logs the reason once per path and lets the training continue.
    """
    try:
        yield
    except OSError as error:
        if path not in _REPORTED_PATHS:
            _REPORTED_PATHS.add(path)
            log(f"{why_not_written(path, error)}. The training goes on without these files, until there is room")


def write_atomically(path: Path, text: str) -> None:
    """Replaces a small file atomically: readers see the old or the new text, also after a crash."""
    draft = _write_draft(path, text)
    os.replace(draft, path)
    _sync(path.parent)


def _write_draft(path: Path, text: str) -> Path:
    """Writes the text that is to replace a file to a draft next to it, and returns the draft."""
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(text, encoding="utf-8")
    _sync(draft)  # before the rename, which could otherwise reach the disk before the text
    return draft


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
    """Waits until the content of a file, or the names in a folder, are on the disk.

    Does nothing for a folder on a file system that cannot sync folders. Its files are synced all the same.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        is_unsupported = error.errno in _FOLDERS_ARE_NOT_SYNCED and path.is_dir()
        if not is_unsupported:
            raise
    finally:
        os.close(handle)
