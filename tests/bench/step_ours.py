"""Our side of `bench step`: `RayPPOTrainer` as the main job builds it, one step at a time on command.

Reads a line from standard input before each step and answers on the given file descriptor with one JSON line.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.bench.step_task import arguments, begun


def main() -> None:
    """argv: as `begun` has them, then more overrides."""
    folder, lengths, report = begun()
    from trainer.cli import prepare_driver

    prepare_driver()
    from trainer.launch.ppo_job import run_ppo
    from trainer.ray_trainer import RayPPOTrainer
    from verl_lite.protocol import DataProto

    class OnCommand(RayPPOTrainer):
        """The same trainer, whose `log_step` reports and waits for a line."""

        def log_step(self, batch: DataProto, validation: dict[str, float]) -> None:
            tokens = int(batch.batch["response_mask"].sum())
            report(seconds=self.timing["step"], completions=len(batch), tokens=tokens, stages=self.timing)
            sys.stdin.readline()

    own = {
        "rollout.ignore_eos": lengths.exact,
        "reward.custom_reward_function.path": Path(__file__).parent / "step_task.py",
        "trainer.total_training_steps": 10_000,
        "trainer.total_epochs": 10_000,
        "trainer.default_local_dir": folder / f"ours-{lengths.name}",
    }
    sys.stdin.readline()
    run_ppo([*arguments(folder, lengths, own), *sys.argv[4:]], trainer_class=OnCommand)


if __name__ == "__main__":
    main()
