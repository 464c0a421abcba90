"""What the options that save memory save in reward flow, and what they cost: one train step of a model for the CPU.

`python -m tests.bench reward_flow_memory [--frames 17] [--side 64] [--only NAME ...]`. Each row is a process of its
own: the worker of `trainer.main_reward_flow`, an image-to-video pipeline of diffusers' own classes with random weights,
one sample, four denoising steps with gradient. Columns: peak of the bytes of live tensors beside weights and Adam, the
same by the planner (`trainer.plan`) and their ratio; growth of resident memory at its highest; processor time
of a step. On a CPU there is no other memory to move activations to; for that row the copies that would be the host's
are not counted.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from tests.bench.frame import in_a_process, options, print_row
from tests.bench.reward_flow_live import OPTIONS, Measured, configured, measure, wan_pipeline

COLUMNS = ("live MB", "of all off", "planned MB", "planned / live", "RSS MB", "s / step", "of all off")


def main(argv: list[str]) -> int:
    """Prints the table; ratios are to its first row."""
    given = options("reward_flow_memory", __doc__, argv, frames=17, side=64, only=list(OPTIONS))
    started = time.perf_counter()
    rows: dict[str, Measured] = {}
    with tempfile.TemporaryDirectory(prefix="bench-flow-") as folder:
        path = wan_pipeline(Path(folder) / "wan")
        for name in given.only:
            rows[name] = in_a_process("fork", measure, configured(path, given.frames, given.side, OPTIONS[name]))
    first = rows[given.only[0]]
    print_row([f"{'options':42}", *COLUMNS], head=True)
    for name, row in rows.items():
        ratios = (row.live / first.live, row.planned / row.live, row.seconds / first.seconds)
        of_all_off, of_live, time_of_all_off = (f"{ratio:.2f}" for ratio in ratios)
        live, planned, rss = (f"{size / 1e6:.0f}" for size in (row.live, row.planned, row.rss))
        print_row([f"{name:42}", live, of_all_off, planned, of_live, rss, f"{row.seconds:.1f}", time_of_all_off])
    print(f"{given.frames} frames of {given.side} x {given.side}; {time.perf_counter() - started:.0f} s in all")
    return 0
