"""One registration of every kind that the guides name, by a recipe, under a plain name, in a run of one step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_model import tiny_qwen2
from tests.tiny_run import good_row, write_rows
from tests.trainer import tiny_run
from tests.trainer.made_clips import grey_frames, write_folder
from tests.workers.diffusion.tiny_wan import tiny_pipeline
from trainer.launch.ppo_job import run_ppo
from trainer.main_reward_flow import main as main_reward_flow
from trainer.observe.tracking import TRACKERS
from trainer.recipe import load_recipe
from verl_lite.errors import UserError
from verl_lite.rewards import REWARDS
from verl_lite.visual_rewards import VISUAL_REWARDS
from workers.engines.base import ROLLOUT_ENGINES

pytestmark = pytest.mark.usefixtures("nothing_stays")

RECIPE = """
from tests.workers.counting_env import Counting
from tests.workers.diffusion.tiny_wan import MeanColourReward
from trainer.observe.tracking import register_tracker
from verl_lite.core_algos import (
    compute_grpo_outcome_advantage, compute_policy_loss_gpg, register_adv_est, register_policy_loss,
)
from verl_lite.envs import register_env
from verl_lite.group_filters import register_group_filter
from verl_lite.rewards import register_reward
from verl_lite.visual_rewards import register_visual_reward
from workers.engines.base import register_rollout_engine
from workers.engines.hf_engine import HFEngine

used = []

def noted(name, function):
    def called(*arguments, **named):
        used.append(name)
        return function(*arguments, **named)
    return called

register_rollout_engine("mine")(noted("engine", HFEngine))
register_env("mine")(noted("env", Counting))
register_visual_reward("mine")(noted("visual reward", MeanColourReward))
register_reward("mine/*")(noted("reward", lambda solution_str, **rest: float(len(set(solution_str)))))

@register_adv_est("mine", groups=True)
def estimator(token_level_rewards, response_mask, index, **rest):
    used.append("estimator")
    return compute_grpo_outcome_advantage(token_level_rewards, response_mask, index)

@register_policy_loss("mine")
def loss(*columns, **counts):
    used.append("loss")
    return compute_policy_loss_gpg(*columns, **counts)

@register_group_filter("mine")
class KeepsAll:
    def __init__(self, config, env_manager_config, mode):
        used.append("filter")

    def filter(self, group_id, episode_id, group):
        return False

@register_tracker("mine")
class Tracker:
    def __init__(self, run):
        used.append("tracker")

    def log(self, metrics, step):
        assert metrics

    def log_samples(self, samples, step):
        pass

    def finish(self):
        used.append("tracker ends")

def overrides():
    return {}
"""


@pytest.fixture
def used(tmp_path: Path) -> Iterator[list[str]]:
    """What the recipe notes when a part of its own is called; ./mine/recipe.py."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "recipe.py").write_text(RECIPE)
    yield load_recipe(str(tmp_path / "mine")).used
    for registry in (REWARDS, ROLLOUT_ENGINES, TRACKERS, VISUAL_REWARDS):
        for name in ("mine", "mine/*"):
            registry.pop(name, None)


def test_answers_with_an_engine_a_reward_an_estimator_a_loss_and_a_tracker(used: list[str], tmp_path: Path) -> None:
    tiny_run.write_files(tmp_path, ["1+1", "2+2", "3+3", "4+4"])
    write_rows(tmp_path / "prompts.jsonl", (good_row(number, "mine/sums") for number in range(4)))
    options = [
        *(one for one in tiny_run.options_of(tmp_path) if not one.startswith("reward.custom")), "rollout.name=mine",
        f"recipe={tmp_path / 'mine'}", "algorithm.adv_estimator=mine", "actor.policy_loss.loss_mode=mine",
        "trainer.logger=[jsonl,mine]", "trainer.total_training_steps=1", "rollout.engine_kwargs.mine={a: 1}",
    ]  # fmt: skip
    run_ppo(options)
    assert {"engine", "reward", "estimator", "loss", "tracker", "tracker ends"} == set(used)


