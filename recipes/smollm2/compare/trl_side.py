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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import recipes.smollm2.tasks  # noqa: F401  # registers the reward
from recipes.smollm2.compare.settings import trl_settings
from trainer.tracking import METRICS, TRAINED
from verl_lite.rewards import default_compute_score

if TYPE_CHECKING:
    import torch
    from transformers import TrainerCallback, TrainerState
    from trl import GRPOTrainer

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

Completions = Sequence[Sequence[Mapping[str, str]]]
"""Answers as TRL gives them to a reward: each is a chat of one message."""


class LastStep(TypedDict, total=False):
    """The content of answers.json: what TRL sampled, and computed from it, in the last step.

    Attributes:
        prompts: Token ids of the question of each answer.
        answers: Token ids of each answer.
        rewards: `text_reward` of each answer, with which TRL trains.
        right: `addition_reward` of each answer.
        metrics: The metrics of the step.
    """

    prompts: list[list[int]]
    answers: list[list[int]]
    rewards: list[float]
    right: list[float]
    metrics: dict[str, float]


def addition_reward(completions: Completions, ground_truth: Sequence[str], **_: object) -> list[float]:
    """Scores answers with the reward of the addition task, in the form that TRL calls."""
    rewards = []
    for [message], truth in zip(completions, ground_truth, strict=True):
        reward = default_compute_score("smollm2/addition", message["content"], truth)
        rewards.append(reward)
    return rewards


def text_reward(completions: Completions, **_: object) -> list[float]:
    """Scores answers by their number of characters, in which the answers to a question differ."""
    return [len(message["content"]) % 5 / 4 for [message] in completions]


def main() -> None:
    """Trains and writes the files."""
    options = _options()
    questions = _read_questions(options.questions)
    # here, because `runs.py` imports this module where TRL need not be installed
    import torch
    from datasets import Dataset
    from transformers import PrinterCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    last_step: LastStep = {}
    trainer_class = GRPOTrainer
    reward_functions: list[Callable[..., list[float]]] = [addition_reward]
    if options.keep_answers:
        trainer_class = _recording_trainer(last_step)
        reward_functions = [text_reward, addition_reward]

    trainer = trainer_class(
        model=str(options.model),
        reward_funcs=reward_functions,
        args=GRPOConfig(**_grpo_arguments(options)),
        train_dataset=Dataset.from_dict(questions),
        callbacks=[_report(options.folder, last_step)],
    )
    # its lines would repeat those of `_report`
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=_newest_checkpoint(options.folder))
    if options.keep_answers:
        (options.folder / "answers.json").write_text(json.dumps(last_step))


def _recording_trainer(last_step: LastStep) -> type[GRPOTrainer]:
    """Returns a `GRPOTrainer` that writes the tokens and rewards of each step into `last_step`."""
    from trl import GRPOTrainer

    class Recording(GRPOTrainer):
        # TRL divides the result of this method into micro-batches, so that here a step is still whole
        def _generate_and_score_completions(self, inputs: object) -> dict[str, torch.Tensor]:
            batch: dict[str, torch.Tensor] = super()._generate_and_score_completions(inputs)
            last_step["prompts"] = _unpadded(batch["prompt_ids"], batch["prompt_mask"])
            last_step["answers"] = _unpadded(batch["completion_ids"], batch["completion_mask"])
            # TRL keeps the rewards of the last step under the names of their functions
            rewards = self._logs["rewards"]
            last_step["rewards"] = list(rewards[text_reward.__name__])
            last_step["right"] = list(rewards[addition_reward.__name__])
            return batch

    return Recording


def _report(folder: Path, last_step: LastStep) -> TrainerCallback:
    """Returns a callback that appends the metrics of each step to metrics.jsonl, and writes them into `last_step`."""
    from transformers import TrainerCallback

    class Report(TrainerCallback):
        started = 0.0
        seconds = 0.0

        def on_step_begin(self, *_: object, **__: object) -> None:
            self.started = time.perf_counter()

        def on_step_end(self, *_: object, **__: object) -> None:
            self.seconds = time.perf_counter() - self.started

        # after `on_step_end`, because TRL logs a step when it is complete
        def on_log(
            self, args: object, state: TrainerState, control: object, logs: Mapping[str, float], **_: object
        ) -> None:
            # the summary after the last step has no reward
            if "reward" not in logs:
                return
            step = state.global_step
            metrics = {ours: logs[theirs] for theirs, ours in LOGGED.items()}
            metrics |= {"timing_s/step": self.seconds, TRAINED: step}
            last_step["metrics"] = metrics
            print(f"step {step}: reward {logs['reward']:.3f}, {self.seconds:.1f} s", flush=True)
            line = json.dumps({"step": step, "data": metrics})
            with (folder / METRICS).open("a") as file:
                file.write(f"{line}\n")

    return Report()


def _read_questions(path: Path) -> dict[str, list[object]]:
    """Returns the columns of a prompt file that TRL needs: the prompts and their ground truths."""
    import pyarrow.parquet as pq

    prompts = []
    truths = []
    for row in pq.read_table(path).to_pylist():
        prompts.append(row["prompt"])
        truths.append(row["reward_model"]["ground_truth"])
    return {"prompt": prompts, "ground_truth": truths}


def _grpo_arguments(options: argparse.Namespace) -> dict[str, object]:
    """Returns the arguments of `GRPOConfig`: the settings of the comparison and those of this run."""
    arguments: dict[str, object] = {
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
    """Parses the command line."""
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


def _unpadded(ids: torch.Tensor, mask: torch.Tensor) -> list[list[int]]:
    """Returns the tokens of each row without padding."""
    rows = []
    for row, is_token in zip(ids, mask.bool(), strict=True):
        tokens = row[is_token].tolist()
        rows.append(tokens)
    return rows


if __name__ == "__main__":
    main()
