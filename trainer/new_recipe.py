"""`python -m trainer.new_recipe NAME [--out FOLDER]`: writes a recipe that runs at once, to be made one's own.

FOLDER, by default ./NAME, gets recipe.py (settings), reward.py (a reward), estimator.py (an estimator), run.sh and
README.md. It trains the model of recipes/quickstart until its settings name another. Nothing is written over.
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
"""Each is written from TEMPLATE/FILE.txt, in which NAME and PLACE stand for the recipe's."""


def write_recipe(name: str, folder: Path) -> Path:
    """Writes the recipe into a new folder; returns it. Raises UserError for a name that Python cannot import from
    there, or a folder that exists."""
    from verl_lite.core_algos import ADV_ESTIMATOR_REGISTRY

    folder = folder.expanduser().absolute()
    is_word = all(re.fullmatch(r"[a-z][a-z0-9_]*", one) and not keyword.iskeyword(one) for one in (name, folder.name))
    is_hidden = is_word and not (folder.parent / "__init__.py").exists() and importlib.util.find_spec(folder.name)
    if not is_word or name in ADV_ESTIMATOR_REGISTRY or is_hidden:
        raise UserError(
            f"NAME={name!r} in {folder}: they become an estimator and a Python package: expected small letters, digits "
            "and _, as in my_recipe, and no name that a module, an advantage estimator or Python itself has already"
        )
    if folder.exists():
        raise UserError(f"{folder} exists already, and nothing is written over: choose another NAME or --out FOLDER")
    if not folder.parent.is_dir():
        raise UserError(f"--out {folder}: there is no folder {folder.parent}; make it first")
    folder.mkdir()
    for file in FILES:
        text = (TEMPLATE / f"{file}.txt").read_text(encoding="utf-8")
        (folder / file).write_text(text.replace("NAME", name).replace("PLACE", place_of(folder)), encoding="utf-8")
    (folder / "run.sh").chmod(0o755)
    return folder


def place_of(folder: Path) -> str:
    """What to give to recipe=: the path, from here if it is below."""
    return f"./{folder.relative_to(Path.cwd())}" if folder.is_relative_to(Path.cwd()) else str(folder)


@command
def main(argv: list[str]) -> int:
    """The command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m trainer.new_recipe", description="Writes a recipe that runs.")
    parser.add_argument("name", metavar="NAME", help="of the recipe: small letters, digits and _")
    parser.add_argument(
        "--out", "--to", type=Path, metavar="FOLDER", help="the recipe's own, new folder; default: ./NAME"
    )
    options = parser.parse_args(argv)
    folder = write_recipe(options.name, options.out or Path(options.name))
    print(f"wrote {folder}: {', '.join(FILES)}\n")
    print(f"  run it        python -m trainer.main_ppo recipe={place_of(folder)}")
    print("  change it     recipe.py has the settings; the guide is recipes/README.md of verl_lite")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