def test_a_loss_that_divides_by_its_own_micro_batch_is_refused_in_its_first_update(tmp_path: Path) -> None:
    """And an estimator whose result cannot be trained on, at its first batch."""
    tiny_run.write_files(tmp_path, ["1+1", "2+2", "3+3", "4+4"])
    options = [*tiny_run.options_of(tmp_path), "trainer.total_training_steps=1"]
    wrong = "actor.policy_loss.loss_mode=tests.trainer.launch.test_registered:divides_by_its_own"
    with pytest.raises(
        UserError, match=f"{wrong} depends on how .* split into micro-batches: divide by batch_num_tokens"
    ):
        run_ppo([*options, wrong])
    assert not (tmp_path / "run" / "metrics.jsonl").exists(), "no step was trained"
    for name in ("one_tensor", "not_finite"):
        wrong = f"algorithm.adv_estimator=tests.trainer.launch.test_registered:{name}"
        with pytest.raises(UserError, match=f"{wrong}: expected a tuple .* of shape .8, 6., finite where"):
            run_ppo([*options, wrong, "trainer.resume_mode=auto"])


def divides_by_its_own(
    old: torch.Tensor, new: torch.Tensor, a: torch.Tensor, mask: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, dict[str, float]]:
    return -(a * new * mask).sum() / mask.sum(), {}


def one_tensor(token_level_rewards: torch.Tensor, **rest: Any) -> torch.Tensor:
    return token_level_rewards


def not_finite(token_level_rewards: torch.Tensor, **rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return token_level_rewards / 0, token_level_rewards


def test_episodes_with_an_environment_and_a_filter(used: list[str], tmp_path: Path) -> None:
    options = [
        "trainer.backend=inline", "trainer.device=cpu", "rollout.name=hf", f"model.path={tiny_qwen2(tmp_path / 'm')}",
        "data.max_prompt_length=48", "data.max_response_length=96", "actor.ppo_mini_batch_size=2",
        f"recipe={tmp_path / 'mine'}", "trainer.logger=[jsonl]", "trainer.save_freq=0", "trainer.test_freq=0",
        "trainer.val_before_train=false", "trainer.total_training_steps=1", "agentic.train_env_manager.tags=[count]",
        "agentic.custom_envs.count={env_type: mine, max_steps: 2, max_tokens_per_step: 4}",
        "agentic.train_env_manager.group_filter_cls=mine", "agentic.train_env_manager.num_env_groups=1",
        "agentic.train_env_manager.group_size=2", "agentic.rollout_batch_size=2", "agentic.env_pool.num_workers=0",
    ]  # fmt: skip
    run_ppo([*options, f"trainer.default_local_dir={tmp_path / 'run'}"])
    assert {"env", "filter"} == set(used)


def test_clips_with_a_visual_reward(used: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("diffusers")
    write_folder(tmp_path / "clip", grey_frames(5))
    (tmp_path / "metadata.csv").write_text("video,prompt\nclip,a red face\n")
    options = [
        "trainer.backend=inline", "trainer.device=cpu", "trainer.logger=[jsonl]", "trainer.save_freq=0",
        "trainer.test_freq=0", "trainer.video_freq=0", "data.num_frames=5", "data.train_batch_size=1",
        "model.checkpoint_steps=false", "model.checkpoint_decode=false", "model.enable_gradient_checkpointing=false",
        "sampler.num_inference_steps=4", "sampler.mid_timestep=2", "sampler.final_timestep=3", "model.lora_rank=4",
        f"model.path={tiny_pipeline(tmp_path / 'pipeline')}", f"data.train_files={tmp_path / 'metadata.csv'}",
        "reward.name=mine", f"recipe={tmp_path / 'mine'}", f"trainer.default_local_dir={tmp_path / 'run'}",
        "trainer.total_training_steps=1", "actor.fsdp_config.wrap_policy.min_num_params=10000000",
    ]  # fmt: skip
    assert main_reward_flow([*options, "trainer.dry_run=true"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "5 48 x 32 48 x 32" in printed
    assert not (tmp_path / "run" / "metrics.jsonl").exists(), "a dry run trains nothing"
    assert main_reward_flow(options) == 0
    assert "visual reward" in used
