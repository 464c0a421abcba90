"""`python -m trainer.sync RUN [--to TRACKER]`: uploads all metrics of a run, from its metrics.jsonl, to trackers as a
new run.

The trackers are those of `trainer.logger`. With --to it is one tracker, for example one that failed during training or
that the run did not use. wandb and swanlab upload what they wrote offline with their own commands, `wandb sync` and
`swanlab sync`. Exit status: 0 success, 2 invalid input.
"""

import argparse
import shutil
from pathlib import Path

import yaml

from trainer.cli import command
from trainer.console import Console
from trainer.recipe import load_recipe
from trainer.tracking import METRICS, TRACKERS, TrackedRun, check_trackers, read_metrics
from trainer.tracking.trackers import OWN
from verl_lite.errors import UserError


@command
def main(argv: list[str]) -> int:
    """Runs the command and returns its exit status."""
    from trainer.run import locked_folder

    parser = argparse.ArgumentParser(prog="python -m trainer.sync", description="Uploads a whole run to trackers.")
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--to", metavar="TRACKER", help="upload only to this tracker, whether or not the run used it")
    given = parser.parse_args(argv)
    folder, console = given.run.expanduser().absolute(), Console()
    if not (folder / "config.yaml").is_file():
        raise UserError(f"{folder}: expected the folder of a run, with config.yaml in it")
    options = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    trainer = options["trainer"]
    name = trainer.get("experiment_name") or folder.name
    run = TrackedRun(folder, trainer.get("project_name") or "verl_lite", name, options, console)
    names = [given.to] if given.to else [name for name in trainer["logger"] if name not in OWN]
    if options.get("recipe") and not TRACKERS.keys() >= set(names):
        load_recipe(options["recipe"])  # the recipe may register trackers
    check_trackers(names, "--to" if given.to else None)
    numbers = read_metrics(folder / METRICS)
    with locked_folder(folder, console.note):
        for name in names:
            for known_as in folder.glob(f"{name}*_id.txt"):
                known_as.unlink()  # without the saved id the tracker starts a new run and keeps the old one
            if name == "tensorboard":  # tensorboard shows all files of a folder as one run
                shutil.rmtree(folder / name, ignore_errors=True)
            tracker = TRACKERS.get_fn(name)(run)
            for step, metrics in numbers.items():
                tracker.log(metrics, step)
            tracker.finish()
            console.print(f"{name}: {len(numbers)} steps")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
