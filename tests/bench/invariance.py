"""By how much the gradient of one optimizer step depends on how the batch was cut: the table of the closing note.

`python -m tests.bench invariance [--losses vanilla gspo ...] [--worlds 1 2 4]`. One row for each policy loss and
aggregation mode, and for each mode of the value loss; a number is the largest difference from plain transformers in
fp64 on the whole mini-batch, relative to the largest entry of each parameter's gradient. Columns in fp64, in this
process: the ways to cut, each with 1, 2, 4 and 7 ranks one after the other. Columns in fp32: the training engine over
gloo, all cuts. Columns "sp n x dp m", packed cuts: n ranks share each sequence
(`actor.ulysses_sequence_parallel_size`). Last come losses that are wrong on purpose.
"""

from __future__ import annotations

import tempfile
import time

import torch
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from tests.bench.frame import options, print_row
from tests.workers.invariance import (
    CUTS,
    LAYOUTS,
    RAGGED,
    WRONG,
    Table,
    all_cases,
    fp32_table,
    fp64_table,
    shared_table,
    write_networks,
)
from tests.workers.ranks import Ranks


def main(argv: list[str]) -> None:
    """Prints the table."""
    losses = list(dict.fromkeys(case.name for case in all_cases()))
    args = options("invariance", __doc__, argv, losses=losses, worlds=[1, 2, 4])
    torch.set_num_threads(1)
    disable_progress_bar()
    set_verbosity_error()
    cases = [case for case in all_cases() if case.name in args.losses]
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, Ranks(max(args.worlds), timeout_s=1800) as ranks:
        path = write_networks(folder)
        right = merged(fp64_table(path, cases), fp32_table(path, folder, cases, ranks, tuple(args.worlds)))
        layouts = tuple(layout for layout in LAYOUTS if layout[0] * layout[1] in args.worlds)
        shared = shared_table(path, folder, cases, ranks, layouts)
        right = {case: row | merged(shared["fp64"], shared["fp32"])[case] for case, row in right.items()}
        cuts = {RAGGED: {name: cut for name, cut in CUTS[RAGGED].items() if name != "whole"}}
        wrong = merged(
            fp64_table(path, list(WRONG), cuts_of=cuts),
            fp32_table(path, folder, list(WRONG), ranks, tuple(args.worlds), cuts_of=cuts),
        )
    show(right | wrong)
    worst = {
        kind: max(value for row in right.values() for name, value in row.items() if kind in name) for kind in KINDS
    }
    print(
        f"{len(cases)} losses and modes; largest: " + ", ".join(f"{kind} {value:.1e}" for kind, value in worst.items())
    )
    print(f"{time.perf_counter() - started:.0f} s")


KINDS = ("fp64", "fp32")


def merged(fp64: Table, fp32: Table) -> Table:
    """Both as one table, columns marked with their precision."""
    tables = {"fp64": fp64, "fp32": fp32}
    return {
        case: {f"{kind} {column}": value for kind, table in tables.items() for column, value in table[case].items()}
        for case in fp64
    }


def show(table: Table) -> None:
    """Prints the table as markdown."""
    columns = list(dict.fromkeys(column for row in table.values() for column in row))
    print_row(["loss and mode", *columns], head=True)
    for case, row in table.items():
        print_row([case, *(f"{row[column]:.0e}" if column in row else "" for column in columns)])
