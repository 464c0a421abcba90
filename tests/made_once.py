"""Folders that one of the test processes fills for all of them.

pytest-xdist distributes the tests of a module to several processes, each of which would set up a module's fixtures
again. A run that takes half a minute is therefore made in a folder that the processes share.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

MADE = "made"
"""The file that marks a complete folder."""


def shared_folder(factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of all test processes of this pytest command."""
    own = factory.getbasetemp()
    # each process of xdist has a folder of its own in the command's folder
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Returns a folder that `make` has filled, in this or another test process.

    A process that needs the folder while another one fills it waits. If `make` fails, the next process tries again.

    Args:
        factory: pytest's fixture `tmp_path_factory`.
        name: Name of the folder, different from all others of the tests.
        make: Fills the folder, which exists and is empty.
    """
    folder = shared_folder(factory) / name
    with FileLock(f"{folder}.lock"):
        if not (folder / MADE).exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            (folder / MADE).touch()
    return folder
