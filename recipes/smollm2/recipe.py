"""SmolLM2-135M-Instruct, a pretrained model, learns to add numbers of two digits on two CPU cores.

    make pretrained
    python -m trainer.main_ppo recipe=smollm2 key=value ...

The other recipes of this folder differ in the task and in its published settings: `recipe=recipes.smollm2.arithmetic`,
`.spell_backward`, `.length` and `.reversed_text`. All of them train the same model, which `model.py` converts once.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from recipes import made_data
from recipes.embedded import Made
from recipes.smollm2 import model, tasks

if TYPE_CHECKING:
    from verl_lite.config import PPOConfig, SFTConfig


def overrides() -> dict[str, object]:
    """Returns the settings of the run by dotted key; options on the command line override them."""
    return task_settings(
        "addition",
        questions=16,
        answers=8,
        prompt_tokens=64,
        answer_tokens=16,
        lr=1e-5,
        steps=40,
    )


def task_settings(
    name: str, *, questions: int, answers: int, prompt_tokens: int, answer_tokens: int, lr: float, steps: int
) -> dict[str, object]:
    """Returns the settings of a run on a task, with one optimizer step per training step.

    Sampled and greedy answers are validated before the run, in the middle and at the end.

    Args:
        name: Name of the task in `tasks.TASKS`.
        questions: Number of questions of a training step.
        answers: Number of answers to each question.
        prompt_tokens: Maximum number of tokens of a prompt.
        answer_tokens: Maximum number of tokens of an answer.
        lr: Learning rate.
        steps: Number of training steps.
    """
    folder = made_tasks().folder / name
    return {
        "model.path": str(model.folder()),
        "data.train_files": [str(folder / "train.parquet")],
        "data.val_files": [str(folder / "test.parquet")],
        "data.train_batch_size": questions,
        "data.max_prompt_length": prompt_tokens,
        "data.max_response_length": answer_tokens,
        "rollout.n": answers,
        # as in training, so that the accuracy is that of the policy that learns
        "rollout.val_kwargs.do_sample": True,
        "rollout.val_kwargs.temperature": 1.0,
        "rollout.val_kwargs.greedy_too": True,
        # the whole batch: one optimizer step, in which every ratio is 1
        "actor.ppo_mini_batch_size": questions,
        "actor.optim.lr": lr,
        # more than enough, so that the number of steps ends the run
        "trainer.total_epochs": 100,
        "trainer.total_training_steps": steps,
        "trainer.val_before_train": True,
        "trainer.test_freq": steps // 2,
    }


def made_tasks() -> Made:
    """Returns the cached files of all tasks."""
    return Made("smollm2-tasks", _write_tasks, [Path(tasks.__file__), Path(made_data.__file__)])


def _write_tasks(folder: Path) -> None:
    for name, task in tasks.TASKS.items():
        task.write(folder / name, name)


def prepare(config: PPOConfig | SFTConfig) -> None:
    """Converts the model and writes the files of the tasks, as far as the run uses them and the cache lacks them."""
    made_tasks().prepare(config)
    path = Path(config.model.path or "")
    if path.is_relative_to(model.folder().parent):
        model.make()
