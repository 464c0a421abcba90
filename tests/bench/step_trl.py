"""The peer of `bench step`: TRL's GRPOTrainer in a process of its own, one step at a time on command.

Reads a line from standard input before each step and answers on the given file descriptor with one JSON line.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from tests.bench.step_task import LEARNING_RATE, begun, compute_score


def main() -> None:
    """argv: as `begun` has them, then settings of `GRPOConfig` as JSON."""
    folder, lengths, report = begun()
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    seen = {"completions": 0, "tokens": 0}

    def reward(completions: list[list[dict[str, str]]], completion_ids: list[list[int]], **_: Any) -> list[float]:
        seen["completions"] += len(completions)
        seen["tokens"] += sum(map(len, completion_ids))
        return [compute_score("bench", messages[0]["content"], "") for messages in completions]

    class OnCommand(TrainerCallback):
        """Waits for a line before each step, reports after it."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            sys.stdin.readline()
            seen.update(completions=0, tokens=0)
            self.started = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            report(seconds=time.perf_counter() - self.started, **seen, stages=dict(stages))
            stages.clear()

    stages: dict[str, float] = {}

    class Timed(GRPOTrainer):
        """The same trainer, with its generation timed."""

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            started = time.perf_counter()
            result = super()._generate_and_score_completions(inputs)
            stages["gen"] = stages.get("gen", 0.0) + time.perf_counter() - started
            return result

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    prompts = json.loads((folder / "prompts.json").read_text())
    args = GRPOConfig(
        output_dir=str(folder / "trl"),
        num_generations=lengths.samples,
        max_completion_length=lengths.maximum,
        generation_kwargs={"min_new_tokens": lengths.maximum} if lengths.exact else None,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_steps=10_000,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        num_iterations=1,
        use_cpu=True,
        bf16=False,
        max_grad_norm=1.0,
        logging_steps=1000,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
        **json.loads(sys.argv[4]),
    )
    trainer = Timed(
        model=str(folder / "model"),
        reward_funcs=reward,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        callbacks=[OnCommand()],
    )
    trainer.train()


if __name__ == "__main__":
    main()
