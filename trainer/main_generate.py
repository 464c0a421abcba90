"""`python -m trainer.main_generate TARGET data.val_files=FILE --out FILE.parquet [key=value ...]`: samples responses to
each prompt and saves them, without rewards.

TARGET is a run folder (its newest checkpoint), a global_step_N folder, a model folder or a hub name.
rollout.val_kwargs.* sets the sampling, for example rollout.val_kwargs.n=8 with do_sample=true and a temperature. The
file has one row per response, with the columns of `trainer.validation.sample_files`. The folder FILE.parquet.run keeps
the responses generated so far; if the command was killed, the same command continues it. --help-config lists the
options.
"""

from pathlib import Path

from trainer.cli import command, leave, out_as_word
from verl_lite.errors import UserError

USAGE = "usage: python -m trainer.main_generate RUN_OR_CHECKPOINT_OR_MODEL --out FILE.parquet [key=value ...]"
OUTPUT = "output="


@command
def main(argv: list[str]) -> int:
    """Runs the command and returns its exit status."""
    if "--help" in argv or "-h" in argv:
        print(__doc__)
        return 0
    from trainer.evaluate.generation import generate
    from trainer.evaluate.targets import split_arguments

    argv = out_as_word(argv, "output")
    outputs = [item.removeprefix(OUTPUT) for item in argv if item.startswith(OUTPUT)]
    other_words = [item for item in argv if not item.startswith(OUTPUT)]
    names, options = split_arguments(other_words)
    if len(names) != 1:
        raise UserError(USAGE)
    if len(outputs) != 1 or not outputs[0].endswith(".parquet"):
        raise UserError(f"--out {','.join(outputs)}: expected exactly one output file, --out FILE.parquet")
    output = Path(outputs[0]).expanduser()
    return generate(names[0], output.absolute(), options)


if __name__ == "__main__":
    leave(main())
