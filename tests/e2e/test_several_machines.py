"""Runs over several machines of a Ray cluster, of which some go away: what is told, what goes on, what is left.

The machines are Ray nodes with addresses of their own on this one (`tests/ray_machines.py`), each with room for both
ranks of a run, which take one machine each all the same. A run is the whole command; in the second step it waits, where
asked to, for the test to do its mischief.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ray_machines import AUTH, RayMachines
from tests.tiny_run import TinyRun, TinyTask
from trainer.observe.tracking import read_metrics

pytestmark = pytest.mark.slow

SOON_S = 60.0
STEPS = 3


class Site:
    """The cluster, and the runs of the tests in it."""

    def __init__(self, folder: Path) -> None:
        self.pause = folder / "pause"
        self.task = TinyTask(folder)
        own = "ray_kwargs.ray_init."
        self.task.options = [option for option in self.task.options if not option.startswith(own)]
        self.machines = RayMachines([], slots=2, env={"PAUSE": str(self.pause)})
        self.there: list[str] = []
        self.joined = 0

    def join(self) -> str:
        """One more machine, with an address that none had before."""
        self.joined += 1
        self.there.append(f"127.0.0.{9 + self.joined}")
        self.machines.add(self.there[-1])
        return self.there[-1]

    def lose(self) -> str:
        """The machine that joined last goes away."""
        self.machines.kill(self.there[-1])
        return self.there.pop()

    def start(self, name: str, *options: str) -> TinyRun:
        return self.task.start(
            name,
            f"ray_kwargs.ray_init.address={self.machines.address}",
            "trainer.nnodes=2",
            "trainer.save_freq=1",
            "reward.num_workers=0",
            "actor.policy_loss.loss_mode=tests.e2e.faulty_parts:loss_that_pauses",
            *options,
            steps=STEPS,
            env=AUTH,
        )

    def start_and_pause(self, name: str, *options: str, ranks: int = 2) -> TinyRun:
        """A run whose ranks wait in the second step."""
        self.pause.touch()
        for told in self.paused():
            told.unlink()
        run = self.start(name, *options)
        run.wait_for(lambda: len(self.paused()) == ranks and all(told.read_text() for told in self.paused()))
        return run

    def paused(self) -> list[Path]:
        return sorted(self.pause.parent.glob("paused-*"))

    def go_on(self) -> None:
        self.pause.unlink()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("site"))
    yield site
    site.machines.close()


@pytest.fixture
def site(cluster: Site) -> Site:
    """With two machines, whatever the tests before have done."""
    while len(cluster.there) < 2:
        cluster.join()
    return cluster


def test_each_rank_has_a_machine_and_a_replacement_costs_nothing_but_time(site: Site, runs: list[TinyRun]) -> None:
    """That the steps are those of a run without loss is shown by the resumed runs of `test_exact_resume_ray`."""
    run = site.start_and_pause("hit", "trainer.max_retries=1")
    runs.append(run)
    told = [path.read_text().split() for path in site.paused()]
    assert len({node for node, _, _ in told}) == 2, "two ranks on one machine"
    assert len({address for _, address, _ in told}) == 1 and told[0][1] in site.there  # where they meet: rank 0's
    site.lose()
    run.wait_for(lambda: "waiting up to 300 s for room in the cluster" in run.log.read_text())
    site.go_on()
    site.join()
    assert run.wait() == 0, run.output()
    assert "Starting again from the last checkpoint" in run.log.read_text()
    assert list(read_metrics(run.run_dir / "metrics.jsonl")) == [1, 2, 3]
    run.leaves_nothing(within_s=0)


@pytest.mark.long
def test_kill_9_of_the_driver_leaves_no_worker(site: Site, runs: list[TinyRun]) -> None:
    before = set(site.machines.processes())
    run = site.start_and_pause("orphans", "trainer.nnodes=1", "trainer.n_gpus_per_node=2")
    runs.append(run)
    workers = [int(path.read_text().split()[2]) for path in site.paused()]
    assert set(workers) <= set(site.machines.processes()) - before
    run.send(signal.SIGKILL)
    assert run.wait() == -signal.SIGKILL
    deadline = time.monotonic() + SOON_S
    while any(Path("/proc", str(pid), "cmdline").exists() for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not [pid for pid in workers if Path("/proc", str(pid)).exists()]
    site.go_on()
    run.leaves_nothing(within_s=SOON_S)


@pytest.mark.long
def test_without_a_machine_to_take_its_place_the_run_ends_goes_on_with_fewer_and_tells_of_a_dead_cluster(
    site: Site, runs: list[TinyRun]
) -> None:
    """Last: there is no cluster after it."""
    run = site.start_and_pause("alone", "trainer.max_retries=1", "ray_kwargs.ray_init.wait_for_nodes_s=5")
    runs.append(run)
    killed = time.monotonic()
    lost = site.lose()
    site.go_on()
    assert run.wait() == 1, run.output()
    assert time.monotonic() - killed < SOON_S
    text = run.log.read_text()
    summary = text.split("The run failed: ")[-1]
    assert summary.startswith("actor_rollout, rank ") and f"on node {lost}" in summary
    assert "in update_actor (phase update_actor of step 2)" in summary and "left the cluster" in summary
    assert "needs 2 slots on 2 machines with 1 CPU each; 1 of the 2 machines in the cluster can hold that" in text
    assert "trainer.nnodes=1" in text and "trainer.resume_mode=auto" in text
    dump = run.run_dir / "crash" / "step_2"
    assert (dump / "step.pkl").exists() and f"node {lost}" in (dump / "error.txt").read_text()
    assert "most recent call first" in (dump / "stacks.txt").read_text()
    assert (dump / "logs" / "actor_rollout-1.log").exists()

    fewer = site.start_and_pause("alone", "trainer.nnodes=1", "trainer.resume_mode=auto", ranks=1)
    runs.append(fewer)
    assert list(read_metrics(fewer.run_dir / "metrics.jsonl")) == [1, 2]  # the second with one rank
    killed = time.monotonic()
    site.machines.kill_head()
    assert fewer.wait() == 1, fewer.output()
    assert time.monotonic() - killed < SOON_S
    assert "the Ray cluster at" in fewer.output().splitlines()[-1]
    assert (fewer.run_dir / "crash" / "step_3" / "step.pkl").exists()
    fewer.leaves_nothing(within_s=SOON_S)
    site.go_on()
