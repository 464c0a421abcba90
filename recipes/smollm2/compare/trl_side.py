"""TRL's side of the comparison, in a process of its own: `GRPOTrainer` on the addition task.

Appends the metrics of each step to FOLDER/metrics.jsonl under this library's names, and writes checkpoints, also one of
the last step, into FOLDER/checkpoints. The same command continues a stopped run from its newest checkpoint. With
--keep-answers it trains with another reward, which varies whatever the model can do, and writes FOLDER/answers.json:
tokens, rewards, loss and gradient norm of the last step, which `recipes.smollm2.compare.same_answers` repeats here.

    python -m recipes.smollm2.compare.trl_side FOLDER MODEL QUESTIONS STEPS SEED [--keep-answers]
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import recipes.smollm2.tasks  # noqa: F401  # registers the reward
from recipes.smollm2.compare.settings import trl_settings
from trainer.tracking import METRICS, TRAINED
from verl_lite.rewards import default_compute_score

CHECKPOINTS = "checkpoints"
LOGGED = {
    "reward": "critic/score/mean",
    "completions/mean_length": "response_length/mean",
    "completions/clipped_ratio": "response_length/clip_ratio",
    "loss": "actor/pg_loss",
    "grad_norm": "actor/grad_norm",
    "entropy": "actor/entropy",
}
"""The logged values of TRL that are kept, and their names here."""


def addition_reward(completions: Sequence[Any], ground_truth: Sequence[str], **_: Any) -> list[float]:
    """Scores answers with the reward of the addition task, in the form that TRL calls."""
    rewards = []
    for completion, truth in zip(completions, ground_truth, strict=True):
        rewards.append(default_compute_score("smollm2/addition", completion[0]["content"], truth))
    return rewards


def text_reward(completions: Sequence[Any], **_: Any) -> list[float]:
    """Scores answers by their number of characters, in which the answers to a question differ."""
    return [len(completion[0]["content"]) % 5 / 4 for completion in completions]


def main() -> None:
    """Trains and writes the files."""
    options = _options()
    folder: Path = options.folder
    questions = _read_questions(options.questions)
    import torch
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    answers: dict[str, Any] = {}

    class Recording(GRPOTrainer):
        """The same trainer. Keeps the tokens of a step if they are wanted."""

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            batch = super()._generate_and_score_completions(inputs)
            if options.keep_answers:
                rewards: Any = self._logs["rewards"]
                answers.update(
                    prompts=_unpadded(batch["prompt_ids"], batch["prompt_mask"]),
                    answers=_unpadded(batch["completion_ids"], batch["completion_mask"]),
                    rewards=list(rewards[text_reward.__name__]),
                    right=list(rewards[addition_reward.__name__]),
                )
            return batch

    class Report(TrainerCallback):
        """Appends a line to metrics.jsonl after each step."""

        started = 0.0
        seconds = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.started = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.seconds = time.perf_counter() - self.started

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
            if "reward" not in logs:
                return  # the summary after the last step
            metrics = {ours: logs[theirs] for theirs, ours in LOGGED.items()}
            metrics |= {"timing_s/step": self.seconds, TRAINED: state.global_step}
            answers["metrics"] = metrics
            print(f"step {state.global_step}: reward {logs['reward']:.3f}, {self.seconds:.1f} s", flush=True)
            with (folder / METRICS).open("a") as file:
                file.write(json.dumps({"step": state.global_step, "data": metrics}) + "\n")

    reward_functions: list[Any] = [addition_reward]
    if options.keep_answers:
        reward_functions = [text_reward, addition_reward]
    trainer = Recording(
        model=str(options.model),
        reward_funcs=reward_functions,
        args=GRPOConfig(**_grpo_arguments(options)),
        train_dataset=Dataset.from_dict(questions),
        callbacks=[Report()],
    )
    trainer.remove_callback(PrinterCallback)  # its lines would repeat those of Report
    trainer.train(resume_from_checkpoint=_newest_checkpoint(folder))
    if options.keep_answers:
        (folder / "answers.json").write_text(json.dumps(answers))


def _read_questions(path: Path) -> dict[str, list[Any]]:
    """Returns the columns of a prompt file that TRL needs: the prompts and their ground truths."""
    import pyarrow.parquet as pq

    rows = pq.read_table(path).to_pylist()
    return {
        "prompt": [row["prompt"] for row in rows],
        "ground_truth": [row["reward_model"]["ground_truth"] for row in rows],
    }


def _grpo_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the arguments of `GRPOConfig`: the settings of the comparison and those of this run."""
    arguments: dict[str, Any] = {
        "output_dir": str(options.folder / CHECKPOINTS),
        "seed": options.seed,
        "max_steps": options.steps,
        **trl_settings(),
    }
    if options.keep_answers:
        # the answers are also scored with the reward of the task, which has no weight
        arguments["reward_weights"] = [1.0, 0.0]
    return arguments


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m recipes.smollm2.compare.trl_side", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("questions", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("seed", type=int)
    parser.add_argument("--keep-answers", action="store_true")
    return parser.parse_args()


def checkpoint_of(folder: Path, step: int) -> Path:
    """Returns the folder of a checkpoint, which is also a model folder."""
    return folder / CHECKPOINTS / f"checkpoint-{step}"


def is_complete(checkpoint: Path) -> bool:
    """Returns True if a checkpoint has the file that is written last."""
    return (checkpoint / "trainer_state.json").is_file()


def _newest_checkpoint(folder: Path) -> str | None:
    """Returns the newest complete checkpoint of a run, or None."""
    complete_steps = []
    for checkpoint in (folder / CHECKPOINTS).glob("checkpoint-*"):
        if is_complete(checkpoint):
            complete_steps.append(int(checkpoint.name.removeprefix("checkpoint-")))
    if not complete_steps:
        return None
    return str(checkpoint_of(folder, max(complete_steps)))


def _unpadded(ids: Any, mask: Any) -> list[list[int]]:
    """Returns the tokens of each row without padding."""
    rows = []
    for row, is_token in zip(ids, mask, strict=True):
        rows.append(row[is_token.bool()].tolist())
    return rows


if __name__ == "__main__":
    main()
