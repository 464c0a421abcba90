"""An environment for the package verifiers: the questions of the quickstart, with exact match as its rubric."""

from __future__ import annotations

import functools
import random
import threading
from typing import TYPE_CHECKING, Any

from recipes.quickstart import data

if TYPE_CHECKING:
    from datasets import Dataset

NUMBER = 512
SEEDS = {"train": 1, "eval": 2}

_loading = threading.Lock()


def load_environment() -> Any:
    """Returns the environment, which the episodes of a process share. verifiers calls this function by its name."""
    with _loading:
        return _environment()


@functools.cache
def _environment() -> Any:
    import verifiers

    rubric = verifiers.Rubric(funcs=[_is_exact])
    return verifiers.SingleTurnEnv(dataset=_questions("train"), eval_dataset=_questions("eval"), rubric=rubric)


def _questions(split: str) -> Dataset:
    from datasets import Dataset

    rng = random.Random(SEEDS[split])
    sources = [data.sort_questions(rng), data.add_questions(rng)]
    rows = []
    for question in data.draw(sources, NUMBER, rng, (1, 1)):
        rows.append({"question": question.prompt, "answer": question.answer})
    return Dataset.from_list(rows)


def _is_exact(completion: Any, answer: str, **_: object) -> float:
    text = str(completion[-1]["content"]).strip()
    return float(text == answer)
