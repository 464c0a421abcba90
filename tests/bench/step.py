"""A GRPO step by this trainer and by TRL's GRPOTrainer: same model, prompts, lengths, reward and cores, in one run.

Each side lives in a process of its own and they work in turn, A B A B, so that a drifting machine slows all alike; a
side that waits uses no CPU. All compute in fp32. Needs the extra `bench`. Options: --steps N (per side and lengths,
default 12), --size 1M|12M|135M, --only LENGTHS, and any key=value for our side.

1M and 12M: TRL without gradient checkpointing, with all answers of a step in one micro-batch. 135M: our side with the
settings of `recipe=smollm2`; TRL twice, with its defaults (gradient checkpointing, micro-batches of 8) and with the
best settings that were found (no checkpointing, micro-batches of 32). This size needs about 20 GiB of memory. Before
each round the rate of fp32 matrix products is measured on all cores; the share of this rate that generation and update
reach counts the products of the task's different tokens, without recomputation and attention.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.bench.step_task import SIZES, Lengths, Size, make_task

ROOT = Path(__file__).resolve().parents[2]
WARM_UP = 3

WHOLE_MODEL = ["model.enable_gradient_checkpointing=false", "actor.fsdp_config.wrap_policy.min_num_params=10000000"]
"""Settings of our side for models so small that a collective per layer costs more time than sharding saves."""

_MEASURE_RATE = """
import time, torch
left, right = torch.randn(1024, 576), torch.randn(576, 1536)
rates = []
for _ in range(5):
    started = time.perf_counter()
    for _ in range(40):
        left @ right
    rates.append(40 * 2 * 1024 * 576 * 1536 / (time.perf_counter() - started))
print(max(rates))
"""


@dataclass(frozen=True)
class Contestant:
    """A side of the comparison. module: of this folder. extra: its arguments after those of `step_task.begun`."""

    name: str
    module: str
    threads: int
    extra: tuple[str, ...]


def contestants(size: Size, lengths: Lengths, extra: Sequence[str]) -> list[Contestant]:
    """Returns our side, then TRL with each of its settings. extra: options of our side."""
    own = () if size.is_recipe else tuple(WHOLE_MODEL)
    ours = Contestant("verl_lite", "step_ours", 1, (*own, *extra))
    answers = lengths.prompts * lengths.samples

    def peer(name: str, micro_batch: int, is_checkpointing: bool) -> Contestant:
        settings = {
            "per_device_train_batch_size": micro_batch,
            "gradient_accumulation_steps": answers // micro_batch,
            "gradient_checkpointing": is_checkpointing,
        }
        return Contestant(name, "step_trl", 2, (json.dumps(settings),))

    if not size.is_recipe:
        return [ours, peer("trl", answers, is_checkpointing=False)]
    return [ours, peer("trl_defaults", 8, is_checkpointing=True), peer("trl_best", 32, is_checkpointing=False)]


class Side:
    """One trainer in a process: `step()` runs one training step there and gives its report."""

    def __init__(self, contestant: Contestant, folder: Path, lengths: Lengths) -> None:
        reader, writer = os.pipe()
        own = {
            "OMP_NUM_THREADS": str(contestant.threads),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        self.log = (folder / f"{contestant.name}.log").open("w")
        command = [sys.executable, "-m", f"tests.bench.{contestant.module}", str(folder), json.dumps(asdict(lengths))]
        self.process = subprocess.Popen(
            [*command, str(writer), *contestant.extra],
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
            raise RuntimeError(f"{Path(self.log.name).stem} ended; its log ends with:\n{log}")
        return json.loads(line)

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()  # what waits for a line goes on, and finds the signal
        self.process.terminate()
        self.process.wait(60)
        self.log.close()


def matrix_rate() -> float:
    """Measures the FLOP/s of fp32 matrix products: the sum over all cores, each of which runs a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _MEASURE_RATE]
    running = []
    for _ in range(os.cpu_count() or 1):
        running.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    return sum(float(process.communicate()[0]) for process in running)


