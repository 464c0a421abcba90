"""On a machine that is not ours alone: runs beside each other and beside somebody else's Ray, and what they leave.

Each run is the whole command in a process of its own, with a reward function that litters: it leaves a process in a
session of its own, temporary files and shared memory.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.tiny_run import TinyRun, TinyTask
from trainer.observe.tracking import read_metrics
from verl_lite.machine.process_table import marked_processes
from verl_lite.machine.process_tree import end_processes
from verl_lite.single_controller.watcher import LOOK_EVERY_S

pytestmark = pytest.mark.slow

FOREIGN_MARK = "VERL_LITE_TEST_FOREIGN"
GONE_S = 30.0
LITTER = """
import mmap, os, subprocess, tempfile

litter = []

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if not litter:
        litter.append(subprocess.Popen(["sleep", "600"], start_new_session=True))
        litter.append(tempfile.mkdtemp())
    if len(litter) == 2 and solution_str != ground_truth:  # not when it is tried before the run
        file = open(f"/dev/shm/vt-{os.getpid()}", "w+b")
        file.truncate(4096)
        litter.append(mmap.mmap(file.fileno(), 4096))
        if os.environ.get("TIDY"):
            os.unlink(file.name)
    return sum(map(ord, solution_str)) % 7 / 7
"""
ASK = """
import ray, sys
ray.init(address=sys.argv[1], log_to_driver=False)
print(len(ray.nodes()), len(ray._private.state.actors()))
"""
FOREVER = 1_000_000


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> TinyTask:
    return TinyTask(tmp_path_factory.mktemp("guest"), LITTER)


class ForeignRay:
    """A Ray cluster as somebody else starts it by hand: most ports as they are by default, a temporary folder."""

    def __init__(self) -> None:
        self.temp = tempfile.mkdtemp(prefix="fr-", dir="/tmp")
        self.mark = Path(self.temp).name
        self.env = {
            **os.environ, FOREIGN_MARK: self.mark, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"
        }  # fmt: skip
        out = self.ray(
            "start", "--head", "--num-cpus=1", "--port=0", f"--temp-dir={self.temp}", "--include-dashboard=false",
            "--object-store-memory=80000000",
        )  # fmt: skip
        found = re.search(r"--address='([\d.:]+)'", out)
        assert found is not None, out
        self.address = found[1]
        self.processes = sorted(marked_processes(FOREIGN_MARK, self.mark))

    def ray(self, *arguments: str) -> str:
        argv = [sys.executable, "-m", "ray.scripts.scripts", *arguments]
        return subprocess.run(argv, env=self.env, capture_output=True, text=True, timeout=300).stdout

    def is_as_before(self) -> bool:
        """Whether its processes are those that it started with, and it answers, with no actor of anybody in it."""
        argv = [sys.executable, "-c", ASK, self.address]
        answer = subprocess.run(argv, env=self.env, capture_output=True, text=True, timeout=300).stdout
        return set(self.processes) <= set(marked_processes(FOREIGN_MARK, self.mark)) and answer == "1 0\n"

    def close(self) -> None:
        end_processes(marked_processes(FOREIGN_MARK, self.mark))
        shutil.rmtree(self.temp, ignore_errors=True)


def test_two_runs_at_once_beside_somebody_elses_ray_and_a_closed_terminal(task: TinyTask, runs: list[TinyRun]) -> None:
    """One ends by itself. The other is in a terminal that closes: SIGHUP goes to all of the driver's process group, as
    SIGTERM of `timeout`; batch systems send it to every process of the job."""
    env = {"TIDY": "1"}
    runs.append(one := task.start("one", env=env))
    foreign = ForeignRay()
    try:
        env["RAY_ADDRESS"] = foreign.address
        runs.append(two := task.start("two", "trainer.save_freq=1000000", steps=FOREVER, env=env))
        assert one.wait() == 0, one.output()
        assert sorted(read_metrics(one.run_dir / "metrics.jsonl")) == [1, 2]
        one.leaves_nothing(within_s=0)
        two.wait_for_step(2)
        for pid in set(two.processes()) - {two.process.pid}:
            os.kill(pid, signal.SIGTERM)
        os.killpg(two.process.pid, signal.SIGHUP)
        assert two.wait() == 130, two.output()
        assert "To continue:" in two.output() and list(two.run_dir.glob("global_step_*"))
        two.leaves_nothing(within_s=0)
        assert foreign.is_as_before()
    finally:
        foreign.close()


@pytest.mark.long
def test_kill_9_of_the_driver_leaves_nothing(task: TinyTask, runs: list[TinyRun]) -> None:
    run = task.start("killed", steps=FOREVER)
    runs.append(run)
    run.wait_for_step(2)
    time.sleep(LOOK_EVERY_S + 2.0)  # shared memory that is younger than one look may be missed
    assert len(run.processes()) > 5 and any("vt-" in name for name in run.shared), "else nothing is tested"
    run.send(signal.SIGKILL)
    assert run.wait() == -signal.SIGKILL
    run.leaves_nothing(within_s=GONE_S)


def test_a_signal_before_the_training_ends_it_too(task: TinyTask, runs: list[TinyRun]) -> None:
    reward = task.folder / "slow.py"
    reward.write_text("import os, time\nopen(os.environ['REACHED'], 'w')\ntime.sleep(100)\n" + LITTER)
    reached = task.folder / "reached"
    options = [f"reward.custom_reward_function.path={reward}", "trainer.backend=inline"]
    run = task.start("early", *options, env={"REACHED": str(reached)})
    runs.append(run)
    run.wait_for(reached.exists)
    run.send(signal.SIGTERM)
    assert run.wait() == 128 + signal.SIGTERM, run.output()
    assert "Stopped by SIGTERM" in run.output() and "Traceback" not in run.output()
    run.leaves_nothing(within_s=0)
