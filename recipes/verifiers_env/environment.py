"""An environment for the package verifiers: the questions of the quickstart, with exact match as its rubric."""

import functools
import random
import threading
from typing import Any

from recipes.quickstart import data

_loading = threading.Lock()
NUMBER, SEEDS = 512, {"train": 1, "eval": 2}


def load_environment() -> Any:
    """Returns the environment, which the episodes of a process share. verifiers calls this function by its name."""
    with _loading:
        return _environment()


@functools.cache
def _environment() -> Any:
    import verifiers
    from datasets import Dataset

    def rows(split: str) -> Any:
        rng = random.Random(SEEDS[split])
        sources = [data.sort_questions(rng), data.add_questions(rng)]
        questions = data.draw(sources, NUMBER, rng, (1, 1))
        return Dataset.from_list([{"question": question.prompt, "answer": question.answer} for question in questions])

    def exact(completion: Any, answer: str, **_: Any) -> float:
        return float(str(completion[-1]["content"]).strip() == answer)

    rubric = verifiers.Rubric(funcs=[exact])
    return verifiers.SingleTurnEnv(dataset=rows("train"), eval_dataset=rows("eval"), rubric=rubric)
