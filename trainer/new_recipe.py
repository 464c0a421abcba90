"""`python -m trainer.new_recipe NAME [--out FOLDER]`: writes a working recipe as a starting point for your own.

The new folder FOLDER, by default ./NAME, contains recipe.py (settings), reward.py (a reward), estimator.py (an
advantage estimator), run.sh and README.md. The recipe trains the model of recipes/quickstart until its settings name
another one. Existing folders are never overwritten.
"""

import argparse
import importlib.util
import keyword
import re
from pathlib import Path

from trainer.cli import command
from verl_lite.errors import UserError

TEMPLATE = Path(__file__).with_name("recipe_template")
FILES = ("__init__.py", "recipe.py", "reward.py", "estimator.py", "run.sh", "README.md")
"""Files of a new recipe. Each is written from TEMPLATE/FILE.txt with NAME and PLACE replaced."""


def write_recipe(name: str, folder: Path) -> Path:
    """Writes the recipe into a new folder and returns the folder's absolute path.

    Args:
        name: Name of the recipe and of its advantage estimator.
        folder: The new folder.

    Raises:
        UserError: if the folder exists, or if Python cannot import a package of this name from there.
    """
    from verl_lite.core_algos import ADV_ESTIMATOR_REGISTRY

    folder = folder.expanduser().absolute()
    is_usable = _is_word(name) and _is_word(folder.name) and name not in ADV_ESTIMATOR_REGISTRY
    is_top_folder = not (folder.parent / "__init__.py").exists()
    # a package of this name that is found first would be imported instead of the top folder of the recipe
    if is_usable and is_top_folder:
        is_usable = importlib.util.find_spec(folder.name) is None
    if not is_usable:
        raise UserError(
            f"NAME={name!r} in {folder}: NAME names an estimator, and the folder is a Python package: expected "
            "lower-case letters, digits and _, as in my_recipe, and no existing module, advantage estimator or keyword"
        )
    if folder.exists():
        raise UserError(f"{folder} already exists and is not overwritten: choose another NAME or --out FOLDER")
    if not folder.parent.is_dir():
        raise UserError(f"--out {folder}: the folder {folder.parent} does not exist; create it first")
    # fails if another process has created the folder meanwhile, whose files stay as they are
    folder.mkdir()
    for file in FILES:
        template_file = TEMPLATE / f"{file}.txt"
        text = template_file.read_text(encoding="utf-8")
        text = text.replace("NAME", name)
        text = text.replace("PLACE", place_of(folder))
        (folder / file).write_text(text, encoding="utf-8")
    (folder / "run.sh").chmod(0o755)
    return folder


def _is_word(name: str) -> bool:
    """Returns True for a name that Python accepts for a package."""
    if keyword.iskeyword(name):
        return False
    return re.fullmatch(r"[a-z][a-z0-9_]*", name) is not None


def place_of(folder: Path) -> str:
    """Returns the value for `recipe=`: the folder's path, relative to the current folder if it is below it."""
    current_folder = Path.cwd()
    if folder.is_relative_to(current_folder):
        # with ./, so that it is read as a path and not as the name of a recipe
        return f"./{folder.relative_to(current_folder)}"
    return str(folder)


@command
def main(argv: list[str]) -> int:
    """Runs the command and returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m trainer.new_recipe", description="Writes a working recipe.")
    parser.add_argument("name", metavar="NAME", help="name of the recipe: lower-case letters, digits and _")
    parser.add_argument("--out", "--to", type=Path, metavar="FOLDER", help="new folder for the recipe; default: ./NAME")
    options = parser.parse_args(argv)
    target = options.out or Path(options.name)
    folder = write_recipe(options.name, target)
    print(f"wrote {folder}: {', '.join(FILES)}\n")
    print(f"  run it        python -m trainer.main_ppo recipe={place_of(folder)}")
    print("  change it     recipe.py has the settings; the guide is recipes/README.md of verl_lite")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
