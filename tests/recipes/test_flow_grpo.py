"""flow_grpo: its world and judge, its options, the driver's stages around a worker that is none; whole runs on a
network of a few hundred weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recipes.flow_grpo.__main__ import main
from recipes.flow_grpo.run import FlowGRPOJob, read_prompts
from recipes.flow_grpo.trainer import EVALUATION, PATH, FlowActor, FlowGRPOTrainer, data_metrics
from recipes.flow_grpo.world import PLACES, PROMPTS, describe, draw
from tests.set_keys import set_keys
from tests.workers.diffusion.sde_cases import NETWORK, TinyField, write_field
from trainer.loop.steps import EpochSteps
from trainer.observe.console import Console
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
        ({"algorithm__use_kl_in_reward": True}, "flow_grpo.s KL is actor.use_kl_loss=true"),
        ({"actor__entropy_coeff": 0.1}, "actor.entropy_coeff: not supported"),
        ({"actor__ppo_max_token_len_per_gpu": 3}, "expected at least 4, the denoising steps of one sample"),
        ({"actor__use_dynamic_bsz": False}, "set actor.ppo_micro_batch_size_per_gpu"),
        ({"actor__policy_loss__loss_mode": "vanila"}, "vanila"),
        ({"model__network": None}, "model.network is not set"),
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
    metrics, samples = trainer.evaluate()
    assert len(samples.batch["frames"]) == 4
    scores = samples.batch["face_score"]
    assert metrics["val-core/prompts/reward/mean@2"] == pytest.approx(float(scores.mean()), abs=1e-6)
    assert metrics == trainer.evaluate()[0]


# ----------------------------------------------------------------------------------------------------------- whole runs

LIKE_LANGUAGE = (
    "critic/score/mean", "critic/rewards/mean", "critic/advantages/max", "critic/returns/min", "actor/pg_loss",
    "actor/ppo_kl", "actor/grad_norm", "actor/lr", "timing_s/gen", "timing_s/update_actor",
    "training/global_step", "frac_reward_zero_std",
)  # fmt: skip
USUAL = [
    "data.train_batch_size=2", f"model.network={NETWORK}", f"reward.name={__name__}:bright_pixels", "rollout.n=16",
    "rollout.val_kwargs.n=8", "sampler.num_train_steps=4", "sampler.num_inference_steps=8", "trainer.device=cpu",
    "actor.ppo_mini_batch_size=1", "actor.clip_ratio=0.02", "actor.optim.lr=1e-2", "trainer.backend=inline",
    "trainer.logger=[jsonl]", "trainer.save_freq=0", "trainer.test_freq=-1",
]  # fmt: skip


def bright_pixels(frames: torch.Tensor, prompts: Sequence[str]) -> list[float]:
    """Share of pixels above a half: a count, which has no gradient."""
    return (frames > 0.5).float().flatten(1).mean(1).tolist()


def arguments(tmp_path: Path, run: str, **options: object) -> list[str]:
    if not (tmp_path / "field").exists():
        write_field(tmp_path / "field")
        (tmp_path / "prompts.txt").write_text("one\nthree\n")
    places = [f"data.train_files=[{tmp_path}/prompts.txt]", f"model.path={tmp_path}/field"]
    given = [f"{name.replace('__', '.')}={value}" for name, value in options.items()]
    return [*places, *USUAL, f"trainer.default_local_dir={tmp_path / run}", *given]


def logged(run: Path) -> list[Mapping[str, float]]:
    return [json.loads(line)["data"] for line in (run / "metrics.jsonl").read_text().splitlines()]


OTHER = {
    "algorithm__adv_estimator": "rloo", "actor__policy_loss__loss_mode": "gspo", "model__lora_rank": 4,
    "actor__loss_agg_mode": "seq-mean-token-mean", "actor__use_kl_loss": "true", "sampler__share_first_noise": "true",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, OTHER])
def test_it_learns_from_a_count(tmp_path: Path, options: dict[str, object]) -> None:
    total = 12
    assert main(arguments(tmp_path, "run", trainer__total_training_steps=total, **options)) == 0
    steps = logged(tmp_path / "run")
    scores = [step["critic/score/mean"] for step in steps if "critic/score/mean" in step]
    assert len(scores) == total and all(name in steps[1] for name in LIKE_LANGUAGE)
    name = "val-core/prompts/reward/mean@8"
    first, last = steps[0][name], steps[-1][name]
    assert last > first + 0.15 and sum(scores[-3:]) / 3 > scores[0] + 0.2, (first, last, scores)
    assert (tmp_path / "run" / "curve.png").is_file() and (tmp_path / "run" / "before_after.png").is_file()


@pytest.mark.slow
def test_a_resumed_run_goes_on_bit_for_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = {"trainer__total_training_steps": 4, "trainer__save_freq": 2, "actor__optim__lr_warmup_steps": 4}
    assert main(arguments(tmp_path, "whole", **common)) == 0
    at_two = f"trainer.resume_from_path={tmp_path / 'whole' / 'global_step_2'}"
    resumed = [*arguments(tmp_path, "resumed", **common), "trainer.resume_mode=resume_path", at_two]
    assert main(resumed) == 0
    assert f'TinyField.from_pretrained("{tmp_path / "resumed" / "model"}")' in capsys.readouterr().out
    networks = [TinyField.from_pretrained(str(tmp_path / run / "model")) for run in ("whole", "resumed")]
    for name, weight in networks[0].state_dict().items():
        assert torch.equal(networks[1].state_dict()[name], weight), name
    whole, rest = (
        {step["training/global_step"]: step for step in logged(tmp_path / run) if "actor/pg_loss" in step}
        for run in ("whole", "resumed")
    )
    assert set(rest) == {3, 4}
    for step, metrics in rest.items():
        for name in ("critic/score/mean", "actor/pg_loss", "actor/grad_norm", "actor/lr"):
            assert metrics[name] == whole[step][name]


@pytest.mark.long
def test_two_ranks_under_ray(tmp_path: Path) -> None:
    """The same samples as in one process, and so the same scores; the update differs by rounding alone."""
    common = {"trainer__total_training_steps": 2, "trainer__val_before_train": "false", "trainer__test_freq": 0}
    assert main(arguments(tmp_path, "one", **common)) == 0
    ray = {"trainer__backend": "ray", "trainer__n_gpus_per_node": 2}
    small = ["ray_kwargs.ray_init.num_cpus=2", "ray_kwargs.ray_init.object_store_memory_mb=80"]
    command = [sys.executable, "-m", "recipes.flow_grpo", *arguments(tmp_path, "two", **common, **ray), *small]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    for one, two in zip(logged(tmp_path / "one"), logged(tmp_path / "two"), strict=True):
        assert two["critic/score/mean"] == pytest.approx(one["critic/score/mean"], abs=0.02)
        assert two["actor/grad_norm"] == pytest.approx(one["actor/grad_norm"], rel=0.02)
