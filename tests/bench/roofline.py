"""What a micro-batch of Qwen2.5 with 16k nominal tokens costs on an H200, counted without a GPU.

`python -m tests.bench roofline [--sizes 0.5b 1.5b 7b]`. Counts kernels, arithmetic and bytes as `tests.gpu_static.cost`
does, and computes the time at 620 TFLOP/s for products, 330 TFLOP/s for attention and 2.75 TB/s for all other kernels,
without overlap.
"""

from __future__ import annotations

from tests.bench.frame import options, print_row
from tests.gpu_static.cost import SIZES, micro_batch

CASES = {
    "eager, full checkpointing (default)": (1.0, False),
    "eager, no checkpointing": (0.0, False),
    "compiled, full checkpointing": (1.0, True),
    "compiled, half of the layers checkpointed": (0.5, True),
    "compiled, no checkpointing": (0.0, True),
}
"""Share of the layers that are recomputed (`model.gradient_checkpointing_layers`), and `model.compile`."""


def main(argv: list[str]) -> int:
    """Prints the table."""
    given = options("roofline", __doc__, argv, sizes=list(SIZES), cases=list(CASES))
    print_row(("model", "execution", "kernels", "TFLOP", "GB", "ms"), head=True)
    for size in given.sizes:
        for case in given.cases:
            recomputed, compiled = CASES[case]
            cost = micro_batch(size, recomputed=recomputed, compiled=compiled)
            numbers = f"{cost.total['TFLOP']:.1f}", f"{cost.total['GB']:.1f}", f"{cost.milliseconds:.0f}"
            print_row((size, case, cost.total["kernels"], *numbers))
    return 0
