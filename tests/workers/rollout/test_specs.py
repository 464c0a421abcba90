"""The specifications of samples: their kinds, and checkpoints that contain them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.workers.rollout.scripted import SAMPLING, ScriptedEngine, ScriptedPool, make_runner, spec
from verl_lite.machine.safe_state import read_state, write_state
from verl_lite.rewards import RewardItem
from workers.engines.base import Sampled
from workers.rollout.specs import AnswerSpec, EpisodeCounts, EpisodeSpec, GroupPlan, ProgramSpec

ANSWER = AnswerSpec((3, 4), 8, seed=5, item=RewardItem("a/0", "sums", "", "7"), sampled=Sampled((6,), (-0.5,), (2,)))
PROGRAM = ProgramSpec("p/0", "p", "sums", start_step=1, row={"prompt": []})


def test_a_plan_gives_its_samples_only_as_what_they_are() -> None:
    assert GroupPlan("g", (ANSWER, ANSWER)).samples_of(AnswerSpec) == (ANSWER, ANSWER)
    assert GroupPlan("g", ()).samples_of(AnswerSpec) == ()
    for kind in (EpisodeSpec, ProgramSpec):
        with pytest.raises(TypeError, match=f"group 'g': this run samples {kind.__name__}s, found"):
            GroupPlan("g", (ANSWER,)).samples_of(kind)
    with pytest.raises(TypeError, match="this run samples AnswerSpecs"):
        GroupPlan("g", (ANSWER, PROGRAM)).samples_of(AnswerSpec)


def test_a_runner_refuses_samples_of_another_kind() -> None:
    runner = make_runner(ScriptedEngine(lambda *_: [3]), ScriptedPool(lambda seed, actions: {"observation": "d"}))
    with pytest.raises(TypeError, match="this run samples EpisodeSpecs"):
        runner.begin(GroupPlan("p", (PROGRAM,)), SAMPLING)
    runner.begin(GroupPlan("g", (spec(),)), SAMPLING)


@pytest.mark.parametrize("are_old", [False, True])
def test_checkpoints_with_groups_can_be_read_also_those_of_earlier_versions(
    are_old: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier versions defined the classes in the modules of the runners, which still import them."""
    state: dict[str, Any] = {"plan": GroupPlan("g", (ANSWER,)), "counts": EpisodeCounts(4, 1, first_failure="broken")}
    if are_old:
        monkeypatch.setattr(AnswerSpec, "__module__", "workers.rollout.answers")
        monkeypatch.setattr(EpisodeCounts, "__module__", "workers.agents.episodes")
        monkeypatch.setattr(GroupPlan, "__module__", "workers.rollout.group_run")
    write_state(tmp_path / "state", state)
    monkeypatch.undo()
    module = b"workers.rollout.answers" if are_old else b"workers.rollout.specs"
    assert module in (tmp_path / "state").read_bytes()
    assert read_state(tmp_path / "state") == state
