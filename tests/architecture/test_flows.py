"""The paths of a prompt, a key, a reward and a program through the files can be followed. A plain run enters no code of
agents."""

from __future__ import annotations

import pytest

from tests.architecture.flows import in_own_process

FLOWS = ("prompt", "key", "reward", "program")


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
    assert [file for file in flows["program"] if file.startswith(agents)], "the folders are those of the agents"
