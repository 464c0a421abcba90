"""Runs of a mixture of experts, in this process: balanced, with the rollout's experts in the update, resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_experts import tiny_experts
from tests.tiny_model import tiny_qwen2
from tests.trainer import tiny_run
from trainer.build import check_experts, run_ppo
from trainer.tracking import read_metrics
from verl_lite.config import AgenticConfig, EnvManagerConfig, ModelConfig, PPOConfig, RolloutConfig
from verl_lite.errors import UserError


def test_a_run_balances_its_experts_and_replays_those_of_the_rollout(tmp_path: Path) -> None:
    tiny_run.write_files(tmp_path, [f"{number}+{number}" for number in range(8)])
    options = [
        *tiny_run.options_of(tmp_path), f"model.path={tiny_experts(tmp_path / 'experts')}", "rollout.name=hf",
        "rollout.router_replay=true", "actor.router_aux_loss_coef=0.01", "actor.optim.lr=1e-2", "actor.ppo_epochs=2",
        "trainer.save_freq=1",
    ]  # fmt: skip
    for steps in (1, 2):
        run_ppo([*options, f"trainer.total_training_steps={steps}", "trainer.resume_mode=auto"])
    first, second = read_metrics(tmp_path / "run" / "metrics.jsonl").values()
    for step in (first, second):
        assert 1 <= step["actor/router_aux_loss"] <= 4 and step["actor/grad_norm"] > 0
        assert 0 < step["actor/router_replay_changed"] < 1, "the second epoch's router has moved"
        assert step["training/rollout_probs_diff_max"] < 1e-4


def test_replay_is_refused_where_no_experts_are_kept(tmp_path: Path) -> None:
    experts, dense = tiny_experts(tmp_path / "experts"), tiny_qwen2(tmp_path / "dense")
    agents = AgenticConfig(train_env_manager=EnvManagerConfig(tags=["FrozenLake"]))
    replay, model = RolloutConfig(name="hf", router_replay=True), ModelConfig(path=experts)
    check_experts(PPOConfig(model=model, rollout=replay))
    cases = {
        "rollout.name=vllm: .* say rollout.name=hf": PPOConfig(
            model=model, rollout=RolloutConfig(name="vllm", router_replay=True)
        ),
        "turns of episodes": PPOConfig(model=model, rollout=replay, agentic=agents),
        "Qwen2ForCausalLM has no experts": PPOConfig(model=ModelConfig(path=dense), rollout=replay),
    }
    for told, config in cases.items():
        with pytest.raises(UserError, match=f"rollout.router_replay=true.*{told}"):
            check_experts(config)
