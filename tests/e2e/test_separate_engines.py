"""Runs whose engines are on devices of their own: the colocated run's numbers, and engines that are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.made_once import made_once
from tests.tiny_run import ROOT, TinyRun, TinyTask

pytestmark = pytest.mark.slow

POOL = ["actor_rollout_ref.hybrid_engine=false", "actor_rollout_ref.rollout.nnodes=1", "rollout.n_gpus_per_node=1"]
DIES = """
import os
from workers.engines.hf_engine import HFEngine

class Engine(HFEngine):
    def submit(self, request):
        os._exit(7)
"""
BROKEN = """
def loss(*args, **kwargs):
    raise ArithmeticError("the loss is broken")
"""
TIMES = ("timing", "seconds", "perf/", "_frac", "per_second", "weight_sync", "idle", "host_", "rollout/engine_")


Numbers = dict[int, dict[str, float]]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> TinyTask:
    return TinyTask(tmp_path_factory.mktemp("separate"))


@contextmanager
def cores(count: int) -> Iterator[None]:
    """Processes that start inside use so many cores. A run gives its workers as many threads as it has cores for each,
    and the number of threads decides the last bits of sums."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, set(sorted(before)[:count]))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def numbers(run_dir: Path) -> Numbers:
    """All metrics of each step except those that measure time."""
    steps: Numbers = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        row: dict[str, Any] = json.loads(line)
        kept = {name: value for name, value in row["data"].items() if not any(part in name for part in TIMES)}
        steps.setdefault(row["step"], {}).update(kept)
    return steps


def finish(run: TinyRun) -> TinyRun:
    assert run.wait() == 0, run.output()
    run.leaves_nothing(20)
    return run


def engine_processes(run: TinyRun) -> list[int]:
    """The processes whose output is the log of an engine."""
    return [pid for pid in run.processes() if "engine_" in os.readlink(f"/proc/{pid}/fd/1")]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Numbers:
    """The numbers of a run on separate devices, without failures."""

    def make(folder: Path) -> None:
        with cores(2):
            finish(TinyTask(folder).start("run", *POOL, steps=6))

    folder = made_once(tmp_path_factory, "engines-undisturbed", make)
    return numbers(folder / "run")


@pytest.fixture(scope="module")
def colocated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of the same task on shared devices, with a checkpoint of step 3."""

    def make(folder: Path) -> None:
        with cores(1):
            finish(TinyTask(folder).start("run", "trainer.save_freq=3", steps=6))

    return made_once(tmp_path_factory, "engines-colocated", make) / "run"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_on_policy_numbers_are_those_of_the_colocated_run(colocated: Path, undisturbed: Numbers) -> None:
    assert numbers(colocated) == undisturbed
    assert len(undisturbed) == 6 and len(undisturbed[1]) > 50


def test_a_killed_engine_is_replaced_and_changes_no_number(task: TinyTask, undisturbed: Numbers) -> None:
    with cores(2):
        run = task.start("killed", *POOL, steps=6)
    run.wait_for_step(2)
    for pid in engine_processes(run):
        os.kill(pid, signal.SIGKILL)
    finish(run)
    assert "engine_0 rank 0 died" in run.output() and "The engine is replaced" in run.output()
    assert numbers(run.run_dir) == undisturbed


PARTIAL = ["async_training.max_off_policy_threshold=2", "data.max_response_length=40", "rollout.oversample=1.5"]
ADAPTER = ["model.lora_rank=4", "model.lora_alpha=8", "trainer.save_freq=2"]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["async_training.max_off_policy_threshold=1"], marks=pytest.mark.long),
        pytest.param(PARTIAL, marks=pytest.mark.long),
        pytest.param(ADAPTER, marks=pytest.mark.long),
        [*PARTIAL, *ADAPTER],
    ],
    ids=["stale", "partial", "adapter", "partial, adapter"],
)
def test_other_settings_survive_a_kill_too(task: TinyTask, request: pytest.FixtureRequest, options: list[str]) -> None:
    name = request.node.callspec.id.replace(", ", "-")
    run = task.start(name, *POOL, *options, steps=6)
    run.wait_for_step(3)
    for pid in engine_processes(run):
        os.kill(pid, signal.SIGKILL)
    finish(run)
    assert len(numbers(run.run_dir)) == 6
    sent = [json.loads(line)["data"] for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    megabytes = sorted(row["weight_sync/megabytes"] for row in sent if "weight_sync/megabytes" in row)
    if "model.lora_rank=4" in options:  # the base model, 0.56 MB, is sent again to an engine that was replaced
        assert megabytes[len(megabytes) // 2] < 0.1


def test_an_engine_that_dies_again_and_again_ends_the_run_with_the_first_cause(task: TinyTask) -> None:
    (task.folder / "dies.py").write_text(DIES)
    options = ["rollout.name=dies:Engine", "trainer.save_freq=0"]
    run = task.start("dies", *POOL, *options, env={"PYTHONPATH": os.pathsep.join([str(task.folder), str(ROOT)])})
    assert run.wait() == 1
    run.leaves_nothing(20)
    assert "engine_0 rank 0 died in take_groups" in run.output() and "The engine is replaced" in run.output()


def test_when_the_trainer_is_killed_no_engine_stays(task: TinyTask) -> None:
    run = task.start("orphan", *POOL, steps=400)
    run.wait_for_step(2)
    assert engine_processes(run)
    run.send(signal.SIGKILL)  # the driver
    run.process.wait()
    run.leaves_nothing(30)


@pytest.mark.long
def test_when_a_rank_of_the_trainer_is_killed_the_run_ends_and_no_engine_stays(task: TinyTask) -> None:
    run = task.start("rank", *POOL, steps=400)
    run.wait_for_step(2)
    trainers = [pid for pid in run.processes() if "actor_rollout" in os.readlink(f"/proc/{pid}/fd/1")]
    os.kill(trainers[0], signal.SIGKILL)
    assert run.wait() == 1
    assert "actor_rollout rank 0 died" in run.output()
    run.leaves_nothing(20)


def test_a_checkpoint_of_shared_devices_continues_on_separate_ones_with_the_same_numbers(
    colocated: Path, undisturbed: Numbers
) -> None:
    # a checkpoint names the files of its task
    task = TinyTask(colocated.parent)
    resume = f"trainer.resume_from_path={colocated / 'global_step_3'}"
    with cores(2):
        resumed = finish(task.start("resumed", *POOL, "trainer.resume_mode=resume_path", resume, steps=6))
    assert numbers(resumed.run_dir) == {step: undisturbed[step] for step in (4, 5, 6)}


@pytest.mark.long
def test_a_failed_step_is_repeated_in_one_process(task: TinyTask) -> None:
    (task.folder / "broken_loss.py").write_text(BROKEN)
    env = {"PYTHONPATH": os.pathsep.join([str(task.folder), str(ROOT)])}
    run = task.start("broken", *POOL, "actor.policy_loss.loss_mode=broken_loss:loss", env=env)
    assert run.wait() == 1
    run.leaves_nothing(20)
    command = [sys.executable, "-m", "trainer.replay", str(run.run_dir / "crash" / "step_1")]
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True)
    assert done.returncode == 1 and "the loss is broken" in done.stderr, done.stdout + done.stderr
