"""Trainer and engines on different machines of a Ray cluster, of which one goes away. The machines are Ray nodes with
one slot each (`tests/ray_machines.py`)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.ray_machines import AUTH, RayMachines
from tests.tiny_run import ROOT, TinyRun, TinyTask
from trainer.observe.tracking import read_metrics

pytestmark = pytest.mark.slow

POOL = ["hybrid_engine=false", "rollout.nnodes=1", "rollout.n_gpus_per_node=1", "trainer.save_freq=1"]


def guide_commands() -> list[list[str]]:
    """The options of the guide's commands, for a small task and with one device per machine."""
    guide = (ROOT / "recipes" / "launch" / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    found = re.findall(r"python -m trainer.main_ppo (recipe=grpo ray_kwargs.*)", guide)
    return [[re.sub(r"(n_gpus_per_node)=\d+", r"\1=1", word) for word in words.split()[2:]] for words in found]


class Site:
    """The cluster and its machines."""

    def __init__(self, folder: Path) -> None:
        self.task = TinyTask(folder)
        self.task.options = [option for option in self.task.options if not option.startswith("ray_kwargs.ray_init.")]
        self.machines, self.there, self.joined = RayMachines([], slots=1, env={}), list[str](), 0

    def join(self) -> None:
        self.joined += 1
        self.there.append(f"127.0.1.{9 + self.joined}")
        self.machines.add(self.there[-1])

    def start(self, name: str, *options: str, steps: int = 8) -> TinyRun:
        address = f"ray_kwargs.ray_init.address={self.machines.address}"
        return self.task.start(name, address, *POOL, *options, steps=steps, env=AUTH)

    def machine_of(self, part: str) -> str:
        """The machine on which the process with this log runs. Its raylet, which started it, has the address."""
        for pid in self.machines.processes():
            if part in os.readlink(f"/proc/{pid}/fd/1"):
                command = " ".join(word for parent in psutil.Process(pid).parents() for word in parent.cmdline())
                return next(machine for machine in self.there if f"node_ip_address={machine} " in command)
        raise AssertionError(f"no process writes {part}")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("site"))
    yield site
    site.machines.close()


@pytest.fixture
def site(cluster: Site) -> Site:
    """With two machines."""
    while len(cluster.there) < 2:
        cluster.join()
    return cluster


def test_an_engine_moves_to_another_machine_when_its_own_is_lost(site: Site) -> None:
    site.join()
    run = site.start("moves")
    run.wait_for_step(2)
    lost = site.machine_of("engine_0")
    assert lost != site.machine_of("actor_rollout")
    site.there.remove(lost)
    site.machines.kill(lost)
    assert run.wait() == 0, run.output()
    assert f"on node {lost}" in run.log.read_text() and "The engine is replaced" in run.log.read_text()
    assert len(read_metrics(run.run_dir / "metrics.jsonl")) == 8
    run.leaves_nothing(within_s=20)


@pytest.mark.long
def test_without_room_the_run_ends_names_the_machine_and_continues_when_there_is_room(site: Site) -> None:
    run = site.start("ends", "ray_kwargs.ray_init.wait_for_nodes_s=3")
    run.wait_for_step(2)
    lost = site.machine_of("engine_0")
    site.there.remove(lost)
    site.machines.kill(lost)
    assert run.wait() == 1, run.output()
    text = run.log.read_text()
    assert f"engine_0, rank 0, on node {lost}" in text and "it cannot be replaced" in text
    run.leaves_nothing(within_s=20)
    site.join()
    again = site.start("ends", "trainer.resume_mode=auto", steps=12)
    assert again.wait() == 0, again.output()
    assert sorted(read_metrics(again.run_dir / "metrics.jsonl")) == list(range(1, 13))
    again.leaves_nothing(within_s=20)


@pytest.mark.long
@pytest.mark.parametrize("number", [0, 1, 2])
def test_the_commands_of_the_guide_run(site: Site, number: int) -> None:
    commands = guide_commands()
    assert len(commands) == 3
    site.join()
    address = f"ray_kwargs.ray_init.address={site.machines.address}"
    run = site.task.start(f"guide-{number}", address, *commands[number], steps=3, env=AUTH)
    assert run.wait() == 0, run.output()
    assert len(read_metrics(run.run_dir / "metrics.jsonl")) == 3
    run.leaves_nothing(within_s=20)


@pytest.mark.long
def test_a_lost_trainer_machine_is_replaced_by_a_retry(site: Site) -> None:
    run = site.start("retry", "trainer.max_retries=1", steps=12)
    run.wait_for_step(2)
    lost = site.machine_of("actor_rollout")
    site.there.remove(lost)
    site.machines.kill(lost)
    site.join()
    assert run.wait() == 0, run.output()
    assert "Starting again from the last checkpoint" in run.log.read_text()
    run.leaves_nothing(within_s=20)
