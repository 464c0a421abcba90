"""A whole checkpoint in one call, from the parts that `trainer.loop.saving.Saver` uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainer.checkpoint.files import open_draft, publish, removed_on_failure
from verl_lite.machine.safe_state import write_state


def write_checkpoint(
    run_dir: Path, step: int, save_models: Callable[[Path], None], state: Mapping[str, Any], expected_bytes: int = 0
) -> Path:
    """Writes global_step_<step>; the checkpoints that are there stay until it is complete.

    save_models: fills the folder it is given. state: goes into data.pt. expected_bytes: a guess of the size, for the
    first checkpoint of a run; later the size of the newest one counts.

    Raises DiskFull before anything is written if there is no room, or after the draft is removed if the room ran out.
    """
    draft = open_draft(run_dir, step, expected_bytes)
    with removed_on_failure(draft):
        save_models(draft)
        write_state(draft / "data.pt", {"steps": {"global_step": step}} | dict(state))
        return publish(draft)
