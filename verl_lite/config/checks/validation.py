"""Checks of the options of validation: how its answers are sampled, and how long it may take.

Takes a `PPOConfig`; gives one text for each problem, as the other checks do.
"""

from __future__ import annotations

from verl_lite.config.checks.values import Problems
from verl_lite.config.ppo import PPOConfig


def validation(config: PPOConfig) -> Problems:
    """Whether there is something to validate on, ways to answer that contradict each other, and a time budget where
    nothing would look at it."""
    yield from _answers(config)
    trainer, budget = config.trainer, config.trainer.val_time_budget_s
    if not config.validates and (trainer.val_only or trainer.test_freq > 0):
        asked = "val_only=true" if trainer.val_only else f"test_freq={trainer.test_freq}"
        source = "agentic.val_env_manager.tags" if config.is_agentic else "data.val_files"
        yield f"trainer.{asked} needs {source}, which is empty"
    if budget is None:
        return
    if config.is_agentic:
        yield (
            f"trainer.val_time_budget_s={budget} has no effect where agents act: agentic.val_batch_size says how many "
            "episodes a validation has; leave the budget out"
        )
    elif not config.validates:
        yield f"trainer.val_time_budget_s={budget} has no effect without data.val_files: name them, or leave it out"
    elif not (trainer.val_only or trainer.val_before_train or trainer.test_freq):
        yield (
            f"trainer.val_time_budget_s={budget} has no effect with trainer.test_freq=0 and "
            "trainer.val_before_train=false: nothing is validated; leave it out"
        )


def _answers(config: PPOConfig) -> Problems:
    val = config.rollout.val_kwargs
    if val.do_sample and not val.temperature > 0:
        yield (
            f"rollout.val_kwargs.do_sample=true with rollout.val_kwargs.temperature={val.temperature}: sampling needs "
            "a temperature above 0, such as 1.0; or set do_sample=false"
        )
    if val.do_sample:
        return
    given = {"temperature": val.temperature, "top_p": val.top_p, "top_k": val.top_k}
    neutral = {"temperature": (0.0, 1.0), "top_p": (1.0,), "top_k": (-1,)}
    for name, value in given.items():
        if value not in neutral[name]:
            yield (
                f"rollout.val_kwargs.{name}={value} has no effect with rollout.val_kwargs.do_sample=false "
                "(greedy): set do_sample=true to sample in validation"
            )
    if val.n > 1:
        yield (
            f"rollout.val_kwargs.n={val.n} with do_sample=false would give {val.n} equal answers: "
            "set do_sample=true and a temperature, or n=1"
        )
    if val.greedy_too:
        yield (
            "rollout.val_kwargs.greedy_too=true with do_sample=false would answer greedily twice: set do_sample=true "
            "and a temperature to sample besides, or greedy_too=false"
        )
