"""Agents in environments by the main command: exact resume, replay, all backends.

Runs and comparisons are those of `tests/forked_runs.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.test_exact_resume import GAE, KL
from tests.e2e.test_replay import dump_of
from tests.forked_runs import ACTOR, CRITIC, Forked, assert_same_end, differences, driver_state, history, models_of
from tests.guess_number import GUESS_NUMBER
from tests.tiny_model import tiny_qwen2
from trainer.checkpoint.crash_dump import read_dump
from trainer.observe.tracking import read_metrics
from trainer.replay import main as replay

pytestmark = pytest.mark.slow

GUESS = {
    "env_type": GUESS_NUMBER,
    "max_steps": 3,
    "max_tokens_per_step": 4,
    "agent_template": "{observation}",
    "env_config": {"low": 1, "high": 4, "answer_pattern": r"(\d)", "env_instruction": "1-4? "},
}
COMMON = [
    "trainer.backend=inline", "trainer.device=cpu", "rollout.name=hf", "data.max_prompt_length=48",
    "data.max_response_length=96", "actor.optim.lr=1e-3", "trainer.save_freq=1", "actor.ppo_mini_batch_size=4",
    "trainer.logger=[jsonl]", "trainer.test_freq=0", "trainer.val_before_train=false",
    "agentic.train_env_manager.tags=[guess]", "agentic.train_env_manager.num_env_groups=2",
    "agentic.train_env_manager.group_size=4", "agentic.rollout_batch_size=8", "agentic.env_pool.num_workers=0",
]  # fmt: skip
STEPS = ["agentic.custom_envs.guess.env_manager_cls=step", "algorithm.adv_estimator=gigpo"]
AHEAD = [
    "agentic.async_generation_ratio=1",
    "agentic.val_env_manager.tags=[guess]",
    "agentic.val_env_manager.num_env_groups=2",
    "agentic.val_batch_size=2",
]


class Episodes(Forked):
    """Starts runs of episodes in one folder."""

    def __init__(self, folder: Path, *options: str, env: dict[str, Any] = GUESS) -> None:
        config = folder / "envs.yaml"
        config.write_text(json.dumps({"agentic": {"custom_envs": {"guess": env}}}))
        model = f"model.path={tiny_qwen2(folder / 'model')}"
        super().__init__(folder, ["--config", str(config), *COMMON, model, *options])


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        pytest.param([], ACTOR, id="trajectories", marks=pytest.mark.long),
        pytest.param(STEPS, ACTOR, id="steps as rows, gigpo"),
        pytest.param([*AHEAD, "trainer.test_freq=2"], ACTOR, id="a step ahead, validated on the way"),
        pytest.param([*GAE, *KL, "actor.ppo_epochs=2"], CRITIC, id="critic, KL in the reward", marks=pytest.mark.long),
    ],
)
def test_a_run_that_goes_on_from_a_checkpoint_is_the_run(
    options: list[str], parts: tuple[str, ...], tmp_path: Path
) -> None:
    runs = Episodes(tmp_path, *options, "trainer.total_training_steps=4")
    whole = runs.finish("whole")
    start = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={whole}/global_step_2"]
    resumed = runs.finish("resumed", *start)
    assert_same_end(whole, resumed, 4, parts)
    assert_same_history({step: history(whole)[step] for step in (3, 4)}, history(resumed))
    written = read_metrics(whole / "metrics.jsonl")
    assert all("rollout/score/mean" in metrics and "env/guess/success" in metrics for metrics in written.values())


VOLATILE = ("time/", "engine_sequences", "busy_frac", "system/tps", "processes_replaced")


def assert_same_history(left: dict[int, dict[str, float]], right: dict[int, dict[str, float]]) -> None:
    """Equal but for what depends on the clock. Which sequences are decoded together depends on when environments
    answer, and with it the last bits of the engine's log-probs: so numbers that are made of them are only close."""
    assert list(left) == list(right)
    for step in left:
        rows = [
            {name: x for name, x in row.items() if not any(part in name for part in VOLATILE)}
            for row in (left[step], right[step])
        ]
        assert rows[0] == pytest.approx(rows[1], rel=1e-5, abs=1e-5)


