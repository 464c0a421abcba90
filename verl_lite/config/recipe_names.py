"""What a value of `recipe` is: the name of a folder of recipes/, a path, or a module. `trainer.recipe` loads it."""

from __future__ import annotations

import os
from pathlib import Path

RECIPE_FILE = "recipe.py"


def is_recipe_path(name: str) -> bool:
    """Whether it is a path of a folder or a file; anything else is a name or a module."""
    return os.sep in name or name.startswith((".", "~")) or name.endswith(".py")


def absolute_recipe(name: str) -> str:
    """A path from the root, so that a saved configuration finds it from any folder; names and modules unchanged."""
    return str(Path(name).expanduser().absolute()) if is_recipe_path(name) else name


def recipe_title(name: str) -> str:
    """What runs of it are called: the name, the folder or the module's last part."""
    if not is_recipe_path(name):
        return name.rpartition(".")[2]
    path = Path(name)
    return path.parent.name if path.name == RECIPE_FILE else path.stem
