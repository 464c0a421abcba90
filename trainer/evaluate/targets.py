"""Targets of `main_eval` and `main_generate`: the policies that a command line names.

A target (a run, a checkpoint or a model) is translated to the first arguments of a command line: the settings saved
with the run, or only the model, with everything that belongs to training switched off.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from trainer.checkpoint.files import whole_steps
from verl_lite.errors import UserError

MODELS = Path("runs/eval")
"""Parent folder of the results of models that do not belong to a run."""

ONLY_ANSWERS = (
    "trainer.val_only=true",
    "trainer.save_freq=0",
    "data.train_files=[]",
    "~data.sources",
    "~data.sampler",
    "~algorithm.filter_groups",
    "~distillation",
    "~trainer.validation_data_dir",
    "~trainer.rollout_data_dir",
    "~trainer.resume_allow",
    "~trainer.callbacks",
    "~trainer.early_stopping",
)
"""Arguments that switch off training and saving, so that files written by the training stay unchanged."""


@dataclass(frozen=True)
class Target:
    """A policy to evaluate.

    Attributes:
        name: Display name, also for folders.
        path: Its folder, or its name on the hub.
        folder: Parent folder of its results.
        arguments: Command line of a run that only generates answers with it.
        is_model: True for a model that is not part of a run, and so has no data.
    """

    name: str
    path: str
    folder: Path
    arguments: tuple[str, ...]
    is_model: bool = False


def find_targets(text: str, *, all_checkpoints: bool = False) -> list[Target]:
    """Returns the policies that `text` names.

    Args:
        text: a run folder, a global_step_N folder, a model folder, or the name of a model on the hub.
        all_checkpoints: True to return all complete checkpoints of a run folder instead of the newest one.

    Raises:
        UserError: for any other text, and for a run without a complete checkpoint.
    """
    path = Path(text).expanduser().absolute()
    # a complete checkpoint has this file
    if (path / "data.pt").exists():
        return [_checkpoint_target(path)]
    if (path / "config.yaml").exists():
        return _checkpoints_of_run(path, all_checkpoints)
    if all_checkpoints:
        raise UserError(f"{path}: --all-checkpoints requires a run folder, but there is no config.yaml in it")

    # a name on the hub; the check of the options finds out whether it exists
    if not path.exists() and re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", text):
        return [_model_target(text.replace("/", "--"), text)]
    if not (path / "config.json").exists():
        raise UserError(f"{path}: neither a run folder (config.yaml), a checkpoint (data.pt) nor a model (config.json)")
    return [_model_target(path.name, str(path))]


def _checkpoints_of_run(run_dir: Path, all_checkpoints: bool) -> list[Target]:
    """Returns the newest complete checkpoint of a run, or all of them. Raises UserError if there is none."""
    # `whole_steps` checks each checkpoint when it is requested, so only the needed ones are
    count = None if all_checkpoints else 1
    newest_first = list(islice(whole_steps(run_dir, print), count))
    if not newest_first:
        raise UserError(f"{run_dir} is a run without a checkpoint; train it with trainer.save_freq=-1 or above 0")
    # oldest first, so that the lines of the table are in the order of training
    return [_checkpoint_target(folder) for folder in reversed(newest_first)]


def _checkpoint_target(path: Path) -> Target:
    """Returns the target of a checkpoint folder, which is evaluated with the configuration of its run."""
    run_dir = path.parent
    # ONLY_ANSWERS after the configuration, whose training options they override
    resume = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={path}")
    arguments = ("--config", str(run_dir / "config.yaml"), *ONLY_ANSWERS, *resume)
    return Target(path.name, str(path), run_dir / "eval", arguments)


def _model_target(name: str, path: str) -> Target:
    """Returns the target of a model, with the name of its results and its folder or name on the hub."""
    arguments = (f"model.path={path}", *ONLY_ANSWERS)
    return Target(name, path, MODELS.absolute(), arguments, is_model=True)


def titles(targets: Sequence[Target]) -> list[str]:
    """Returns a distinct title for each target: its name, or for equal names the differing part of its path."""
    paths_by_name: dict[str, set[str]] = {}
    for target in targets:
        paths = paths_by_name.setdefault(target.name, set())
        paths.add(os.path.abspath(target.path))

    distinct = []
    for target in targets:
        title = target.name
        paths = paths_by_name[target.name]
        # checkpoints of several runs have equal names, such as global_step_20
        if len(paths) > 1:
            common_folder = os.path.commonpath(paths)
            title = os.path.relpath(target.path, common_folder)
        distinct.append(title)
    return distinct


def split_arguments(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits a command line into the targets at its beginning and the options after them."""
    count = 0
    for item in argv:
        # the first flag, override of the form +key or ~key, or key=value
        if item.startswith(("-", "+", "~")) or "=" in item:
            break
        count += 1
    return list(argv[:count]), list(argv[count:])
