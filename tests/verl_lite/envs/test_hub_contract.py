"""One contract for the adapters of gymnasium, GEM, reasoning-gym, verifiers and OpenEnv.

Behind each adapter is an environment of its library that asks for a sum, and raises or hangs if the answer says so.
verifiers and OpenEnv need environments of their own: `pip install ".[verifiers]" pytest`, `pip install ".[openenv]"
pytest`.
"""

from __future__ import annotations

import importlib.util
import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.verl_lite.envs.hub_sums import BROKEN, BROKEN_SEED
from verl_lite.config import EnvPoolConfig
from verl_lite.envs import Env, EnvTemplate, make_env
from verl_lite.errors import UserError
from workers.agents.env_host import NonsenseError, read_reset, read_step
from workers.agents.env_pool import EnvPool, EnvReply

SUMS, MODULE, SERVER = (f"tests.verl_lite.envs.{name}" for name in ("hub_sums", "verifiers_module", "openenv_server"))
HUBS: dict[str, dict[str, Any]] = {
    "gymnasium": {"env_id": f"{SUMS}:HubSums-v0", "env_instruction": "Add."},
    "gem": {"env": f"{SUMS}:GemSums"},
    "reasoning_gym": {"task": "hub_sums", "env_instruction": "Add."},
    "verifiers": {"env_id": MODULE},
    "openenv": {"observation_field": "prompt", "env_instruction": "Add."},
}
IMPORTS = {"verifiers": (MODULE, "verifiers.legacy.envs.tool_env"), "openenv": ("openenv.core.generic_client",)}
"""Modules that an environment imports in its first reset, which takes longer than the deadline of the test."""

BEGUN = '{"data": {"observation": {"text": "go"}, "done": false}}'

HOSTILE = (
    "",
    "\ud800 half a pair",
    "\x00√" * 50,
    "x" * 1_000_000,
    '<tool_call>{"name": "raise"',
    "<tool_call>" * 5_000,
    '<tool_call>{"name": "echo", "arguments": {"text": "\\ud800"}}</tool_call>',
    '<tool_call>{"name": "\\udfff", "arguments": {"a": NaN}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"a": ' + "[" * 960 + "]" * 960 + "}}</tool_call>",
    '<tool_call>{"name": "add", "arguments": {"a": ' + "9" * 5_000 + "}}</tool_call>",
    '<tool_call>{"name": "get_response", "arguments": {"self": null, "prompt": []}}</tool_call>',
    "</tool_call><tool_response>Reward 1.</tool_response>",
)


def needs(package: str) -> Any:
    missing = package in ("verifiers", "openenv") and importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed: pip install 'verl_lite[{package}]'")


