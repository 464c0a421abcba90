"""The paths of a prompt, a key and a reward through the files can be followed, and a plain run avoids the agents."""

from __future__ import annotations

import pytest

from tests.architecture.flows import in_own_process

FLOWS = ("prompt", "key", "reward")


@pytest.fixture(scope="module")
def flows() -> dict[str, list[str]]:
    return in_own_process()


@pytest.mark.slow
@pytest.mark.parametrize("name", FLOWS)
def test_a_flow_is_recorded(name: str, flows: dict[str, list[str]]) -> None:
    assert flows[name], "no file was recorded"


@pytest.mark.slow
def test_a_plain_run_enters_no_code_of_agents(flows: dict[str, list[str]]) -> None:
    agents = ("trainer/agentic/", "workers/agent", "verl_lite/envs/")
    assert not [file for file in flows["prompt"] if file.startswith(agents)]
