"""What streaming rewards save: generation and reward at the same time, against one after the other, in one run.

The main job in this process on the task of `bench step` (1.06M parameters, 16 prompts x 8 samples of skewed lengths,
Hugging Face engine) with a reward that waits a set time for each sample, as a sandbox or a judge does: as long in all
as generation takes. Steps with streaming and steps that hold every sample back until generation has ended take turns.
Printed are generation and reward as they follow (`timing_s/gen` + `timing_s/reward`) against the longer of the two,
which no schedule can beat, and against their sum. Options: --rounds N (pairs of steps for each kind of reward).
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Hashable, Iterable
from contextlib import redirect_stdout
from pathlib import Path

from tests.bench.frame import options
from tests.bench.step_task import SIZES, arguments, make_task

SIZE = SIZES[0]
LENGTHS = SIZE.lengths[1]
PROCESSES = 2
WARM_UP = 3

REWARD = """
import asyncio, time, zlib

def score(solution_str):
    return (zlib.crc32(solution_str.encode()) % 1000) / 1000

def seconds(file):
    return float(open(file).read())

def sleeps(data_source, solution_str, ground_truth, extra_info, file):
    time.sleep(seconds(file))
    return score(solution_str)

async def awaits(data_source, solution_str, ground_truth, extra_info, file):
    await asyncio.sleep(seconds(file))
    return score(solution_str)
"""


def run(folder: Path, function: str, at_once: int, rounds: int) -> dict[str, float]:
    """Median seconds: of generation and of the reward by themselves, and of both with and without streaming.

    function: of the reward file. at_once: samples that it can work on at one time.
    """
    from trainer.launch import build
    from trainer.launch.ppo_job import run_ppo
    from trainer.ray_trainer import RayPPOTrainer
    from verl_lite.protocol import DataProto
    from verl_lite.rewards import RewardItem, RewardResult
    from workers.rewards.reward_pool import RewardPool

    (file := folder / "seconds").write_text("0")
    hold, generation = False, list[float]()
    both: dict[bool, list[float]] = {True: [], False: []}

    class Holding(RewardPool):
        """A pool that, while `hold`, gets its samples when somebody waits for them: when generation has ended."""

        held: list[RewardItem] = []

        def submit(self, items: Iterable[RewardItem]) -> None:
            if hold:
                self.held += items
            else:
                super().submit(items)

        def collect(self, keys: Iterable[Hashable]) -> dict[Hashable, RewardResult]:
            held, self.held = self.held, []
            super().submit(held)
            return super().collect(keys)

    class Timed(RayPPOTrainer):
        def log_step(self, batch: DataProto, validation: dict[str, float]) -> None:
            nonlocal hold
            step = self.steps.global_step
            if step <= WARM_UP:
                generation.append(self.timing["gen"])
                file.write_text(str(statistics.median(generation) * at_once / len(batch)))
            else:
                both[hold].append(self.timing["gen"] + self.timing["reward"])
                generation.append(self.timing["gen"])
            hold = step >= WARM_UP and (step - WARM_UP) % 2 == 1

    own = {
        "rollout.name": "hf",
        "reward.custom_reward_function.path": folder / "reward.py",
        "reward.custom_reward_function.name": function,
        "reward.reward_kwargs": f"{{file: {folder}/seconds}}",
        "reward.num_workers": PROCESSES if function == "sleeps" else 1,
        "trainer.backend": "inline",
        "trainer.device": "cpu",
        "trainer.total_training_steps": WARM_UP + 2 * rounds,
        "trainer.default_local_dir": folder / f"run-{function}",
    } | ({"reward.max_concurrent": at_once} if function == "awaits" else {})
    pool_class, build.RewardPool = build.RewardPool, Holding  # type: ignore[misc]
    try:
        with (folder / f"{function}.log").open("w") as log, redirect_stdout(log):
            run_ppo(arguments(folder, LENGTHS, own), trainer_class=Timed)
    finally:
        build.RewardPool = pool_class  # type: ignore[misc]
    reward = float(file.read_text()) * LENGTHS.prompts * LENGTHS.samples / at_once
    return {
        "generation": statistics.median(generation[WARM_UP:]),
        "reward": reward,
        "streaming": statistics.median(both[False]),
        "in turn": statistics.median(both[True]),
    }


def show(title: str, seconds: dict[str, float]) -> None:
    """Prints the measured times against the longer of the two and against their sum."""
    both = seconds["generation"], seconds["reward"]
    longer, total = max(both), sum(both)
    print(f"\n{title}")
    print(f"  generation {seconds['generation']:.3f} s, reward {seconds['reward']:.3f} s")
    for name in ("streaming", "in turn"):
        took = seconds[name]
        print(f"  {name:9s}  {took:.3f} s = {took / longer:.2f} x the longer = {took / total:.2f} x the sum")
    print(f"  ratio streaming / in turn: {seconds['streaming'] / seconds['in turn']:.2f}")


def main(argv: list[str]) -> int:
    """Runs both kinds of reward."""
    rounds = options("overlap", __doc__, argv, rounds=6).rounds
    from trainer.cli import prepare_driver

    prepare_driver()
    with tempfile.TemporaryDirectory(prefix="bench-overlap-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        make_task(folder, SIZE, LENGTHS)
        (folder / "reward.py").write_text(REWARD)
        show(f"a function in {PROCESSES} processes", run(folder, "sleeps", PROCESSES, rounds))
        show("an async function, 16 calls at once in one process", run(folder, "awaits", 16, rounds))
    return 0
