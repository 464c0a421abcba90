"""Parses the command line of a training command and runs its job. Heavy modules are imported after the parsing."""

import importlib
import os
from contextlib import ExitStack

from trainer.cli import MOST_DEFAULT_CPU_SLOTS, worker_environment
from trainer.recipe import recipe_overrides
from verl_lite.config import RunOptions, help_text, load_schema
from verl_lite.machine.gpus import list_gpus
from verl_lite.machine.host import cpu_count
from verl_lite.registry import importing
from verl_lite.single_controller.guard import preload, worker_template_running


def start(job: str, options: type[RunOptions], argv: list[str], default_recipe: str | None = None) -> int:
    """Runs a job and returns its exit status. Help and errors in the command line are printed before the job is
    imported, which takes seconds.

    Args:
        job: the job's class as "module:Class".
        options: class of the job's options.
        default_recipe: recipe that is used if the command line names neither recipe, model nor data.
    """
    with ExitStack() as stack:
        with importing():
            loaded = load_schema(argv, options, recipe_loader=recipe_overrides, default_recipe=default_recipe)
            if loaded.action == "help":
                print(help_text(loaded))
                return 0
            if loaded.action == "run":
                start_template(loaded.config, stack)
            from trainer.launch.run import run

            module, _, name = job.partition(":")
            job_class = getattr(importlib.import_module(module), name)
        return run(job_class, loaded, argv)


def start_template(config: RunOptions, stack: ExitStack) -> None:
    """Lets a template import the libraries of the workers while this process imports its own (`worker_template`), if
    the run starts Ray on Linux and the workers use the CPU."""
    trainer = config.trainer
    starts_ray = trainer.backend == "ray" and config.ray_kwargs.ray_init.address is None and not trainer.dry_run
    # CUDA and libraries of macOS do not survive a fork
    if not starts_ray or not os.path.isdir("/proc") or trainer.device == "cuda" or list_gpus():
        return
    slots = trainer.n_gpus_per_node or min(MOST_DEFAULT_CPU_SLOTS, cpu_count())
    threads = max(1, cpu_count() // slots)
    stack.enter_context(worker_template_running(worker_environment(cpu=True, threads=threads)))
    preload("workers.engine.fsdp", "tensordict")
