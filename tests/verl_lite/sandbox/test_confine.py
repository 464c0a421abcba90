"""What is given up on machines that lack a layer: tried by a process that pretends to be on one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from verl_lite.errors import UserError
from verl_lite.rewards import code as code_reward
from verl_lite.sandbox import Limits, Sandbox, client, confine, system_calls
from verl_lite.sandbox.confine import NOBODY
from verl_lite.sandbox.system_calls import ABSENT, ALLOWED, CHANGING, NONE, OPEN

HEADERS = {0: Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), 1: Path("/usr/include/asm-generic/unistd.h")}
ROOT = Path(__file__).resolve().parents[3]
CHILD = "import sys, cloudpickle; work = cloudpickle.load(sys.stdin.buffer); print(__import__('json').dumps(work()))"
NEEDS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
WRITES = ["open('x', 'w')", "import os; os.unlink('old')"]


def in_child(work: Callable[[], Any]) -> Any:
    """What `work` returns in a small process of its own, as the sandbox's server is one: a test process that has
    loaded much would be over the limits at once."""
    command = [sys.executable, "-c", CHILD]
    done = subprocess.run(command, input=cloudpickle.dumps(work), capture_output=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


def done_in(folder: str, readable: list[str], *, user: int = 0, **fakes: Any) -> set[str]:
    """What a confined process can do of `ATTEMPTS`, and of WRITES in its own folder."""

    def attempt() -> list[str]:
        for name, value in fakes.items():
            setattr(confine, name, value)
        if user:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
        confine.confine(Limits(), folder, readable)
        done = []
        for what, code in (*client.ATTEMPTS, *((code, code) for code in WRITES)):
            try:
                exec(code, {})
                done.append(what)
            except OSError:
                pass
        return done

    Path(folder, "old").write_text("x")
    return set(in_child(attempt))


def test_each_layer_holds_its_part(tmp_path: Path) -> None:
    """Without Landlock nothing is written and everything can be read; without seccomp it is not safe."""
    assert done_in(str(tmp_path), ["/root"]) == set(WRITES)
    assert done_in(str(tmp_path), ["/root"], landlock_version=lambda libc: 0) == {client.READ}
    found = done_in(str(tmp_path), ["/root"], is_known_machine=lambda: False)
    assert {"open network connections", "start processes"} <= found
    assert not {client.READ, "write files outside its folder"} & found  # Landlock's part


@NEEDS_ROOT
def test_root_becomes_nobody_where_python_can_be_read_by_all() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:

        def look() -> list[Any]:
            confine.confine(Limits(), folder, ["/usr/lib"])
            Path("own").write_text("x")
            return [os.getuid(), os.getgroups(), Path("own").stat().st_uid]

        assert in_child(look) == [NOBODY, [], NOBODY]


@NEEDS_ROOT
def test_without_privilege_it_holds_as_well() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chown(folder, 4711, 4711)
        assert done_in(folder, ["/usr/lib"], user=4711) == set(WRITES)


def test_a_machine_that_cannot_hold_code_runs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "ATTEMPTS", [("reach the network", "pass")])
    with pytest.raises(UserError, match="reach the network .*allow_unsafe: true"):
        Sandbox().run_script("print(1)")
    with pytest.raises(UserError, match="does not run on this machine"):
        code_reward.compute_score("rule/code", "x = 1", ["assert x == 1"], memory_mb=999)
    allowed = Sandbox(allow_unsafe=True)
    assert allowed.run_script("print(1)").value == "1\n"
    allowed.close()


@pytest.mark.parametrize("column", [0, 1])
def test_the_numbers_of_system_calls_are_the_headers(column: int) -> None:
    if not HEADERS[column].exists():
        pytest.skip(f"{HEADERS[column]} is not installed")
    found: dict[str, int] = {}
    for name, number in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", HEADERS[column].read_text()):
        found.setdefault(name, int(number))
    others = ("clone", "kill", "tgkill", "prlimit64", "ioctl", "fcntl")
    table = {name: getattr(system_calls, name.upper().removesuffix("64")) for name in others}
    for name, numbers in {**ALLOWED, **CHANGING, **OPEN, **ABSENT, **table}.items():
        if numbers[column] != NONE:
            assert found.get(name, found.get(name.replace("newfstatat", "fstatat"))) == numbers[column], name
        else:
            assert column == 1


def test_jumps_of_the_filter_stay_inside_it() -> None:
    for may_write in (False, True):
        lines = system_calls._program(4711, may_write)
        assert len(lines) < 4096 and lines[-1][0] == 0x06
        for place, (_, if_true, if_false, _) in enumerate(lines):
            assert place + 1 + max(if_true, if_false) <= len(lines) - 1 or place == len(lines) - 1
