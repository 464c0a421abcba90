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
    """Runs a job and returns its exit status.

    Help and errors in the command line are printed before the job is imported, which takes seconds.

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
    """Lets a template import the libraries of the workers while this process imports its own (`worker_template`).

    Does so only if the run starts Ray on Linux and the workers use the CPU.
    """
    trainer = config.trainer
    starts_ray = trainer.backend == "ray" and config.ray_kwargs.ray_init.address is None
    if not starts_ray or trainer.dry_run:
        return
    # CUDA and libraries of macOS do not survive a fork
    is_linux = os.path.isdir("/proc")
    if not is_linux or trainer.device == "cuda" or list_gpus():
        return

    # the environment of the workers, as `create_groups` will set it: with another one the template is not used
    num_cores = cpu_count()
    slots = trainer.n_gpus_per_node or min(MOST_DEFAULT_CPU_SLOTS, num_cores)
    threads = max(1, num_cores // slots)
    env = worker_environment(cpu=True, threads=threads)
    stack.enter_context(worker_template_running(env))
    preload("workers.engine.fsdp", "tensordict")
