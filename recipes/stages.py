"""Shared code of recipes that run several commands one after the other, such as training stages."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from trainer.checkpoint.files import saved_steps


def call(module: str, *words: str, environment: Mapping[str, str] | None = None) -> None:
    """Runs `python -m module words`. Ends this program with the command's exit status if it fails or is interrupted.

    Args:
        module: The module.
        words: Its command line arguments.
        environment: Environment variables in addition to those of this program.
    """
    print("python -m", module, *words, flush=True)
    command = [sys.executable, "-m", module, *words]
    variables = dict(os.environ)
    variables.update(environment or {})
    finished = subprocess.run(command, check=False, env=variables)
    if finished.returncode:
        raise SystemExit(finished.returncode)


def is_finished(run: Path, steps: int) -> bool:
    """Returns True if the run folder has a checkpoint of its last step."""
    return run.is_dir() and steps in saved_steps(run)


def supervised_stage(folder: Path, recipe: str) -> Path:
    """Runs supervised fine-tuning with the settings of a recipe, unless it is finished. Returns the trained model."""
    # `trainer.main_sft` writes this folder at its end
    trained = folder / "hf"
    if not trained.is_dir():
        call("trainer.main_sft", f"recipe={recipe}", *_continued(folder, save_freq=100))
    return trained


def rl_stage(folder: Path, start: Path, recipe: str, steps: int) -> Path:
    """Trains a model on its own samples, unless that is finished, and exports it.

    Args:
        folder: The run folder of the stage.
        start: The model from which the stage starts.
        recipe: Recipe with the settings of `trainer.main_ppo`.
        steps: Number of training steps.

    Returns:
        The folder of the trained model.
    """
    if not is_finished(folder, steps):
        options = [
            f"recipe={recipe}",
            f"model.path={start}",
            f"trainer.total_training_steps={steps}",
        ]
        call("trainer.main_ppo", *options, *_continued(folder, save_freq=20))

    # the next stage needs the Hugging Face format, which checkpoints do not have
    trained = folder / "hf"
    if not trained.is_dir():
        call("trainer.export", str(folder), "--out", str(trained))
    return trained


def _continued(folder: Path, save_freq: int) -> list[str]:
    """Returns the options of a run in `folder` that continues from its last checkpoint."""
    return [
        f"trainer.default_local_dir={folder}",
        "trainer.resume_mode=auto",
        f"trainer.save_freq={save_freq}",
    ]


def folder_argument(module: str) -> Path:
    """Returns the only command line argument, a folder. Ends the program with the usage for other arguments."""
    words = sys.argv[1:]
    if len(words) != 1 or words[0].startswith("-"):
        raise SystemExit(f"usage: python -m {module} FOLDER")
    folder = Path(words[0]).expanduser()
    return folder.absolute()
