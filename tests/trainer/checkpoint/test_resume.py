"""A checkpoint is continued only with a configuration that means the same run; the refusal lists what differs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.set_keys import set_keys
from tests.trainer.checkpoint.written_checkpoint import write_checkpoint
from trainer.checkpoint.resume import differing_keys, flat_config, refuse_another_run
from verl_lite.config import PPOConfig
from verl_lite.errors import UserError

LOOK = "a mirror"


def config(**values: object) -> PPOConfig:
    return set_keys(PPOConfig(), **values)


def checkpoint(run_dir: Path, step: int, made_with: PPOConfig) -> None:
    state = {"config": flat_config(made_with), "steps": {"global_step": step}}
    write_checkpoint(run_dir, step, lambda folder: None, state)


@pytest.mark.parametrize(
    ("key", "value", "decides"),
    [
        ("actor__optim__lr", 1e-3, True),
        ("algorithm__adv_estimator", "rloo", True),
        ("data__train_batch_size", 7, True),
        ("trainer__seed", 2, True),
        ("model__path", "/elsewhere", True),
        ("reward__reward_kwargs", {"scale": 2}, True),
        ("trainer__total_training_steps", 9, False),
        ("trainer__n_gpus_per_node", 4, False),
        ("actor__ppo_max_token_len_per_gpu", 77, False),
        ("actor__fsdp_config__param_offload", True, False),
        ("data__val_files", ["other.parquet"], False),
    ],
)
def test_only_what_decides_the_result_must_not_change(key: str, value: object, decides: bool) -> None:
    name = key.replace("__", ".")
    found = differing_keys(flat_config(PPOConfig()), changed := config(**{key: value}))
    assert [line.split(":")[0] for line in found] == [name] * decides and all(f"{value} now" in line for line in found)
    changed.trainer.resume_allow = [name]
    assert differing_keys(flat_config(PPOConfig()), changed) == []


@pytest.mark.parametrize("schedule", [{"lr_scheduler_type": "cosine"}, {"lr_warmup_steps_ratio": 0.1}])
def test_the_length_of_the_run_counts_where_the_schedule_reads_it(schedule: dict[str, object]) -> None:
    before, after = (
        config(trainer__total_training_steps=steps, **{f"actor__optim__{name}": x for name, x in schedule.items()})
        for steps in (10, 20)
    )
    assert differing_keys(flat_config(before), after) == [
        "trainer.total_training_steps: 10 in the checkpoint, 20 now",
    ]


def test_a_run_continues_with_its_engine_only() -> None:
    """A checkpoint of version 0.1 says auto for vLLM."""
    vllm, hf = config(rollout__name="vllm"), config(rollout__name="hf")
    assert differing_keys(flat_config(vllm), hf) == ["rollout.name: vllm in the checkpoint, hf now"]
    assert differing_keys(flat_config(config(rollout__name="auto")), vllm) == []
    assert len(differing_keys(flat_config(config(rollout__name="auto")), hf)) == 1


def test_the_refusal_lists_the_keys_and_the_ways_out(tmp_path: Path) -> None:
    checkpoint(tmp_path, 4, config(rollout__n=3, actor__shuffle=True))
    refuse_another_run(config(rollout__n=5), tmp_path, 9, LOOK)  # not asked to resume
    refuse_another_run(config(trainer__resume_mode="auto", rollout__n=3, actor__shuffle=True), tmp_path, 9, LOOK)
    with pytest.raises(UserError) as refusal:
        refuse_another_run(config(trainer__resume_mode="auto", rollout__n=5), tmp_path, 9, LOOK)
    text = str(refusal.value)
    assert (
        "rollout.n: 3 in the checkpoint, 5 now" in text and "actor.shuffle: True in the checkpoint, False now" in text
    )
    assert "trainer.resume_allow=[actor.shuffle,rollout.n]" in text
    allowed = config(trainer__resume_mode="auto", rollout__n=5, trainer__resume_allow=["rollout.n", "actor.shuffle"])
    refuse_another_run(allowed, tmp_path, 9, LOOK)


def test_nothing_left_to_do_is_said(tmp_path: Path) -> None:
    checkpoint(tmp_path, 9, config())
    refuse_another_run(config(trainer__resume_mode="auto"), tmp_path, 10, LOOK)
    with pytest.raises(UserError, match="is at step 9 of 9: nothing is left to do.*to look at it, a mirror"):
        refuse_another_run(config(trainer__resume_mode="auto"), tmp_path, 9, LOOK)
