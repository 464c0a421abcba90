"""The batch arithmetic of the launch table, against numbers worked out by hand."""

from __future__ import annotations

from trainer.plan import launch_rows, launch_table
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


def test_sizes_that_do_not_divide_are_rounded_up() -> None:
    config = gsm8k()
    config.data.train_batch_size, config.actor.ppo_mini_batch_size, config.actor.ppo_epochs = 10, 4, 2
    config.actor.use_dynamic_bsz, config.actor.ppo_micro_batch_size_per_gpu = False, 3
    rows = table(config, slots=3)
    assert rows["optimizer steps per training step"][0] == "6"  # mini-batches of 4, 4 and 2 prompts, twice
    assert rows["rows per device and mini-batch"][0] == "7"  # 20 rows on 3 devices
    assert rows["micro-batches per device and mini-batch"] == ("3", "actor.ppo_micro_batch_size_per_gpu=3 sequences")
    assert rows["training steps"][0] == "?"


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


def test_engines_are_counted_by_tensor_parallel_groups() -> None:
    config = gsm8k()
    config.rollout.name = "vllm"
    config.rollout.tensor_model_parallel_size = 2
    assert table(config, slots=8)["rollout engine"][0] == "4 x vllm"


def test_the_text_has_one_aligned_line_for_each_row() -> None:
    lines = launch_table(gsm8k(), slots=8, total_steps=7).splitlines()
    assert len(lines) == len(launch_rows(gsm8k(), 8))
    options = [row.options for row in launch_rows(gsm8k(), slots=8, total_steps=7)]
    assert len({line.rindex(option) for line, option in zip(lines, options, strict=True) if option}) == 1
    assert "5120" in lines[2] and lines[2].startswith("= samples per training step")
