"""An environment for the package verifiers: the questions of the quickstart, with exact match as its rubric."""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from recipes.quickstart import data
from verl_lite.json_types import ChatMessage

if TYPE_CHECKING:
    from datasets import Dataset
    from verifiers import SingleTurnEnv

NUMBER = 512
SEEDS = {"train": 1, "eval": 2}

_loading = threading.Lock()


def load_environment() -> SingleTurnEnv:
    """Returns the environment, which the episodes of a process share. verifiers calls this function by its name."""
    # a cache alone would let two threads build it at the same time
    with _loading:
        return _environment()


@functools.cache
def _environment() -> SingleTurnEnv:
    """Builds the environment at the first call."""
    import verifiers

    rubric = verifiers.Rubric(funcs=[_is_exact])
    return verifiers.SingleTurnEnv(
        dataset=_questions("train"),
        eval_dataset=_questions("eval"),
        rubric=rubric,
    )


def _questions(split: str) -> Dataset:
    """Returns NUMBER sums and sorts of a split, `train` or `eval`."""
    from datasets import Dataset

    rng = random.Random(SEEDS[split])
    sources = [data.sort_questions(rng), data.add_questions(rng)]
    rows = []
    for question in data.draw(sources, NUMBER, rng, parts=(1, 1)):
        # the columns that verifiers reads
        rows.append({"question": question.prompt, "answer": question.answer})
    return Dataset.from_list(rows)


def _is_exact(completion: Sequence[ChatMessage], answer: str, **_: object) -> float:
    """Returns 1.0 if the last message is the answer, apart from blanks around it."""
    last_message = completion[-1]
    text = str(last_message["content"]).strip()
    return float(text == answer)
