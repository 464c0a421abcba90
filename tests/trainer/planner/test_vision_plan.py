"""Plans of vision-language models: published sizes, bytes and operations by hand, and a tower against live tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny_vision import FAMILIES, tiny_vision_model
from trainer.planner.accelerators import ACCELERATORS
from trainer.planner.diffusion_memory import LiveBytes
from trainer.planner.memory import memory_plan
from trainer.planner.model_shape import config_like, read_shape
from trainer.planner.networks import read_networks, trained_parameters
from trainer.planner.step_time import Lengths, step_stages
from trainer.planner.vision_tower import tower_of
from verl_lite.config import NetworkConfig, PPOConfig
from workers.policy.loading import count_parameters

H100 = ACCELERATORS["h100"]
# a block of the tower: two norms, attention with biases, and an MLP with biases
BLOCK = 2 * 1280 + 4 * (1280**2 + 1280) + 3 * 1280 * 3420 + 2 * 3420 + 1280
TOWER = 1176 * 1280 + 32 * BLOCK + 1280 + 5120**2 + 5120 + 5120 * 3584 + 3584


def planned(folder: Path, *, frozen: bool = True) -> PPOConfig:
    (folder / "config.json").write_text(json.dumps(config_like("qwen2.5-vl-7b")))
    config = PPOConfig()
    config.model.path, config.rollout.name, config.rollout.n = str(folder), "vllm", 8
    config.data.train_batch_size, config.actor.ppo_mini_batch_size = 64, 8
    config.data.max_prompt_length, config.data.max_response_length = 1000, 1000
    config.actor.freeze_vision_tower, config.trainer.n_gpus_per_node = frozen, 8
    return config


@pytest.mark.parametrize(("like", "published"), [("qwen2.5-vl-3b", 3_754_622_976), ("qwen2.5-vl-7b", 8_292_166_656)])
def test_parameters_are_those_published(like: str, published: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_like(like)))
    network = NetworkConfig(path=str(tmp_path))
    assert read_shape(network).parameters == published == count_parameters(network)


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_of_each_family(family: str, tmp_path: Path) -> None:
    network = NetworkConfig(path=tiny_vision_model(tmp_path, family))
    assert read_shape(network).parameters == count_parameters(network)


def test_phases_with_images(tmp_path: Path) -> None:
    config = planned(tmp_path)
    networks = read_networks(config)
    assert trained_parameters(config.model, networks.policy, freezes_tower=True) == (8_292_166_656 - TOWER, 0)
    plan = memory_plan(config, networks, 8, H100)
    assert plan.always["actor: weights"] == 4 * 8_292_166_656 / 8, "also of the frozen tower"
    assert plan.host["images of the batch"] == 8 * 4000 * 1176 * 2
    update = plan.phases["update"]
    # a micro-batch of 8 rows may have 8 prompts of 4000 patches
    assert update["pixels"] == plan.phases["old log-probs"]["pixels"] == 8 * 4000 * 1176 * 2
    assert update["vision tower"] == 2 * 8 * (1000 * 3584 + 4000 * 1280), "features and last hidden states"
    assert "1000 tokens of a prompt" in plan.images and "4000 patches" in "\n".join(plan.lines("h100", 80.0))
    config.actor.freeze_vision_tower = False
    trained = memory_plan(config, networks, 8, H100).phases["update"]
    merger = 8 * 1280 + 4 * 1280  # bytes per patch: norm, and two tensors in bf16
    kept = 8 * 4000 * (32 * 2 * 1280 + merger)
    assert trained["vision tower"] == update["vision tower"] + kept
    assert trained["gradients, this rank's shard"] - update["gradients, this rank's shard"] == 4 * TOWER / 8


def test_operations_of_the_tower(tmp_path: Path) -> None:
    config = planned(tmp_path)
    config.data.max_pixels = 100 * 14**2
    tower = read_networks(config).policy.tower
    assert tower is not None
    # 28 blocks attend to windows of 64 patches, 4 to the image of 100
    merger = TOWER - 1176 * 1280 - 32 * BLOCK
    patch = 2 * (32 * BLOCK + 1176 * 1280) + 4 * 1280 * (28 * 64 + 4 * 100)
    assert tower.flops(3, 1000) == 3 * (4000 * patch + 1000 * 2 * merger)
    times = []
    for config.actor.freeze_vision_tower in (True, False):
        times.append(step_stages(config, read_networks(config), 8, H100, Lengths(1000, 1000))["update"].seconds)
    per_rank = 64 / 8 * tower.flops(8, 1000) / 8  # eight rows in a micro-batch may have eight prompts
    assert (times[1] - times[0]) * H100.flops * 0.4 == pytest.approx(3 * 8 * per_rank), "backward twice, and again"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tower_against_its_live_tensors(family: str, tmp_path: Path) -> None:
    sizes = {"depth": 4, "hidden_size": 64, "num_heads": 2, "intermediate_size": 172}
    network = AutoModelForCausalLM.from_pretrained(tiny_vision_model(tmp_path, family, **sizes)).train()
    network.set_attn_implementation({"vision_config": "sdpa"})
    tower, pixels, grid = tower_of(network), torch.randn(4032, 96), torch.tensor([[1, 36, 28]] * 4)
    with torch.no_grad(), LiveBytes() as live:
        network.base_model.get_image_features(pixels, grid)
    found = [live.peak / (tower.work_bytes(1008, 4) + tower.feature_bytes(1008, 4))]
    for is_recomputed in (False, True):
        if is_recomputed:
            network.gradient_checkpointing_enable({"use_reentrant": False})
        with LiveBytes() as live:
            features = network.base_model.get_image_features(pixels, grid)
        kept = tower.kept_bytes(1008, 4, is_recomputed=is_recomputed) + tower.feature_bytes(1008, 4)
        found.append(live.now / kept)
        del features
    assert found == pytest.approx([1, 1, 1], rel=0.15)


def test_the_tower_of_a_critic_is_frozen_too(tmp_path: Path) -> None:
    config = planned(tmp_path)
    config.algorithm.adv_estimator, config.actor.freeze_vision_tower = "gae", False
    networks = read_networks(config)
    assert networks.critic is not None
    always = memory_plan(config, networks, 8, H100).always
    assert always["critic: AdamW's moments"] == 2 * 4 * (networks.critic.parameters - TOWER) / 8
    assert always["actor: AdamW's moments"] == 2 * 4 * 8_292_166_656 / 8
