"""A rank dies or raises in the middle of a real run: the run ends soon, and says who, where and why.

The runs share one Ray cluster, in this process; each has two ranks that wait for each other in collectives. One more
is a whole command in a process of its own, whose rank is killed in the update, twice.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.faulty_parts import DYING
from tests.tiny_run import TinyTask
from trainer.build import run_ppo
from trainer.cli import failure_text
from trainer.tracking import read_metrics
from verl_lite.config import RayInitConfig
from verl_lite.errors import WorkerDiedError, circumstances

pytestmark = pytest.mark.slow

SOON_S = 60.0


def seconds_since_death(run_dir: Path) -> float:
    """By what the rank printed last."""
    lines = (run_dir / "logs" / "actor_rollout-1.log").read_text().splitlines()
    return time.time() - float([line for line in lines if line.startswith(DYING)][-1].removeprefix(DYING))


def tiny(folder: Path) -> TinyTask:
    """Two ranks, and no process for the reward."""
    task = TinyTask(folder)
    task.options += ["trainer.n_gpus_per_node=2", "reward.num_workers=0"]
    return task


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyTask]:
    from verl_lite.single_controller.ray_cluster import ray_running

    with ray_running(RayInitConfig(num_cpus=2, object_store_memory_mb=80), "faults"):
        yield tiny(tmp_path_factory.mktemp("faults"))


@pytest.mark.parametrize(
    ("option", "method", "phase"),
    [
        ("rollout.name=tests.e2e.faulty_parts:DiesGenerating", "generate_sequences", "gen"),
        pytest.param(
            "rollout.name=tests.e2e.faulty_parts:DiesInSync", "update_weights", "update_weights", marks=pytest.mark.long
        ),
    ],
)
def test_a_rank_killed_ends_the_run(option: str, method: str, phase: str, task: TinyTask) -> None:
    run_dir = task.folder / phase
    argv = [*task.options, f"trainer.default_local_dir={run_dir}", option]
    with pytest.raises(WorkerDiedError) as caught:
        run_ppo(argv)
    assert seconds_since_death(run_dir) < SOON_S
    place = circumstances(caught.value)
    assert (place.role, place.rank, place.method) == ("actor_rollout", 1, method)
    assert (place.phase, place.step) == (phase, 1)
    assert place.log == str(run_dir / "logs" / "actor_rollout-1.log")


def test_an_exception_on_one_rank_is_told_with_its_traceback(task: TinyTask) -> None:
    option = "actor.policy_loss.loss_mode=tests.e2e.faulty_parts:raising_loss"
    argv = [*task.options, f"trainer.default_local_dir={task.folder / 'raise'}", option]
    with pytest.raises(LookupError, match="the user's loss") as caught:
        run_ppo(argv)
    text = failure_text(caught.value)
    *_, cause, summary = text.split("\n\n")
    assert cause.startswith("The first cause, actor_rollout, rank 1, in update_actor (phase update_actor of step 1):")
    assert 'faulty_parts.py", line' in cause and "in raising_loss" in cause
    assert summary == (
        "The run failed: actor_rollout, rank 1, in update_actor (phase update_actor of step 1): "
        "LookupError: the user's loss"
    )


@pytest.mark.long  # a lost machine (test_several_machines) and a lost store (test_exact_resume_ray) are in make test
def test_a_lost_worker_costs_nothing_but_time_where_retries_are_allowed(tmp_path: Path) -> None:
    """Once; the second time the command ends soon and leaves nothing. That the steps are those of a run without loss is
    shown by the resumed runs of `test_exact_resume_ray`."""
    loss = "actor.policy_loss.loss_mode=tests.e2e.faulty_parts:loss_that_dies_twice"
    options = [loss, "trainer.save_freq=1", "trainer.max_retries=1"]
    run = tiny(tmp_path).start("run", *options, steps=9, env={"DIED": str(tmp_path / "died")})
    try:
        assert run.wait() == 1, run.output()
        assert seconds_since_death(run.run_dir) < SOON_S
        assert "Starting again from the last checkpoint" in run.log.read_text()
        last = run.output().splitlines()[-2:]
        assert last[0].startswith(
            "The run failed: actor_rollout, rank 1, in update_actor (phase update_actor of step 4)"
        )
        assert last[1].strip() == f"its log: {run.run_dir}/logs/actor_rollout-1.log"
        run.leaves_nothing(within_s=0)
    finally:
        run.close()
    assert list(read_metrics(run.run_dir / "metrics.jsonl")) == [1, 2, 3]
