"""Tests of `Runner` on several ranks: the other ranks of an engine repeat every call of the leader, in order."""

from __future__ import annotations

from typing import Any

import pytest

from tests.workers.rollout.scripted import ScriptedEngine, ScriptedPool, ids_of, make_runner, run_groups, spec
from workers.engines.base import Completion, Request, SamplingParams
from workers.rollout.runner import Runner, group_of_engine


class LoggedEngine(ScriptedEngine):
    """A scripted engine that records its calls."""

    def __init__(self) -> None:
        super().__init__(lambda traj_id, turn, request: ids_of("a" * (12 if traj_id.endswith("_2") else 2)))
        self.calls: list[Any] = []

    def submit(self, request: Request) -> None:
        self.calls.append((request.request_id, request.prompt_ids, request.sampling.seed))
        super().submit(request)

    def step(self) -> list[Completion]:
        self.calls.append("step")
        return super().step()

    def abort(self, request_ids: Any) -> None:
        self.calls += [("abort", name) for name in request_ids]
        super().abort(request_ids)


def run_episodes_on_rank(rng_seed: int) -> tuple[bool, list[Any]]:
    """Runs groups of three episodes that keep two; the third writes longer turns and is aborted. Environments answer
    after a random number of polls, which only the leader knows."""
    engine = LoggedEngine()
    runner: Runner[Any] = Runner(engine, group_of_engine(2))
    with runner.lead() as leads:
        if leads:
            pool = ScriptedPool(
                lambda seed, actions: {"observation": "ab"[: len(actions)], "terminated": len(actions) > 1},
                latency=(0, 5),
                rng_seed=rng_seed,
            )
            episodes = make_runner(runner, pool, stop_token_ids=(0,), max_live=9)
            members = [spec(f"g{group}_{k}", group_size=2) for group in range(4) for k in range(3)]
            run_groups(episodes, members, SamplingParams(max_tokens=16))
    return leads, engine.calls


def fail_in_a_step() -> str:
    """An engine step fails on both ranks, as when a collective fails. Returns the error that the caller sees."""

    class Failing(LoggedEngine):
        def step(self) -> list[Completion]:
            raise ArithmeticError("the step failed")

    runner: Runner[int] = Runner(Failing(), group_of_engine(2))
    try:
        with runner.lead() as leads:
            if leads:
                runner.submit(Request("1/a_0/0", (1,), SamplingParams(max_tokens=3)), 0)
                runner.step()
    except ArithmeticError as error:
        return str(error)
    return ""


def fail_on_leader() -> list[Any]:
    engine = LoggedEngine()
    runner: Runner[int] = Runner(engine, group_of_engine(2))
    try:
        with runner.lead() as leads:
            if leads:
                runner.submit(Request("1/a_0/0", (1,), SamplingParams(max_tokens=3)), 0)
                runner.step(until_completion=True)
                runner.submit(Request("2/a_0/0", (1,), SamplingParams(max_tokens=3)), 0)
                raise ZeroDivisionError
    except ZeroDivisionError:
        assert leads
    return engine.calls


@pytest.mark.parametrize("rng_seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_every_rank_of_an_engine_makes_the_calls_of_the_leader(ranks: Any, rng_seed: int) -> None:
    (first_leads, first), (second_leads, second) = ranks.run(run_episodes_on_rank, rng_seed, size=2)
    assert first_leads and not second_leads
    assert first.count("step") > 8 and any(call[0] == "abort" for call in first if call != "step")

    # between two steps the order of submitted and aborted requests is free, because none of them has run yet
    def by_step(calls: list[Any]) -> list[list[str]]:
        parts: list[list[str]] = [[]]
        for call in calls:
            parts[-1].append(repr(call))
            if call == "step":
                parts.append([])
        return [sorted(part) for part in parts]

    assert by_step(first) == by_step(second)


def test_the_other_ranks_return_when_the_leader_fails(ranks: Any) -> None:
    first, second = ranks.run(fail_on_leader, size=2)
    assert first == second
    assert [call[0] for call in first if call != "step"] == ["1/a_0/0", "2/a_0/0"]


def test_a_failed_step_is_raised_on_every_rank_at_once(ranks: Any) -> None:
    assert ranks.run(fail_in_a_step, size=2) == ["the step failed"] * 2
