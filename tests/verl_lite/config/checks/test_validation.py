"""Contradictions in the options of validation: each is one sentence that names the key and what to change."""

import pytest

from verl_lite.config import PPOConfig
from verl_lite.config.checks.validation import validation


def problems(**settings: object) -> list[str]:
    """settings: of trainer and val_kwargs, wherever the name belongs."""
    config = PPOConfig()
    config.data.val_files = ["val.jsonl"]
    for name, value in settings.items():
        section = next(x for x in (config.trainer, config.rollout.val_kwargs, config.data) if hasattr(x, name))
        setattr(section, name, value)
    return list(validation(config))


def test_the_defaults_and_what_fits_together_pass() -> None:
    assert problems() == []
    assert problems(do_sample=True, temperature=1.0, n=8, greedy_too=True, val_time_budget_s=60.0) == []
    assert problems(temperature=1.0) == [], "verl's scripts leave it there beside do_sample=false"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"do_sample": True}, "temperature=0.0: sampling needs a temperature above 0"),
        ({"n": 4}, "n=4 with do_sample=false would give 4 equal answers"),
        ({"top_p": 0.9}, "top_p=0.9 has no effect with rollout.val_kwargs.do_sample=false"),
        ({"top_k": 5}, "top_k=5 has no effect"),
        ({"greedy_too": True}, "would answer greedily twice"),
        ({"val_time_budget_s": 9.0, "val_files": []}, "val_time_budget_s=9.0 has no effect without data.val_files"),
        ({"val_time_budget_s": 9.0, "test_freq": 0, "val_before_train": False}, "nothing is validated"),
    ],
)
def test_what_contradicts_itself_is_told(settings: dict[str, object], told: str) -> None:
    [problem] = problems(**settings)
    assert told in problem


def test_agents_have_no_time_budget() -> None:
    config = PPOConfig()
    config.agentic.train_env_manager.tags = ["lake"]
    config.trainer.val_time_budget_s = 5.0
    [problem] = validation(config)
    assert "has no effect where agents act" in problem
