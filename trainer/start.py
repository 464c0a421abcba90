"""Parses the command line of a training command and runs its job. Heavy modules are imported after the parsing."""

import importlib
from typing import Any

from trainer.recipe import recipe_overrides
from verl_lite.config import help_text, load_schema
from verl_lite.registry import importing


def start(job: str, options: type[Any], argv: list[str], default_recipe: str | None = None) -> int:
    """Runs a job and returns its exit status. Help and errors in the command line are printed before the job is
    imported, which takes seconds.

    Args:
        job: the job's class as "module:Class".
        options: class of the job's options.
        default_recipe: recipe that is used if the command line names neither recipe, model nor data; None if the
            command takes no recipes.
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
