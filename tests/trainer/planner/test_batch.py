"""The batch arithmetic of the launch table, against numbers worked out by hand."""

from __future__ import annotations

from pathlib import Path

from tests.tiny_model import tiny_qwen2
from trainer.planner.batch import launch_rows
from trainer.requirements import is_on_policy
from verl_lite.config import PPOConfig


def table(config: PPOConfig, slots: int, total_steps: int | None = None) -> dict[str, tuple[str, str]]:
    return {row.what: (row.value, row.options) for row in launch_rows(config, slots, total_steps)}


def gsm8k() -> PPOConfig:
    """1024 prompts x 5 samples of at most 512 + 1024 tokens, four mini-batches, eight devices."""
    config = PPOConfig()
    config.rollout.name = "hf"
    config.rollout.n = 5
    config.data.max_response_length = 1024
    config.actor.ppo_mini_batch_size = 256
    config.actor.ppo_max_token_len_per_gpu = 24000
    config.actor.use_kl_loss = True
    return config


def test_prompts_times_samples_to_optimizer_steps_to_micro_batches() -> None:
    rows = table(gsm8k(), slots=8, total_steps=105)
    assert rows["= samples per training step"] == ("5120", "at most 512 + 1024 tokens each")
    assert rows["optimizer steps per training step"][0] == "4"  # 1024 / 256
    assert rows["rows per device and mini-batch"] == ("160", "8 devices")  # 256 * 5 / 8
    # 24000 tokens hold 15 samples of 1536, and 160 / 15 is 10.7
    assert rows["micro-batches per device and mini-batch"][0] == "1 to 11"
    assert rows["strictly on-policy"][0] == "no"
    assert rows["passes before the update"] == ("2", "old log-probs, reference log-probs")
    assert rows["training steps"] == ("105", "trainer.total_epochs=1")
    assert rows["rollout engine"] == ("8 x hf", "rollout.name")
    config = gsm8k()
    config.rollout.tensor_model_parallel_size = 2
    config.data.train_batch_size, config.actor.ppo_mini_batch_size, config.actor.ppo_epochs = 10, 4, 2
    config.actor.use_dynamic_bsz, config.actor.ppo_micro_batch_size_per_gpu = False, 3
    rows = table(config, slots=3)
    assert rows["rollout engine"][0] == "1 x hf"
    assert rows["optimizer steps per training step"][0] == "6"  # mini-batches of 4, 4 and 2 prompts, twice
    assert rows["rows per device and mini-batch"][0] == "7"  # 20 rows on 3 devices
    assert rows["micro-batches per device and mini-batch"] == ("3", "actor.ppo_micro_batch_size_per_gpu=3 sequences")


def test_a_small_model_on_a_cpu_is_told_the_faster_engine(tmp_path: Path) -> None:
    config = gsm8k()
    config.model.path, config.trainer.device, config.rollout.name = tiny_qwen2(tmp_path), "cpu", "vllm"
    told = table(config, slots=1)["rollout engine"][1]
    assert told == "rollout.name; on a CPU rollout.name=hf is faster for a model this small"
    config.trainer.device = "cuda"
    assert table(config, slots=1)["rollout engine"][1] == "rollout.name"


def test_dynamic_sampling_and_sources_with_their_own_number_are_told() -> None:
    config = gsm8k()
    assert "generation batches per training step" not in table(config, slots=8)
    config.algorithm.filter_groups.enable = True
    config.data.sources = {"math": {"n": 16}, "gsm8k": {"weight": 1.0}}
    rows = table(config, slots=8)
    assert rows["x samples per prompt"] == ("5", "rollout.n for most prompts; data.sources: math 16")
    assert rows["= samples per training step"][0] == "about 5120"
    assert rows["generation batches per training step"] == (
        "1 to 10",
        "algorithm.filter_groups: until the prompts have answers that differ in acc, else score",
    )


def test_one_optimizer_step_per_batch_is_on_policy_and_skips_the_old_log_probs() -> None:
    config = gsm8k()
    config.actor.ppo_mini_batch_size = config.data.train_batch_size
    config.actor.use_kl_loss = False
    rows = table(config, slots=1)
    assert rows["strictly on-policy"][0] == "yes"
    assert rows["passes before the update"][0] == "0"
    assert "old log-probs skipped" in rows["passes before the update"][1]
    config.actor.ppo_epochs = 2
    assert table(config, slots=1)["strictly on-policy"][0] == "no"
    config.actor.ppo_epochs = 1
    config.algorithm.use_kl_in_reward = True
    assert table(config, slots=1)["passes before the update"] == ("2", "old log-probs, reference log-probs")
    config.algorithm.rollout_correction.bypass_mode = True
    assert table(config, slots=1)["passes before the update"] == (
        "1",
        "reference log-probs; old log-probs skipped: bypass_mode takes the rollout's",
    )
    config.algorithm.rollout_correction.bypass_mode, config.algorithm.use_kl_in_reward = False, False
    config.algorithm.rollout_correction.rollout_is = "token"
    assert table(config, slots=1)["passes before the update"] == ("1", "old log-probs")


def test_critic_and_reward_model_have_passes_and_the_critic_optimizer_steps_of_its_own() -> None:
    config = gsm8k()
    assert "of the critic" not in table(config, slots=8)
    config.algorithm.adv_estimator, config.trainer.critic_warmup = "gae", 20
    rows = table(config, slots=8)
    assert rows["of the critic"][0] == "4"  # as the actor: 1024 / 256
    assert "the policy learns from step 21 on" in rows["of the critic"][1]
    assert rows["passes before the update"] == ("3", "old log-probs, reference log-probs, values")
    config.critic.ppo_mini_batch_size, config.critic.ppo_epochs = 500, 2
    assert table(config, slots=8)["of the critic"][0] == "6"  # 500, 500 and 24 prompts, twice
    config.reward_model.enable = True
    passes = table(config, slots=8)["passes before the update"]
    assert passes == ("4", "reward model, old log-probs, reference log-probs, values")


def test_a_mini_batch_of_minus_one_is_the_whole_batch() -> None:
    config = PPOConfig()
    config.data.train_batch_size, config.actor.ppo_mini_batch_size, config.actor.ppo_epochs = 64, -1, 2
    rows = {row.what: row for row in launch_rows(config, slots=2)}
    assert rows["optimizer steps per training step"].value == "2"
    assert rows["rows per device and mini-batch"].value == "32"
    config.actor.ppo_epochs = 1
    assert is_on_policy(config)


def test_the_plan_of_episodes_counts_them_and_not_prompts() -> None:
    config = PPOConfig()
    agentic = config.agentic
    agentic.train_env_manager.tags, agentic.train_env_manager.num_groups_partition = ["lake", "guess"], [6, 2]
    agentic.train_env_manager.group_size, agentic.rollout_batch_size = 4, 32
    config.actor.ppo_mini_batch_size = 8
    rows = {row.what: row for row in launch_rows(config, slots=2, total_steps=5)}
    assert rows["episodes per training step"].value == "32" and rows["in groups of"].value == "4"
    assert rows["groups at one time"].options == "6 of lake + 2 of guess"
    assert rows["optimizer steps per training step"].value == "1 x rows / 8"
    assert rows["strictly on-policy"].value == "no" and "prompts per training step" not in rows
    config.actor.ppo_mini_batch_size, agentic.async_generation_ratio = -1, 1
    ahead = next(row for row in launch_rows(config, slots=2) if row.what == "strictly on-policy")
    assert ahead.value == "no" and "rollout_is=token" in ahead.options
