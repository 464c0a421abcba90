"""Every version of vLLM that setup.py allows has what this project touches of it, by the source of its wheels."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.gpu_static.vllm_contract import DATA, ROOT, VERSIONS, Source, broken
from tests.gpu_static.vllm_touches import SCHEDULER, touches, touches_of_project

CONTRACT: dict[str, Any] = json.loads(DATA.read_text())
ENGINE = "workers/engines/vllm_engine.py"


def told(version: str, text: str | None = None) -> list[str]:
    """What a version lacks of what the project touches, or a changed engine file alone."""
    found = touches_of_project() if text is None else touches(text, ENGINE)
    return broken(found, lambda key: CONTRACT[version]["has"].get(key, {}))


@pytest.mark.parametrize("version", VERSIONS)
def test_a_version_has_all_that_is_touched(version: str) -> None:
    assert told(version) == []


@pytest.mark.parametrize("version", [each for each in VERSIONS if Version(each) >= Version("0.32")])
def test_what_is_guarded_for_the_replay_of_experts_is_there_where_it_is_allowed(version: str) -> None:
    assert "aux_output_connector" in CONTRACT[version]["has"][SCHEDULER]


def test_the_versions_are_those_that_setup_py_allows() -> None:
    [text] = re.findall(r'"(vllm>[^"]*)"', (ROOT / "setup.py").read_text())
    allowed = Requirement(text).specifier
    assert list(CONTRACT) == list(VERSIONS) and all(version in allowed for version in VERSIONS)
    first, last = Version(VERSIONS[0]), Version(VERSIONS[-1])
    assert f"{first.major}.{first.minor - 1}.99" not in allowed
    assert f"{last.major}.{last.minor}.{last.micro + 1}" not in allowed


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
def test_the_installed_build_has_it_too() -> None:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    assert broken(touches_of_project(), Source(Path(spec.origin).parents[1]).members) == []


@pytest.mark.parametrize(
    ("ours", "other", "problem"),
    [
        ('"max_num_seqs":', '"max_num_sequences":', "vllm:EngineArgs has no .* with max_num_sequences"),
        ("flat_logprobs=True", "flat_logprob=True", "vllm:SamplingParams has no .* with flat_logprob"),
        ("self._engine.wake_up(tags=", "self._engine.wake_up(names=", "wake_up .*unexpected keyword argument 'names'"),
        ("core.engine_core.scheduler.shutdown()", "core.engine_core.scheduler.stop()", "Scheduler has no stop"),
        ("import TokensPrompt, tokens_input", "import token_input", "vllm.inputs:token_input has no place"),
        ("renderer.render_cmpl([prompt])", "renderer.render([prompt])", "BaseRenderer has no render"),
        ('["limit_mm_per_prompt"]', '["limit_mm"]', "vllm:EngineArgs has no .* with limit_mm"),
        ('"logprobs_mode": "processed_logprobs"', '"logprobs_mode": "processed"', "LogprobsMode has no processed"),
        ('getattr(core, "_finalizer", None)', "core._finalizer", "InprocClient has no _finalizer"),
    ],
)
def test_what_a_version_has_not_is_told(ours: str, other: str, problem: str) -> None:
    text = (ROOT / ENGINE).read_text()
    assert ours in text
    found = told("0.26.0", text.replace(ours, other))
    assert any(re.search(problem, each) for each in found), found
