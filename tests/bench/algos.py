"""Time and error of the mathematics: every estimator, policy loss, aggregation, the value loss, KL, group statistics.

`python -m tests.bench algos [--rows 8192] [--width 1024] [--group-rows 16384] [--repeat 3] [--only NAME ...]`, one
thread, CPU time, best of `--repeat`; the contestants of a line take turns, so that noise on the machine hits all. Freed
memory is kept for the next tensor, as caching allocators do; else the kernel's page faults would be most of each time.

  ours       the whole batch in fp32; losses with their gradient
  passes     ours in units of one elementwise pass, c = a b into a new (rows, width) fp32 tensor: the limit of what is
             bound by memory is a few of them
  loop       plain Python loops over `--naive-rows` of the rows, extrapolated to all; a loss's value only
  x          loop / ours
  fp64 fp32  largest difference between the loops (in double precision) and ours on those rows, in that precision
  verl       verl's own function on the same batch, if verl is importable: time, verl / ours, largest difference in fp64

Two comparisons with the way it is usually written follow: statistics of groups by a dict of lists, and GAE by columns
of row-major tensors.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.bench.algos_cases import CASES, Case, Columns, batch, group_columns, in_precision, largest_difference
from tests.bench.algos_peers import VerlPeer, find_verl, gae_by_columns, grpo_by_dict
from verl_lite.core_algos import compute_gae_advantage_return, compute_grpo_outcome_advantage

ROWS_PER_GROUP = 8
PASSES_OF_THE_LIMIT = 10


def best_ms(repeat: int, *contestants: Callable[[], Any]) -> list[float]:
    """CPU milliseconds of each contestant's best run; they take turns."""
    best = [float("inf")] * len(contestants)
    for _ in range(repeat):
        for number, contestant in enumerate(contestants):
            started = time.process_time()
            contestant()
            best[number] = min(best[number], (time.process_time() - started) * 1e3)
    return best


def keep_memory() -> bool:
    """Asks the allocator (glibc) to keep what is freed; whether it does."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):
        return False
    never_map, never_trim = (-3, 1 << 30), (-1, (1 << 31) - 1)
    return all(library.mallopt(*setting) for setting in (never_map, never_trim))


def elementwise_pass(columns: Columns) -> Callable[[], Any]:
    """One pass over memory: two (B, T) tensors read, a new one written."""
    a, b = columns["log_prob"], columns["advantages"]
    return lambda: a * b


def one_line(case: Case, columns: Columns, small: Columns, verl: VerlPeer | None, repeat: int) -> str:
    """Measures one case and formats it."""
    mask = small["response_mask"]
    scale = len(columns["response_mask"]) / len(mask)
    contestants: list[Callable[[], Any]] = [
        lambda: case.ours(columns),
        elementwise_pass(columns),
        lambda: case.naive(small),
    ]
    peer = verl.find(case, small) if verl else ""
    if not isinstance(peer, str):
        contestants.append(lambda: peer(columns))
    ours, one_pass, naive, *theirs = best_ms(repeat, *contestants)
    double = in_precision(small, torch.float64)
    loops, found = case.naive(small), case.ours(double)
    differences = [largest_difference(numbers, loops, mask) for numbers in (found, case.ours(small))]
    if isinstance(peer, str):
        compared = f"   {peer[:60]}"
    else:
        compared = f"{theirs[0]:>8.1f} {theirs[0] / ours:>6.2f} {largest_difference(found, peer(double), mask):>8.0e}"
    return (
        f"{case.kind:<10} {case.name:<28} {ours:>8.1f} {ours / one_pass:>7.1f} {naive * scale / 1e3:>8.1f} "
        f"{naive * scale / ours:>7.0f} {differences[0]:>8.0e} {differences[1]:>8.0e} {compared}".rstrip()
    )


def group_statistics(rows: int, repeat: int) -> str:
    """GRPO of `rows` answers of one token against a dict of lists, as it is usually written."""
    columns = group_columns(rows, ROWS_PER_GROUP)
    arguments = (columns["token_level_rewards"], columns["response_mask"], columns["index"])
    ours, loop = best_ms(
        max(3, repeat), lambda: compute_grpo_outcome_advantage(*arguments), lambda: grpo_by_dict(*arguments)
    )
    found, expected = compute_grpo_outcome_advantage(*arguments)[0], grpo_by_dict(*arguments)
    difference = float((found - expected).abs().max())
    return (
        f"group statistics, {rows} rows in groups of {ROWS_PER_GROUP}: ours {ours:.1f} ms, dict of lists {loop:.0f} "
        f"ms, {loop / ours:.0f} times as long (goal: 10); largest difference {difference:.0e}"
    )


def gae_against_the_limit(columns: Columns, repeat: int) -> list[str]:
    """GAE against passes over memory, and against a loop over the columns of row-major tensors."""
    names = ("token_level_rewards", "values", "response_mask")
    arguments = {name: columns[name] for name in names} | {"gamma": columns["gamma"], "lam": columns["lam"]}
    once = elementwise_pass(columns)

    def limit() -> None:
        for _ in range(PASSES_OF_THE_LIMIT):
            once()

    ours, passes, by_columns = best_ms(
        max(3, repeat),
        lambda: compute_gae_advantage_return(**arguments),
        limit,
        lambda: gae_by_columns(**arguments),
    )
    found, expected = compute_gae_advantage_return(**arguments), gae_by_columns(**arguments)
    difference = max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))
    return [
        f"gae: ours {ours:.0f} ms; {PASSES_OF_THE_LIMIT} elementwise passes over the same tensors {passes:.0f} ms, "
        f"ours is {ours / passes:.1f} times that",
        f"gae: loop over columns of row-major tensors {by_columns:.0f} ms, {by_columns / ours:.1f} times as long; "
        f"largest difference {difference:.0e}",
    ]


def main(argv: Sequence[str]) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench algos")
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--group-rows", type=int, default=16384)
    parser.add_argument("--naive-rows", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="entries of these names; default: all")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    kept = "" if keep_memory() else " (the allocator returns memory: page faults are part of every time)"
    verl = find_verl()
    columns = batch(args.rows, args.width, ROWS_PER_GROUP)
    small = batch(args.naive_rows, args.width, ROWS_PER_GROUP)
    tokens = float(columns["response_mask"].float().mean())
    print(
        f"{args.rows} rows x {args.width} tokens, {tokens:.0%} of them valid, groups of {ROWS_PER_GROUP}; one thread; "
        f"loops over {args.naive_rows} rows, extrapolated; verl is {'there' if verl else 'not importable'}{kept}"
    )
    head = f"{'kind':<10} {'name':<28} {'ours ms':>8} {'passes':>7} {'loop s':>8} {'x':>7} {'fp64':>8} {'fp32':>8}"
    print(head + (f" {'verl ms':>8} {'x':>6} {'fp64':>8}" if verl else ""))
    for case in CASES:
        if args.only is None or case.name in args.only:
            print(one_line(case, columns, small, verl, args.repeat), flush=True)
    print(group_statistics(args.group_rows, args.repeat))
    print("\n".join(gae_against_the_limit(columns, args.repeat)))
