"""Shared code of recipes that run several commands one after the other, such as training stages."""

import subprocess
import sys
from pathlib import Path

from trainer.checkpoint import saved_steps


def call(module: str, *words: str) -> None:
    """Runs `python -m module words`. Ends this program with the command's exit status if it fails or is interrupted."""
    print("python -m", module, *words, flush=True)
    if status := subprocess.run([sys.executable, "-m", module, *words], check=False).returncode:
        raise SystemExit(status)


def is_finished(run: Path, steps: int) -> bool:
    """Returns True if the run folder has a checkpoint of its last step."""
    return run.is_dir() and steps in saved_steps(run)


def folder_argument(module: str) -> Path:
    """Returns the only command line argument, a folder. Ends the program with the usage for other arguments."""
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        raise SystemExit(f"usage: python -m {module} FOLDER")
    return Path(sys.argv[1]).expanduser().absolute()
