"""vLLM in the processes of a trainer: beside its process group, split over two ranks, quiet, and gone afterwards."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny_model import tiny_qwen2
from tests.workers.engines.test_engines import TEMPERATURE, mixed_requests, plain_log_probs

# torch's C++ warning about NUMA binding can be silenced by the environment only
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]


def test_two_ranks_of_a_trainer_share_an_engine(tmp_path: Path) -> None:
    folder = tiny_qwen2(tmp_path / "model")
    command = [sys.executable, "-m", "tests.workers.engines.vllm_rank", folder, str(tmp_path)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [report["sum_of_ranks"] for report in reports] == [3, 3]
    assert [report["left"] for report in reports] == [[], []]
    assert [report["unfinished"] for report in reports] == [0, 0]
    assert reports[1]["results"] == [] and len(reports[0]["results"]) == 24, "only the first rank takes completions"
    for report in reports:
        # buffers of the group, if any, have no name while it runs: killed ranks leave none; Python's own
        # segment (psm_) has one, which its resource tracker removes if its owner is killed
        assert [path for path in report["mapped"] if "(deleted)" not in path and "/psm_" not in path] == []
    results: dict[str, Any] = {result["request_id"]: result for result in reports[0]["results"]}
    model = AutoModelForCausalLM.from_pretrained(folder)
    for request in mixed_requests(24, max_tokens=16):
        result = results[request.request_id]
        assert set(result["versions"]) == {2}
        expected = plain_log_probs(model, request.prompt_ids, result["token_ids"], 1.0)
        torch.testing.assert_close(torch.tensor(result["log_probs"]), expected, atol=1e-4, rtol=0)
    assert len(reports[0]["turns"]) > 8
    for prompt_ids, response_ids, log_probs in reports[0]["turns"]:
        expected = plain_log_probs(model, prompt_ids, response_ids, TEMPERATURE)
        torch.testing.assert_close(torch.tensor(log_probs), expected, atol=1e-4, rtol=0)


@pytest.mark.long
def test_building_and_generating_prints_nothing(tmp_path: Path) -> None:
    folder = tiny_qwen2(tmp_path / "model")
    code = f"""
import torch
from transformers import AutoModelForCausalLM
from tests.workers.engines.test_engines import load, make_engine, mixed_requests, run
model = AutoModelForCausalLM.from_pretrained({folder!r})
print("built", flush=True)
engine = make_engine("vllm", {folder!r})
load(engine, model, 1)
run(engine, mixed_requests(4))
engine.close()
print("closed", flush=True)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=ENVIRONMENT)
    lines = [line for line in (result.stdout + result.stderr).splitlines() if line and "Loading weights" not in line]
    assert [line for line in lines if not line.startswith("vLLM: ")] == ["built", "closed"]  # without our own line