def compare(folder: Path, size: Size, lengths: Lengths, steps: int, extra: Sequence[str]) -> None:
    """Prints median samples/s of all sides, their shares of the machine's rate, and the ratios of seconds per step."""
    sides = {}
    for contestant in contestants(size, lengths, extra):
        sides[contestant.name] = Side(contestant, folder, lengths)
    rows: dict[str, list[dict]] = {name: [] for name in sides}
    rates = []
    try:
        warm_up = 1 if size.is_recipe else WARM_UP  # steps of a minute hardly depend on the first calls
        for round_ in range(warm_up + steps):
            rate = matrix_rate()
            for name, side in sides.items():
                row = side.step()
                if round_ >= warm_up:
                    rows[name].append(row)
            if round_ >= warm_up:
                rates.append(rate)
    finally:
        for side in sides.values():
            side.end()

    rate = statistics.median(rates)
    print(f"{lengths.name} lengths, at most {lengths.maximum} tokens, {steps} steps each, in turn")
    print(f"  fp32 matrix products: {rate / 1e9:.0f} GFLOP/s on {os.cpu_count()} cores")
    for name, reports in rows.items():
        print_side(name, reports, size, lengths, rate)
    for name in list(rows)[1:]:
        pairs = zip(rows["verl_lite"], rows[name], strict=True)
        ratios = sorted(theirs["seconds"] / ours["seconds"] for ours, theirs in pairs)
        median = statistics.median(ratios)
        print(f"  ratio verl_lite / {name}: {median:.2f}x (pair by pair: {ratios[0]:.2f} to {ratios[-1]:.2f})")


def print_side(name: str, reports: Sequence[dict], size: Size, lengths: Lengths, rate: float) -> None:
    """Prints medians of a side's reports, and the shares of `rate` that generation and the rest of a step reach."""
    seconds = statistics.median(row["seconds"] for row in reports)
    spread = max(row["seconds"] for row in reports) - min(row["seconds"] for row in reports)
    samples = statistics.median(row["completions"] / row["seconds"] for row in reports)
    tokens = statistics.mean(row["tokens"] / max(1, row["completions"]) for row in reports)
    stages = {}
    for stage in reports[-1]["stages"]:
        stages[stage] = statistics.median(row["stages"].get(stage, 0.0) for row in reports)
    split = ", ".join(f"{stage} {value:.3f}" for stage, value in stages.items() if stage != "step" and value > 5e-4)
    print(
        f"  {name:12s} {samples:8.1f} samples/s   {seconds:.3f} s/step (range {spread:.3f})   "
        f"{tokens:.1f} tokens/sample   [{split}]"
    )

    shares = [shares_of_rate(row, size, lengths, rate) for row in reports]
    generation = statistics.median(generation for generation, _ in shares)
    update = statistics.median(update for _, update in shares)
    print(f"  {'':12s} share of the matrix rate: generation {generation:.2f}, update {update:.2f}")


def shares_of_rate(row: dict, size: Size, lengths: Lengths, rate: float) -> tuple[float, float]:
    """Returns the shares of `rate` (FLOP/s) that generation and update of a reported step reach.

    A side that does not report its update (TRL) spends the rest of the step on it.
    """
    tokens = lengths.prompts * lengths.prompt_tokens + row["tokens"]
    generation_seconds = row["stages"]["gen"]
    update_seconds = row["stages"].get("update_actor", row["seconds"] - generation_seconds)
    generation = size.forward_flops(tokens, row["tokens"]) / (generation_seconds * rate)
    update = size.update_flops(tokens, row["tokens"]) / (update_seconds * rate)
    return generation, update


def main(argv: list[str]) -> int:
    """Runs the comparison."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench step", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=12)
    names = [lengths.name for size in SIZES for lengths in size.lengths]
    parser.add_argument("--only", choices=list(dict.fromkeys(names)))
    parser.add_argument("--size", choices=[size.name for size in SIZES])
    options, extra = parser.parse_known_args(argv)
    for size in SIZES:
        if options.size not in (None, size.name):
            continue
        for lengths in size.lengths:
            if options.only not in (None, lengths.name):
                continue
            with tempfile.TemporaryDirectory(prefix="bench-step-", ignore_cleanup_errors=True) as folder:
                written = make_task(Path(folder), size, lengths)
                print(f"\n{size.name} parameters, ", end="", flush=True)
                compare(Path(folder), size, written, options.steps, extra)
    return 0
