"""Our side of `bench step`: `RayPPOTrainer` as the main job builds it, one step at a time on command.

Reads a line from standard input before each step and answers on the given file descriptor with one JSON line.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tests.bench.step_task import LEARNING_RATE, SAMPLES, Lengths


def main() -> None:
    """argv: task folder, JSON of Lengths, file descriptor for answers, then more overrides."""
    folder, lengths, answers = Path(sys.argv[1]), Lengths(**json.loads(sys.argv[2])), os.fdopen(int(sys.argv[3]), "w")
    from trainer.cli import prepare_driver

    prepare_driver()
    from trainer.build import run_ppo
    from trainer.ray_trainer import RayPPOTrainer
    from verl_lite.protocol import DataProto

    class OnCommand(RayPPOTrainer):
        """The same trainer; the stage `collect` waits for a line, `log_step` reports."""

        def log_step(self, batch: DataProto, validation: dict[str, float]) -> None:
            row = {
                "seconds": self.timing["step"],
                "completions": len(batch),
                "tokens": int(batch.batch["response_mask"].sum()),
                "stages": self.timing,
            }
            answers.write(json.dumps(row) + "\n")
            answers.flush()
            sys.stdin.readline()

    overrides = {
        "model.path": folder / "model",
        "model.enable_gradient_checkpointing": False,
        "data.train_files": folder / "train.parquet",
        "data.train_batch_size": lengths.prompts,
        "data.max_prompt_length": 16,
        "data.max_response_length": lengths.maximum,
        "actor.ppo_mini_batch_size": lengths.prompts,
        "actor.optim.lr": LEARNING_RATE,
        "actor.fsdp_config.wrap_policy.min_num_params": 10_000_000,
        "rollout.n": SAMPLES,
        "rollout.ignore_eos": lengths.exact,
        "reward.custom_reward_function.path": Path(__file__).parent / "step_task.py",
        "trainer.total_training_steps": 10_000,
        "trainer.total_epochs": 10_000,
        "trainer.save_freq": 0,
        "trainer.logger": "[jsonl]",
        "trainer.default_local_dir": folder / f"ours-{lengths.name}",
    }
    sys.stdin.readline()
    run_ppo([*(f"{key}={value}" for key, value in overrides.items()), *sys.argv[4:]], trainer_class=OnCommand)


if __name__ == "__main__":
    main()
