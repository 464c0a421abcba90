"""`python -m trainer.main_generate TARGET data.val_files=FILE --out FILE.parquet [key=value ...]`: samples responses to
each prompt and saves them, without rewards.

TARGET is a run folder (its newest checkpoint), a global_step_N folder, a model folder or a hub name.
rollout.val_kwargs.* sets the sampling, for example rollout.val_kwargs.n=8 with do_sample=true and a temperature. The
file has one row per response, with the columns of `trainer.evaluate.sample_files`. The folder FILE.parquet.run keeps
the responses generated so far; if the command was killed, the same command continues it. --help-config lists the
options.
"""

from pathlib import Path

from trainer.cli import command, leave, out_as_word
from verl_lite.config import load_config
from verl_lite.errors import UserError

USAGE = "usage: python -m trainer.main_generate RUN_OR_CHECKPOINT_OR_MODEL --out FILE.parquet [key=value ...]"
OUTPUT, FOLDER = "output=", "trainer.default_local_dir="
UNSCORED = ("~reward", "~reward_model", "rollout.val_kwargs.greedy_too=false")
"""Overrides that remove the settings of a run that are only needed for scores."""
REFUSED = (FOLDER, "reward.", "reward_model.", "rollout.val_kwargs.greedy_too=")


def generate(name: str, output: Path, overrides: list[str]) -> int:
    """Generates the responses, writes the file and returns the exit status. Raises UserError for options without effect
    here, agentic runs, and an `output` that another command wrote."""
    from trainer.build import run_ppo
    from trainer.evaluate.chunks import read_settings
    from trainer.evaluate.evaluation import CHUNKS, Generation, answer_settings, find_targets, folder_of
    from trainer.recipe import prepare_recipe, recipe_overrides

    for item in overrides:
        if item.startswith(REFUSED):
            raise UserError(
                f"{item} has no effect here; remove it. main_generate computes no scores and no greedy baseline "
                "(`python -m trainer.score` scores the file), and its run folder is FILE.parquet.run"
            )
    [target] = find_targets(name)
    argv = [*target.arguments, *UNSCORED, "trainer.experiment_name=generate", *overrides]
    argv.append(f"{FOLDER}{folder_of(output)}")
    loaded = load_config(argv, recipe_loader=recipe_overrides)
    if loaded.action != "run":
        return run_ppo(argv)
    if loaded.config.is_agentic:
        raise UserError(
            "main_generate answers the prompts of a dataset, but this run is agentic. To save episodes, use "
            "`python -m trainer.main_eval` with trainer.validation_data_dir=FOLDER"
        )
    prepare_recipe(loaded.config)
    if output.exists():
        settings = read_settings(folder_of(output) / CHUNKS)
        if settings is None:
            raise UserError(
                f"--out {output} exists, but {folder_of(output)}, which would name its settings, does not; choose "
                "another file"
            )
        if settings == answer_settings(loaded.config, are_scored=False):
            print(f"{output} already has all answers under these settings")
            return 0
    status = run_ppo(argv, trainer_class=Generation)
    if not status:
        print(f"answers: {output}")
    return status


@command
def main(argv: list[str]) -> int:
    """Runs the command and returns its exit status."""
    if "--help" in argv or "-h" in argv:
        print(__doc__)
        return 0
    from trainer.evaluate.evaluation import split_arguments

    argv = out_as_word(argv, "output")
    outputs = [item.removeprefix(OUTPUT) for item in argv if item.startswith(OUTPUT)]
    names, options = split_arguments([item for item in argv if not item.startswith(OUTPUT)])
    if len(names) != 1:
        raise UserError(USAGE)
    if len(outputs) != 1 or not outputs[0].endswith(".parquet"):
        raise UserError(f"--out {','.join(outputs)}: expected exactly one output file, --out FILE.parquet")
    return generate(names[0], Path(outputs[0]).expanduser().absolute(), options)


if __name__ == "__main__":
    leave(main())
