"""How often ranks communicate in a training step, by the arithmetic of FSDP2: on 8 and 32 simulated ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu_static.simulated_ranks import LAYERS, MICRO_BATCHES, MINI_BATCHES

ROOT = Path(__file__).resolve().parents[2]
UNITS = LAYERS + 1  # what is gathered at once: each layer, and the rest of the network
CASES = {"8": (8, -1, 1), "32": (32, -1, 1), "4 x 8": (32, 8, 1), "8, sequences on 4": (8, -1, 4)}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What each case communicates."""
    cases = [",".join(map(str, case)) for case in CASES.values()]
    command = [sys.executable, "-m", "tests.gpu_static.simulated_ranks", *cases]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return dict(zip(CASES, lines, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_step_communicates_what_it_must(case: str, found: dict[str, Any]) -> None:
    # parameters before each forward and each backward pass; gradients once an optimizer step, whatever it was cut into
    gathers, reductions = 2 * UNITS * MICRO_BATCHES * MINI_BATCHES, UNITS * MINI_BATCHES
    norms = MINI_BATCHES
    replicas = reductions if CASES[case][1] > 0 else 0
    expected = {"allgather_base": gathers, "reduce_scatter_base": reductions, "allreduce": norms + replicas}
    if (
        CASES[case][2] > 1
    ):  # twice around each layer's attention, forward and backward; log-probs and entropies are summed
        expected["all_to_all_single"] = 4 * LAYERS * MICRO_BATCHES * MINI_BATCHES
        expected["allreduce"] += 2 * MICRO_BATCHES * MINI_BATCHES
    assert found[case]["step"] == expected
    assert found[case]["weights"] == {"allgather_base": 1}, "all weights fit into one bucket"
