"""`python -m trainer.main_eval RUN [key=value ...]`: validates a checkpoint or a Hugging Face folder, and prints the
table.

RUN is a run folder (its newest checkpoint), a global_step_N folder, or a model folder (then name what to validate on:
data.val_files=..., or environments by --config FILE or recipe=NAME). The settings are those the run was saved with;
key=value replaces them, for example rollout.val_kwargs.n=8. The result is a run folder of its own under RUN/eval.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from trainer.environment import prepare_driver

USAGE = "usage: python -m trainer.main_eval RUN_OR_CHECKPOINT_OR_MODEL [key=value ...]"


def eval_arguments(target: Path, overrides: list[str]) -> list[str]:
    """The command line of the run that validates `target`. Raises UserError if there is nothing to validate."""
    from trainer.checkpoint import saved_steps
    from verl_lite.errors import UserError

    stamp = time.strftime("%Y%m%d-%H%M%S")
    only_validate = ["trainer.val_only=true", "trainer.save_freq=0", f"trainer.experiment_name=eval-{stamp}"]
    if (target / "data.pt").exists():
        run_dir, checkpoint = target.parent, target
    elif (target / "config.yaml").exists():
        steps = saved_steps(target)
        if not steps:
            raise UserError(f"{target} is a run without a checkpoint; run it with trainer.save_freq=-1 or above 0")
        run_dir, checkpoint = target, steps[max(steps)]
    elif (target / "config.json").exists():
        folder = f"trainer.default_local_dir=runs/eval/{target.name}-{stamp}"
        files = [item.split("=", 1)[1] for item in overrides if item.startswith("data.val_files=")]
        if not files and not any(item.startswith(("agentic.", "--config", "recipe=")) for item in overrides):
            raise UserError(
                f"{target} is a model folder: name what to validate on, data.val_files=PATH, or the environments: "
                "--config FILE or recipe=NAME"
            )
        train = [f"data.train_files={files[0]}"] if files else []
        return [f"model.path={target}", *train, folder, *only_validate, *overrides]
    else:
        raise UserError(
            f"{target}: neither a run folder (config.yaml), a checkpoint (data.pt) nor a model (config.json)"
        )
    resume = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoint}"]
    folder = f"trainer.default_local_dir={run_dir / 'eval' / stamp}"
    return ["--config", str(run_dir / "config.yaml"), *only_validate, *resume, folder, *overrides]


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    prepare_driver()
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0].startswith("-") or "=" in argv[0]:
        print(USAGE, file=sys.stderr)
        return 2
    from trainer.ending import run_command

    def command() -> int:
        from trainer.run import run_ppo

        return run_ppo(eval_arguments(Path(argv[0]).expanduser().absolute(), argv[1:]))

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())
