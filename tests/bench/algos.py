"""Time and error of the mathematics: every estimator, policy loss, aggregation, the value loss and KL.

`python -m tests.bench algos [--rows 8192] [--width 1024] [--repeat 3] [--only NAME ...]`, one thread, CPU time, best of
`--repeat`; the contestants of a line take turns, so that noise on the machine hits all.

  ours       the whole batch in fp32; losses with their gradient
  loop       plain Python loops over `--naive-rows` of the rows, extrapolated to all; a loss's value only
  x          loop / ours
  fp64 fp32  largest difference between the loops (in double precision) and ours on those rows, in that precision
  verl       verl's own function on the same batch, if verl is importable: time, verl / ours, largest difference in fp64
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.bench.algos_cases import CASES, Case, Columns, batch, in_precision, largest_difference
from tests.bench.algos_verl import VerlPeer, find_verl

ROWS_PER_GROUP = 8


def best_ms(repeat: int, *contestants: Callable[[], Any]) -> list[float]:
    """CPU milliseconds of each contestant's best run; they take turns."""
    best = [float("inf")] * len(contestants)
    for _ in range(repeat):
        for number, contestant in enumerate(contestants):
            started = time.process_time()
            contestant()
            best[number] = min(best[number], (time.process_time() - started) * 1e3)
    return best


def one_line(case: Case, columns: Columns, small: Columns, verl: VerlPeer | None, repeat: int) -> str:
    """Measures one case and formats it."""
    mask = small["response_mask"]
    scale = len(columns["response_mask"]) / len(mask)
    contestants: list[Callable[[], Any]] = [lambda: case.ours(columns), lambda: case.naive(small)]
    peer = verl.find(case, small) if verl else ""
    if not isinstance(peer, str):
        contestants.append(lambda: peer(columns))
    ours, naive, *theirs = best_ms(repeat, *contestants)
    double = in_precision(small, torch.float64)
    loops, found = case.naive(small), case.ours(double)
    differences = [largest_difference(numbers, loops, mask) for numbers in (found, case.ours(small))]
    if isinstance(peer, str):
        compared = f"   {peer[:60]}"
    else:
        compared = f"{theirs[0]:>8.1f} {theirs[0] / ours:>6.2f} {largest_difference(found, peer(double), mask):>8.0e}"
    return (
        f"{case.kind:<10} {case.name:<28} {ours:>8.1f} {naive * scale / 1e3:>8.1f} "
        f"{naive * scale / ours:>7.0f} {differences[0]:>8.0e} {differences[1]:>8.0e} {compared}".rstrip()
    )


def main(argv: Sequence[str]) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench algos")
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--naive-rows", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="entries of these names; default: all")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    verl = find_verl()
    columns = batch(args.rows, args.width, ROWS_PER_GROUP)
    small = batch(args.naive_rows, args.width, ROWS_PER_GROUP)
    tokens = float(columns["response_mask"].float().mean())
    print(
        f"{args.rows} rows x {args.width} tokens, {tokens:.0%} of them valid, groups of {ROWS_PER_GROUP}; one thread; "
        f"loops over {args.naive_rows} rows, extrapolated; verl is {'there' if verl else 'not importable'}"
    )
    head = f"{'kind':<10} {'name':<28} {'ours ms':>8} {'loop s':>8} {'x':>7} {'fp64':>8} {'fp32':>8}"
    print(head + (f" {'verl ms':>8} {'x':>6} {'fp64':>8}" if verl else ""))
    for case in CASES:
        if args.only is None or case.name in args.only:
            print(one_line(case, columns, small, verl, args.repeat), flush=True)
