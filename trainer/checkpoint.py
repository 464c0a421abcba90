"""Checkpoints of a run: verl's folder layout, written under a temporary name and renamed, the marker last.

run folder / latest_checkpointed_iteration.txt
           / global_step_N / actor/      sharded model, optimizer, schedule (torch DCP); huggingface/
                           / data.pt     position in the data, step, KL coefficient
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

MARKER = "latest_checkpointed_iteration.txt"


class CheckpointNotFound(FileNotFoundError):
    """There is no checkpoint where the configuration says that one is."""


def write_checkpoint(
    run_dir: Path, step: int, save_models: Callable[[Path], None], state: dict[str, Any], keep: int | None
) -> Path:
    """Writes global_step_<step>. `save_models` fills the folder it is given; `state` goes into data.pt.

    Then deletes the oldest checkpoints beyond `keep` (null = none): never before the new one is complete.
    """
    final, draft = run_dir / f"global_step_{step}", run_dir / f".global_step_{step}.draft"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    save_models(draft)
    torch.save(state, draft / "data.pt")
    shutil.rmtree(final, ignore_errors=True)
    os.replace(draft, final)
    marker = run_dir / f".{MARKER}"
    marker.write_text(str(step))
    os.replace(marker, run_dir / MARKER)
    if keep is not None:
        for _, folder in sorted(saved_steps(run_dir).items())[: -max(1, keep)]:
            shutil.rmtree(folder)
    return final


def saved_steps(run_dir: Path) -> dict[int, Path]:
    """The complete checkpoints of a run folder by step."""
    found = ((re.fullmatch(r"global_step_(\d+)", path.name), path) for path in run_dir.glob("global_step_*"))
    return {int(match[1]): path for match, path in found if match}


def find_checkpoint(run_dir: Path, mode: str, path: str | None) -> Path | None:
    """The checkpoint to start from: none for `disable`, the newest for `auto` (or none), `path` for `resume_path`."""
    if mode == "disable":
        return None
    if mode == "auto":
        marker = run_dir / MARKER
        return run_dir / f"global_step_{marker.read_text().strip()}" if marker.exists() else None
    folder = Path(path or "").expanduser().resolve()
    if not (folder / "data.pt").exists():
        raise CheckpointNotFound(
            f"trainer.resume_from_path={path!r}: no checkpoint there ({folder} has no data.pt); expected a folder "
            "named global_step_N inside a run folder"
        )
    return folder


def read_state(folder: Path) -> dict[str, Any]:
    """What `write_checkpoint` put into data.pt."""
    return torch.load(folder / "data.pt", weights_only=False)
