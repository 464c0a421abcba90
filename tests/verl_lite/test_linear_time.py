"""What reads an answer takes time in proportion to its length, whatever is in it: a megabyte takes seconds at most."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trainer.observe.final_report import FitResult, Sample, final_report
from verl_lite import gym_scores
from verl_lite.envs.actions import ActionParser
from verl_lite.envs.adapters import _HIGHLIGHTED
from verl_lite.envs.tool_calls import llama_calls, mistral_calls, parse_tool_calls
from verl_lite.rewards import default_compute_score, judge
from verl_lite.rewards.code import extract_code
from verl_lite.rewards.judge import read_verdict

CHARACTERS = 1_000_000
HANG_S = 60
REPEATED = (
    "`", "a", " ", "7", "\\", "{", "}", "<", "\n", "a,", "a ", "- ", "####", "\\boxed{", "Answer:", "score ", "score: ",
    "```", "```\n", "<answer>", "</answer>", "<think>", "<tool_call>", "<function=", "<function=f>", "<parameter=",
    "<parameter=p>", "<arg_key>a</arg_key><arg_value>", "[TOOL_CALLS]", "\x1b[1m", "$",
)  # fmt: skip


def reward(rule: str, truth: str = "72", **kwargs: Any) -> Callable[[str], Any]:
    return lambda text: default_compute_score(f"rule/{rule}", text, truth, **kwargs)


def verdict(text: str) -> None:
    with pytest.raises(ValueError):
        read_verdict(text, "number", 0, 10)


def report(text: str) -> None:
    sample = Sample(0, "uid", "source", "prompt", f"a{text}b", "72", 0.0, 1, "stop", 0, {})
    final_report(FitResult({}, {}, [sample]), Path("nowhere"), {}, {})


READERS: dict[str, Callable[[str], Any]] = {
    **{rule: reward(rule) for rule in ("exact_match", "gsm8k", "math_dapo", "exact_answer", "format")},
    "math_dapo of the box": reward("math_dapo", strict_box_verify=True),
    "math_verify": reward("math_verify"),
    "math_verify, not strict": reward("math_verify", strict=False),
    "multiple_choice": reward("multiple_choice", "B"),
    "code": extract_code,
    "judge": verdict,
    "the answer to a judge": lambda text: judge._as_material("<" + text, "<answer>{answer}</answer>"),
    "scores of reasoning-gym": lambda text: gym_scores.score(
        "coin_flip", lambda answer, entry: 0.0, text, {"answer": "1"}
    ),
    "actions": ActionParser(),
    "tool calls": parse_tool_calls,
    "tool calls of Mistral": lambda text: mistral_calls("[TOOL_CALLS]a" + text),
    "tool calls of Llama": lambda text: llama_calls("{" + text),
    "observations": lambda text: _HIGHLIGHTED.sub("", text),
    "final report": report,
}


@pytest.fixture
def hang_guard() -> Iterator[None]:
    """Regular expressions look for signals while they search."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"more than {HANG_S} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(HANG_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_a_megabyte_of_a_repeated_text_is_read_at_once(name: str, hang_guard: None) -> None:
    for repeated in REPEATED:
        text = repeated * (CHARACTERS // len(repeated))
        for prefix in ("", "```", "\\boxed{"):
            READERS[name](prefix + text)
