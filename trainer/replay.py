"""`python -m trainer.replay RUN/crash/step_N [--pdb] [key=value ...]`: repeats the step of a crash dump.

Everything runs in this process (trainer.backend=inline), so breakpoints also work in workers; --pdb opens the debugger
where the error is raised. The run starts from its newest checkpoint, or from the model if there is none.

A step of PPO is run alone, possibly with older weights than those it failed with. Its batch is taken from the dump if
it was complete (responses and scores); otherwise responses are sampled again with the same seeds. Supervised training
also repeats the steps between the checkpoint and the failed step, so the weights are the same.
"""

import pdb
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.cli import command
from verl_lite.errors import UserError, printable

if TYPE_CHECKING:
    from trainer.checkpoint.crash_dump import FailedStep
    from trainer.data.preferences import Pair
    from trainer.data.sft_dataset import Example
    from trainer.observe.tracking import Tracking
    from trainer.supervised.loop import SupervisedTrainer

IN_THIS_PROCESS = """
    trainer.backend=inline trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.logger=[console]
    trainer.val_before_train=false trainer.test_freq=0 trainer.save_freq=0 trainer.resume_mode=disable
    trainer.max_actor_ckpt_to_keep=null trainer.async_save=false trainer.profile_steps=[]
    ~trainer.resume_from_path ~trainer.resume_allow ~trainer.callbacks ~trainer.early_stopping
""".split()
ONE_DEVICE = ["rollout.tensor_model_parallel_size=1", "hybrid_engine=true", "rollout.nnodes=0"]
# without processes of their own, environments have no time limit
EPISODES = ["agentic.env_pool.num_workers=0", "~agentic.env_pool.timeout_s"]


def replay(folder: Path, overrides: list[str]) -> int:
    """Repeats the step of a crash dump. Returns the exit status of the run.

    Args:
        folder: The crash dump.
        overrides: Options that replace those of the run.
    """
    from trainer.checkpoint.crash_dump import read_dump

    failed = read_dump(folder)
    arguments = ["--config", str(folder / "config.yaml"), *IN_THIS_PROCESS]
    arguments.append(f"trainer.default_local_dir={folder / 'replay'}")
    # the checkpoint may have been deleted since; then the run starts from the model
    if failed.checkpoint is not None and Path(failed.checkpoint).is_dir():
        arguments += ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={failed.checkpoint}"]
    # last, because they replace the others
    arguments += overrides

    heading = f"Step {failed.step}, which failed in {failed.phase}"
    weights = f"weights of {failed.checkpoint or 'the model'}"
    if failed.sampling is None:
        print(f"{heading}: {weights}")
        return _replay_supervised(failed, arguments)
    origin = "sampled again" if failed.batch is None else "from the dump"
    print(f"{heading}: answers {origin}, {weights}")
    return _replay_ppo(failed, arguments)


def _replay_supervised(failed: "FailedStep", arguments: list[str]) -> int:
    """Repeats the steps from the checkpoint to the failed one."""
    from trainer.launch.run import run
    from verl_lite.config import load_schema

    class ReplayJob(failed.job):  # type: ignore[name-defined]
        # if the step fails again, there is nothing new to replay
        replays_steps = False

        @contextmanager
        def build(self, tracking: "Tracking") -> Iterator["SupervisedTrainer[Example | Pair]"]:
            with super().build(tracking) as trainer:
                # the workers have the schedule of the whole run
                trainer.steps.total = failed.step
                yield trainer

    loaded = load_schema(arguments, failed.options)
    return run(ReplayJob, loaded, arguments)


def _replay_ppo(failed: "FailedStep", arguments: list[str]) -> int:
    """Repeats the failed step alone."""
    from trainer.launch.ppo_job import run_ppo
    from trainer.recipe import recipe_overrides, trainer_of
    from verl_lite.config import load_config
    from verl_lite.protocol import DataProto

    saved_options = arguments[:2]  # --config FILE
    config = load_config(saved_options, recipe_loader=recipe_overrides).config
    standard_trainer = trainer_of(config)

    class Replay(standard_trainer):  # type: ignore[misc, valid-type]
        def resume(self) -> None:
            super().resume()
            self.steps.restrict_to_step(failed.step, failed.sampling)

        def collect_batch(self) -> DataProto:
            if failed.batch is not None:
                return failed.batch
            return super().collect_batch()

        def score(self, batch: DataProto) -> DataProto:
            # the batch of a dump has its scores
            if failed.batch is not None:
                return batch
            return super().score(batch)

    # rewards or environments run in this process, where a debugger can stop in them
    in_this_process = EPISODES
    if config.reads_prompts:
        in_this_process = ["reward.num_workers=0"]
    # they replace the saved options, and the user's overrides at the end replace them
    words = [*saved_options, *ONE_DEVICE, *in_this_process, *arguments[2:]]
    return run_ppo(words, trainer_class=Replay)


@command
def main(argv: list[str]) -> int:
    """Runs the command and returns its exit status."""
    if not argv or argv[0].startswith("-") or "=" in argv[0]:
        raise UserError("usage: python -m trainer.replay RUN/crash/step_N [--pdb] [key=value ...]")
    folder = Path(argv[0]).expanduser().absolute()
    overrides = [word for word in argv[1:] if word != "--pdb"]
    try:
        return replay(folder, overrides)
    except UserError:
        # a wrong folder or option: there is nothing to debug
        raise
    except Exception as error:
        if "--pdb" in argv:
            print(printable(f"\n{type(error).__name__}: {error}"))
            print("Where it was raised; q ends, w shows the whole stack.")
            pdb.post_mortem(error.__traceback__)
        raise


if __name__ == "__main__":
    raise SystemExit(main())
