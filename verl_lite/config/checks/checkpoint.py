"""Whether the options of saving and resuming fit each other: a part of `checks.config`.

Takes the section `trainer`; yields problems, each naming key, value, what was expected and what to change.
"""

from __future__ import annotations

from pathlib import Path

from verl_lite.config.checks.values import Problems
from verl_lite.config.ppo import RunConfig


def checkpoints(trainer: RunConfig, *, validates: bool) -> Problems:
    """Problems with retention, background saves and what to resume. validates: there is validation data."""
    yield from _retention(trainer, validates)
    source = trainer.resume_from_path
    if trainer.resume_mode == "resume_path" and source is None:
        yield "trainer.resume_mode=resume_path needs trainer.resume_from_path, a global_step_N folder, which is null"
    if trainer.resume_mode != "resume_path" and source is not None:
        yield (
            f"trainer.resume_from_path={source} has no effect with trainer.resume_mode={trainer.resume_mode}: "
            "set trainer.resume_mode=resume_path, or leave the path out"
        )
    if source is not None and not Path(source).is_dir():
        yield f"trainer.resume_from_path={source}: there is no folder {Path(source).absolute()}"
    if trainer.resume_allow and trainer.resume_mode == "disable":
        yield (
            f"trainer.resume_allow={trainer.resume_allow} has no effect with trainer.resume_mode=disable: leave "
            "it out, or set trainer.resume_mode=auto"
        )


def _retention(trainer: RunConfig, validates: bool) -> Problems:
    best = trainer.max_best_ckpt_to_keep
    if trainer.save_freq == 0:
        asked = {
            "max_best_ckpt_to_keep": best > 0,
            "max_actor_ckpt_to_keep": trainer.max_actor_ckpt_to_keep is not None,
            "async_save": trainer.async_save,
            "max_retries": trainer.max_retries > 0,
        }
        for name in (name for name, is_asked in asked.items() if is_asked):
            yield (
                f"trainer.{name}={getattr(trainer, name)} has no effect with trainer.save_freq=0 (never): set "
                "trainer.save_freq, such as 20"
            )
    if best > 0 and trainer.max_actor_ckpt_to_keep is None:
        yield (
            f"trainer.max_best_ckpt_to_keep={best} has no effect with trainer.max_actor_ckpt_to_keep=null, which keeps "
            "all: say how many of the newest are kept besides, such as trainer.max_actor_ckpt_to_keep=1"
        )
    if best > 0 and (not validates or trainer.test_freq <= 0):
        missing = f"trainer.test_freq={trainer.test_freq}" if validates else "nothing to validate on"
        yield (
            f"trainer.max_best_ckpt_to_keep={best} compares validations on the way, and there are none with {missing}: "
            "validate every few steps, such as trainer.test_freq=10"
        )
    if best == 0 and trainer.best_ckpt_metric is not None:
        yield (
            f"trainer.best_ckpt_metric={trainer.best_ckpt_metric} has no effect with trainer.max_best_ckpt_to_keep=0: "
            "leave it out, or keep some"
        )
