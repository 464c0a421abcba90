"""Environments of a rollout engine: replies by key, checked; the same in threads and in processes."""

from __future__ import annotations

import math
import time

import pytest

from tests.workers.env_cases import BAD_RESULTS, MakePool, begin, replies, step, template
from workers.agents.env_host import NonsenseError, read_reset, read_step
from workers.agents.env_pool import EnvError


def test_each_call_gives_one_reply_under_its_key(make_pool: MakePool) -> None:
    pool = make_pool()
    assert pool.poll() == []
    first = begin(pool, "a", ("b", 2), seed=7)
    assert {key: reply.observation for key, reply in first.items()} == {"a": "seed 7: ", ("b", 2): "seed 7: "}
    assert first["a"].info["env_instruction"] == "Obey."
    pool.step("a", "up")
    pool.step(("b", 2), "end")
    second = replies(pool, 2)
    assert (second["a"].observation, second["a"].reward, second["a"].terminated) == ("seed 7: up", 1.0, False)
    assert (second["b", 2].observation, second["b", 2].terminated) == ("seed 7: end", True)
    with pytest.raises(KeyError, match="was not reset"):
        pool.step("c", "up")
    third = step(pool, a="sleep|0.05")["a"]
    assert third.reward == 2.0 and third.seconds >= 0.05 and third.error is None


def test_an_environment_serves_one_episode_after_another(make_pool: MakePool) -> None:
    pool = make_pool()
    one = begin(pool, "a")["a"].info["object"]
    step(pool, a="up")
    pool.discard("a")
    again = begin(pool, "b", seed=5)["b"]
    assert again.info["object"] == one and again.observation == "seed 5: "
    assert begin(pool, "b", seed=6)["b"].observation == "seed 6: "  # a key begun anew


def test_one_that_raises_fails_alone_and_its_object_is_not_used_again(make_pool: MakePool) -> None:
    pool = make_pool()
    begin(pool, "a", "b")
    found = step(pool, a="raise", b="up")
    assert found["b"].error is None and found["a"].observation is None
    assert "RuntimeError: no such move" in found["a"].error and not found["a"].is_timeout
    with pytest.raises(KeyError, match="has failed"):
        pool.step("a", "up")
    begin(pool, "a", "c")
    assert "SystemExit" in step(pool, a="leave", c="up")["a"].error


def test_nonsense_is_a_failure_that_says_what_came(make_pool: MakePool) -> None:
    pool = make_pool()
    begin(pool, *BAD_RESULTS)
    for word, reply in step(pool, **{word: word for word in BAD_RESULTS}).items():
        assert reply.error is not None and "expected" in reply.error, word


def test_what_the_checks_say() -> None:
    began = read_reset(["text", {"suffix": "s", "metrics": {"a": 1}}])
    assert (began.observation, began.info) == ("text", {"suffix": "s", "metrics": {"a": 1.0}})
    for read, result, match in (
        (read_reset, "text", "what reset gave is 'text', expected 2 values"),
        (read_step, ("text", 0.0, False, {}), "what step gave is .* expected 5 values"),
        (read_step, ("text", math.nan, False, False, {}), "reward of step is nan, expected a finite number"),
        (read_step, (None, 0.0, False, False, {}), "observation of step is None, expected text"),
        (read_step, ("text", 10**400, False, False, {}), "reward of step is 1000.*, expected a finite number"),
        (
            read_reset,
            ("text", {"metrics": {"error_rate": 8}}),
            "metric's name .* is 'error_rate', expected another name: the trainer logs env/error_rate",
        ),
        (read_reset, ("text", {"metrics": {"a\nb": 8}}), "name of a metric"),
        (read_reset, ("text", {"metrics": dict.fromkeys(map(str, range(65)), 1)}), "number of metrics .* is 65"),
    ):
        with pytest.raises(NonsenseError, match=match):
            read(result)


def test_numpy_scalars_become_plain_values() -> None:
    import numpy as np

    info = {"metrics": {"success": np.bool_(True), "length": np.int64(3)}}
    read = read_step((np.str_("text"), np.float32(0.5), np.bool_(True), False, info))
    assert (read.observation, read.reward, read.terminated, read.truncated) == ("text", 0.5, True, False)
    assert type(read.observation) is str and type(read.reward) is float and type(read.terminated) is bool
    assert read.info["metrics"] == {"success": True, "length": 3.0}


def test_slow_environments_do_not_hold_up_others(make_pool: MakePool) -> None:
    pool = make_pool(1, threads=32)
    keys = [f"env{number}" for number in range(32)]
    begin(pool, *keys)
    started = time.monotonic()
    step(pool, **dict.fromkeys(keys, "sleep|0.5"))
    assert time.monotonic() - started < 8  # one after the other: 16 s


@pytest.mark.slow
def test_a_limit_of_a_tag_holds_for_that_tag_alone(make_pool: MakePool) -> None:
    pool = make_pool(1, others={"shy": template("shy", max_env_step_concurrent=1)})
    keys = [f"env{number}" for number in range(6)]
    begin(pool, *keys, tag="shy")
    begin(pool, "free")
    found = step(pool, **dict.fromkeys(keys, "sleep|0.1"))
    assert max(reply.info["most"] for reply in found.values()) == 1
    found = step(pool, **dict.fromkeys(keys, "sleep|0.3"), free="sleep|0.3")
    assert max(reply.info["most"] for reply in found.values()) == 2


def test_a_discarded_episode_is_not_heard_of_again(make_pool: MakePool) -> None:
    pool = make_pool(1, others={"shy": template("shy", max_env_step_concurrent=1)})
    begin(pool, "a", "b", "c", tag="shy")
    pool.step("a", "sleep|0.2")
    pool.step("b", "up")  # waits for the limit
    pool.step("c", "down")
    pool.discard("a")
    pool.discard("b")
    pool.discard("never there")
    assert [*replies(pool, 1)] == ["c"] and pool.poll(0.1) == []
    with pytest.raises(KeyError):
        pool.step("a", "up")


def test_dry_run_names_tag_cause_and_remedy(make_pool: MakePool) -> None:
    pool = make_pool(others={"broken": template("broken", env_config={"first": "raise"})})
    assert pool.dry_run(["obey"]) == []
    with pytest.raises(EnvError, match=r"(?s)custom_envs.broken .*'first': 'raise'.*RuntimeError: no such move"):
        pool.dry_run(["broken"])
    with pytest.raises(EnvError, match="'nowhere': agentic.custom_envs has no such entry"):
        pool.dry_run(["nowhere"])
    assert begin(pool, "a")["a"].error is None


def test_dry_run_resets_an_environment_again_with_the_same_seed(make_pool: MakePool) -> None:
    others = {
        "forgets": template("forgets", "Forgetful"),
        "refuses": template("refuses", "Forgetful", env_config={"refuses": True}),
    }
    pool = make_pool(1, others=others)
    assert pool.dry_run(["obey", "forgets"]) == ["forgets"]
    with pytest.raises(EnvError, match=r"(?s)custom_envs.refuses .*a second reset failed.*only one episode"):
        pool.dry_run(["refuses", "obey"])
