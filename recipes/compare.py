"""`python -m recipes.compare`: all algorithms on one task, with one model, one budget and several seeds, as a table and
a picture.

    python -m recipes.compare                        # all algorithms, three seeds, as far as they are missing
    python -m recipes.compare --recipes grpo rloo --seeds 5 --steps 80 --jobs 4
    python -m recipes.compare --write                # and puts table and pictures into recipes/

Each run is a `trainer.main_ppo` of its own: inline, one thread, the Hugging Face engine. What is finished is kept until
its settings change; a run that was interrupted, by kill -9 too, begins anew. A run that fails is reported and does not
end the others; the next call tries it again.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean

from recipes import common_task
from recipes.comparison_report import Point, RunResult, report
from trainer.cli import command
from trainer.final_report import validation_means
from trainer.recipe import recipe_overrides
from trainer.resume import flat_config
from trainer.tracking import read_metrics
from verl_lite.config import PPOConfig, load_config
from verl_lite.errors import UserError
from workers.pool.child import die_with_parent

ROOT = Path(__file__).resolve().parents[1]
VALIDATIONS = 4
"""In a run, beside the one before it."""

INLINE = (
    "trainer.backend=inline",
    "trainer.n_gpus_per_node=1",
    "trainer.device=cpu",
    "rollout.name=hf",
    "reward.num_workers=0",
    "trainer.logger=[jsonl]",
    "trainer.save_freq=0",
)
"""How a model this small runs with the fewest processor seconds."""

_EACH_ITS_OWN = ("trainer.experiment_name", "trainer.default_local_dir")


@dataclass(frozen=True)
class Algorithm:
    """A row of the table. answers, baselines: as of `common_task.budget`; arguments: beside the recipe's settings."""

    name: str
    recipe: str
    answers: int = 8
    baselines: int = 0
    arguments: tuple[str, ...] = ()


ALGORITHMS = (
    *(Algorithm(name, name) for name in ("grpo", "dr_grpo", "dapo", "rloo", "gspo", "cispo")),
    Algorithm("reinforce_pp", "reinforce_pp", answers=1),
    Algorithm("reinforce_pp_baseline", "reinforce_pp", arguments=("--config", "recipes/reinforce_pp/baseline.yaml")),
    Algorithm("gspo_wide", "gspo", arguments=("--config", "recipes/gspo/wide.yaml")),
    Algorithm("ppo_gae", "ppo_gae", answers=1, arguments=("critic.ppo_mini_batch_size=128",)),
    Algorithm("remax", "remax", answers=1, baselines=1),
)


