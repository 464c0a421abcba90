"""What a run over several machines needs of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainer.resources import require_shared_folder
from verl_lite.errors import UserError
from verl_lite.single_controller.worker import Worker


class Machines:
    """A worker group whose ranks see these folders in the place of the driver's."""

    def __init__(self, *folders: Path) -> None:
        self.folders = folders

    def execute_all_sync(self, method: str, path: str) -> list[Any]:
        return [getattr(Worker(), method)(f"{folder}/{Path(path).name}", 0.1) for folder in self.folders]


def test_a_machine_that_does_not_share_the_run_folder_is_named(tmp_path: Path) -> None:
    shared, own = tmp_path / "shared", tmp_path / "own"
    shared.mkdir()
    own.mkdir()
    require_shared_folder(Machines(shared, shared), shared)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"trainer\.default_local_dir=.*shared is not the same folder on .*NFS"):
        require_shared_folder(Machines(shared, own), shared)  # type: ignore[arg-type]
    assert not list(shared.iterdir())
