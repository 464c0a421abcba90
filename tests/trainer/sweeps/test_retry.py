"""What the end of a run means, and what is done about it."""

from __future__ import annotations

import pytest

from trainer.resume import flat_config, is_bound
from trainer.sweeps.retry import Cause, diagnose, is_retried, smaller
from verl_lite.config import PPOConfig, load_config


@pytest.mark.parametrize(
    ("status", "output", "cause"),
    [
        (0, "all is well", Cause.DONE),
        (1, "torch.OutOfMemoryError: CUDA out of memory. Tried", Cause.OUT_OF_MEMORY),
        (1, "The run failed: ...: RayTaskError: the machine's memory ran out (22GB)", Cause.OUT_OF_MEMORY),
        (1, "WorkerDiedError: actor_rollout, rank 1, died in update_actor", Cause.LOST_DEVICE),
        (1, "RuntimeError: CUDA error: uncorrectable ECC error encountered", Cause.LOST_DEVICE),
        (2, "UserError: trainer.n_gpus_per_node=1, but only 0 of 1 devices can be had (...)", Cause.DEVICE_TAKEN),
        (2, "UserError: x is in use by pid 3 of user ann", Cause.DEVICE_TAKEN),
        (2, "ConfigError: the configuration has one problem:\n  - rollout.n=0", Cause.WRONG_INPUT),
        (130, "SIGINT: stopping after this step", Cause.STOPPED),
        (-15, "", Cause.STOPPED),
        (-9, "step 3", Cause.OUT_OF_MEMORY),
        (1, "Traceback (most recent call last):\n  File 'x'\nValueError: no", Cause.UNKNOWN),
    ],
)
def test_causes(status: int, output: str, cause: Cause) -> None:
    assert diagnose(status, output).cause == cause


def test_the_error_of_the_table_is_the_telling_line() -> None:
    assert (
        diagnose(1, "Traceback (most recent call last):\n  File 'x'\nValueError: no\n").error == "error: ValueError: no"
    )
    assert diagnose(2, "note\nConfigError: one problem:\n  - rollout.n=0\n").lines == (
        "ConfigError: one problem:", "- rollout.n=0",
    )  # fmt: skip
    assert diagnose(3, "").error == "error: exit status 3, without a word"


def test_how_often() -> None:
    again = {Cause.OUT_OF_MEMORY, Cause.LOST_DEVICE, Cause.DEVICE_TAKEN, Cause.UNKNOWN}
    never = {Cause.DONE, Cause.WRONG_INPUT, Cause.STOPPED}
    assert all(is_retried(cause, [], 3) for cause in again) and not any(is_retried(cause, [], 3) for cause in never)
    assert not is_retried(Cause.UNKNOWN, [Cause.UNKNOWN], 3)
    assert is_retried(Cause.OUT_OF_MEMORY, [Cause.OUT_OF_MEMORY] * 2 + [Cause.SWEEP_DIED] * 5, 3)
    assert not is_retried(Cause.OUT_OF_MEMORY, [Cause.OUT_OF_MEMORY] * 3, 3)
    assert not is_retried(Cause.LOST_DEVICE, [], 0), "--retries 0"
    assert not is_retried(Cause.DEVICE_TAKEN, [Cause.DEVICE_TAKEN] * 10, 3)


@pytest.mark.parametrize(
    "options",
    [
        ["actor.ppo_micro_batch_size_per_gpu=4"],
        ["actor.ppo_max_token_len_per_gpu=3000", "rollout.log_prob_max_token_len_per_gpu=4000"],
    ],
)
def test_less_memory_never_changes_the_result(options: list[str]) -> None:
    argv = ["model.path=m", "data.train_files=a", *options]
    config, before = load_config(argv).config, dict[str, object]()
    words: list[str] = []
    for _ in range(40):
        found = smaller(flat_config(config))
        if not found:
            break
        keys = [word.partition("=")[0] for word in found]
        assert not any(is_bound(key, PPOConfig()) for key in keys), "keys on which the result does not depend"
        words = [word for word in words if word.partition("=")[0] not in keys] + found
        config = load_config([*argv, *words]).config
        assert flat_config(config) != before
        before = flat_config(config)
    else:
        pytest.fail("there is no end of it")
    assert config.actor.ppo_max_token_len_per_gpu >= config.data.max_prompt_length + config.data.max_response_length


def test_halves_of_what_counts() -> None:
    assert smaller(flat_config(PPOConfig())) == [
        f"actor.ppo_max_token_len_per_gpu={PPOConfig().actor.ppo_max_token_len_per_gpu // 2}"
    ]
    fixed = {"actor.ppo_micro_batch_size_per_gpu": 8, "actor.use_dynamic_bsz": False, "model.lr": 3}
    assert smaller(fixed) == ["actor.ppo_micro_batch_size_per_gpu=4"]
    assert smaller({"data.max_token_len_per_gpu": 1500, "data.max_length": 1024}) == ["data.max_token_len_per_gpu=1024"]
    assert smaller({"actor.ppo_micro_batch_size_per_gpu": 1, "actor.use_dynamic_bsz": False}) == []
    assert smaller({"model.enable_gradient_checkpointing": False}) == ["model.enable_gradient_checkpointing=true"]
