"""A micro-batch of Qwen2.5-1.5B costs no more on a GPU than it did, counted by `tests.gpu_static.cost`.

Each number may be 2% above its ceiling here. Whoever lowers a number lowers its ceiling.
"""

from __future__ import annotations

import pytest

from tests.gpu_static.cost import micro_batch

CEILINGS = {
    "eager, full checkpointing": {"kernels": 6_487, "TFLOP": 136.5, "GB": 526.8, "ms": 419},
    "compiled, no checkpointing": {"kernels": 1_791, "TFLOP": 114.2, "GB": 131.6, "ms": 237},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CEILINGS)
def test_a_micro_batch_costs_no_more_than_it_did(case: str) -> None:
    cost = micro_batch("1.5b", recomputed=float("full" in case), compiled="compiled" in case)
    found = {**cost.total, "ms": cost.milliseconds}
    for name, ceiling in CEILINGS[case].items():
        assert 0.9 * ceiling <= found[name] <= 1.02 * ceiling, f"{name}: {found}"
