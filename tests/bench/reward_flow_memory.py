"""What the options that save memory save in reward flow, and what they cost: one train step of a model for the CPU.

`python -m tests.bench reward_flow_memory [--frames 17] [--side 64] [--only NAME ...]`. Each row is a process of its
own: the worker of `trainer.main_reward_flow`, an image-to-video pipeline of diffusers' own classes with random weights,
one sample, four denoising steps with gradient. Columns: peak of the bytes of live tensors beside weights and Adam, the
same by the planner (`trainer.diffusion_plan`) and their ratio; growth of resident memory at its highest; processor time
of a step. On a CPU there is no other memory to move activations to; for that row the copies that would be the host's
are not counted.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tests.bench.reward_flow_live import OPTIONS, Measured, configured, measure, wan_pipeline

COLUMNS = ("live MB", "of all off", "planned MB", "planned / live", "RSS MB", "s / step", "of all off")


def main(argv: list[str]) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench reward_flow_memory", description=__doc__)
    parser.add_argument("--frames", type=int, default=17, help="4 k + 1")
    parser.add_argument("--side", type=int, default=64, help="pixels, a multiple of 16")
    parser.add_argument("--only", nargs="+", choices=list(OPTIONS), default=list(OPTIONS))
    given = parser.parse_args(argv)
    started = time.perf_counter()
    rows: dict[str, Measured] = {}
    with tempfile.TemporaryDirectory(prefix="bench-flow-") as folder:
        path = wan_pipeline(Path(folder) / "wan")
        for name in given.only:
            rows[name] = in_a_process(name, path, given.frames, given.side)
    show(rows)
    print(f"{given.frames} frames of {given.side} x {given.side}; {time.perf_counter() - started:.0f} s in all")
    return 0


def in_a_process(name: str, path: str, frames: int, side: int) -> Measured:
    """One row. The process is a fork: what is imported here need not be imported again."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        return pool.submit(measure, configured(path, frames, side, OPTIONS[name])).result()


def show(rows: dict[str, Measured]) -> None:
    """Prints the rows as markdown, ratios to the first."""
    first = next(iter(rows.values()))
    print(f"| {'options':42} | {' | '.join(COLUMNS)} |")
    print(f"|---|{'---|' * len(COLUMNS)}")
    for name, row in rows.items():
        cells = (
            f"{row.live / 1e6:.0f}",
            f"{row.live / first.live:.2f}",
            f"{row.planned / 1e6:.0f}",
            f"{row.planned / row.live:.2f}",
            f"{row.rss / 1e6:.0f}",
            f"{row.seconds:.1f}",
            f"{row.seconds / first.seconds:.2f}",
        )
        print(f"| {name:42} | {' | '.join(cells)} |")