def test_a_step_that_fails_is_run_again_from_its_capsule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = dump_of(Episodes(tmp_path, "actor.ppo_mini_batch_size=-1"), monkeypatch)
    dump = read_dump(folder)
    assert dump.phase == "update_actor" and dump.batch is not None and "env_metrics" in dump.batch
    import broken_loss

    broken_loss.STEP[0] = 1
    with pytest.raises(ArithmeticError, match="step 2"):
        replay([str(folder)])
    assert "answers from the dump" in capsys.readouterr().out


def actor_of(checkpoint: Path) -> dict[str, Any]:
    return models_of(checkpoint, ACTOR)


RAY = [
    "trainer.backend=ray", "trainer.n_gpus_per_node=1", "agentic.env_pool.num_workers=1",
    "ray_kwargs.ray_init.num_cpus=2", "ray_kwargs.ray_init.object_store_memory_mb=80",
]  # fmt: skip


NO_BYPASS = "algorithm.rollout_correction.bypass_mode=false"  # the update does not read the engine's log-probs


@pytest.mark.long
@pytest.mark.parametrize("ratio", [0, 1])
def test_with_ray_a_run_that_is_killed_and_goes_on_is_the_run(ratio: int, tmp_path: Path) -> None:
    """Both are killed within step 5. At ratio 1 its episodes are in the checkpoint of step 4, with the seconds that
    they took and the last bits of the engine's log-probs."""
    options = [*RAY, "trainer.n_gpus_per_node=2", f"agentic.async_generation_ratio={ratio}", NO_BYPASS]
    runs = Episodes(tmp_path, *options, "trainer.total_training_steps=1000")
    whole = runs.kill_after(4, "whole")
    start = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={whole}/global_step_2"]
    resumed = runs.kill_after(4, "resumed", *start)
    models, states = ([of(run / "global_step_4") for run in (whole, resumed)] for of in (actor_of, driver_state))
    assert len(models[0]) > 20 and differences(*models) == []
    timed = ("/metrics/", "/rollout_log_probs")
    assert [path for path in differences(*states) if not any(name in path for name in timed)] == []
    rows = [history(run_dir) for run_dir in (whole, resumed)]
    assert_same_history(*({step: row[step] for step in (3, 4)} for row in rows))


TENSOR_PARALLEL = [
    "rollout.name=vllm", "trainer.n_gpus_per_node=2", "rollout.tensor_model_parallel_size=2",
    "agentic.async_generation_ratio=1", NO_BYPASS,
]  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["rollout.name=hf"], id="hf"),
        pytest.param(["rollout.name=vllm"], id="vllm", marks=pytest.mark.long),
        pytest.param(TENSOR_PARALLEL, id="vllm on two devices, a step ahead"),
    ],
)
def test_with_ray_the_same_episodes_run_in_processes(options: list[str], tmp_path: Path) -> None:
    if "rollout.name=vllm" in options:
        pytest.importorskip("vllm")
    runs = Episodes(tmp_path, *RAY, *options, "trainer.save_freq=0", "trainer.total_training_steps=2")
    steps = read_metrics(runs.finish("run") / "metrics.jsonl")
    assert len(steps) == 2 and steps[1]["training/rollout_probs_diff_max"] < 1e-3
    if "agentic.async_generation_ratio=1" in options:
        assert steps[2]["scheduler/off_policy_ratio"] == 1 and steps[2]["rollout/seconds_beside_training"] > 0
    else:
        assert steps[2]["training/rollout_probs_diff_max"] < 1e-3
    assert torch.isfinite(torch.tensor([step["actor/pg_loss"] for step in steps.values()])).all()
