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
from tests.workers.rollout.test_engines import mixed_requests, plain_log_probs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]


@pytest.mark.parametrize("tensor_parallel", [pytest.param(1, marks=pytest.mark.long), 2])
def test_two_ranks_of_a_trainer(tmp_path: Path, tensor_parallel: int) -> None:
    folder = tiny_qwen2(tmp_path / "model")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.workers.rollout.vllm_rank"]
            + [str(rank), "2", str(tensor_parallel), folder, str(tmp_path)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    printed = []
    try:
        printed = [process.communicate(timeout=240)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(printed)
    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [report["sum_of_ranks"] for report in reports] == [3, 3]
    assert [report["left"] for report in reports] == [[], []]
    results: dict[str, Any] = {result["request_id"]: result for report in reports for result in report["results"]}
    if tensor_parallel == 2:
        assert reports[0]["results"] == reports[1]["results"]
        for report in reports:
            # buffers of the group, if any, have no name while it runs: killed ranks leave none; Python's own
            # segment (psm_) has one, which its resource tracker removes if its owner is killed
            named = [path for path in report["mapped"] if "(deleted)" not in path and "/psm_" not in path]
            assert named == []
    model = AutoModelForCausalLM.from_pretrained(folder)
    for request in mixed_requests(24, max_tokens=16):
        result = results[request.request_id]
        assert result["policy_version"] == 2
        expected = plain_log_probs(model, request.prompt_ids, result["token_ids"], 1.0)
        torch.testing.assert_close(torch.tensor(result["log_probs"]), expected, atol=1e-4, rtol=0)


@pytest.mark.long
def test_building_and_generating_prints_nothing(tmp_path: Path) -> None:
    folder = tiny_qwen2(tmp_path / "model")
    code = f"""
import torch
from transformers import AutoModelForCausalLM
from tests.workers.rollout.test_engines import load, make_engine, mixed_requests, run
model = AutoModelForCausalLM.from_pretrained({folder!r})
print("built", flush=True)
engine = make_engine("vllm", {folder!r})
load(engine, model, 1)
run(engine, mixed_requests(4))
engine.close()
print("closed", flush=True)
"""
    # torch's C++ warning about NUMA binding can be silenced by the environment only
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    lines = [line for line in (result.stdout + result.stderr).splitlines() if line and "Loading weights" not in line]
    assert lines == ["built", "closed"]
