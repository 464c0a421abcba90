"""Loads the recipe that `recipe=...` names: its settings, its `prepare` function and its trainer.

    recipe=grpo                          a folder of recipes/
    recipe=path/to/my_recipe             a folder with recipe.py in it, or the file itself
    recipe=my_package.my_recipe          a module, or a package with a module `recipe`

A recipe is a module with a function `overrides()` that returns settings by dotted key; the command line overrides
them. Optionally it has `prepare(config)`, which is called before the files of the configuration are checked, and
`trainer_class`, a subclass of the trainer that replaces a stage. It can register losses, estimators, rewards, filters
and environments. Other processes import the module by its name; for a path, the folder above its package is appended to
sys.path.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

from verl_lite.config import PPOConfig, RunOptions
from verl_lite.config.loader import RECIPE_FILE, is_recipe_path
from verl_lite.errors import UserError
from verl_lite.registry import foreign_modules

if TYPE_CHECKING:
    from trainer.ray_trainer import RayPPOTrainer

T = TypeVar("T")
BUILT_IN = Path(__file__).resolve().parents[1] / "recipes"
FORMS = "a path (recipe=path/to/folder with recipe.py in it) or a module (recipe=my_package.my_recipe)"


def load_recipe(name: str) -> ModuleType:
    """Imports the recipe's module. Raises UserError if it does not exist or has no `overrides`. Exceptions of the
    recipe's code propagate with a note."""
    built_in = built_in_recipes()
    if name in built_in:
        module_name = f"recipes.{name}.recipe"
    elif is_recipe_path(name):
        module_name = _module_at(name)
    else:
        module_name = _importable_module(name)
    if not module_name:
        here = ""
        if (Path(name) / RECIPE_FILE).is_file():
            here = f" For the folder here write recipe=./{name}"
        raise UserError(
            f"recipe={name!r}: no such folder of recipes/, and no such module (Python looks in the current folder, in "
            f"PYTHONPATH and among installed packages); recipes/ has {', '.join(built_in)}; or give {FORMS}.{here}"
        )
    module = _call_recipe(partial(importlib.import_module, module_name), name)
    if not callable(getattr(module, "overrides", None)):
        raise UserError(
            f"recipe={name!r}: {module.__file__} has no function overrides(): it returns the recipe's settings, "
            '{"algorithm.adv_estimator": "rloo", ...}; `python -m trainer.new_recipe NAME` writes an example'
        )
    return module


def built_in_recipes() -> list[str]:
    """Returns the names of the recipes in recipes/."""
    files = BUILT_IN.glob(f"*/{RECIPE_FILE}")
    return sorted(file.parent.name for file in files)


def recipe_overrides(name: str) -> Mapping[str, object]:
    """Returns the settings of a recipe by dotted key."""
    settings = _call_recipe(load_recipe(name).overrides, name)
    if not isinstance(settings, Mapping):
        raise UserError(f"recipe={name!r}: overrides() returned {type(settings).__name__}, expected a dictionary")
    return settings


def prepare_recipe(config: RunOptions) -> None:
    """Calls the recipe's `prepare` function, if it has one, to create files that its settings name, such as data."""
    if config.recipe is None:
        return
    prepare = getattr(load_recipe(config.recipe), "prepare", None)
    if prepare is not None:
        _call_recipe(partial(prepare, config), config.recipe)


def worker_modules(config: PPOConfig) -> list[str]:
    """Returns the modules that a worker process imports first: the recipe, and the user's modules that register the
    configured loss, rollout engine and group filters."""
    # these import torch, which parsing the options does not need
    from verl_lite.core_algos import POLICY_LOSS_REGISTRY
    from verl_lite.group_filters import GROUP_FILTERS
    from workers.engines.base import ROLLOUT_ENGINES

    configured = [
        POLICY_LOSS_REGISTRY.get(config.actor.policy_loss.loss_mode),
        ROLLOUT_ENGINES.get(config.rollout.name),
        GROUP_FILTERS.get(config.agentic.train_env_manager.group_filter_cls or ""),
        GROUP_FILTERS.get(config.agentic.val_env_manager.group_filter_cls or ""),
    ]
    users_modules = foreign_modules(entry for entry in configured if entry is not None)
    modules = [*recipe_modules(config), *users_modules]
    # each once: the recipe itself can register them
    return list(dict.fromkeys(modules))


