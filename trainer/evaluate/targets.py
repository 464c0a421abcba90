"""What `main_eval` and `main_generate` are pointed at: a run, a checkpoint, a model; and the run that looks at it.

A target becomes the beginning of a command line: the settings that the run was saved with, or those of a model alone,
less all that belongs to training.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.checkpoint import saved_steps
from verl_lite.errors import UserError

ONLY_ANSWERS = (
    "trainer.val_only=true",
    "trainer.save_freq=0",
    "data.train_files=[]",
    "~data.sources",
    "~data.sampler",
    "~algorithm.filter_groups",
    "~trainer.val_time_budget_s",
    "~trainer.validation_data_dir",
    "~trainer.rollout_data_dir",
    "~trainer.resume_allow",
)
"""Nothing is trained or saved; files that the training wrote stay as they are."""


@dataclass(frozen=True)
class Target:
    """A policy to look at. name: for people and folders. folder: where results belong. arguments: of a run that only
    answers with it. is_model: without data of its own."""

    name: str
    folder: Path
    arguments: tuple[str, ...]
    is_model: bool = False


def find_targets(text: str, *, all_checkpoints: bool = False) -> list[Target]:
    """The policies that `text` names: a run folder (its newest checkpoint, or all), a global_step_N folder, a model
    folder, a pattern of such folders, or the name of a model on the hub. Raises UserError if it is none of these."""
    path = Path(text).expanduser().absolute()
    if not path.exists() and glob.has_magic(text):
        found = sorted((Path(each) for each in glob.glob(str(path))), key=_by_number)
        if not found:
            raise UserError(f"{text}: nothing matches this pattern")
        return [target for each in found for target in find_targets(str(each), all_checkpoints=all_checkpoints)]
    if (path / "data.pt").exists():
        return [_checkpoint(path)]
    if (path / "config.yaml").exists():
        steps = saved_steps(path)
        if not steps:
            raise UserError(f"{path} is a run without a checkpoint; run it with trainer.save_freq=-1 or above 0")
        return [_checkpoint(steps[step]) for step in (sorted(steps) if all_checkpoints else [max(steps)])]
    if all_checkpoints:
        raise UserError(f"{path}: --all-checkpoints is for a run folder (config.yaml), which this is not")
    if (path / "config.json").exists():
        return [Target(path.name, Path("runs/eval").absolute(), (f"model.path={path}", *ONLY_ANSWERS), is_model=True)]
    if not path.exists() and re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", text):  # a hub name; the options' check looks further
        name = text.replace("/", "--")
        return [Target(name, Path("runs/eval").absolute(), (f"model.path={text}", *ONLY_ANSWERS), is_model=True)]
    raise UserError(f"{path}: neither a run folder (config.yaml), a checkpoint (data.pt) nor a model (config.json)")


def _checkpoint(path: Path) -> Target:
    resume = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={path}")
    arguments = ("--config", str(path.parent / "config.yaml"), *ONLY_ANSWERS, *resume)
    return Target(path.name, path.parent / "eval", arguments)


def _by_number(path: Path) -> list[tuple[int, str]]:
    """global_step_9 before global_step_10."""
    parts = re.split(r"(\d+)", str(path))
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


def split_arguments(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The targets at the beginning of a command line, and the options after them."""
    count = next((i for i, item in enumerate(argv) if item[0:1] in ("-", "+", "~") or "=" in item), len(argv))
    return list(argv[:count]), list(argv[count:])
