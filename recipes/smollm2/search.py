"""`python -m recipes.smollm2.search FOLDER [--questions N]`: which tasks of reasoning-gym does SmolLM2 solve sometimes?

A task can be learnt by reinforcement learning if some answers are right and others are not. The command writes N
questions (24) of each task with short questions and answers, samples one answer and one greedy answer to each by
`trainer.main_eval`, and prints the tasks by their share of right answers. The questions are those of reasoning-gym's
generators with their default settings, and so more difficult than those that `tasks.py` trains on.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from recipes.made_data import Question, reasoning_gym_entries, write_parquet
from recipes.smollm2 import model
from recipes.smollm2.tasks import gym_question
from recipes.stages import call
from trainer.cli import command, leave

MAX_QUESTION = 600
"""Characters of the longest question of a task."""
MAX_ANSWER = 40
"""Characters of the longest answer of a task."""
NEED_FILES = ("composite", "codeio", "arc_agi", "rearc")
"""Tasks that need other packages or files, or consist of other tasks."""
SAMPLED = "val-core/reasoning_gym/{task}/reward/mean@1"
GREEDY = "val-aux/reasoning_gym/{task}/greedy/reward/mean@1"


def questions_of(task: str, count: int) -> list[Question]:
    """Returns questions of a task, or an empty list if one of them or of their answers is long."""
    questions = []
    for entry in reasoning_gym_entries(task, seed=1, size=count):
        text = entry["question"].strip()
        answer = str(entry["answer"])
        if len(text) > MAX_QUESTION or len(answer) > MAX_ANSWER:
            return []
        questions.append(gym_question(task, entry))
    return questions


def task_names() -> list[str]:
    """Returns the names of all tasks that need nothing but reasoning-gym."""
    from reasoning_gym.factory import DATASETS

    # sorted, so that a repeated command writes the same file
    return sorted(DATASETS.keys() - set(NEED_FILES))


def write_questions(file: Path, count: int) -> list[str]:
    """Writes questions of all tasks that have short ones, and returns the names of these tasks."""
    rows = []
    names = []
    for task in task_names():
        questions = questions_of(task, count)
        if questions:
            names.append(task)
        rows += [question.row("test", index) for index, question in enumerate(questions)]
    write_parquet(rows, file)
    return names


def table(names: Sequence[str], metrics: dict[str, float], count: int) -> Iterator[str]:
    """Yields the lines of a table of the tasks with a right answer, best first, and lines with the others."""
    unsolved = []
    unscored = []
    solved = []
    for name in names:
        sampled = metrics.get(SAMPLED.format(task=name))
        greedy = metrics.get(GREEDY.format(task=name))
        if sampled is None or greedy is None:
            unscored.append(name)
        elif sampled or greedy:
            solved.append((name, sampled, greedy))
        else:
            unsolved.append(name)
    solved.sort(key=lambda task: task[1] + task[2], reverse=True)

    yield f"| task, {count} questions | sampled | greedy |"
    yield "|---|---|---|"
    for name, sampled, greedy in solved:
        yield f"| {name} | {sampled:.2f} | {greedy:.2f} |"
    yield ""
    yield f"No right answer: {', '.join(unsolved)}"
    if unscored:
        yield f"Not scored, because the reward failed for all answers: {', '.join(unscored)}"


@command
def main(argv: list[str]) -> int:
    """Runs the search and returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m recipes.smollm2.search", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--questions", type=int, default=24)
    arguments = parser.parse_args(argv)
    if arguments.questions < 1:
        parser.error(f"--questions {arguments.questions}: expected at least 1")
    # another number of questions is another evaluation; the same number continues a stopped one
    folder = arguments.folder.expanduser().absolute() / f"{arguments.questions}_questions"
    file = folder / "questions.parquet"
    names = write_questions(file, arguments.questions)

    run = folder / "evaluation"
    options = [
        f"data.val_files={file}",
        "data.max_prompt_length=512",
        # 600 characters can be more than 512 tokens
        "data.filter_overlong_prompts=true",
        "data.max_response_length=32",
        "rollout.val_kwargs.do_sample=true",
        "rollout.val_kwargs.temperature=1.0",
        "rollout.val_kwargs.greedy_too=true",
        f"trainer.default_local_dir={run}",
    ]
    # continues a stopped evaluation of the same questions
    call("trainer.main_eval", str(model.make()), *options)

    [file_of_results] = run.rglob("results.json")
    results = json.loads(file_of_results.read_text())
    lines = table(names, results["metrics"], arguments.questions)
    print("", *lines, sep="\n")
    return 0


if __name__ == "__main__":
    leave(main())
