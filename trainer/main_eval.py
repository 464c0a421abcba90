"""`python -m trainer.main_eval TARGET ... [--all-checkpoints] [key=value ...]`: validates checkpoints or models, and
prints a table of the results.

TARGET is a run folder (its newest checkpoint, or all with --all-checkpoints), a global_step_N folder, a model folder or
a hub name. A model also needs validation data: data.val_files=..., or environments by --config FILE or recipe=NAME. The
settings are those of the saved run; key=value overrides them, for example rollout.val_kwargs.n=8, with do_sample=true
and a temperature if the run validates greedily. Each evaluation is a new run folder under RUN/eval with a results.json.
If the command was killed, the same command continues it and repeats no finished work. The guide is
trainer/EVALUATION.md. --help-config lists the options.
"""

from trainer.cli import command, leave
from verl_lite.errors import UserError

USAGE = "usage: python -m trainer.main_eval RUN_OR_CHECKPOINT_OR_MODEL ... [--all-checkpoints] [key=value ...]"
ALL_CHECKPOINTS = "--all-checkpoints"


@command
def main(argv: list[str]) -> int:
    """Runs the command and returns its exit status."""
    if "--help" in argv or "-h" in argv:
        print(__doc__)
        return 0
    from trainer.evaluate.evaluation import evaluate_all
    from trainer.evaluate.targets import split_arguments

    other_words = [item for item in argv if item != ALL_CHECKPOINTS]
    names, options = split_arguments(other_words)
    if not names:
        raise UserError(USAGE)
    return evaluate_all(names, options, all_checkpoints=ALL_CHECKPOINTS in argv)


if __name__ == "__main__":
    leave(main())
