"""`python -m tests.fuzz --configs 500 --datasets 200 --seed 0`: random configurations and malformed datasets.

Each has to run (one step of a tiny model, in this machine's processes) or to stop with our error, which has to name
something that was typed. A traceback from inside, a crash, a hang, or an error about something else is a failure: it is
made as small as possible and shown with the command that repeats it. Exit status: 0 without failures, else 1.
"""

from __future__ import annotations

import argparse
import queue
import re
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.fuzz.cases import OVERLAY, Case, make_good_files
from tests.fuzz.configs import draw_config
from tests.fuzz.datasets import draw_dataset
from tests.fuzz.pool import FuzzProcess, Result
from tests.fuzz.shrink import shrink

Draw = Callable[[], Case]
DRAWS = {"config": draw_config, "dataset": draw_dataset}


@dataclass(frozen=True)
class Failure:
    """A case that failed, as small as it could be made, and what happened."""

    case: Case
    result: Result
    command: str


def main(argv: list[str]) -> int:
    """Runs the fuzz; returns the exit status."""
    options = parse(argv)
    root = Path(options.keep or tempfile.mkdtemp(prefix="fuzz-", dir="/tmp")).resolve()
    make_good_files(root)
    began = time.monotonic()
    results, failures = fuzz(chosen(options, root), root, options.jobs, options.time_limit)
    console = Console(width=150)
    show(results, time.monotonic() - began, console)
    seen = Counter(failure.result.kind for failure in failures)
    for failure in {failure.result.kind: failure for failure in reversed(failures)}.values():
        count = seen[failure.result.kind]
        console.print(f"\n{failure.case.name} ({count} like it): {failure.result.kind}", style="bold red", markup=False)
        console.print(
            f"  {failure.result.message[:600]}\n  {failure.command}", markup=False, highlight=False, soft_wrap=True
        )
    if failures:
        console.print(f"\nThe cases that failed: {' '.join(failure.case.name for failure in failures)}", markup=False)
        console.print(f"Again: python -m tests.fuzz --seed {options.seed} --only {failures[0].case.name}", markup=False)
    elif not options.keep:
        shutil.rmtree(root)
    return int(bool(failures))


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.split("\n\n")[1])
    parser.add_argument("--configs", type=int, default=500, help="random configurations")
    parser.add_argument("--datasets", type=int, default=200, help="malformed datasets")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--only", nargs="*", help="these cases alone, such as config:17")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--time-limit", type=float, default=120.0, help="seconds of a case, past which it hangs")
    parser.add_argument("--keep", help="folder for the files; it stays. Without it, it stays where something failed")
    return parser.parse_args(argv)


def chosen(options: argparse.Namespace, root: Path) -> list[Draw]:
    """The cases that the options ask for, to be drawn when their turn comes: their files may be large."""
    names = options.only or [
        f"{kind}:{index}"
        for kind, count in {"config": options.configs, "dataset": options.datasets}.items()
        for index in range(options.first, options.first + count)
    ]
    pairs = (name.split(":") for name in names)
    return [partial(DRAWS[kind], options.seed, int(index), root) for kind, index in pairs]


def fuzz(
    draws: list[Draw], root: Path, jobs: int, time_limit_s: float
) -> tuple[list[tuple[Case, Result]], list[Failure]]:
    """Runs the cases in some processes; gives every result, and the failures."""
    waiting: queue.SimpleQueue[Draw] = queue.SimpleQueue()
    for draw in draws:
        waiting.put(draw)
    results: list[tuple[Case, Result]] = []
    failures: list[Failure] = []
    shrunk: set[str] = set()

    def work() -> None:
        process = FuzzProcess(time_limit_s)
        try:
            while True:
                case = waiting.get_nowait()()
                result = judged(process, case, root)
                if result.outcome == "failed":
                    known = result.kind in shrunk
                    shrunk.add(result.kind)
                    failures.append(examined(process, case, result, root, make_small=not known))
                    texts = [part.text for part in failures[-1].case.parts]
                    print(
                        f"\n{case.name}: {result.kind}: {result.message[:300]}\n  {texts!r:.600}",
                        file=sys.stderr,
                        flush=True,
                    )
                results.append((case, result))
                print(f"\r{len(results)} of {len(draws)}", end="", file=sys.stderr, flush=True)
        except queue.Empty:
            return
        finally:
            process.close()

    threads = [threading.Thread(target=work) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(file=sys.stderr)
    return results, failures


def judged(process: FuzzProcess, case: Case, root: Path) -> Result:
    """The result of a case; a refusal that names nothing of what was typed counts as a failure."""
    folder = folder_of(case, root)
    shutil.rmtree(folder, ignore_errors=True)
    result = process.run(case, folder)
    if result.outcome == "refused" and not names_what_was_typed(result.message, case):
        return replace(result, outcome="failed", kind=f"an error that does not name what was typed, in {result.kind}")
    if result.outcome != "failed":
        shutil.rmtree(folder, ignore_errors=True)
    return result


def folder_of(case: Case, root: Path) -> Path:
    return root / "cases" / case.name.replace(":", "-")


def names_what_was_typed(message: str, case: Case) -> bool:
    """Whether an error has a word of the case: the last part of a key, an argument, a file."""
    words = {word for part in case.parts for word in re.split(r"[\s=+~.:,\[\]{}\"']+", part.text) if len(word) > 1}
    if OVERLAY in message and any(part.in_file for part in case.parts):  # the file and its line
        return True
    told = set(re.split(r"[\s=+~.:,;()\[\]{}\"'/]+", message))
    short = all(len(part.text) < 4 for part in case.parts)
    return short or bool(words & told) or any(part.text in message for part in case.parts)


def examined(process: FuzzProcess, case: Case, result: Result, root: Path, make_small: bool) -> Failure:
    """The failure, made small if asked for, with its files in place and its command."""

    def fails(smaller: Case) -> bool:
        return judged(process, smaller, root).kind == result.kind

    small = shrink(case, fails) if make_small else case
    folder = folder_of(case, root)
    shutil.rmtree(folder, ignore_errors=True)
    return Failure(small, result, small.command(folder))


def show(results: list[tuple[Case, Result]], seconds: float, console: Console) -> None:
    """How many of each kind ran, were refused (and where), failed."""
    counts: dict[tuple[str, str], Counter[str]] = {}
    for case, result in results:
        place = result.kind if result.outcome in ("refused", "failed") else ""
        counts.setdefault((result.outcome, place), Counter())[case.kind] += 1
    table = Table(title=f"{len(results)} cases in {seconds:.0f} s")
    for name in ("outcome", "where", "configs", "datasets"):
        table.add_column(name, justify="right" if name.endswith("s") and name != "where" else "left")
    order = {"ran": 0, "planned": 1, "refused": 2, "failed": 3}
    for (outcome, place), by_kind in sorted(counts.items(), key=lambda item: (order[item[0][0]], -item[1].total())):
        style = "bold red" if outcome == "failed" else None
        table.add_row(outcome, place, f"{by_kind['config']}", f"{by_kind['dataset']}", style=style)
    console.print(table)
    slow = sorted(results, key=lambda pair: -pair[1].seconds)[:3]
    console.print("slowest: " + ", ".join(f"{case.name} {result.seconds:.0f} s" for case, result in slow), markup=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
