"""A GRPO step by this trainer and by TRL's GRPOTrainer: same model, prompts, lengths, reward and threads, in one run.

Both sides live in processes of their own and work in turn, A B A B, so that a drifting machine slows both alike; the
side that waits uses no CPU. Needs the extra `bench`. Options: --steps N (per side and lengths, default 12), --size
1M|12M, --only uniform|skewed, and any key=value for our side.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from tests.bench.step_task import SIZES, Lengths, make_task

ROOT = Path(__file__).resolve().parents[2]
WARM_UP = 3


class Side:
    """One trainer in a process: `step()` runs one training step there and gives its report."""

    def __init__(self, module: str, folder: Path, lengths: Lengths, threads: int, extra: list[str]) -> None:
        reader, writer = os.pipe()
        own = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        self.log = (folder / f"{module}-{lengths.name}.log").open("w")
        command = [sys.executable, "-m", f"tests.bench.{module}", str(folder), json.dumps(asdict(lengths))]
        self.process = subprocess.Popen(
            [*command, str(writer), *extra],
            cwd=ROOT,
            env={**os.environ, **own},
            stdin=subprocess.PIPE,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            pass_fds=(writer,),
            text=True,
        )
        os.close(writer)
        self.answers = os.fdopen(reader)

    def step(self) -> dict:
        """Runs one step; raises with the end of the log if the process died."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        line = self.answers.readline()
        if not line:
            log = Path(self.log.name).read_text()[-3000:]
            raise RuntimeError(f"{self.process.args[2]} ended; its log ends with:\n{log}")
        return json.loads(line)

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()  # what waits for a line goes on, and finds the signal
        self.process.terminate()
        self.process.wait(60)
        self.log.close()


def compare(folder: Path, lengths: Lengths, steps: int, extra: list[str]) -> None:
    """Prints median samples/s of both sides and their ratio."""
    sides = {
        "verl_lite": Side("step_ours", folder, lengths, threads=1, extra=extra),
        "trl": Side("step_trl", folder, lengths, threads=2, extra=[]),
    }
    rows: dict[str, list[dict]] = {name: [] for name in sides}
    try:
        for round_ in range(WARM_UP + steps):
            for name, side in sides.items():
                row = side.step()
                if round_ >= WARM_UP:
                    rows[name].append(row)
    finally:
        for side in sides.values():
            side.end()
    print(f"{lengths.name} lengths, at most {lengths.maximum} tokens, {steps} steps each, in turn")
    for name, reports in rows.items():
        seconds = statistics.median(row["seconds"] for row in reports)
        samples = statistics.median(row["completions"] / row["seconds"] for row in reports)
        tokens = statistics.mean(row["tokens"] / max(1, row["completions"]) for row in reports)
        stages = {s: statistics.median(row["stages"].get(s, 0.0) for row in reports) for s in reports[-1]["stages"]}
        split = ", ".join(f"{stage} {value:.3f}" for stage, value in stages.items() if stage != "step" and value > 5e-4)
        print(f"  {name:10s} {samples:8.1f} samples/s   {seconds:.3f} s/step   {tokens:.1f} tokens/sample   [{split}]")
    ratios = sorted(b["seconds"] / a["seconds"] for a, b in zip(rows["verl_lite"], rows["trl"], strict=True))
    median = statistics.median(ratios)
    print(f"  ratio verl_lite / trl: {median:.2f}x (pair by pair: {ratios[0]:.2f} to {ratios[-1]:.2f})")


def main(argv: list[str]) -> int:
    """Runs the comparison."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench step", description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--only", choices=["uniform", "skewed"])
    parser.add_argument("--size", choices=[size.name for size in SIZES])
    options, extra = parser.parse_known_args(argv)
    for size in (size for size in SIZES if options.size in (None, size.name)):
        with tempfile.TemporaryDirectory(prefix="bench-step-", ignore_cleanup_errors=True) as folder:
            make_task(Path(folder), size)
            for lengths in (lengths for lengths in size.lengths if options.only in (None, lengths.name)):
                print(f"\n{size.name} parameters, ", end="")
                compare(Path(folder), lengths, options.steps, extra)
    return 0
