"""From a command line to the job that it asks for. Imports nothing heavy before the words have been understood."""

import importlib
from typing import Any

from trainer.recipe import recipe_overrides
from verl_lite.config import help_text, load_schema
from verl_lite.registry import importing


def start(job: str, options: type[Any], argv: list[str], default_recipe: str | None = None) -> int:
    """Runs the job at "module:Class"; returns the exit status. Help, and what is wrong in the command line, are
    answered before the job is imported, which takes seconds.

    options: class of the job's options. default_recipe: taken where the command line names neither recipe, model nor
    data; None = recipes are not for this command.
    """
    with importing():
        loader = None if default_recipe is None else recipe_overrides
        loaded = load_schema(argv, options, recipe_loader=loader, default_recipe=default_recipe or "")
        if loaded.action == "help":
            print(help_text(loaded))
            return 0
        from trainer.run import run

        module, _, name = job.partition(":")
        job_class = getattr(importlib.import_module(module), name)
    return run(job_class, loaded, argv)
