"""Environments in processes: what one of them can do to the others, and to the machine.

Forks, and what a hang of each kind says, are told of rewards, whose processes are the same: rewards/test_faults.py.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Hashable
from pathlib import Path

import psutil
import pytest

from tests.workers.env_cases import MakePool, begin, replies, step, template
from tests.workers.processes import gone

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("action", "reason"),
    [("segfault", "SIGSEGV"), ("exit|9", "exit code 9"), ("kill", "SIGKILL")],
)
def test_only_the_culprit_fails_and_the_others_go_on_as_if_nothing_had_been(
    make_pool: MakePool, action: str, reason: str
) -> None:
    pool = make_pool(1, threads=8)
    keys = [f"env{number}" for number in range(6)]
    begin(pool, *keys, seed=4)
    step(pool, **{key: f"go {key}" for key in keys[:4]})
    # two others are under way when it happens, one has said something, one was only reset
    found = step(pool, env0="sleep|0.4", env1="sleep|0.4", env2=f"{action}")
    assert found["env2"].error is not None and reason in found["env2"].error and not found["env2"].is_timeout
    assert [found[key].observation for key in ("env0", "env1")] == [f"seed 4: go {k} sleep|0.4" for k in keys[:2]]
    assert not found["env0"].info["has_torch"], "a start takes a second"
    after = step(pool, env0="a", env1="b", env3="c", env4="d", env5="e")
    assert {key: reply.observation for key, reply in after.items()} == {
        "env0": "seed 4: go env0 sleep|0.4 a",
        "env1": "seed 4: go env1 sleep|0.4 b",
        "env3": "seed 4: go env3 c",
        "env4": "seed 4: d",
        "env5": "seed 4: e",
    }
    if action == "segfault":
        assert "env_cases.py" in found["env2"].error, "the stack of the crash should be told"
        assert pool.processes_replaced == 1
    pool.discard("env0")
    assert begin(pool, "new")["new"].error is None


def test_one_that_hangs_fails_at_its_deadline_and_nobody_else_notices(make_pool: MakePool) -> None:
    pool = make_pool(1, timeout_s=0.6, threads=4)
    pid = begin(pool, "hangs", "lives", seed=2)["lives"].info["pid"]
    pool.step("hangs", "sleep|1000")
    for number in range(3):
        assert step(pool, lives=f"a{number}")["lives"].info["pid"] == pid
    failed = replies(pool, 1)["hangs"]
    assert failed.is_timeout and "agentic.env_pool.timeout_s=0.6" in failed.error and "in _do" in failed.error
    after = step(pool, lives="b")["lives"]
    assert after.observation == "seed 2: a0 a1 a2 b" and after.info["pid"] != pid
    assert pool.processes_replaced == 1 and gone(pid)


def test_one_that_holds_the_interpreter_is_found_out_among_those_that_could_not_go_on(make_pool: MakePool) -> None:
    pool = make_pool(1, timeout_s=0.6, threads=4)
    begin(pool, "a", "b", "c")
    found = step(pool, a="sleep|0.2", b="freeze", c="sleep|0.3")
    assert found["b"].is_timeout and "timeout_s=0.6" in found["b"].error
    assert found["a"].error is None and found["c"].error is None
    assert step(pool, a="up", c="up")["c"].observation == "seed 1: sleep|0.3 up"


def test_one_that_answers_differently_when_begun_again_fails_and_says_so(make_pool: MakePool) -> None:
    pool = make_pool(1, others={"drift": template("drift", env_config={"drift": True})})
    begin(pool, "a")
    begin(pool, "b", tag="drift")
    assert "exit code 9" in step(pool, a="exit")["a"].error
    error = step(pool, b="up")["b"].error
    assert "because of another session" in error and "call 1 of 1 returned another result" in error


def test_a_lock_of_a_tag_is_not_held_for_ever_by_one_that_hangs(make_pool: MakePool) -> None:
    pool = make_pool(1, timeout_s=0.5, others={"shy": template("shy", use_thread_lock=True)})
    begin(pool, "a", "b", tag="shy")
    pool.step("a", "sleep|1000")
    pool.step("b", "up")
    found = replies(pool, 2)
    assert found["a"].is_timeout and found["b"].observation == "seed 1: up"


def test_what_cannot_be_sent_is_a_failure(make_pool: MakePool) -> None:
    pool = make_pool(1, others={"odd": template("odd", "Odd")})
    begin(pool, "a", "b", "c", tag="odd")
    found = step(pool, a="lock", b="trap", c="long")
    for key, reason in (("a", "cannot be pickled"), ("b", "cannot be unpickled"), ("c", "has 70 MiB")):
        assert reason in found[key].error


HARMS = ("raise", "exit", "segfault", "kill", "nan", "fork", "leave", "sleep|1000", "freeze")


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1])
def test_whatever_happens_each_call_has_one_reply_and_the_innocent_go_on(make_pool: MakePool, seed: int) -> None:
    draw, pool = random.Random(seed), make_pool(2, timeout_s=4.0, threads=8)
    said: dict[Hashable, list[str]] = {}
    asked: dict[Hashable, str] = {}
    harms = [*HARMS, "kill", "exit", "segfault"]
    draw.shuffle(harms)
    until = time.monotonic() + 240
    fresh = 0
    while (harms or asked) and time.monotonic() < until:
        while len(said) < 10:
            key, fresh = f"env{fresh}", fresh + 1
            pool.reset(key, "obey", 5)
            said[key], asked[key] = [], ""
        for key in [key for key in said if key not in asked and draw.random() < 0.5]:
            chance = draw.random()
            if harms and chance < 0.05:
                asked[key] = harms.pop()
            elif harms or chance < 0.5:
                asked[key] = draw.choice(["up", "down", "sleep|0.02", "sleep|0.1"])
            else:
                continue
            pool.step(key, asked[key])
        if draw.random() < 0.02:
            gone_key = draw.choice(sorted(said))
            pool.discard(gone_key)
            said.pop(gone_key)
            asked.pop(gone_key, None)
        for reply in pool.poll(0.05):
            action = asked.pop(reply.key)
            if action in HARMS and action != "fork":
                assert reply.error is not None, action
                assert reply.is_timeout is (action in ("sleep|1000", "freeze")), (action, reply.error)
                del said[reply.key]
                continue
            assert reply.error is None, (action, reply.error)
            said[reply.key] += [action] if action else []
            assert reply.observation == f"seed 5: {' '.join(said[reply.key])}"
    assert not harms and not asked


OWNER = """
import sys, time
from tests.workers.env_cases import begin, templates
from verl_lite.config.agentic import EnvPoolConfig
from workers.agents.env_pool import EnvPool
pool = EnvPool(EnvPoolConfig(num_workers=1), templates())
found = begin(pool, "a", "b")
pool.step("a", "sleep|1000")
pool.step("b", "fork|1000")
time.sleep(0.3)
print(found["a"].info["pid"], flush=True)
time.sleep(1000)
"""


def test_no_process_outlives_an_owner_that_is_killed() -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    pids = [pid, *(child.pid for child in psutil.Process(pid).children())]
    assert len(pids) == 2
    owner.kill()
    owner.wait()
    owner.stdout.close()
    assert all(gone(pid) for pid in pids)
