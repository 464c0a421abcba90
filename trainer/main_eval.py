"""`python -m trainer.main_eval TARGET ... [--all-checkpoints] [key=value ...]`: validates checkpoints or models, and
prints a table of the results.

TARGET is a run folder (its newest checkpoint, or all with --all-checkpoints), a global_step_N folder, a model folder or
a hub name. A model also needs validation data: data.val_files=..., or environments by --config FILE or recipe=NAME. The
settings are those of the saved run; key=value overrides them, for example rollout.val_kwargs.n=8, with do_sample=true
and a temperature if the run validates greedily. Each evaluation is a new run folder under RUN/eval with a results.json.
If the command was killed, the same command continues it and repeats no finished work. The guide is
trainer/EVALUATION.md. --help-config lists the options.
"""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.cli import command, leave
from verl_lite.config import load_config
from verl_lite.errors import UserError

if TYPE_CHECKING:
    from trainer.evaluate.evaluation import Target

USAGE = "usage: python -m trainer.main_eval RUN_OR_CHECKPOINT_OR_MODEL ... [--all-checkpoints] [key=value ...]"
ALL_CHECKPOINTS = "--all-checkpoints"


def evaluate(target: Target, overrides: list[str]) -> tuple[int, dict[str, float]]:
    """Validates one target, or shows the result of an earlier call with the same settings. An agentic evaluation keeps
    no episodes, so the same command runs them again in a new folder.

    Returns:
        The exit status, and the metrics if it is 0.
    Raises:
        UserError: if there is nothing to validate.
    """
    from trainer.build import run_ppo
    from trainer.console import Console
    from trainer.evaluate.evaluation import FOLDER, RESULTS, Evaluation, answer_settings, finished_metrics
    from trainer.final_report import validation_table
    from trainer.recipe import prepare_recipe, recipe_overrides
    from trainer.tracking import read_metrics

    argv = eval_arguments(target, overrides)
    loaded = load_config(argv, recipe_loader=recipe_overrides)
    if loaded.action != "run":
        return run_ppo(argv), {}
    config = loaded.config
    name, settings = time.strftime("%Y%m%d-%H%M%S"), {}
    if not config.is_agentic:
        prepare_recipe(config)
        settings = answer_settings(config)
        name = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
    given = [item.removeprefix(FOLDER) for item in overrides if item.startswith(FOLDER)]
    folder = Path(given[-1]).expanduser() if given else target.folder / f"{target.name}-{name}"
    argv.append(f"{FOLDER}{folder}")
    if config.is_agentic:
        status = run_ppo(argv)
        rows = {} if status else read_metrics(folder / "metrics.jsonl")
        return status, list(rows.values())[-1] if rows else {}
    known = finished_metrics(folder, settings)
    if known is not None:
        console = Console()
        console.note(f"{target.name} was evaluated before under the same settings: {folder}")
        console.print(validation_table({"mean": known}))
        return 0, known
    # auto: continues a folder that already has answers; Evaluation loads no weights from it
    resume = ["trainer.resume_mode=auto"] if target.is_model else []
    status = run_ppo([*argv, *resume], trainer_class=Evaluation)
    return status, {} if status else json.loads((folder / RESULTS).read_text(encoding="utf-8"))["metrics"]


def eval_arguments(target: Target, overrides: list[str]) -> list[str]:
    """Returns the command line of the run that validates `target`. Raises UserError without validation data."""
    has_data = any(item.startswith(("data.val_files=", "agentic.", "--config", "recipe=")) for item in overrides)
    if target.is_model and not has_data:
        raise UserError(
            f"{target.name} is a model: name what to validate on, data.val_files=PATH, or the environments: "
            "--config FILE or recipe=NAME"
        )
    return [*target.arguments, "trainer.experiment_name=eval", *overrides]


@command
def main(argv: list[str]) -> int:
    """Runs the command and returns its exit status."""
    if "--help" in argv or "-h" in argv:
        print(__doc__)
        return 0
    from trainer.console import Console
    from trainer.evaluate.evaluation import FOLDER, find_targets, split_arguments, titles
    from trainer.final_report import validation_table

    names, options = split_arguments([item for item in argv if item != ALL_CHECKPOINTS])
    if not names:
        raise UserError(USAGE)
    targets = [each for name in names for each in find_targets(name, all_checkpoints=ALL_CHECKPOINTS in argv)]
    given = [item for item in options if item.startswith(FOLDER)]
    if given and len(targets) > 1:
        raise UserError(f"{given[-1]}: each of the {len(targets)} targets gets its own folder; remove this option")
    done: dict[str, dict[str, float]] = {}
    for target, title in zip(targets, titles(targets), strict=True):
        status, done[title] = evaluate(target, options)
        if status:
            return status
    if len(targets) > 1:
        Console().print(validation_table(done))
    return 0


if __name__ == "__main__":
    leave(main())
