"""The way of a prompt, a key and a reward through the files, against what it may cost."""

from __future__ import annotations

import pytest

from tests.architecture.flows import BUDGET, in_own_process

NOW = {"prompt": 64, "key": 5, "reward": 8}
"""What each costs where it is above its budget yet; only falls."""


@pytest.fixture(scope="module")
def flows() -> dict[str, list[str]]:
    return in_own_process()


@pytest.mark.slow
@pytest.mark.parametrize("name", BUDGET)
def test_a_flow_enters_no_more_files_than_it_may(name: str, flows: dict[str, list[str]]) -> None:
    assert flows[name], "something was counted"
    assert len(flows[name]) <= max(NOW[name], BUDGET[name]), "\n".join(flows[name])


@pytest.mark.slow
def test_a_plain_run_enters_no_code_of_agents(flows: dict[str, list[str]]) -> None:
    agents = ("trainer/agentic/", "workers/agent", "verl_lite/envs/")
    assert not [file for file in flows["prompt"] if file.startswith(agents)]
