"""The runner of episodes over a scripted engine and scripted environments: order, limits, groups, failures, seeds."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.workers.rollout.scripted import END, SAMPLING, ScriptedEngine, ScriptedPool, ids_of, make_runner, play, spec
from workers.agents.episodes import TokenLimits, aggregate_metrics
from workers.agents.turns import Turn
from workers.engines.base import Request, SamplingParams, derive_seed
from workers.rollout.specs import GroupPlan

LONG = TokenLimits(max_prompt_length=200, max_response_length=400, max_model_len=600)


def endless(seed: int, actions: list[str]) -> dict[str, Any]:
    return {"observation": "d", "reward": 1.0}


def ending(turns: int) -> Any:
    return lambda seed, actions: {"observation": "d", "reward": 1.0, "terminated": len(actions) == turns}


def says_b(traj_id: str, turn: int, request: Request) -> list[int]:
    return [*ids_of("b"), END]


# -------------------------------------------------------------------------------------------------------- one episode


@pytest.mark.parametrize(
    ("flags", "stop"), [({"terminated": True}, "terminated"), ({"truncated": True}, "truncated"), ({}, "max_steps")]
)
def test_why_an_episode_ends(flags: dict[str, bool], stop: str) -> None:
    def script(seed: int, actions: list[str]) -> dict[str, Any]:
        return {"observation": "d", "reward": 1.0, **(flags if len(actions) == 2 else {})}

    episodes, pool, _ = play(script, says_b, max_steps=2)
    assert episodes[0].stop == stop and episodes[0].score == 2.0 and episodes[0].is_kept
    assert len(pool.discarded) == 1


def test_each_turn_has_the_seed_of_its_run_step_episode_and_number() -> None:
    """The engine draws from (seed, position). With one seed for all turns, two turns that begin at the same position,
    as those of a step environment, would draw the same numbers."""
    _, _, engine = play(ending(3), says_b, [spec("g_0", start_step=3)], limits=LONG)
    seeds = [request.sampling.seed for request in engine.requests]
    assert seeds == [derive_seed(5, 3 - 1, "g_0", turn) for turn in range(3)]
    assert len(set(seeds)) == 3


def test_templates_are_filled() -> None:
    def script(seed: int, actions: list[str]) -> dict[str, Any]:
        info = {"env_instruction": "find it"} if not actions else {"suffix": f" s{len(actions)}"}
        return {"observation": f"o{len(actions)}", "info": info, "terminated": len(actions) == 3}

    fields = "{observation} turn {turn_idx} left {actions_left} at most {max_response_length}{suffix}"
    options = {"agent_template": fields, "agent_system_template": "be {good}", "max_steps": 5}
    episodes, _, _ = play(script, says_b, limits=LONG, max_tokens_per_step=9, **options)
    assert [message["content"] for message in episodes[0].messages if message["role"] != "assistant"] == [
        "be {good}",
        "find it\no0 turn 1 left 5 at most 9",
        "o1 turn 2 left 4 at most 9 s1",
        "o2 turn 3 left 3 at most 9 s2",
    ]
    assert [message["role"] for message in episodes[0].prompt_messages] == ["system", "user"]
    in_place = {"agent_template": "<{env_instruction}>{observation}"}
    episodes, _, _ = play(script, says_b, limits=LONG, **in_place)
    assert [turn.messages[-1]["content"] for turn in episodes[0].turns] == ["<find it>o0", "<>o1", "<>o2"]


def test_step_prompts_tell_the_last_turns_valid_or_not() -> None:
    def script(seed: int, actions: list[str]) -> dict[str, Any]:
        metrics = {"action_is_valid": len(actions) != 2}
        return {"observation": f"o{len(actions)}", "reward": 0.5, "info": {"metrics": metrics, "env_instruction": "go"}}

    said = ["up", "x", "left", "down"]
    episodes, _, engine = play(
        script,
        lambda _, turn, __: [*ids_of(said[turn]), END],
        limits=LONG,
        env_manager_cls="step",
        max_steps=4,
        history_length=2,
        agent_template="{step_count}/{history_length}/{current_step}: {history}| {current_observation}",
        format_penalty=-1.0,
    )
    # the instruction of the reset stands before each prompt, as each is a conversation of its own
    assert [turn.messages[0]["content"] for turn in episodes[0].turns] == [
        "go\n0/0/1: | o0",
        "go\n1/1/2: (step 1, observation: o0, action: up, reward: 0.5)| o1",
        "go\n2/2/3: (step 1, observation: o0, action: up, reward: 0.5)\n"
        "(step 2, observation: o1, action: x (not a valid action), reward: -0.5)| o2",
        "go\n3/2/4: (step 2, observation: o1, action: x (not a valid action), reward: -0.5)\n"
        "(step 3, observation: o2, action: left, reward: 0.5)| o3",
    ]
    assert engine.requests[2].prompt_ids == tuple([1, *ids_of(episodes[0].turns[2].messages[0]["content"]), 1])


def test_format_penalty_of_the_purpose() -> None:
    def script(seed: int, actions: list[str]) -> dict[str, Any]:
        return {
            "observation": "d",
            "reward": 0.25,
            "terminated": len(actions) == 2,
            "info": {"metrics": {"action_is_valid": len(actions) != 1}},
        }

    train, val = spec("g_0"), spec("v_0", purpose="val")
    episodes, _, _ = play(script, says_b, [train, val], format_penalty=-0.5)
    assert [[turn.reward for turn in one.turns] for one in episodes] == [[-0.25, 0.25], [0.25, 0.25]]


def test_metrics_of_a_step_may_be_null() -> None:
    episodes, _, _ = play(
        lambda seed, actions: {
            "observation": "d",
            "reward": 0.25,
            "terminated": len(actions) == 2,
            "info": {"metrics": None},
        },
        says_b,
        format_penalty=-0.5,
    )
    assert [turn.reward for turn in episodes[0].turns] == [0.25, 0.25]
    assert episodes[0].metrics == {"num_actions": 2.0}


def test_metrics_are_aggregated_as_the_environment_says() -> None:
    def turn(**info: Any) -> Turn:
        return Turn([], (), [3], [0.0], "stop", 0, "", "", "", info=info)

    modes = {"a": "sum", "b": "min", "c": "max", "d": "last", "e": "first"}
    turns = [
        turn(metrics=dict.fromkeys("abcdef", 1) | {"g": True}, metrics_agg_mode={"a": "mean"}),
        turn(metrics=dict.fromkeys("abcdef", 4) | {"g": False}, metrics_agg_mode=modes),
        turn(metrics=dict.fromkeys("abcdef", 2)),
        turn(),
    ]
    found = aggregate_metrics(turns)
    expected = {"a": 7, "b": 1, "c": 4, "d": 2, "e": 1, "f": 7 / 3, "g": 0.5, "num_actions": 4}
    assert found == pytest.approx(expected)


def test_state_hash_is_the_environments_or_the_observations() -> None:
    def script(seed: int, actions: list[str]) -> dict[str, Any]:
        observation, info = [("same", {}), ("other", {"state_hash": "room 1"}), ("same", {})][len(actions)]
        return {"observation": observation, "info": info}

    episodes, _, _ = play(script, says_b, limits=LONG, max_steps=2)
    first, second = (turn.state_hash for turn in episodes[0].turns)
    assert second == "room 1" and len(first) == 64


# ------------------------------------------------------------------------------------------------------------- groups


def test_the_first_members_to_end_are_kept_and_the_others_aborted() -> None:
    lengths = {"g_0": 3, "g_1": 1, "g_2": 3, "g_3": 2}

    def script(seed: int, actions: list[str]) -> dict[str, Any]:
        return {"observation": "d", "reward": 1.0, "terminated": len(actions) == seed}

    specs = [spec(name, seed=length, group_size=2) for name, length in lengths.items()]
    episodes, pool, engine = play(script, says_b, specs)
    assert [(one.stop, one.is_kept) for one in episodes] == [
        ("surplus", False),
        ("terminated", True),
        ("surplus", False),
        ("terminated", True),
    ]
    assert len(pool.discarded) == 4
    # those that were with the engine are aborted there; those that were with their environment are discarded
    assert set(engine.aborted) <= {request.request_id for request in engine.requests}


def test_a_failed_member_is_kept_only_if_the_group_cannot_be_filled_without_it() -> None:
    def script(seed: int, actions: list[str]) -> dict[str, Any]:
        if seed == 0 and actions:
            return {"observation": None, "error": "boom"}
        return {"observation": "d", "terminated": len(actions) == 3}

    specs = [spec("g_0", seed=0, group_size=2), *(spec(f"g_{n}", seed=1, group_size=2) for n in (1, 2))]
    specs += [spec("h_0", seed=0, group_size=2), spec("h_1", seed=1, group_size=2)]
    episodes, _, _ = play(script, says_b, specs)
    assert [(one.stop, one.is_kept) for one in episodes] == [
        ("failed", False),
        ("terminated", True),
        ("terminated", True),
        ("failed", True),
        ("terminated", True),
    ]


# ---------------------------------------------------------------------------------------------- company, time, seeds


def gambling(traj_id: str, turn: int, request: Request) -> list[int]:
    """An answer that depends on the request's own seed and prompt, as an engine's does."""
    rng = random.Random(f"{request.sampling.seed} {request.prompt_ids}")
    return [rng.randrange(3, 60) for _ in range(rng.randrange(1, 6))] + [END] * rng.randrange(2)


def reacting(seed: int, actions: list[str]) -> dict[str, Any]:
    rng = random.Random(f"{seed} {actions}")
    return {"observation": "abcdef"[: rng.randrange(1, 6)], "reward": rng.random(), "terminated": rng.random() < 0.2}


@pytest.mark.parametrize("by", ["trajectory", "step"])
def test_trajectories_are_the_same_whatever_the_company_and_the_time(by: str) -> None:
    specs = [spec(f"g{group}_{member}", seed=group, group_size=2) for group in range(6) for member in range(2)]
    options: dict[str, Any] = {"limits": LONG, "max_steps": 6, "max_tokens_per_step": 4, "env_manager_cls": by}
    expected, _, _ = play(reacting, gambling, specs, **options)
    assert len({tuple(turn.action for turn in one.turns) for one in expected}) == len(specs)
    assert {one.stop for one in expected} == {"terminated", "max_steps"}
    for rng_seed, max_live in enumerate((1, 3, 100)):
        found, pool, _ = play(
            reacting, gambling, specs, latency=(0, 7), max_live=max_live, rng_seed=rng_seed, **options
        )
        assert found == expected and pool.most_live == min(max_live, len(specs))
    alone = spec(specs[5].traj_id, seed=specs[5].seed, group_size=1)
    some, _, _ = play(reacting, gambling, [alone], latency=(3, 3), **options)
    assert some[0].turns == expected[5].turns


def test_turns_do_not_wait_for_each_other() -> None:
    """One environment takes 50 polls for each answer; the other episode plays on meanwhile."""

    class Slow(ScriptedPool):
        def _answer(self, key: Any) -> None:
            self.latency = (50, 50) if "slow" in key else (0, 0)
            super()._answer(key)

    engine, pool = ScriptedEngine(says_b), Slow(ending(5))
    runner = make_runner(engine, pool, limits=LONG)
    runner.begin(GroupPlan("slow", (spec("slow_0"),)), SAMPLING)
    runner.begin(GroupPlan("fast", (spec("fast_0"),)), SAMPLING)
    while not runner.is_finished("fast"):
        runner.advance()
    assert len(runner.take("fast").rows[0].turns) == 5
    assert not any("slow" in request.request_id for request in engine.requests)
    while not runner.is_finished("slow"):
        runner.advance()
    assert len(runner.take("slow").rows[0].turns) == 5


def test_it_waits_for_environments_only_when_nothing_decodes() -> None:
    engine, pool = ScriptedEngine(lambda *_: [*ids_of("bbb"), END]), ScriptedPool(ending(2), latency=(2, 2))
    runner = make_runner(engine, pool)
    runner.begin(GroupPlan("g", (spec(),)), SAMPLING)
    waits_while_decoding: list[float] = []
    while not runner.is_finished("g"):
        busy, before = engine.unfinished > 0, len(pool.waits)
        runner.advance(wait_s=9.0)
        if busy:
            waits_while_decoding += pool.waits[before:]
        else:
            assert set(pool.waits[before:]) <= {9.0}
    assert set(waits_while_decoding) == {0.0} and 9.0 in pool.waits


def test_each_group_has_its_own_sampling_and_is_taken_once() -> None:
    engine, pool = ScriptedEngine(says_b), ScriptedPool(ending(1), latency=(0, 5))
    runner = make_runner(engine, pool)
    members = tuple(spec(f"g_{number}", group_size=5) for number in range(5))
    runner.begin(GroupPlan("g", members), SAMPLING)
    runner.advance()
    runner.begin(GroupPlan("h", (spec("h_0"),)), SamplingParams(temperature=0.0, max_tokens=1))
    assert not runner.is_finished("g") and not runner.is_finished("h")
    while not (runner.is_finished("g") and runner.is_finished("h")):
        runner.advance()
    episodes, counts = runner.take("g")
    assert tuple(one.spec for one in episodes) == members and counts.episodes == 5
    assert [one.spec.traj_id for one in runner.take("h").rows] == ["h_0"]
    by_name = {request.request_id.split("/")[1]: request.sampling for request in engine.requests}
    assert (by_name["h_0"].temperature, by_name["h_0"].max_tokens) == (0.0, 1)
    assert (by_name["g_0"].temperature, by_name["g_0"].max_tokens) == (1.0, 16)
    with pytest.raises(KeyError):
        runner.take("g")
