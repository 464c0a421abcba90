"""What happens with Ray when something dies: a rank, or the driver."""

from __future__ import annotations

import ipaddress
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.verl_lite.single_controller.workers import Calculator, Collective
from trainer.cli import file_mask
from verl_lite.errors import NoRoomError, StalledError, WorkerDiedError, circumstances
from verl_lite.machine.process_table import marked_processes
from verl_lite.machine.process_tree import RUN_MARK
from verl_lite.single_controller import ClassWithInitArgs, ResourcePool, create_worker_groups, liveness
from verl_lite.single_controller.watcher import CLUSTER_MARK

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
POOL = ResourcePool([2], cpus_per_process=0.25)

DRIVER = """
import json, os, sys
from trainer.cli import run_command
from verl_lite.config import RayInitConfig
from verl_lite.single_controller import ClassWithInitArgs, ResourcePool, create_worker_groups
from verl_lite.single_controller.ray_cluster import ray_running
from tests.verl_lite.single_controller.workers import Calculator, Collective

def drive():
    import ray
    from verl_lite.single_controller import guard

    roles = {"c": ClassWithInitArgs(Calculator), "d": ClassWithInitArgs(Collective)}
    groups = create_worker_groups("ray", ResourcePool([2], cpus_per_process=0.5), roles)
    groups["d"].sum_of_ranks()
    own = guard.current_guard()
    facts = {"token": own.token, "folder": str(own.folder), "pid": os.getpid(), "workers": groups["c"].process()}
    print(json.dumps(facts | {"address": ray.get_runtime_context().gcs_address}), flush=True)
    how = sys.argv[1]
    if how == "hang":
        run_command(lambda: groups["d"].hang(0))  # the door of every command
    raise RuntimeError("the driver fails")

with ray_running(RayInitConfig(num_cpus=1, object_store_memory_mb=100), "r"):
    drive()
"""


def start_driver(
    how: str, cwd: Path, stderr: int = subprocess.DEVNULL, **env: str
) -> tuple[subprocess.Popen[str], dict]:
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, how],
        cwd=cwd,  # workers must find the packages although they are not here
        env=os.environ | {"PYTHONPATH": str(ROOT), "HOME": str(cwd)} | env,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())


def leftovers(facts: dict) -> list:
    marked = marked_processes(RUN_MARK, facts["token"]) + marked_processes(CLUSTER_MARK, facts["token"])
    return marked + [facts["folder"]] * Path(facts["folder"]).exists()


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(("how", "expected"), [("raise", LookupError), ("die", WorkerDiedError)])
def test_driver_does_not_wait_for_ranks_that_wait(how: str, expected: type[Exception], tmp_path: Path) -> None:
    recipe = {"c": ClassWithInitArgs(Collective), "d": ClassWithInitArgs(Calculator)}
    with file_mask("027", tmp_path):  # other than that of the cluster
        groups = create_worker_groups("ray", POOL, recipe, log_dir=tmp_path, env={"FLAG": "up", "OMP_NUM_THREADS": "1"})
    assert (tmp_path / "c+d-1.log").stat().st_mode & 0o777 == 0o640
    assert groups["d"].environment("FLAG") == ["up", "up"]
    assert groups["d"].environment("OMP_NUM_THREADS") == ["1", "1"]
    groups["d"].say("good morning")
    log = (tmp_path / "c+d-1.log").read_text()
    assert "good morning" in log and "child says good morning" in log
    (tmp_path / "c+d-1.log").rename(tmp_path / "before.log")
    groups["d"].say("good morning again")
    log = (tmp_path / "c+d-1.log").read_text()
    assert "good morning again" in log and "child says good morning again" in log
    started = time.monotonic()
    with pytest.raises(expected) as caught:
        groups["c"].fail_before_collective(1, how)
    assert time.monotonic() - started < 30  # the collective itself would wait for 60 s
    if how == "die":
        assert "c rank 1 died in fail_before_collective" in str(caught.value)
        assert "good morning" in "".join(caught.value.__notes__)  # the end of its log
    with pytest.raises(WorkerDiedError, match="the workers were ended"):
        groups["d"].process()


@pytest.mark.usefixtures("ray_cluster")
def test_a_rank_that_never_answers_ends_the_wait_with_its_stack_in_its_log(tmp_path: Path) -> None:
    recipe = {"c": ClassWithInitArgs(Collective), "d": ClassWithInitArgs(Calculator)}
    groups = create_worker_groups("ray", POOL, recipe, log_dir=tmp_path, stall_timeout_s=3)
    started = time.monotonic()
    said = r"c.hang: ranks \[1\] of 2 have not answered for 3 s .*stall_timeout_s"
    with pytest.raises(StalledError, match=said) as told:
        groups["c"].hang(1)
    assert time.monotonic() - started < 30
    assert circumstances(told.value).rank == 1
    log = (tmp_path / "c+d-1.log").read_text()
    assert "Timeout (0:00:02.7" in log and "in hang" in log
    with pytest.raises(WorkerDiedError, match="the workers were ended: stalled"):
        groups["d"].process()


