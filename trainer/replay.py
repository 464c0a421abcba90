"""`python -m trainer.replay RUN/crash/step_N [--pdb] [key=value ...]`: runs the step of a crash dump once more.

Everything runs in this process (trainer.backend=inline), so that breakpoints hold in workers too; --pdb stops where the
error is raised. The weights are those of the newest checkpoint that the run had, else the model's own: if it failed
later than that, they are older than they were. A batch that was complete (answers and scores) is taken from the
dump; else answers are sampled again with the same seeds.
"""

import pdb
from pathlib import Path

from trainer.cli import command
from verl_lite.errors import UserError, printable

IN_THIS_PROCESS = """
    trainer.backend=inline trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.logger=[console]
    trainer.val_before_train=false trainer.test_freq=0 trainer.save_freq=0 trainer.resume_mode=disable
    trainer.max_actor_ckpt_to_keep=null trainer.async_save=false ~trainer.resume_from_path ~trainer.resume_allow
    rollout.tensor_model_parallel_size=1
""".split()
EPISODES = ["agentic.env_pool.num_workers=0", "~agentic.env_pool.timeout_s"]


def replay(folder: Path, overrides: list[str]) -> int:
    """Runs the step; returns the exit status of the run."""
    from trainer.build import run_ppo
    from trainer.crash_dump import read_dump
    from trainer.recipe import recipe_overrides, trainer_of
    from verl_lite.config import load_config
    from verl_lite.protocol import DataProto

    failed = read_dump(folder)
    made_with = ["--config", str(folder / "config.yaml")]
    config = load_config(made_with, recipe_loader=recipe_overrides).config
    alone = EPISODES if config.is_agentic else ["reward.num_workers=0"]
    arguments = [*made_with, *IN_THIS_PROCESS, *alone, f"trainer.default_local_dir={folder / 'replay'}"]
    if failed.checkpoint is not None and Path(failed.checkpoint).is_dir():
        arguments += ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={failed.checkpoint}"]
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
    return run_ppo([*arguments, *overrides], trainer_class=Replay)


@command
def main(argv: list[str]) -> int:
    """The command; returns the exit status."""
    if not argv or argv[0].startswith("-") or "=" in argv[0]:
        raise UserError("usage: python -m trainer.replay RUN/crash/step_N [--pdb] [key=value ...]")
    try:
        return replay(Path(argv[0]).expanduser().absolute(), [word for word in argv[1:] if word != "--pdb"])
    except UserError:  # a wrong folder or option: nothing to look at
        raise
    except Exception as error:
        if "--pdb" in argv:
            print(printable(f"\n{type(error).__name__}: {error}"))
            print("Where it was raised; q ends, w shows the whole stack.")
            pdb.post_mortem(error.__traceback__)
        raise


if __name__ == "__main__":
    raise SystemExit(main())
