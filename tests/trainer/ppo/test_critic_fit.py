"""A run with a real critic, in this process: warm-up, metrics, a checkpoint with two models, and its export."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import AutoModelForTokenClassification

from tests.trainer import tiny_run
from trainer.export import main as export
from trainer.launch.ppo_job import run_ppo
from trainer.observe.tracking import read_metrics
from trainer.ray_trainer import RayPPOTrainer
from verl_lite.protocol import DataProto

OPTIONS = [
    "algorithm.adv_estimator=gae", "trainer.critic_warmup=1", "critic.optim.lr=1e-3", "actor.optim.lr=1e-3",
    "critic.ppo_epochs=2", "critic.ppo_mini_batch_size=2", "trainer.save_freq=1",
]  # fmt: skip


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    tiny_run.write_files(tmp_path, [f"{number}+{number}" for number in range(8)])
    return [*tiny_run.options_of(tmp_path), *OPTIONS]


def state_of(folder: Path) -> dict[str, torch.Tensor]:
    dcp_to_torch_save(folder, folder.with_suffix(".pt"))
    return torch.load(folder.with_suffix(".pt"), weights_only=False)


@pytest.mark.slow
def test_a_critic_learns_first_then_both(options: list[str], tmp_path: Path) -> None:
    run_ppo([*options, "trainer.total_training_steps=2"])
    run_dir = tmp_path / "run"
    first, second = read_metrics(run_dir / "metrics.jsonl").values()
    for name in ("vf_loss", "vf_clipfrac", "vpred_mean", "loss", "grad_norm", "lr", "values/mean", "vf_explained_var"):
        assert f"critic/{name}" in first, name
    assert "timing_s/values" in first and "timing_s/update_critic" in first
    assert first["critic/values/max"] == first["critic/values/min"] == 0.0, "a new head"
    # 1 - Var(returns - 0) / (Var(returns) + 1e-5)
    assert first["critic/vf_explained_var"] == pytest.approx(0.0, abs=1e-3)
    assert second["critic/values/max"] > second["critic/values/min"]
    assert first["critic/lr"] == 1e-3
    # with lam = gamma = 1 and a reward at the end, the return of every token is the score
    assert first["critic/returns/max"] == pytest.approx(first["critic/score/max"], abs=1e-6)
    assert "actor/pg_loss" not in first and "actor/pg_loss" in second, "the first step is the critic's alone"
    parts = [(step, part) for step in (1, 2) for part in ("actor", "critic")]
    taken = {(step, part): int(state_of(run_dir / f"global_step_{step}" / part)["steps_taken"]) for step, part in parts}
    # the critic: two mini-batches, twice; the actor: one
    assert taken == {(1, "actor"): 0, (2, "actor"): 1, (1, "critic"): 4, (2, "critic"): 8}


class Watched(RayPPOTrainer):
    """The trainer; keeps each step's batch with the values after the step's update."""

    batches: list[tuple[DataProto, DataProto]] = []

    def log_step(self, batch: DataProto, validation: dict[str, float]) -> None:
        super().log_step(batch, validation)
        assert self.critic is not None
        self.batches.append((batch, self.critic.compute_values(batch)))


@pytest.mark.slow
def test_the_critic_of_any_checkpoint_is_exported_with_its_values(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Watched.batches = []
    run_ppo([*options, "trainer.total_training_steps=3"], trainer_class=Watched)
    run_dir = tmp_path / "run"
    for run, target, (step, expected) in (
        (run_dir / "global_step_2", tmp_path / "second", Watched.batches[1]),
        (run_dir, tmp_path / "last", Watched.batches[2]),
    ):
        assert export([str(run), "--critic", "--out", str(target)]) == 0
        network = AutoModelForTokenClassification.from_pretrained(target)
        inputs = {name: step.batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
        with torch.no_grad():
            logits = network(**inputs).logits  # (B, S, 1)
        mask = step.batch["response_mask"].bool()
        values = logits[:, -mask.shape[1] - 1 : -1, 0]  # of the state before each response token
        assert (values - expected.batch["values"])[mask].abs().max() < 1e-5
        assert values[mask].std() > 1e-3
    assert export([str(run_dir), "--critic"]) == 0 and (run_dir / "global_step_3" / "hf_critic").is_dir()
    start = [f"critic.model.path={tmp_path / 'last'}", "trainer.critic_warmup=0", "trainer.total_training_steps=1"]
    run_ppo([*options, *start, f"trainer.default_local_dir={tmp_path / 'next'}"])
    [first] = read_metrics(tmp_path / "next" / "metrics.jsonl").values()
    assert first["critic/values/max"] > first["critic/values/min"]
    without = [option for option in options if not option.startswith(("critic.", "trainer.critic", "algorithm."))]
    run_ppo([*without, "trainer.total_training_steps=1", f"trainer.default_local_dir={tmp_path / 'grpo'}"])
    assert export([str(tmp_path / "grpo"), "--critic"]) == 2
    assert "contains no critic" in capsys.readouterr().err
