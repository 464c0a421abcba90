"""flow_grpo: its world and judge, its options, and the driver's stages around a worker that is none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recipes.flow_grpo.run import FlowGRPOJob, read_prompts
from recipes.flow_grpo.trainer import EVALUATION, PATH, FlowActor, FlowGRPOTrainer, data_metrics
from recipes.flow_grpo.world import PLACES, PROMPTS, describe, draw
from tests.set_keys import set_keys
from trainer.console import Console
from trainer.steps import EpochSteps
from verl_lite.config import ConfigError
from verl_lite.config.flow_grpo import FlowGRPOConfig
from verl_lite.errors import UserError
from verl_lite.protocol import DataProto

# ------------------------------------------------------------------------------------------------------------- world


def test_the_judge_reads_what_was_drawn() -> None:
    rng = np.random.default_rng(0)
    for prompt in PROMPTS:
        _, color, _, _, _, *place = prompt.split()
        for _ in range(4):
            assert describe(draw(color, " ".join(place), rng)) == prompt


def test_the_judge_takes_no_less_than_one_whole_square_of_one_color() -> None:
    image = draw("red", "top left", np.random.default_rng(0))
    for place in PLACES:
        if place != "top left":
            assert describe(np.maximum(image, draw("red", place, np.random.default_rng(0)))) is None  # two
    assert describe(np.zeros_like(image)) is None
    assert describe(image * 0.4) is None  # too dark
    purple = image + image[[1, 2, 0]]
    assert describe(purple) is None
    thin = np.zeros_like(image)
    thin[0, 0, :7] = 1
    assert describe(thin) is None
    corners = np.zeros_like(image)
    corners[0, :2, :3] = corners[0, 2, 3] = 1  # which touch at a corner only
    assert describe(corners) is None


# ----------------------------------------------------------------------------------------------------------- options


def config_of(**options: Any) -> FlowGRPOConfig:
    usual = {
        "data__train_files": ["prompts.txt"], "data__train_batch_size": 2, "model__path": "somewhere",
        "model__network": "a:B", "reward__name": "tests.recipes.test_flow_grpo:brightness", "rollout__n": 3,
        "sampler__num_train_steps": 4, "actor__ppo_mini_batch_size": -1,
    }  # fmt: skip
    return set_keys(FlowGRPOConfig(recipe="flow_grpo"), **{**usual, **options})


def job_of(config: FlowGRPOConfig) -> FlowGRPOJob:
    return FlowGRPOJob(config, 1, Console())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"sampler__noise_level": 0.0}, "sampler.noise_level=0.0: a number above 0"),
        ({"sampler__num_train_steps": 1}, "sampler.num_train_steps=1"),
        ({"rollout__n": 1}, "rollout.n=1: grpo compares"),
        ({"algorithm__adv_estimator": "gae"}, "algorithm.adv_estimator=gae needs values"),
        ({"algorithm__adv_estimator": "remax"}, "needs reward_baselines"),
        ({"algorithm__adv_estimator": "grop"}, "algorithm.adv_estimator='grop'|algorithm.adv_estimator=grop"),
        ({"algorithm__use_kl_in_reward": True}, "actor.use_kl_loss=true is the KL"),
        ({"actor__entropy_coeff": 0.1}, "actor.entropy_coeff: not here"),
        ({"actor__ppo_max_token_len_per_gpu": 3}, "at least 4 steps of one sample"),
        ({"actor__use_dynamic_bsz": False}, "needs actor.ppo_micro_batch_size_per_gpu"),
        ({"actor__policy_loss__loss_mode": "vanila"}, "vanila"),
        ({"model__network": None}, "model.network is needed"),
        ({"model__lora_rank": -1}, "model.lora_rank=-1"),
    ],
)
def test_settings_that_cannot_work_are_one_sentence(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        job_of(config_of(**options)).check(None)


def test_the_recipe_is_valid() -> None:
    from trainer.recipe import recipe_overrides
    from verl_lite.config import load_schema

    loaded = load_schema([], FlowGRPOConfig, recipe_loader=recipe_overrides, default_recipe="flow_grpo")
    job_of(loaded.config).check(None)


def test_prompts_and_rewards_that_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "some.txt").write_text("a\n\n b \n")
    assert read_prompts([str(tmp_path / "some.txt")]) == ["a", "b"]
    (tmp_path / "none.txt").write_text("\n")
    with pytest.raises(UserError, match="no prompts"):
        read_prompts([str(tmp_path / "none.txt")])
    with pytest.raises(UserError, match=r"gone\.txt: No such file"):
        read_prompts([str(tmp_path / "gone.txt")])
    with pytest.raises(UserError, match=r"reward\.name='x:y'"):
        job_of(config_of(reward__name="x:y", data__train_files=[str(tmp_path / "some.txt")])).read_data()


# ------------------------------------------------------------------------------------------------------------ driver

SHAPE = (1, 3, 2, 2)


def brightness(frames: torch.Tensor, prompts: Sequence[str], fail: float = -1.0) -> list[float | None]:
    """Mean of the frames; None for those whose first pixel is `fail`."""
    return [None if float(clip[0, 0, 0, 0]) == fail else float(clip.mean()) for clip in frames]


class SeedGroup:
    """A worker group of two ranks whose images and paths are their seeds."""

    world_size = 2

    def generate(self, data: DataProto) -> DataProto:
        value = data.batch["first_seed"].double() / 2**63
        tensors = {"frames": value[:, None, None, None, None].expand(-1, *SHAPE).float().contiguous()}
        if data.meta_info["noise_level"]:
            steps = data.meta_info["steps"]
            tensors["old_log_probs"] = torch.zeros(len(data), steps)
            tensors["latents"] = torch.zeros(len(data), steps + 1, 2)
        return DataProto.from_dict(tensors)

    def update_actor(self, data: DataProto) -> list[DataProto]:
        self.updated = data
        return [DataProto(meta_info={"metrics": {}})]


def trainer_of(config: FlowGRPOConfig, prompts: Sequence[str]) -> FlowGRPOTrainer:
    parts: Any = SeedGroup()
    unused: Any = None
    return FlowGRPOTrainer(
        config,
        actor=FlowActor(parts, config),
        steps=EpochSteps(len(prompts), config.data.train_batch_size, config.trainer, shuffle=True),
        prompts=prompts,
        val_prompts=prompts,
        reward=brightness,
        tracking=unused,
        saver=unused,
    )


def test_samples_have_their_own_noise_and_the_evaluation_always_the_same() -> None:
    trainer = trainer_of(config_of(), ["a", "b"])
    trainer.steps.global_step = 1
    prompts = [(0, "a"), (1, "b")]
    first = trainer.rows_of(prompts, 3, PATH)
    assert list(first.non_tensor_batch["uid"]) == ["0"] * 3 + ["1"] * 3
    seeds = [*first.batch["first_seed"].tolist(), *first.batch["path_seed"].tolist()]
    assert len(set(seeds)) == 12
    evaluation = trainer.rows_of(prompts, 3, EVALUATION)
    trainer.steps.global_step = 2
    assert not set(trainer.rows_of(prompts, 3, PATH).batch["path_seed"].tolist()) & set(seeds)
    assert torch.equal(trainer.rows_of(prompts, 3, EVALUATION).batch["first_seed"], evaluation.batch["first_seed"])
    trainer.config.sampler.share_first_noise = True
    shared = trainer.rows_of(prompts, 3, PATH).batch
    assert len(set(shared["first_seed"].tolist())) == 2 and len(set(shared["path_seed"].tolist())) == 6


def test_advantages_compare_the_samples_of_one_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """GRPO by hand: (score - mean of the prompt's samples) / their standard deviation, the same on every step; a sample
    without a score counts nowhere."""
    trainer = trainer_of(config_of(), ["a", "b"])
    trainer.steps.global_step = 1
    batch = trainer.sample([(0, "a"), (1, "b")])
    scores = [1.0, 2.0, 6.0, 0.0, None, 1.0]
    monkeypatch.setattr(trainer, "reward", lambda frames, prompts: scores)
    batch = trainer.estimate_advantages(trainer.score(batch))
    expected: list[float] = []
    for group in ([1.0, 2.0, 6.0], [0.0, 1.0]):
        expected += [float((score - np.mean(group)) / np.std(group, ddof=1)) for score in group]
    expected.insert(4, 0.0)
    found = batch.batch["advantages"].numpy()
    np.testing.assert_allclose(found, np.repeat(np.array(expected)[:, None], 4, axis=1), atol=1e-4)
    assert batch.batch["response_mask"].sum(1).tolist() == [4, 4, 4, 4, 0, 4]
    assert trainer.metrics["reward/error_rate"] == pytest.approx(1 / 6)
    metrics = data_metrics(batch)
    assert metrics["critic/score/mean"] == pytest.approx(2.0) and metrics["critic/score/max"] == 6.0


@pytest.mark.parametrize(("mini", "epochs", "needs"), [(-1, 1, False), (2, 1, False), (1, 1, True), (-1, 2, True)])
def test_old_log_probs_go_to_the_workers_where_there_is_a_second_step(mini: int, epochs: int, needs: bool) -> None:
    trainer = trainer_of(config_of(actor__ppo_mini_batch_size=mini, actor__ppo_epochs=epochs), ["a", "b"])
    trainer.steps.global_step = 1
    batch = trainer.estimate_advantages(trainer.score(trainer.sample([(0, "a"), (1, "b")])))
    trainer.actor.update(batch, step=1)
    group: Any = trainer.actor.group
    assert ("old_log_probs" in group.updated.batch.keys()) is needs
    schedule = group.updated.meta_info["schedule"]
    assert len(schedule) == epochs and sum(part.num_tokens for part in schedule[0]) == 6 * 4


def test_the_evaluation_is_reported_under_the_names_of_language_models() -> None:
    trainer = trainer_of(config_of(rollout__val_kwargs__n=2), ["a", "b"])
    metrics, samples = trainer.validate()
    assert len(samples.batch["frames"]) == 4
    scores = samples.batch["face_score"]
    assert metrics["val-core/prompts/reward/mean@2"] == pytest.approx(float(scores.mean()), abs=1e-6)
    assert metrics == trainer.validate()[0]
