"""Options of agents that do not fit: one message for each, with key, value, what was expected and what to change."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from verl_lite.config import ConfigError, PPOConfig
from verl_lite.config.checks import ranges, validate
from verl_lite.config.checks.agentic import agentic


class World:
    """An environment."""

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        return "begin", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "end", 1.0, True, False, {}


class Restless:
    """Has no reset."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "end", 1.0, True, False, {}


HERE = "tests.verl_lite.config.checks.test_agentic"
SOUND: dict[str, Any] = {
    "agentic.custom_envs": {"world": {"env_type": f"{HERE}:World"}, "maze": {"env_type": f"{HERE}:World"}},
    "agentic.train_env_manager.tags": ["world", "maze"],
    "agentic.train_env_manager.num_env_groups": 8,
    "agentic.train_env_manager.group_size": 4,
    "agentic.val_env_manager.tags": ["world"],
    "agentic.rollout_batch_size": 32,
    "agentic.val_batch_size": 16,
    "trainer.total_training_steps": 10,
    "trainer.device": "cpu",
}


def config_of(options: dict[str, Any]) -> PPOConfig:
    config = PPOConfig()
    for name, value in (SOUND | options).items():
        target: Any = config
        *path, leaf = name.split(".")
        for part in path:
            target = getattr(target, part)
        setattr(target, leaf, value)
    return config


def world(**entries: object) -> dict[str, Any]:
    return {"agentic.custom_envs": SOUND["agentic.custom_envs"] | {"world": {"env_type": f"{HERE}:World"} | entries}}


TRAIN, VAL, POOL = "agentic.train_env_manager", "agentic.val_env_manager", "agentic.env_pool"


def test_a_sound_configuration_has_no_problem() -> None:
    assert list(agentic(config_of({}))) == []
    assert list(agentic(PPOConfig())) == []


