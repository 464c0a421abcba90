"""What benchmarks share: options, runs that take turns, processes of their own, memory, tables."""

from __future__ import annotations

import argparse
import multiprocessing
import re
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any


def options(name: str, doc: str | None, argv: Sequence[str], **defaults: Any) -> argparse.Namespace:
    """The options of benchmark `name` by their defaults; of a list of texts, which are all there are, some."""
    parser = argparse.ArgumentParser(
        prog=f"python -m tests.bench {name}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for key, default in defaults.items():
        is_list = isinstance(default, list)
        kind = str if default is None else type(default[0] if is_list else default)
        choices = default if is_list and kind is str else None
        nargs = "+" if is_list else None
        parser.add_argument(f"--{key.replace('_', '-')}", default=default, type=kind, nargs=nargs, choices=choices)
    return parser.parse_args(argv)


def best_ms(repeat: int, *contestants: Callable[[], Any]) -> list[float]:
    """CPU milliseconds of each contestant's best run; they take turns, so that noise on the machine hits all."""
    best = [float("inf")] * len(contestants)
    for _ in range(repeat):
        for number, contestant in enumerate(contestants):
            started = time.process_time()
            contestant()
            best[number] = min(best[number], (time.process_time() - started) * 1e3)
    return best


def in_a_process(method: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """What the function gives in a process of its own, started by this method: fork (with what is imported here) or
    spawn."""
    with ProcessPoolExecutor(1, multiprocessing.get_context(method)) as pool:
        return pool.submit(function, *arguments).result()


def reset_high_water() -> None:
    """Starts a new measurement of VmHWM (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")


def status_bytes(name: str, process: int | str = "self") -> int:
    """A figure of /proc/PROCESS/status."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())
    assert found
    return int(found[1]) << 10


def print_row(cells: Iterable[object], head: bool = False) -> None:
    """A line of a markdown table; of its head with the line below."""
    texts = [str(cell) for cell in cells]
    print(f"| {' | '.join(texts)} |" + ("\n|" + "---|" * len(texts) if head else ""), flush=True)
