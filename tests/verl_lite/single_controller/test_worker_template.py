"""Worker processes forked from a template: what they get from it, and what happens without one."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.workers.processes import gone
from verl_lite.single_controller.guard import guarded, preload, worker_template_running

FACTS = """
import faulthandler, json, os, sys
is_preloaded = "wave" in sys.modules and faulthandler.is_enabled()
print(json.dumps([sys.argv[1:], dict(os.environ), os.getcwd(), "ray" in sys.modules, is_preloaded,
                  sys.stdin.read(), sys.path[0], os.getsid(0) == os.getpid()]))
"""


def facts(interpreter: str, script: Path, folder: Path) -> list[object]:
    """What a script sees that is run by this command in this folder."""
    command, env = f"{interpreter} {script} one 'two words'", {"PYTHONPATH": "/extra", "VL_FORKED": "é"}
    done = subprocess.run(command, shell=True, cwd=folder, env=env, input="in", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


def test_a_forked_script_sees_what_it_would_see_in_an_interpreter_of_its_own(tmp_path: Path) -> None:
    script = tmp_path / "facts.py"
    script.write_text(FACTS)
    with worker_template_running({"VL_FORKED": "1"}), guarded() as guard:
        assert guard.template is not None and guard.interpreter({"VL_FORKED": "2"}) is None
        interpreter = guard.interpreter({"VL_FORKED": "1"})
        assert interpreter is not None
        preload("no_such_module", "wave", "faulthandler:enable")
        while not (guard.folder / "template").exists():
            time.sleep(0.01)
        argv, env, folder, has_ray, is_preloaded, read, first_path, leads = facts(interpreter, script, tmp_path)
        assert (argv, folder, read, first_path) == (["one", "two words"], str(tmp_path), "in", "/extra")
        assert isinstance(env, dict) and env["VL_FORKED"] == "é" and "HOME" not in env
        assert (has_ray, is_preloaded, leads) == (False, True, True)
        sleeper = tmp_path / "sleeper.py"
        sleeper.write_text("import os, time; print(os.getpid(), flush=True); time.sleep(100)")
        with subprocess.Popen(f"{interpreter} {sleeper}", shell=True, stdout=subprocess.PIPE, text=True) as started:
            assert started.stdout is not None
            worker = int(started.stdout.readline())
            assert worker != started.pid and not gone(worker, 0) and not gone(started.pid, 0.2)
            guard.template.process.kill()
            assert gone(worker, 20) and gone(guard.template.process.pid, 20)
        argv, env, folder, has_ray, is_preloaded, read, *_ = facts(interpreter, script, tmp_path)
        assert (argv, read, is_preloaded) == (["one", "two words"], "in", False)
        preload("wave")  # no error without a template


UNUSED = """
from tests.workers.processes import gone
from verl_lite.single_controller.guard import current_guard, worker_template_running

try:
    with worker_template_running({}):
        guard = current_guard()
        guard.template.process.stdin.close()
        template = guard.template.process
        assert template.wait(20) == 0
        raise KeyError
except KeyError:
    assert current_guard() is None and gone(template.pid, 0) and not guard.folder.exists()
    print("done")
"""


def test_a_template_ends_with_its_driver_and_a_run_that_has_not_begun_leaves_nothing() -> None:
    """In a process of its own, whose guard no other test has started."""
    done = subprocess.run([sys.executable, "-c", UNUSED], capture_output=True, text=True, timeout=200)
    assert done.stdout == "done\n", done.stderr


SLOW_MODULE = """
import time
from pathlib import Path

Path(__file__).with_name("begun").touch()
time.sleep(60)
Path(__file__).with_name("complete").touch()
"""
DRIVER_WITH_AN_ERROR = """
import sys, time
from pathlib import Path
from verl_lite.single_controller.guard import preload, worker_template_running

folder = Path(sys.argv[1])
sys.path.insert(0, str(folder))
with worker_template_running({}):
    preload("slow_module")
    while not (folder / "begun").exists():
        time.sleep(0.01)
print((folder / "complete").exists())
"""


@pytest.mark.slow
def test_an_error_before_the_first_worker_does_not_wait_for_the_imports_of_the_template(tmp_path: Path) -> None:
    """Such as a wrong option, whose message is printed after the end of the template."""
    (tmp_path / "slow_module.py").write_text(SLOW_MODULE)
    command = [sys.executable, "-c", DRIVER_WITH_AN_ERROR, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.stdout == "False\n", done.stderr


RUN = """
from tests.verl_lite.single_controller.workers import Place
from verl_lite.config import RayInitConfig
from verl_lite.single_controller import ClassWithInitArgs, ResourcePool, create_worker_groups
from verl_lite.single_controller.guard import worker_template_running, guarded, preload
from verl_lite.single_controller.ray_cluster import ray_running

with worker_template_running({"VL_FORKED": "1"}), guarded() as guard:
    preload("wave")
    with ray_running(RayInitConfig(num_cpus=2, object_store_memory_mb=100), "r"):
        for value in ("1", "2"):
            recipe = {"place": ClassWithInitArgs(Place)}
            [group] = create_worker_groups("ray", ResourcePool([2]), recipe, env={"VL_FORKED": value}).values()
            print([(parent == guard.template.process.pid, *rest) for parent, *rest in group.execute_all_sync("facts")])
            group.shutdown()
"""


@pytest.mark.slow
def test_ray_forks_the_workers_whose_variables_the_template_has() -> None:
    done = subprocess.run([sys.executable, "-c", RUN], capture_output=True, text=True, timeout=200)
    forked, started = (True, True, "1", True), (False, False, "2", True)
    assert done.stdout.splitlines() == [str([forked] * 2), str([started] * 2)], done.stderr[-2000:]
