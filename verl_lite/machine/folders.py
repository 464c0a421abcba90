"""Temporary folders of untrusted code, which are removed whatever the code left in them."""

import contextlib
import itertools
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

_NEW_NAME = "verl_lite-moved-"


@contextlib.contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """Context manager of a new folder, which is removed at the end.

    What cannot be removed stays and raises nothing, because an error there would replace the result of the code that
    used the folder.
    """
    folder = new_folder(prefix)
    try:
        yield folder
    finally:
        remove_folder(folder)


def new_folder(prefix: str) -> Path:
    """Creates a temporary folder."""
    restore_base_folder()
    return Path(tempfile.mkdtemp(prefix=prefix))


def restore_base_folder() -> None:
    """Creates the folder for temporary files again if it was removed.

    A run can outlive it: machines remove old entries of /tmp.
    """
    os.makedirs(tempfile.gettempdir(), mode=0o700, exist_ok=True)


def remove_folder(folder: Path) -> bool:
    """Removes a folder with everything in it. Returns True if nothing of it is left.

    The depth of nested folders is not limited: each of them is moved into `folder` before it is removed, so that no
    path becomes too long. Links are removed and not followed. Nobody may change the folder meanwhile.
    """
    if folder.is_symlink() or not folder.is_dir():
        with contextlib.suppress(OSError):
            folder.unlink()
        return not os.path.lexists(folder)

    numbers = itertools.count()
    failed: set[str] = set()
    while True:
        try:
            folder.chmod(0o700)
            with os.scandir(folder) as entries:
                names = [entry.name for entry in entries if entry.name not in failed]
        except OSError:
            # another user owns it
            break
        if not names:
            break
        for name in names:
            try:
                _remove_entry(folder, folder / name, numbers)
            except OSError:
                # such as a mount point or a file that its user made immutable
                failed.add(name)
    with contextlib.suppress(OSError):
        folder.rmdir()
    return not os.path.lexists(folder)


def _remove_entry(top: Path, path: Path, numbers: Iterator[int]) -> None:
    """Removes a file, or a folder whose own folders it moves into `top`. Raises OSError."""
    if not stat.S_ISDIR(path.lstat().st_mode):
        path.unlink()
        return
    path.chmod(0o700)
    with os.scandir(path) as entries:
        children = list(entries)
    for child in children:
        if child.is_dir(follow_symlinks=False):
            # a folder without the right to write cannot be moved
            os.chmod(child.path, 0o700)
            os.rename(child.path, _free_path(top, numbers))
        else:
            os.unlink(child.path)
    path.rmdir()


def _free_path(top: Path, numbers: Iterator[int]) -> Path:
    """Returns a path that does not exist.

    Args:
        top: folder of the path.
        numbers: numbers that no earlier call has used.
    """
    while True:
        path = top / f"{_NEW_NAME}{next(numbers)}"
        if not os.path.lexists(path):
            return path