@dataclass(frozen=True)
class Run:
    """One run of the comparison. folder: its own."""

    algorithm: Algorithm
    seed: int
    steps: int
    folder: Path

    @property
    def arguments(self) -> list[str]:
        """Of `trainer.main_ppo`, without where the run goes. The budget is said here, whatever a recipe says."""
        budget = common_task.budget(self.algorithm.answers, self.algorithm.baselines) | {
            "trainer.total_training_steps": self.steps,
            "trainer.test_freq": max(1, self.steps // VALIDATIONS),
            "trainer.seed": self.seed,
        }
        settings = [f"{key}={value}" for key, value in budget.items()]
        return [f"recipe={self.algorithm.recipe}", *settings, *self.algorithm.arguments, *INLINE]

    def fingerprint(self) -> str:
        """A short name for the settings that are not defaults, those of the recipe included. Raises UserError if they
        are not accepted."""
        usual = flat_config(PPOConfig())
        found = flat_config(load_config(self.arguments, recipe_loader=recipe_overrides).config)
        chosen = {key: value for key, value in found.items() if value != usual[key] and key not in _EACH_ITS_OWN}
        return hashlib.sha256(json.dumps(chosen, sort_keys=True, default=str).encode()).hexdigest()[:16]


@command
def main(argv: list[str]) -> int:
    """The command; returns the exit status: 1 if a run failed. Raises UserError if another comparison writes there."""
    names = [algorithm.name for algorithm in ALGORITHMS]
    parser = argparse.ArgumentParser(prog="python -m recipes.compare", description="Algorithms on one task and budget.")
    parser.add_argument("--recipes", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--seeds", type=int, default=3, help="runs of each algorithm; default 3")
    parser.add_argument("--steps", type=int, default=common_task.RL_STEPS, help="training steps of a run")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each; 0 = none, report")
    parser.add_argument("--to", type=Path, default=Path("runs/comparison"), help="folder of the runs; runs/comparison")
    parser.add_argument("--write", action="store_true", help="put table and pictures into recipes/")
    options = parser.parse_args(argv)
    chosen = [algorithm for algorithm in ALGORITHMS if algorithm.name in options.recipes]
    options.to.mkdir(parents=True, exist_ok=True)
    with (options.to / "in_use").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"--to {options.to} is in use by another comparison: wait, or give another folder"
            ) from None
        runs = [
            Run(algorithm, seed, options.steps, options.to.absolute() / algorithm.name / f"seed-{seed}")
            for seed in range(1, options.seeds + 1)
            for algorithm in chosen
        ]
        # the model that all runs begin with, before several want it at once
        common_task.prepare(load_config(["recipe=grpo"], recipe_loader=recipe_overrides).config)
        found = results_of(runs, options.jobs)
    failures = [each for each in found if isinstance(each, str)]
    results = [each for each in found if isinstance(each, RunResult)]
    report(results, [algorithm.name for algorithm in chosen], failures, options.to, write=options.write)
    return 1 if failures else 0


def results_of(runs: Sequence[Run], jobs: int) -> list[RunResult | str]:
    """What is kept or measured now, `jobs` runs at a time; of a run that failed a sentence. Without jobs what is not
    kept is left out."""
    with ThreadPoolExecutor(max(1, jobs)) as pool:
        return list(filter(None, pool.map(partial(result_of, starts=jobs > 0), runs)))


def result_of(run: Run, *, starts: bool) -> RunResult | str | None:
    """What was measured, where the run is finished with these settings; else it is run, and filed when it is whole."""
    who, file, log = f"{run.algorithm.name}, seed {run.seed}", run.folder / "result.json", run.folder / "output.log"
    try:
        fingerprint = run.fingerprint()
    except UserError as error:
        return f"{who}: {error}"
    saved = json.loads(file.read_text()) if file.exists() else {}
    if saved.get("fingerprint") != fingerprint:
        if not starts:
            return None
        shutil.rmtree(run.folder, ignore_errors=True)
        run.folder.mkdir(parents=True)
        print(f"{time.strftime('%H:%M:%S')} {who}", flush=True)
        _, status, usage = os.wait4(start(run).pid, 0)
        if status != 0:
            last = ["no output", *filter(None, map(str.strip, log.read_text(errors="replace").splitlines()))][-1]
            return f"{who}: ended with status {os.waitstatus_to_exitcode(status)}: {last} ({log})"
        saved = {"fingerprint": fingerprint, "cpu_s": usage.ru_utime + usage.ru_stime}
        building = file.with_suffix(".building")
        building.write_text(json.dumps(saved))
        building.replace(file)
    points = read_points(run.folder / "run" / "metrics.jsonl", run.algorithm.answers)
    return RunResult(run.algorithm.name, run.seed, saved["cpu_s"], points)


def start(run: Run) -> subprocess.Popen[bytes]:
    """Starts a run, which ends with this process; what it prints goes to its folder's output.log."""
    where = f"trainer.default_local_dir={run.folder / 'run'}"
    with (run.folder / "output.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "trainer.main_ppo", *run.arguments, where],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )


def read_points(metrics: Path, answers: int) -> list[Point]:
    """The validations of a run. answers: to each question, where dynamic sampling asked more of them than it kept."""
    points, sampled_so_far = [], 0.0
    for step, row in read_metrics(metrics).items():
        if step > 0:
            asked = row.get("groups/generated")
            sampled_so_far += common_task.SAMPLES if asked is None else asked * answers
        if means := validation_means(row):
            sampled, greedy = (mean(each.value for each in means if each.greedy is way) for way in (False, True))
            points.append(Point(sampled_so_far, sampled, greedy))
    return points


if __name__ == "__main__":
    sys.exit(main())
