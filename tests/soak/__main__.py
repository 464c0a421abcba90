"""`python -m tests.soak --steps 300`: a real but tiny run, watched from outside while it runs.

Starts `trainer.main_ppo` (the whole stack: Ray, vLLM, the reward pool, checkpoints with retention), measures every few
steps what each of its processes holds, and prints how it grew after the warm-up, against the bounds of
`tests.soak.growth`. Exit status: 0 nothing grows, 1 something does, or the run failed or left something behind.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.soak import leaks
from tests.soak.growth import BOUNDED, GROWS, UNCLEAR, Growth, growth_of
from tests.soak.processes import Measured, measure
from tests.tiny_run import REWARD, TinyRun, TinyTask

ROWS = 64  # prompts of the task; a batch is 4
PATIENCE_S = 900.0  # for the next step, on a machine that is busy
LEFT_WITHIN_S = 30.0
OPTIONS = [
    "trainer.test_freq=20", "trainer.val_before_train=true", "trainer.logger=[jsonl,tensorboard]", "rollout.name=vllm",
    "trainer.n_gpus_per_node=2", "reward.num_workers=2", "trainer.save_freq=10", "trainer.max_actor_ckpt_to_keep=2",
]  # fmt: skip


def main(argv: list[str]) -> int:
    """Runs the soak; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--steps", type=int, default=300, help="training steps")
    parser.add_argument("--samples", type=int, default=100, help="measurements over the run")
    parser.add_argument("--leak", choices=list(leaks.OPTIONS), help="where to leak on purpose")
    parser.add_argument("overrides", nargs="*", help="more options of the run, key=value")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="soak-", dir="/tmp") as folder:
        task = TinyTask(Path(folder) / "task", leaks.REWARD if options.leak == "reward" else REWARD, rows=ROWS)
        more = [f"data.val_files={task.folder / 'train.jsonl'}", f"trainer.total_epochs={options.steps}"]
        more += [*leaks.OPTIONS.get(options.leak, []), *options.overrides]
        run = task.start("run", *OPTIONS, *more, steps=options.steps)
        began = time.monotonic()
        try:
            samples = watch(run, options.steps, options.samples)
            status = run.wait()
            seconds = time.monotonic() - began
            deadline = time.monotonic() + LEFT_WITHIN_S
            while (left := run.leftovers()) and time.monotonic() < deadline:
                time.sleep(0.2)
        finally:
            run.close()
        if status:
            print(run.output(), file=sys.stderr)
    points: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for step, measured in samples:
        for place, value in measured.items():
            points[place].append((step, value))
    by_kind = sorted(points.items(), key=lambda item: item[0][::-1])
    growths = [growth_of(*place, found, options.steps) for place, found in by_kind]
    show(growths, f"{options.steps} steps, {len(samples)} samples, {seconds:.0f} s: {' '.join(argv)}")
    grown = sum(growth.verdict == GROWS for growth in growths)
    print(f"exit status of the run {status}; left behind: {left or 'nothing'}; grown past the bound: {grown}")
    return int(bool(status or left or grown))


def watch(run: TinyRun, steps: int, samples: int) -> list[tuple[int, Measured]]:
    """Measures the run about `samples` times at equal distances, from its first step to its last."""
    every = max(1, steps // samples)
    found: list[tuple[int, Measured]] = []
    due, deadline = 1, time.monotonic() + PATIENCE_S
    while run.process.poll() is None and time.monotonic() < deadline:
        step = last_step(run.run_dir / "metrics.jsonl")
        if step < due:
            time.sleep(0.05)
            continue
        found.append((step, measure(run)))
        due, deadline = step + every, time.monotonic() + PATIENCE_S
        if step >= steps:
            break
    return found


def last_step(metrics: Path) -> int:
    """The step of the last whole line; 0 before there is one."""
    if not metrics.exists():
        return 0
    with metrics.open("rb") as file:
        file.seek(max(0, metrics.stat().st_size - 65536))
        lines = file.read().split(b"\n")[:-1]
    return int(json.loads(lines[-1])["step"]) if lines else 0


def show(growths: list[Growth], title: str) -> None:
    """The table; quantities that did not change at all are counted below it."""
    table = Table(title=title)
    for name in ("what", "role", "growth / 100 steps", "95%", "bound", "verdict"):
        table.add_column(name, justify="left" if name in ("what", "role", "verdict") else "right")
    moved = [one for one in growths if one.verdict != BOUNDED or (one.low, one.high) != (0, 0)]
    for one in moved:
        style = {GROWS: "bold red", UNCLEAR: "yellow"}.get(one.verdict)
        interval = f"{one.low:+.2f} to {one.high:+.2f}"
        row = (one.kind, one.role, f"{one.slope:+.2f}", interval, f"{one.bound:g}", one.verdict)
        table.add_row(*row, style=style)
    Console(width=130).print(table)
    print(f"{len(growths) - len(moved)} more did not change")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
