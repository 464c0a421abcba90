"""Questions for the calculator, and conversations of an agent who calls it with careless copies of the question.

    user        [calculator]17*8-5
    assistant   <tool_call>{"name": "calculator", "arguments": {"expression": "17*8-5"}}</tool_call>
    tool        131
    assistant   131

The demonstrated agent copies each digit wrongly with a probability, so that most of the demonstrated answers are wrong.
The same seed gives the same bytes.
"""

import random
from collections.abc import Iterator
from pathlib import Path

from recipes.made_data import Question, Row, careless, write_different_questions
from verl_lite.envs.calculator import evaluate, written

BEFORE = '{"name": "calculator", "arguments": {"expression": "'
AFTER = '"}}'
TOOL = "[calculator]"
WORDS = ("<tool_call>", "</tool_call>", BEFORE, AFTER, TOOL)
"""Words with one token each."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>"
    "{% else %}<|user|>"
    "{% if loop.first %}{% for tool in tools or [] %}[{{ tool['function']['name'] }}]{% endfor %}{% endif %}"
    "{{ message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Names the tools in front of the first message."""

ERROR = "error"
MIN_TERMS = 2
MAX_TERMS = 4
MAX_NUMBER = 99
WRONG_SHARE = 0.12
TEST_ROWS = 256
TRAIN_ROWS = 8192
DEMONSTRATIONS = 12_000


def write_data(folder: Path, seed: int) -> None:
    """Writes test.parquet, train.parquet and demonstrations.parquet into `folder`."""
    write_different_questions(
        folder,
        seed,
        questions,
        demonstration,
        test_rows=TEST_ROWS,
        train_rows=TRAIN_ROWS,
        demonstrations=DEMONSTRATIONS,
    )


def questions(rng: random.Random) -> Iterator[Question]:
    """Yields expressions with their values."""
    while True:
        text = str(rng.randint(1, MAX_NUMBER))
        terms = rng.randint(MIN_TERMS, MAX_TERMS)
        for _ in range(terms - 1):
            text += rng.choice("+-*")
            text += str(rng.randint(1, MAX_NUMBER))
        yield calculator_question(text)


def calculator_question(expression: str) -> Question:
    """Returns an expression with its value as a question."""
    answer = written(evaluate(expression))
    return Question("verl_lite/calculator", "arithmetic", expression, answer)


def demonstration(question: Question, rng: random.Random) -> Row:
    """Returns a conversation in which a careless agent miscopies digits of the question and of the result."""
    expression = ""
    for character in question.prompt:
        # `careless` would replace a sign by a letter
        if character.isdigit():
            expression += careless(character, WRONG_SHARE, rng)
        else:
            expression += character

    try:
        result = written(evaluate(expression))
    except ValueError:
        # a number begins with 0
        result = ERROR
    chat = [
        {"role": "user", "content": f"{TOOL}{question.prompt}"},
        {"role": "assistant", "content": f"<tool_call>{BEFORE}{expression}{AFTER}</tool_call>"},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": careless(result, WRONG_SHARE, rng)},
    ]
    return {"messages": chat}