WRONG: list[tuple[dict[str, Any], str]] = [
    (world(env_type="frozen_lak"), r"custom_envs\.world\.env_type: .*frozen_lak.*Did you mean 'frozen_lake'"),
    (world(max_step=3), r"custom_envs\.world\.max_step: no such key.*Did you mean 'max_steps'"),
    (world(env_type=f"{HERE}:Restless"), r"custom_envs\.world\.env_type=.*Restless has no method reset"),
    (world(max_tokens_per_step=600), r"max_tokens_per_step=600 .*data\.max_response_length=512.*at most 512"),
    ({f"{TRAIN}.tags": ["world", "mase"]}, r"tags=mase is not known; known: maze, world.*maze"),
    ({f"{VAL}.tags": ["wurld"]}, r"val_env_manager\.tags=wurld is not known.*world"),
    ({f"{TRAIN}.tags": ["world", "world"]}, r"tags=\['world', 'world'\]: one is named twice"),
    ({f"{TRAIN}.num_groups_partition": [4, 3]}, r"\[4, 3\] adds up to 7: .*num_env_groups=8"),
    ({f"{TRAIN}.num_groups_partition": [8, 0]}, r"\[8, 0\] adds up to 8: numbers of at least 1"),
    ({f"{TRAIN}.num_groups_partition": [8]}, r"one number for each of the 2 tags"),
    (
        {f"{TRAIN}.num_env_groups": 1, f"{TRAIN}.max_traj_per_env": -1},
        r"num_env_groups=1 is less than the 2 tags",
    ),
    (
        {"agentic.rollout_batch_size": 30},
        r"group_size=4 does not divide .*rollout_batch_size=30.*rollout_batch_size=32",
    ),
    (
        {f"{VAL}.group_size": 3, "rollout.val_kwargs.do_sample": True},
        r"val_env_manager\.group_size=3 does not divide agentic\.val_batch_size=16.*val_batch_size=15",
    ),
    ({f"{TRAIN}.max_traj_per_env": 1, "agentic.rollout_batch_size": 64}, r"max_traj_per_env=1: .*takes 2 episodes"),
    ({f"{TRAIN}.max_traj_per_env": 0}, r"max_traj_per_env=0: -1 \(all\) or at least 1"),
    ({f"{TRAIN}.group_filter_cls": "equal_score"}, r"group_filter_cls=equal_score is not known.*equal_scores"),
    ({f"{TRAIN}.max_replaced_groups": 3}, r"max_replaced_groups=3 has no effect without .*group_filter_cls"),
    ({"trainer.total_training_steps": None}, r"total_training_steps=null: .*such as trainer\.total_training_steps=200"),
    ({"rollout.n": 4}, r"rollout\.n=4: .*1 is expected.*train_env_manager\.group_size"),
    ({"rollout.tensor_model_parallel_size": 2}, r"tensor_model_parallel_size=2: .*1 is expected"),
    ({"data.train_files": ["a.parquet"]}, r"data\.train_files=\['a\.parquet'\] has no effect.*custom_envs"),
    ({"data.val_files": ["a.parquet"]}, r"data\.val_files=.*set agentic\.val_env_manager\.tags instead"),
    ({"data.train_batch_size": 64}, r"data\.train_batch_size=64 .*set agentic\.rollout_batch_size instead"),
    ({"trainer.total_epochs": 3}, r"total_epochs=3 has no effect.*trainer\.total_training_steps"),
    ({"data.shuffle": False}, r"data\.shuffle=False has no effect.*leave it out"),
    ({"reward.timeout_s": 3.0}, r"reward\.timeout_s=3\.0: without effect.*agentic\.env_pool"),
    ({"reward_model.enable": True}, r"reward_model\.enable=True: without effect"),
    ({"rollout.val_kwargs.n": 4}, r"val_kwargs\.n=4 has no effect.*val_env_manager\.group_size"),
    (
        {"agentic.model_update_frequency": 3, "trainer.test_freq": 6, "trainer.save_freq": 4},
        r"trainer\.save_freq=4 with agentic\.model_update_frequency=3: .*a multiple of 3",
    ),
    (
        {"agentic.async_generation_ratio": 1, "trainer.device": "cuda"},
        r"async_generation_ratio=1 with rollout\.free_cache_engine=true.*free_cache_engine=false",
    ),
    ({f"{VAL}.group_size": 2}, r"group_size=2 with rollout\.val_kwargs\.do_sample=false would run 2 equal episodes"),
    ({f"{VAL}.group_size_redundancy": 1}, r"val_env_manager\.group_size_redundancy=1: only episodes that end early"),
    ({f"{VAL}.group_filter_cls": "equal_scores"}, r"val_env_manager\.group_filter_cls=.*measures all groups"),
    (
        {f"{VAL}.tags": [], "agentic.val_batch_size": 8},
        r"val_batch_size=8 has no effect without .*val_env_manager\.tags",
    ),
    ({f"{VAL}.tags": [], f"{VAL}.num_env_groups": 8, "agentic.val_batch_size": 128}, r"num_env_groups=8 has no effect"),
    (
        {f"{VAL}.tags": [], "agentic.render_save_dir": "x", "agentic.val_batch_size": 128},
        r"render_save_dir=x has no effect without",
    ),
    ({f"{POOL}.num_workers": 0, f"{POOL}.timeout_s": 5.0}, r"timeout_s=5\.0 needs a process.*num_workers=0"),
    ({f"{POOL}.timeout_s": 0.0}, r"timeout_s=0\.0: a number above 0"),
    ({f"{POOL}.max_error_rate": 1.5}, r"max_error_rate=1\.5: a share between 0 and 1"),
    ({"agentic.reward_normalization.method": "means"}, r"method=means is not known.*mean"),
    ({"agentic.reward_normalization.norm_std_type": "running"}, r"norm_std_type=running is not known.*or null"),
    ({"agentic.step_reward_gamma": 0.9}, r"step_reward_gamma=0\.9 has no effect with algorithm\.adv_estimator=grpo"),
    (
        {"algorithm.adv_estimator": "step_reinforce", "agentic.step_reward_weight": 0.5},
        r"step_reward_weight=0\.5 has no effect.*belongs to gigpo",
    ),
    (
        {"algorithm.adv_estimator": "gigpo"},
        r"custom_envs\.world\.env_manager_cls=trajectory: .*gigpo.*set agentic\.custom_envs\.world.*cls=step",
    ),
    (
        {"algorithm.adv_estimator": "agentic_reinforce", **world(env_manager_cls="StepEnvManager")},
        r"custom_envs\.world\.env_manager_cls=step: .*agentic_reinforce.*so trajectory is expected",
    ),
    ({"algorithm.adv_estimator": "gae", **world(env_manager_cls="step")}, r"env_manager_cls=step: .*gae"),
    ({f"{TRAIN}.group_size": 1}, r"group_size=1: grpo compares the episodes of a group"),
    ({"algorithm.adv_estimator": "remax"}, r"adv_estimator=remax needs a greedy answer"),
    (
        {f"{TRAIN}.tags": []},
        r"agentic\.custom_envs=.*without effect, because agentic\.train_env_manager\.tags is empty",
    ),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=[message for _, message in WRONG])
def test_what_does_not_fit_is_said(options: dict[str, Any], message: str) -> None:
    config = config_of(options)
    problems = [*ranges(config), *agentic(config)]
    assert any(re.search(message, problem, re.DOTALL) for problem in problems), problems
    assert len(problems) <= 2 + len(options)


def test_asynchrony_needs_no_setting_on_a_cpu_and_none_is_asked_of_rollout_correction() -> None:
    assert list(agentic(config_of({"agentic.async_generation_ratio": 1}))) == []


def test_the_checks_of_datasets_leave_agents_alone(tmp_path: Path) -> None:
    """A whole validation of a run of agents: no dataset is missed, and gigpo is to be had."""
    (tmp_path / "config.json").write_text("{}")
    steps = {tag: {"env_type": f"{HERE}:World", "env_manager_cls": "step"} for tag in ("world", "maze")}
    options = {"model.path": str(tmp_path), "rollout.name": "hf"}
    validate(config_of(options))
    gigpo = options | {"algorithm.adv_estimator": "gigpo", "agentic.custom_envs": steps}
    validate(config_of(gigpo))
    with pytest.raises(ConfigError, match=r"rollout\.n=2"):
        validate(config_of(options | {"rollout.n": 2}))
