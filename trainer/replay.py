"""`python -m trainer.replay RUN/crash/step_N [--pdb] [key=value ...]`: runs the step of a crash dump once more.

Everything runs in this process (trainer.backend=inline), so that breakpoints hold in workers too; --pdb stops where the
error is raised. The weights are those of the newest checkpoint that the run had, else the model's own: if it failed
later than that, they are older than they were. A batch that was complete (answers and scores) is taken from the
dump; else answers are sampled again with the same seeds.
"""

from __future__ import annotations

import pdb
import sys
from pathlib import Path

from trainer.cli import command

USAGE = "usage: python -m trainer.replay RUN/crash/step_N [--pdb] [key=value ...]"


def replay_arguments(folder: Path, checkpoint: str | None, overrides: list[str], acts: bool = False) -> list[str]:
    """The command line of the run that is the replay. acts: whether its samples are episodes of environments."""
    # in this process too: what scores, or what is acted in
    within = ["agentic.env_pool.num_workers=0", "~agentic.env_pool.timeout_s", "~agentic.env_pool.max_memory_mb"]
    arguments = [
        "--config", str(folder / "config.yaml"), "trainer.backend=inline", "trainer.n_gpus_per_node=1",
        "trainer.nnodes=1", f"trainer.default_local_dir={folder / 'replay'}", "trainer.logger=[console]",
        "trainer.val_before_train=false", "trainer.test_freq=0", "trainer.save_freq=0", "trainer.resume_mode=disable",
        "trainer.max_best_ckpt_to_keep=0", "trainer.max_actor_ckpt_to_keep=null", "trainer.async_save=false",
        "~trainer.resume_from_path", "~trainer.resume_allow", "~trainer.best_ckpt_metric",
        "rollout.tensor_model_parallel_size=1", *(within if acts else ["reward.num_workers=0"]),
    ]  # fmt: skip
    if checkpoint is not None and Path(checkpoint).is_dir():
        arguments += ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoint}"]
    return [*arguments, *overrides]


def replay(folder: Path, overrides: list[str]) -> int:
    """Runs the step; returns the exit status of the run."""
    from trainer.build import run_ppo
    from trainer.crash_dump import read_dump
    from trainer.recipe import recipe_overrides, trainer_of
    from verl_lite.config import load_config
    from verl_lite.protocol import DataProto

    failed = read_dump(folder)
    config = load_config(["--config", str(folder / "config.yaml")], recipe_loader=recipe_overrides).config
    arguments = replay_arguments(folder, failed.checkpoint, overrides, acts=config.is_agentic)
    trainer = trainer_of(config)

    class Replay(trainer):  # type: ignore[misc, valid-type]
        def resume(self) -> None:
            super().resume()
            self.steps.only(failed.step, failed.epoch, failed.prompts)

        def collect(self, prompts: DataProto) -> DataProto:
            return super().collect(prompts) if failed.batch is None else failed.batch

        def score(self, batch: DataProto) -> DataProto:
            return super().score(batch) if failed.batch is None else batch

    kept = "sampled again" if failed.batch is None else "from the dump"
    weights = failed.checkpoint or "the model"
    print(f"Step {failed.step}, which failed in {failed.phase}: answers {kept}, weights of {weights}")
    return run_ppo(arguments, trainer_class=Replay)


@command
def main(argv: list[str]) -> int:
    """The command; returns the exit status."""
    from verl_lite.errors import UserError

    if not argv or argv[0].startswith("-") or "=" in argv[0]:
        print(USAGE, file=sys.stderr)
        return 2
    folder = Path(argv[0]).expanduser().absolute()
    try:
        return replay(folder, [argument for argument in argv[1:] if argument != "--pdb"])
    except UserError:  # a wrong folder or option: nothing to look at
        raise
    except Exception as error:
        if "--pdb" in argv:
            print(f"\n{type(error).__name__}: {error}\nWhere it was raised; q ends, w shows the whole stack.")
            pdb.post_mortem(error.__traceback__)
        raise


if __name__ == "__main__":
    sys.exit(main())
