"""A word problem as a row of verl's schema, with the sentence that asks for the format of the answer."""

from __future__ import annotations

from verl_lite.errors import UserError
from verl_lite.rewards.gsm8k import extract_answer

DATA_SOURCE = "openai/gsm8k"
INSTRUCTION = ' Let\'s think step by step and output the final answer after "####".'
"""verl's wording."""


def gsm8k_row(question: str, answer: str, split: str, index: int) -> dict[str, object]:
    """answer: a solution whose last line is `#### N`. Raises UserError if there is no such line."""
    truth = extract_answer(answer)
    if truth is None:
        raise UserError(
            f"{split} row {index}: the answer {answer[-80:]!r} has no number behind ####, which is the ground truth"
        )
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": question + INSTRUCTION}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": split, "index": index, "question": question, "answer": answer},
    }
