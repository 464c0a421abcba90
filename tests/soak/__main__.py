"""`python -m tests.soak --steps 300`: a real but tiny run, watched from outside while it runs.

Starts `trainer.main_ppo` (by default the whole stack: Ray, vLLM, the reward pool, checkpoints with retention), measures
every few steps what each of its processes holds, and prints how it grew after the warm-up, against the bounds of
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

from tests.soak.growth import Growth, Series, Verdict, growth_of
from tests.soak.leaks import REWARD as LEAKING_REWARD
from tests.soak.leaks import VARIABLE
from tests.soak.processes import Measured, measure
from tests.tiny_run import REWARD, TinyRun, TinyTask

ROWS = 64  # prompts of the task; a batch is 4
LOOK_EVERY_S = 0.05
PATIENCE_S = 900.0  # for the next step, on a machine that is busy
LEFT_WITHIN_S = 30.0
ASYNC_REWARD = REWARD.replace("def compute_score", "async def compute_score")


def main(argv: list[str]) -> int:
    """Runs the soak; returns the exit status."""
    options = parse(argv)
    with tempfile.TemporaryDirectory(prefix="soak-", dir="/tmp") as folder:
        run = start(Path(folder), options)
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
    growths = [growth_of(series, options.steps) for series in as_series(samples)]
    show(growths, f"{options.steps} steps, {len(samples)} samples, {seconds:.0f} s: {' '.join(argv)}", options.all)
    if options.record:
        rows = [{"step": step, **{" | ".join(key): value for key, value in one.items()}} for step, one in samples]
        options.record.write_text("".join(json.dumps(row) + "\n" for row in rows))
    grown = [growth for growth in growths if growth.verdict is Verdict.GROWS]
    print(f"exit status of the run {status}; left behind: {left or 'nothing'}; grown past the bound: {len(grown)}")
    return int(bool(status or left or grown))


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__.split("\n\n")[1])
    parser.add_argument("--steps", type=int, default=300, help="training steps")
    parser.add_argument("--samples", type=int, default=100, help="measurements over the run")
    parser.add_argument("--backend", choices=("ray", "inline"), default="ray")
    parser.add_argument("--engine", choices=("vllm", "hf"), default="vllm")
    parser.add_argument("--ranks", type=int, default=2, help="worker processes (backend ray)")
    parser.add_argument("--critic", action="store_true", help="PPO with a critic")
    parser.add_argument("--lora", action="store_true", help="an adapter instead of all weights")
    parser.add_argument("--async-rewards", action="store_true", help="an async reward function")
    parser.add_argument("--save-freq", type=int, default=10, help="steps between checkpoints, two of which are kept")
    parser.add_argument("--leak", help="leak on purpose: driver=1MB | rank=1MB | reward=64KB (a sample) | driver=file")
    parser.add_argument("--record", type=Path, help="write the samples into this file, as jsonl")
    parser.add_argument("--all", action="store_true", help="show quantities that did not change at all, too")
    parser.add_argument("overrides", nargs="*", help="more options of the run, key=value")
    return parser.parse_args(argv)


def start(folder: Path, options: argparse.Namespace) -> TinyRun:
    """Starts the run that is to be watched."""
    reward = ASYNC_REWARD if options.async_rewards else REWARD
    who, _, amount = (options.leak or "").partition("=")
    leaking = {
        "driver": ["algorithm.adv_estimator=tests.soak.leaks:leaking_estimator"],
        "rank": ["actor.policy_loss.loss_mode=tests.soak.leaks:leaking_loss"],
        "reward": [],
        "": [],
    }[who]
    task = TinyTask(folder / "task", LEAKING_REWARD if who == "reward" else reward, rows=ROWS)
    ranks = options.ranks if options.backend == "ray" else 1
    return task.start(
        "run",
        f"data.val_files={folder / 'task' / 'train.jsonl'}",
        "trainer.test_freq=20",
        "trainer.val_before_train=true",
        "trainer.logger=[jsonl,tensorboard]",
        f"trainer.total_epochs={options.steps}",
        f"trainer.backend={options.backend}",
        f"rollout.name={options.engine}",
        f"trainer.n_gpus_per_node={ranks}",
        "reward.num_workers=2",
        f"trainer.save_freq={options.save_freq}",
        *(["trainer.max_actor_ckpt_to_keep=2"] if options.save_freq else []),
        *(["algorithm.adv_estimator=gae"] if options.critic else []),
        *(["model.lora_rank=4"] if options.lora else []),
        *leaking,
        *options.overrides,
        steps=options.steps,
        env={VARIABLE: str(size_of(amount))} if who else None,
    )


def size_of(text: str) -> int:
    """Bytes of `1MB`, `64KB`; 0 for `file`."""
    units = {"MB": 1 << 20, "KB": 1 << 10, "file": 0}
    unit = next(unit for unit in units if text.endswith(unit))
    return int(text.removesuffix(unit) or 0) * units[unit]


def watch(run: TinyRun, steps: int, samples: int) -> list[tuple[int, Measured]]:
    """Measures the run about `samples` times at equal distances, from its first step to its last."""
    every = max(1, steps // samples)
    found: list[tuple[int, Measured]] = []
    due, deadline = 1, time.monotonic() + PATIENCE_S
    while run.process.poll() is None and time.monotonic() < deadline:
        step = last_step(run.run_dir / "metrics.jsonl")
        if step < due:
            time.sleep(LOOK_EVERY_S)
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


def as_series(samples: list[tuple[int, Measured]]) -> list[Series]:
    """A series for each role and kind; only samples in which the role was there."""
    found: dict[tuple[str, str], list[tuple[int, float]]] = defaultdict(list)
    for step, measured in samples:
        for key, value in measured.items():
            found[key].append((step, value))
    return [Series(*key, *map(list, zip(*points, strict=True))) for key, points in sorted(found.items(), key=_order)]


def _order(item: tuple[tuple[str, str], list[tuple[int, float]]]) -> tuple[str, str]:
    return item[0][1], item[0][0]


def show(growths: list[Growth], title: str, everything: bool) -> None:
    """The table. Quantities that did not change at all are counted below it."""
    table = Table(title=title, caption="start and end: medians of the first and last tenth after the warm-up")
    for name in ("what", "role", "start", "end", "growth / 100 steps", "95%", "bound", "verdict"):
        table.add_column(name, justify="left" if name in ("what", "role", "verdict") else "right")
    still = 0
    for growth in growths:
        if not everything and growth.verdict is Verdict.BOUNDED and growth.low == growth.high == 0:
            still += 1
            continue
        series = growth.series
        style = {Verdict.GROWS: "bold red", Verdict.UNCLEAR: "yellow"}.get(growth.verdict)
        numbers = (f"{growth.start:.1f}", f"{growth.end:.1f}", f"{growth.slope:+.2f}")
        interval = f"{growth.low:+.2f} to {growth.high:+.2f}"
        table.add_row(
            series.kind, series.role, *numbers, interval, f"{growth.bound:g}", growth.verdict.value, style=style
        )
    Console(width=130).print(table)
    if still:
        print(f"{still} more did not change (--all shows them)")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
