"""Whole runs of `python -m recipes.flow_grpo` on a network of a few hundred weights: they learn, resume and use Ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

from recipes.flow_grpo.run import FlowGRPOJob
from tests.workers.diffusion.sde_cases import NETWORK, TinyField, write_field
from trainer.run import run

pytestmark = pytest.mark.slow

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


@pytest.mark.parametrize("options", [{}, OTHER])
def test_it_learns_from_a_count(tmp_path: Path, options: dict[str, object]) -> None:
    total = 12
    assert run(FlowGRPOJob, arguments(tmp_path, "run", trainer__total_training_steps=total, **options)) == 0
    steps = logged(tmp_path / "run")
    scores = [step["critic/score/mean"] for step in steps if "critic/score/mean" in step]
    assert len(scores) == total and all(name in steps[1] for name in LIKE_LANGUAGE)
    name = "val-core/prompts/reward/mean@8"
    first, last = steps[0][name], steps[-1][name]
    assert last > first + 0.15 and sum(scores[-3:]) / 3 > scores[0] + 0.2, (first, last, scores)
    assert (tmp_path / "run" / "curve.png").is_file() and (tmp_path / "run" / "before_after.png").is_file()


def test_a_resumed_run_goes_on_bit_for_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = {"trainer__total_training_steps": 4, "trainer__save_freq": 2, "actor__optim__lr_warmup_steps": 4}
    assert run(FlowGRPOJob, arguments(tmp_path, "whole", **common)) == 0
    at_two = f"trainer.resume_from_path={tmp_path / 'whole' / 'global_step_2'}"
    resumed = [*arguments(tmp_path, "resumed", **common), "trainer.resume_mode=resume_path", at_two]
    assert run(FlowGRPOJob, resumed) == 0
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
    assert run(FlowGRPOJob, arguments(tmp_path, "one", **common)) == 0
    ray = {"trainer__backend": "ray", "trainer__n_gpus_per_node": 2}
    small = ["ray_kwargs.ray_init.num_cpus=2", "ray_kwargs.ray_init.object_store_memory_mb=80"]
    command = [sys.executable, "-m", "recipes.flow_grpo", *arguments(tmp_path, "two", **common, **ray), *small]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    for one, two in zip(logged(tmp_path / "one"), logged(tmp_path / "two"), strict=True):
        assert two["critic/score/mean"] == pytest.approx(one["critic/score/mean"], abs=0.02)
        assert two["actor/grad_norm"] == pytest.approx(one["actor/grad_norm"], rel=0.02)