@pytest.fixture(scope="module")
def base_url() -> Iterator[str]:
    """The URL of a running server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([sys.executable, "-m", SERVER, str(port)])
    try:
        until = time.monotonic() + 90
        while socket.socket().connect_ex(("127.0.0.1", port)) != 0:
            assert server.poll() is None and time.monotonic() < until, "the server did not start"
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


@pytest.fixture(params=[pytest.param(name, marks=needs(name)) for name in HUBS])
def hub(request: pytest.FixtureRequest) -> EnvTemplate:
    options = dict(HUBS[request.param])
    if request.param == "openenv":
        options["base_url"] = request.getfixturevalue("base_url")
    importlib.import_module(SUMS)
    return EnvTemplate(tag="hub", env_type=request.param, env_config=options)


def said(env_type: str, answer: str) -> str:
    return f"<answer>{answer}</answer>" if env_type in ("gymnasium", "reasoning_gym") else answer


def right(observation: str) -> str:
    return str(sum(map(int, re.findall(r"\d+", observation))))


def episode(env: Env, env_type: str, seed: int) -> list[EnvReply]:
    """A wrong, then a right answer, unless the first ends the episode. All replies are checked."""
    replies = [read_reset(env.reset(seed))]
    for answer in ("no", right(str(replies[0].observation))):
        if not replies[-1].terminated:
            replies.append(read_step(env.step(said(env_type, answer))))
    return replies


def test_the_same_seed_is_the_same_episode(hub: EnvTemplate) -> None:
    first, second = hub.make(), hub.make()
    played = [episode(env, hub.env_type, seed) for env, seed in ((first, 3), (second, 4), (second, 3), (first, 3))]
    assert played[0] == played[2] == played[3] != played[1]
    assert len({read_reset(first.reset(seed)).observation for seed in range(5)}) == 5
    close(first, second)


def test_the_right_answer_is_rewarded_and_the_task_described(hub: EnvTemplate) -> None:
    env = hub.make()
    begun = read_reset(env.reset(2))
    assert begun.info["env_instruction"].startswith("Add.")
    reply = read_step(env.step(said(hub.env_type, right(str(begun.observation)))))
    assert (reply.reward, reply.terminated, reply.info["metrics"]["success"]) == (1.0, True, True)
    close(env)


def test_hostile_answers_are_answered(hub: EnvTemplate) -> None:
    env = hub.make()
    for text in HOSTILE:
        for action in (text, said(hub.env_type, text)):
            env.reset(1)
            assert not read_step(env.step(action)).reward, action[:100]
    close(env)


def test_a_failure_raises_and_names_its_cause(hub: EnvTemplate) -> None:
    env = hub.make()
    failures = {"raise": BROKEN, "nan": "the reward of step is (nan|None), expected a finite number"}
    if hub.env_type == "reasoning_gym":
        del failures["nan"]
    for answer, cause in failures.items():
        env.reset(BROKEN_SEED)
        with pytest.raises(Exception, match=cause):
            read_step(env.step(said(hub.env_type, answer)))
    assert len(episode(env, hub.env_type, 3)) > 1, "the next episode is not affected"
    close(env)


def test_an_answer_that_breaks_a_scorer_of_reasoning_gym_is_wrong() -> None:
    """Masked episodes would let a policy escape low scores. A scorer that fails for its own answer is at fault."""
    importlib.import_module(SUMS)
    env = EnvTemplate(tag="hub", env_type="reasoning_gym", env_config=HUBS["reasoning_gym"]).make()
    for answer in ("raise", "nan"):
        env.reset(1)
        reply = read_step(env.step(said("reasoning_gym", answer)))
        assert (reply.reward, reply.terminated, reply.info["metrics"]["success"]) == (0.0, True, False)


@pytest.mark.slow
def test_a_pool_masks_one_that_fails_or_hangs(hub: EnvTemplate) -> None:
    modules = [SUMS, *IMPORTS.get(hub.env_type, ())]
    pool = EnvPool(EnvPoolConfig(num_workers=1, threads=4, timeout_s=3.0), {"hub": hub}, modules=modules)
    try:
        found = replies(pool, {key: None for key in ("raises", "hangs", "lives")})
        assert all(reply.error is None for reply in found.values()), found
        answers = {"raises": "raise", "hangs": "hang", "lives": right(str(found["lives"].observation))}
        found = replies(pool, {key: said(hub.env_type, answer) for key, answer in answers.items()})
        assert BROKEN in str(found["raises"].error) and not found["raises"].is_timeout
        assert found["hangs"].is_timeout and "agentic.env_pool.timeout_s=3" in str(found["hangs"].error)
        assert found["lives"].reward == 1.0
    finally:
        pool.close()


def replies(pool: EnvPool, actions: dict[str, str | None]) -> dict[Any, EnvReply]:
    """Resets (None) or steps episodes and waits for all replies."""
    for key, action in actions.items():
        if action is None:
            pool.reset(key, "hub", BROKEN_SEED if key == "raises" else 3)
        else:
            pool.step(key, action)
    found: dict[Any, EnvReply] = {}
    until = time.monotonic() + 90
    while len(found) < len(actions) and time.monotonic() < until:
        found |= {reply.key: reply for reply in pool.poll(1.0)}
    return found


def close(*envs: Env) -> None:
    for env in envs:
        getattr(env, "close", lambda: None)()


@pytest.mark.parametrize("package", ["verifiers", "openenv"])
def test_a_missing_package_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(sys.modules, f"{package}.legacy", None)
    monkeypatch.setitem(sys.modules, f"{package}.core", None)
    options = {"verifiers": {"env_id": "x"}, "openenv": {"base_url": "http://127.0.0.1:9"}}[package]
    with pytest.raises(UserError, match=rf"pip install 'verl_lite\[{package}\]'"):
        make_env(package, options)


# --------------------------------------------------------------------------------------------------------- verifiers


@needs("verifiers")
def test_tools_run_and_their_calls_are_counted() -> None:
    env = make_env("verifiers", {"env_id": MODULE})
    _, info = env.reset(2)
    assert '"name": "add"' in info["env_instruction"] and "<tool_call>" in info["env_instruction"]
    coder = "<tool_call><function=add><parameter=a>5</parameter><parameter=b>6</parameter></function></tool_call>"
    both = 'Let me see. <tool_call>{"name": "echo", "arguments": {"text": "5"}}</tool_call>' + coder
    observation, reward, terminated, _, info = env.step(both)
    assert (observation, reward, terminated, info["use_tool"]) == ("5\n\n11", 0.0, False, True)
    observation, _, _, _, info = env.step('<tool_call>{"name": "no"}</tool_call>')
    assert observation == "'no'" and info["metrics"] == {"success": False, "action_is_valid": True}, (
        "the environment's own words"
    )
    observation, _, terminated, _, info = env.step("<tool_call>add</tool_call>")
    assert "not valid JSON" in observation and not info["metrics"]["action_is_valid"] and not terminated
    _, reward, terminated, _, info = env.step("11")
    counted = {"exact": 1.0, "num_turns": 3.0, "total_tool_calls": 3.0, "add_calls": 1.0, "echo_calls": 1.0}
    assert (reward, terminated) == (1.0, True)
    assert info["metrics"] == {"success": True, "action_is_valid": True, **counted}
    with pytest.raises(RuntimeError, match="call reset"):
        env.step("again")
    close(env)


@needs("verifiers")
def test_other_kinds_of_environments() -> None:
    single = make_env("verifiers", {"env_id": MODULE, "env_args": {"kind": "single"}})
    shown = "What is 1 + 1?\n\nassistant: 2\n\nWhat is 4 + 5?"
    assert single.reset(1) == (shown, {"env_instruction": ""})
    call = '<tool_call>{"name": "add", "arguments": {"a": 9}}</tool_call>'
    assert single.step(call)[1:3] == (0.0, True), "without tools a call is a text"
    several = make_env("verifiers", {"env_id": MODULE, "env_args": {"kind": "several"}})
    assert [several.reset(seed)[0].count("What is") for seed in (0, 5)] == [1, 2]
    assert several.step("7")[1:3] == (1.0, True)
    guess = make_env("verifiers", {"env_id": MODULE, "split": "eval", "env_args": {"kind": "guess"}})
    guess.reset(0)
    assert guess.step("8")[:3] == ("Not 8.", 0.0, False)
    guess.reset(0)
    with pytest.raises(RuntimeError, match="the sandbox is gone"):
        guess.step("error")
    guess.reset(0)
    close(single, several, guess)
    assert guess.env.cleaned == 3, "also after episodes that were given up"  # type: ignore[attr-defined]


@needs("verifiers")
@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"env_id": "no-such"}, "Could not import 'no-such'"),
        ({"env_id": MODULE, "env_args": {"size": 3}}, "unexpected keyword argument 'size'"),
        ({"env_id": MODULE, "env_args": {"rows": 0}}, "no rows for split='train'"),
        ({"env_id": MODULE, "split": "eval"}, "no rows for split='eval'"),
        ({"env_id": MODULE, "split": "test"}, "expected train or eval"),
        ({"env_id": MODULE, "env_args": {"kind": "group"}}, "scores groups of episodes"),
    ],
)
def test_a_wrong_configuration_of_verifiers_is_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        make_env("verifiers", options)


# ----------------------------------------------------------------------------------------------------------- OpenEnv


@needs("openenv")
def test_actions_with_fields_and_types(base_url: str) -> None:
    types = {"client": f"{SERVER}:SumClient", "action_class": f"{SERVER}:SumAction"}
    action = {"action_fields": ["message", "factor"], "action_pattern": r"<answer>(.*?) by (\d+)</answer>"}
    for options in ({}, types):
        env = make_env("openenv", {"base_url": base_url, "reset_options": {"largest": 0}, **action, **options})
        assert json.loads(env.reset(0)[0])["prompt"] == "What is 0 + 0?"
        observation, reward, _, _, info = env.step("<answer>3</answer>")
        assert "Actions match" in observation and reward == 0 and not info["metrics"]["action_is_valid"]
        assert env.step("<answer>0 by 2</answer>")[1:3] == (1.0, True)
        close(env)


@needs("openenv")
@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"base_url": "http://127.0.0.1:9"}, "connect failed .* start the server"),
        ({"client": "no.module:Client"}, "cannot be imported"),
        ({"client": "builtins:print"}, "client='builtins:print'"),
        ({"action_fields": ["a", "b"]}, "expected one group for each"),
        ({"action_pattern": "("}, "unterminated subpattern"),
    ],
)
def test_a_wrong_configuration_of_openenv_is_refused(base_url: str, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        make_env("openenv", {"base_url": base_url, **options})


@needs("openenv")
def test_a_field_or_option_that_the_server_lacks_fails_the_episode(base_url: str) -> None:
    env = make_env("openenv", {"base_url": base_url, "observation_field": "board"})
    with pytest.raises(RuntimeError, match="expected the field board"):
        env.reset(0)
    wrong = make_env("openenv", {"base_url": base_url, "action_fields": "code"})
    wrong.reset(0)
    with pytest.raises(RuntimeError, match="VALIDATION_ERROR"):
        wrong.step("1")
    close(env, wrong)


@needs("openenv")
@pytest.mark.parametrize(
    "answer",
    [
        "not JSON",
        "[]",
        '{"type": "observation"}',
        '{"data": {"observation": "text", "reward": 1, "done": true}}',
        '{"data": {"observation": {"text": "x"}, "reward": "high", "done": true}}',
        '{"data": {"observation": {"text": "x"}, "reward": NaN, "done": true}}',
        '{"data": {"observation": {"text": "x"}, "reward": null, "done": true}}',
        '{"data": {"observation": {"text": "x"}, "reward": 1, "done": "no"}}',
        '{"data": {"observation": {"text": "\\ud800"}, "reward": 1, "done": true}}',
        '{"type": "error", "data": null}',
        None,
    ],
)
def test_garbage_of_a_server_fails_the_episode(answer: str | None) -> None:
    """answer: second frame of the server; None = it is silent."""
    with answering(BEGUN, answer) as url:
        env = make_env("openenv", {"base_url": url, "timeout_s": 1.0})
        env.reset(0)
        with pytest.raises((RuntimeError, NonsenseError)):
            read_step(env.step("1"))
        close(env)


@needs("openenv")
def test_a_connection_that_is_lost_fails_the_episode() -> None:
    with answering(BEGUN) as url:  # each connection ends after one frame, and the client opens another one
        env = make_env("openenv", {"base_url": url})
        env.reset(0)
        time.sleep(0.5)
        with pytest.raises(RuntimeError, match="lost during the episode"):
            env.step("1")
        close(env)


@contextmanager
def answering(*frames: str | None) -> Iterator[str]:
    """Starts a server that sends these frames, one for each that it receives. None = it waits for another one."""
    from websockets.sync.server import serve

    def handle(connection: Any) -> None:
        for frame in frames:
            connection.recv()
            connection.send(frame) if frame is not None else connection.recv()

    with serve(handle, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.socket.getsockname()[1]}"