def recipe_modules(config: RunOptions) -> list[str]:
    """Returns the module name of the recipe as a list, which is empty without a recipe."""
    if config.recipe is None:
        return []
    module = load_recipe(config.recipe)
    return [module.__name__]


def trainer_of(config: PPOConfig) -> type[RayPPOTrainer]:
    """Returns the trainer class: the recipe's, or else the standard class for the configuration.

    Raises:
        UserError: if the recipe's class is not a subclass of the standard class.
    """
    from trainer.agentic.agent_trainer import AgentTrainer
    from trainer.ray_trainer import RayPPOTrainer

    standard = AgentTrainer if config.is_agentic else RayPPOTrainer
    if not config.recipe:
        return standard
    trainer_class = getattr(load_recipe(config.recipe), "trainer_class", standard)
    is_trainer = inspect.isclass(trainer_class) and issubclass(trainer_class, standard)
    if not is_trainer:
        raise UserError(
            f"recipe={config.recipe!r}: its trainer_class is {trainer_class!r}; these settings require a subclass of "
            f"{standard.__module__}.{standard.__name__}"
        )
    return trainer_class


def _importable_module(name: str) -> str:
    """Returns the module of a dotted name: of a package, its module `recipe`. Empty if Python does not find one."""
    # a name without a dot is a misspelt built-in recipe, and not any installed package
    if "." not in name:
        return ""
    for module_name in (f"{name}.{Path(RECIPE_FILE).stem}", name):
        if _call_recipe(partial(_file_of, module_name), name):
            return module_name
    return ""


def _module_at(name: str) -> str:
    """Returns the module name of a path and appends the folder above its package to sys.path."""
    file = Path(name).expanduser().absolute()
    if file.is_dir():
        file = file / RECIPE_FILE
    if not file.is_file() or file.suffix != ".py":
        raise UserError(f"recipe={name!r}: there is no {file}; a recipe is {FORMS}")
    file = file.parent.resolve() / file.name

    # the folder of a recipe is a package, also without __init__.py
    parts = [file.parent.name, file.stem]
    top = file.parent.parent
    while (top / "__init__.py").is_file():
        parts.insert(0, top.name)
        top = top.parent
    module_name = ".".join(parts)
    are_names = all(part and "." not in part for part in parts)
    if not are_names:
        raise UserError(f"recipe={name!r}: {file.parent.name or file.parent} cannot be a package's name; rename it")
    if str(top) not in sys.path:
        # at the end, so that no module of this folder replaces an installed one
        sys.path.append(str(top))
        importlib.invalidate_caches()
    imported_file = _file_of(module_name)
    if imported_file is None or imported_file.resolve() != file.resolve():
        raise UserError(
            f"recipe={name!r}: {file} would be imported as {module_name}, but a module {parts[0]} already exists; "
            f"rename the folder {top / parts[0]}"
        )
    return module_name


def _file_of(module_name: str) -> Path | None:
    """Returns the file of a module, or None if Python does not find the module. Exceptions of its packages propagate
    with a note."""
    try:
        spec = importlib.util.find_spec(module_name)
    except ModuleNotFoundError as error:
        # the package itself is missing, and not a module that it imports
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            return None
        error.add_note(f"raised while the packages of {module_name} were imported")
        raise
    if spec is None:
        return None
    # a folder without __init__.py is a package without a file
    return Path(spec.origin or "")


def _call_recipe(function: Callable[[], T], name: str) -> T:
    """Calls recipe code and adds the recipe's name to any exception."""
    try:
        return function()
    except UserError:
        raise
    except Exception as error:
        error.add_note(f"raised by the code of recipe={name}")
        raise