def test_a_stopped_rank_is_named_and_a_busy_one_is_waited_for(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"LOOK_EVERY_S": 0.2, "_ANSWER_S": 0.5, "LOST_AFTER_LOOKS": 3}.items():
        monkeypatch.setattr(liveness, name, value)
    recipe = {"c": ClassWithInitArgs(Collective), "d": ClassWithInitArgs(Calculator)}
    groups = create_worker_groups("ray", POOL, recipe, log_dir=tmp_path)
    groups["c"].hold_the_lock()
    pid = groups["d"].process()[1]
    os.kill(pid, signal.SIGSTOP)
    said = rf"c rank 1 died in hang: .*\(pid {pid}\) has not answered .*: it is stopped \(SIGSTOP"
    with pytest.raises(WorkerDiedError, match=said):
        groups["c"].hang(1)
    deadline = time.monotonic() + 30
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not psutil.pid_exists(pid)


def test_more_workers_than_room(ray_cluster: None) -> None:
    with pytest.raises(NoRoomError, match="the run needs 3 slots .*3 CPU each; 0 of the 1 machines"):
        create_worker_groups("ray", ResourcePool([3]), {"c": ClassWithInitArgs(Calculator)})


def require_private(facts: dict) -> None:
    """No other user reaches its folder, nobody its ports but this machine's processes; none has nothing to do."""
    assert Path(facts["folder"]).stat().st_mode & 0o077 == 0
    if os.getuid() == 0:
        steal = f"import os; os.setgid(65534); os.setuid(65534); os.rename({facts['folder']!r} + '/ray', '/tmp/x')"
        stolen = subprocess.run([sys.executable, "-c", steal], capture_output=True, text=True)
        assert stolen.returncode != 0 and "Permission denied" in stolen.stderr
    processes = [facts["pid"], *marked_processes(RUN_MARK, facts["token"])]
    processes += marked_processes(CLUSTER_MARK, facts["token"], [facts["folder"]])
    commands = " ".join(" ".join(psutil.Process(pid).cmdline()) for pid in processes)
    assert not any(idle in commands for idle in ("monitor.py", "dashboard.py", "ray::IDLE")), commands
    places = {
        connection.laddr.ip
        for pid in processes
        for connection in psutil.Process(pid).net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert places, "the cluster listens somewhere"
    for place in places:
        address = ipaddress.ip_address(place)
        mapped = getattr(address, "ipv4_mapped", None)
        assert (mapped or address).is_loopback, places


def until_nothing_is_left(facts: dict) -> None:
    deadline = time.monotonic() + 30
    while leftovers(facts) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not leftovers(facts)


def test_private_clusters_are_nobody_elses_business_and_one_whose_store_is_killed_ends_soon(tmp_path: Path) -> None:
    """That kill -9 of a driver leaves nothing is shown by `test_good_guest`."""
    driver, first = start_driver("hang", tmp_path, stderr=subprocess.PIPE)
    require_private(first)
    raising, second = start_driver("raise", tmp_path, RAY_ADDRESS=first["address"])  # not joined: nobody asked to
    assert first["address"] != second["address"] and first["folder"] != second["folder"]
    assert raising.wait(60) == 1
    assert not leftovers(second)
    assert set(first["workers"]) <= set(leftovers(first))  # undisturbed by the end of the other
    assert not (tmp_path / ".ray").exists()  # no token in the home folder
    ends_soon(driver, first, "gcs_server", signal.SIGKILL, "control store: nobody listens at 127.0.0.1:")


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "number", "said"),
    [
        ("gcs_server", signal.SIGSTOP, "control store: gcs_server PID has not answered for 16 s: it is stopped"),
        ("raylet", signal.SIGSTOP, "raylet on this machine: raylet PID has not answered for 16 s: it is stopped"),
        ("raylet", signal.SIGKILL, "raylet on this machine: nobody listens at 127.0.0.1:"),
    ],
)
def test_a_private_cluster_that_loses_a_part_ends_soon(
    name: str, number: signal.Signals, said: str, tmp_path: Path
) -> None:
    ends_soon(*start_driver("hang", tmp_path, stderr=subprocess.PIPE), name, number, said)


def ends_soon(driver: subprocess.Popen[str], facts: dict, name: str, number: signal.Signals, said: str) -> None:
    """A signal to a part of its cluster ends the driver within half a minute, with a message, and all that is left."""
    ours = marked_processes(CLUSTER_MARK, facts["token"], [facts["folder"]])
    [pid] = [pid for pid in ours if psutil.Process(pid).name() == name]
    os.kill(pid, number)
    began = time.monotonic()
    _, told = driver.communicate(timeout=60)
    assert time.monotonic() - began < 30
    assert f"ClusterLostError: the run's own Ray has lost its {said.replace('PID', f'(pid {pid})')}" in told, told
    assert "trainer.resume_mode=auto" in told.splitlines()[-1]
    until_nothing_is_left(facts)
