"""`python -m trainer.main_generate TARGET data.val_files=FILE output=FILE.parquet [key=value ...]`: what the policy
answers to each prompt, without rewards.

TARGET is a run folder (its newest checkpoint), a global_step_N folder, a model folder or a hub name. The sampling is
rollout.val_kwargs.*, for example rollout.val_kwargs.n=8 with do_sample=true and a temperature. The file has a row for
each answer (`trainer.evaluate.generation`); a name that ends in .jsonl gives json lines. Beside it the folder
FILE.parquet.run has what is answered so far: the same command goes on where a killed one was. --help-config lists the
options.
"""

from __future__ import annotations

import sys
from pathlib import Path

from trainer.cli import command
from verl_lite.config import PPOConfig, load_config
from verl_lite.errors import UserError

USAGE = "usage: python -m trainer.main_generate RUN_OR_CHECKPOINT_OR_MODEL output=FILE.parquet [key=value ...]"
OUTPUT, FOLDER = "output=", "trainer.default_local_dir="
FORMATS = (".parquet", ".jsonl")
UNSCORED = ("~reward", "~reward_model", "rollout.val_kwargs.greedy_too=false")
"""What a run's settings may ask for, and answers alone do not need."""


def generate(name: str, output: Path, overrides: list[str]) -> int:
    """Answers and writes the file; returns the exit status. Raises UserError for what cannot be done."""
    from trainer.build import run_ppo
    from trainer.evaluate.evaluation import find_targets
    from trainer.evaluate.generation import Generation, folder_of, is_complete
    from trainer.recipe import prepare_recipe, recipe_overrides

    targets = find_targets(name)
    if len(targets) > 1:
        raise UserError(f"{name} names {len(targets)} checkpoints; one file has the answers of one: name it")
    argv = [*targets[0].arguments, *UNSCORED, "trainer.experiment_name=generate", *overrides]
    argv.append(f"{FOLDER}{folder_of(output)}")
    loaded = load_config(argv, recipe_loader=recipe_overrides)
    if loaded.action != "run":
        return run_ppo(argv)
    refuse_what_has_no_effect(loaded.config, overrides)
    prepare_recipe(loaded.config)
    if is_complete(output, loaded.config):
        print(f"{output} has all answers under these settings already")
        return 0
    status = run_ppo(argv, trainer_class=Generation)
    if not status:
        print(f"answers: {output}")
    return status


def output_file(given: list[str]) -> Path:
    """The file to write. Raises UserError if it is missing or of another kind."""
    if len(given) != 1:
        raise UserError(f"{len(given)} times output=...: give the file to write once, output=answers.parquet")
    output = Path(given[0].removeprefix(OUTPUT)).expanduser().absolute()
    if output.suffix not in FORMATS:
        raise UserError(f"{given[0]}: expected a file named {' or '.join(FORMATS)}")
    return output


def refuse_what_has_no_effect(config: PPOConfig, overrides: list[str]) -> None:
    """Raises UserError for options that a file of answers knows nothing of."""
    if config.is_agentic:
        raise UserError(
            "main_generate answers the prompts of a dataset; agents act in environments: `python -m trainer.main_eval` "
            "with trainer.validation_data_dir=FOLDER keeps their episodes"
        )
    if config.rollout.val_kwargs.greedy_too:
        raise UserError("rollout.val_kwargs.greedy_too=true: a file has one way of answering; leave it out")
    if config.trainer.val_time_budget_s is not None:
        raise UserError(
            f"trainer.val_time_budget_s={config.trainer.val_time_budget_s}: a file has all answers or is not written; "
            "leave it out, and take fewer prompts with data.val_max_samples"
        )
    for item in overrides:
        if item.startswith((FOLDER, "reward.", "reward_model.")):
            raise UserError(
                f"{item} has no effect here: the run folder stands beside output=..., and nothing is scored "
                "(`python -m trainer.score` does that with the file); leave it out"
            )


@command
def main(argv: list[str]) -> int:
    """The command; returns the exit status."""
    if "--help" in argv or "-h" in argv:
        print(__doc__)
        return 0
    from trainer.evaluate.evaluation import split_arguments

    names, options = split_arguments([item for item in argv if not item.startswith(OUTPUT)])
    if len(names) != 1:
        print(USAGE, file=sys.stderr)
        return 2
    return generate(names[0], output_file([item for item in argv if item.startswith(OUTPUT)]), options)


if __name__ == "__main__":
    sys.exit(main())
