"""The batch arithmetic of the launch table, against numbers worked out by hand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.set_keys import set_keys
from tests.tiny_model import tiny_qwen2
from trainer.planner.batch import launch_rows
from trainer.ppo.requirements import is_on_policy
from verl_lite.config import PPOConfig


def table(config: PPOConfig, slots: int, total_steps: int | None = None) -> dict[str, tuple[str, str]]:
    return {row.what: (row.value, row.options) for row in launch_rows(config, slots, total_steps)}


def gsm8k(**changes: Any) -> PPOConfig:
    """1024 prompts x 5 samples of at most 512 + 1024 tokens, four mini-batches."""
    config = PPOConfig()
    config.rollout.name, config.rollout.n, config.data.max_response_length = "hf", 5, 1024
    config.actor.ppo_mini_batch_size, config.actor.ppo_max_token_len_per_gpu = 256, 24000
    config.actor.use_kl_loss, config.trainer.device = True, "cuda"
    return set_keys(config, **changes)


STEPS, PASSES, POLICY = "optimizer steps per training step", "passes before the update", "strictly on-policy"
CRITIC = f"critic {STEPS}"
ON_POLICY: dict[str, Any] = {"actor__ppo_mini_batch_size": 1024, "actor__use_kl_loss": False}
BYPASS = {"algorithm__use_kl_in_reward": True, "algorithm__rollout_correction__bypass_mode": True}
CASES: list[tuple[dict[str, Any], int, dict[str, str]]] = [
    ({}, 8, {
        "= samples per training step": "5120 at most 512 + 1024 tokens each",
        STEPS: "4",  # 1024 / 256
        "rows per device and mini-batch": "160 8 devices",  # 256 * 5 / 8
        "micro-batches per device and mini-batch": "1 to 11",  # 24000 tokens hold 15 samples of 1536: 160 / 15 = 10.7
        POLICY: "no", PASSES: "2 old log-probs, reference log-probs",
        "training steps": "105 trainer.total_epochs=1", "rollout engine": "8 x hf rollout.name",
        "generation batches per training step": "", CRITIC: "",
    }),
    ({"rollout__tensor_model_parallel_size": 2, "data__train_batch_size": 10, "actor__ppo_mini_batch_size": 4,
      "actor__ppo_epochs": 2, "actor__use_dynamic_bsz": False, "actor__ppo_micro_batch_size_per_gpu": 3}, 3, {
        "rollout engine": "1 x hf",
        STEPS: "6",  # mini-batches of 4, 4 and 2 prompts, twice
        "rows per device and mini-batch": "7",  # 20 rows on 3 devices
        "micro-batches per device and mini-batch": "3 actor.ppo_micro_batch_size_per_gpu=3 sequences",
    }),
    ({"algorithm__filter_groups__enable": True, "data__sources": {"math": {"n": 16}, "gsm8k": {"weight": 1.0}}}, 8, {
        "x samples per prompt": "5 rollout.n for most prompts; data.sources: math 16",
        "= samples per training step": "about 5120",
        "generation batches per training step":
            "1 to 10 algorithm.filter_groups: until enough groups have answers that differ in acc, else score",
    }),
    ({"data__train_batch_size": 64, "actor__ppo_mini_batch_size": -1, "actor__ppo_epochs": 2}, 2, {
        STEPS: "2", "rows per device and mini-batch": "160",  # -1 is the whole batch
    }),
    ({"actor__ppo_mini_batch_size": -1}, 2, {POLICY: "yes"}),
    ({"trainer__device": "cpu"}, 8, {"rows per device and mini-batch": "160 8 processes"}),
    (ON_POLICY, 1, {POLICY: "yes", PASSES: "0 old log-probs skipped"}),
    ({**ON_POLICY, "actor__ppo_epochs": 2}, 1, {POLICY: "no"}),
    ({**ON_POLICY, "algorithm__use_kl_in_reward": True}, 1, {PASSES: "2 old log-probs, reference log-probs"}),
    ({**ON_POLICY, **BYPASS}, 1, {
        PASSES: "1 reference log-probs; old log-probs skipped: bypass_mode uses the rollout's log-probs",
    }),
    ({**ON_POLICY, "algorithm__rollout_correction__rollout_is": "token"}, 1, {PASSES: "1 old log-probs"}),
    ({"algorithm__adv_estimator": "gae", "trainer__critic_warmup": 20}, 8, {
        CRITIC: "4",  # as the actor: 1024 / 256
        PASSES: "3 old log-probs, reference log-probs, values",
    }),
    ({"algorithm__adv_estimator": "gae", "critic__ppo_mini_batch_size": 500, "critic__ppo_epochs": 2,
      "trainer__critic_warmup": 20, "reward_model__enable": True}, 8, {
        # 500, 500 and 24 prompts, twice
        CRITIC: "6 critic.ppo_mini_batch_size=500, critic.ppo_epochs=2; the policy is trained from step 21",
        PASSES: "4 reward model, old log-probs, reference log-probs, values",
    }),
]  # fmt: skip
"""What is changed, the number of devices, and what rows begin with: value and options; "" where there is none."""


@pytest.mark.parametrize(("changes", "slots", "expected"), CASES)
def test_prompts_times_samples_to_optimizer_steps_to_micro_batches(
    changes: dict[str, Any], slots: int, expected: dict[str, str]
) -> None:
    rows = table(gsm8k(**changes), slots, total_steps=105)
    for name, text in expected.items():
        found = " ".join(rows.get(name, ()))
        assert found == text or (text and re.match(rf"{re.escape(text)}\b", found)), (name, found)
    assert is_on_policy(gsm8k(**changes)) == (rows[POLICY][0] == "yes")


def test_engines_on_devices_of_their_own_are_told_apart() -> None:
    config = gsm8k(hybrid_engine=False, rollout__nnodes=1, rollout__n_gpus_per_node=2, rollout__name="hf")
    shown = table(config, slots=4)["rollout engine"]
    assert shown[0] == "2 x hf"
    assert shown[1] == "rollout.name; hybrid_engine=false: on 2 devices besides the trainer's 4"


def test_a_small_model_on_a_cpu_is_told_the_faster_engine(tmp_path: Path) -> None:
    config = gsm8k(model__path=tiny_qwen2(tmp_path), trainer__device="cpu", rollout__name="vllm")
    told = table(config, slots=1)["rollout engine"][1]
    assert told == "rollout.name; on a CPU rollout.name=hf is faster where it runs the model"
    config.trainer.device = "cuda"
    assert table(config, slots=1)["rollout engine"][1] == "rollout.name"


def test_the_plan_of_episodes_counts_them_and_not_prompts() -> None:
    config = set_keys(
        PPOConfig(),
        agentic__train_env_manager__tags=["lake", "guess"],
        agentic__train_env_manager__num_groups_partition=[6, 2],
        agentic__train_env_manager__group_size=4,
        agentic__rollout_batch_size=32,
        actor__ppo_mini_batch_size=8,
    )
    rows = table(config, slots=2, total_steps=5)
    assert rows["episodes per training step"][0] == "32" and rows["in groups of"][0] == "4"
    assert rows["groups at one time"][1] == "6 of lake + 2 of guess"
    assert rows["optimizer steps per training step"][0] == "1 x rows / 8"
    assert rows["strictly on-policy"][0] == "no" and "prompts per training step" not in rows
    ahead = set_keys(config, actor__ppo_mini_batch_size=-1, async_training__max_off_policy_threshold=2)
    rows = table(ahead, slots=2)
    value, options = rows["strictly on-policy"]
    assert value == "no" and "rollout_is=token" in options
    value, options = rows["weight updates from sampling to training"]
    assert value == "1" and "max_off_policy_threshold=2" in options
