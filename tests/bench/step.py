"""A GRPO step by this trainer and by TRL's GRPOTrainer: same model, prompts, lengths, reward and threads, in one run.

Both sides live in processes of their own and work in turn, A B A B, so that a drifting machine slows both alike; the
side that waits uses no CPU. Needs the extra `bench`. Options: --steps N (per side and lengths, default 12), --only
uniform|skewed, and any key=value for our side.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from tests.bench.step_task import SKEWED, UNIFORM, Lengths

ROOT = Path(__file__).resolve().parents[2]
WARM_UP = 3


class Side:
    """One trainer in a process: `step()` runs one training step there and gives its report."""

    def __init__(self, module: str, folder: Path, lengths: Lengths, threads: int, extra: list[str]) -> None:
        reader, writer = os.pipe()
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        self.log = (folder / f"{module}-{lengths.name}.log").open("w")
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                f"tests.bench.{module}",
                str(folder),
                json.dumps(asdict(lengths)),
                str(writer),
                *extra,
            ],
            cwd=ROOT,
            env=environment,
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


def compare(folder: Path, lengths: Lengths, steps: int, extra: list[str]) -> dict[str, float]:
    """Median samples/s of both sides and their ratio."""
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
    speed = {}
    print(f"\n{lengths.name} lengths, at most {lengths.maximum} tokens, {steps} steps each, in turn")
    for name, reports in rows.items():
        seconds = statistics.median(row["seconds"] for row in reports)
        samples = statistics.median(row["completions"] / row["seconds"] for row in reports)
        tokens = statistics.mean(row["tokens"] / max(1, row["completions"]) for row in reports)
        stages = {
            stage: statistics.median(r["stages"].get(stage, 0.0) for r in reports) for stage in reports[-1]["stages"]
        }
        split = ", ".join(
            f"{stage} {value:.3f}" for stage, value in stages.items() if stage != "step" and value >= 5e-4
        )
        print(f"  {name:10s} {samples:8.1f} samples/s   {seconds:.3f} s/step   {tokens:.1f} tokens/sample   [{split}]")
        speed[name] = samples
    ratios = sorted(b["seconds"] / a["seconds"] for a, b in zip(rows["verl_lite"], rows["trl"], strict=True))
    ratio = statistics.median(ratios)
    print(f"  ratio verl_lite / trl: {ratio:.2f}x (pair by pair: {ratios[0]:.2f} to {ratios[-1]:.2f})")
    return {**speed, "ratio": ratio}


def main(argv: list[str]) -> int:
    """Runs the comparison."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench step", description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--only", choices=["uniform", "skewed"])
    options, extra = parser.parse_known_args(argv)
    folder = Path(tempfile.mkdtemp(prefix="bench-step-"))
    try:
        subprocess.run(
            [
                sys.executable,
                "-c",
                f"from pathlib import Path; from tests.bench.step_task import *; make_task(Path({str(folder)!r}))",
            ],
            check=True,
            cwd=ROOT,
        )
        for lengths in (UNIFORM, SKEWED):
            if options.only in (None, lengths.name):
                compare(folder, lengths, options.steps, extra)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
