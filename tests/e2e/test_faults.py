"""A rank dies or raises in the middle of a real run: the run ends soon, and says who, where and why.

The runs share one Ray cluster, in this process; each has two ranks that wait for each other in collectives. What starts
again after a loss: `test_several_machines` (a machine), `test_exact_resume_ray` (Ray), `tests/trainer/test_run` (how
often).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.faulty_parts import DYING
from tests.tiny_run import TinyTask
from trainer.cli import failure_text
from trainer.launch.ppo_job import run_ppo
from verl_lite.config import RayInitConfig
from verl_lite.errors import WorkerDiedError, circumstances

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyTask]:
    """Two ranks, and no process for the reward."""
    from verl_lite.single_controller.ray_cluster import ray_running

    task = TinyTask(tmp_path_factory.mktemp("faults"))
    task.options += ["trainer.n_gpus_per_node=2", "reward.num_workers=0"]
    with ray_running(RayInitConfig(num_cpus=2, object_store_memory_mb=80), "faults"):
        yield task


def run_with(task: TinyTask, run_dir: Path, option: str) -> None:
    run_ppo([*task.options, f"trainer.default_local_dir={run_dir}", option])


def test_a_rank_killed_ends_the_run(task: TinyTask) -> None:
    run_dir = task.folder / "killed"
    with pytest.raises(WorkerDiedError) as caught:
        run_with(task, run_dir, "rollout.name=tests.e2e.faulty_parts:DiesGenerating")
    log = run_dir / "logs" / "actor_rollout-1.log"
    [died] = [line for line in log.read_text().splitlines() if line.startswith(DYING)]
    assert time.time() - float(died.removeprefix(DYING)) < 60
    place = circumstances(caught.value)
    assert (place.role, place.rank, place.method) == ("actor_rollout", 1, "begin_groups")
    assert (place.phase, place.step, place.log) == ("gen", 1, str(log))


def test_an_exception_on_one_rank_is_told_with_its_traceback(task: TinyTask) -> None:
    with pytest.raises(LookupError, match="the user's loss") as caught:
        run_with(task, task.folder / "raise", "actor.policy_loss.loss_mode=tests.e2e.faulty_parts:raising_loss")
    cause, *_, summary = failure_text(caught.value).strip().split("\n\n")
    where = "actor_rollout, rank 1, in update_actor (phase update_actor of step 1): "
    assert cause.startswith(f"The first cause, {where.strip()}")
    assert 'faulty_parts.py", line' in cause and "in raising_loss" in cause
    assert summary == f"The run failed: {where}LookupError: the user's loss"
