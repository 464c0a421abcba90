"""Whether a validation's samples depend on how it is cut: the same prompts on several numbers of ranks and by several
batch sizes, sampled and greedy; printed is how many samples differ from those of one rank and one batch.

Ranks are engines in this process, one after the other, so only processor seconds are given. Options: --model FOLDER and
--data FILE (default: those of recipe quickstart, made if need be), --engine hf|vllm, --prompts, --n (samples of each),
--ranks 1,2,3, --sizes 1,7,64,0 (0 = all at once).
"""

from __future__ import annotations

import argparse
import resource
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.bench.frame import options
from verl_lite.config import PPOConfig


def config_of(given: argparse.Namespace) -> PPOConfig:
    """Greedy, and sampled at temperature 1."""
    config = PPOConfig()
    config.model.path, config.data.val_files = given.model, [given.data]
    config.data.max_prompt_length, config.data.max_response_length = 16, 10
    config.data.val_max_samples = given.prompts
    config.rollout.name, config.rollout.kv_cache_memory_mb, config.rollout.max_num_seqs = given.engine, 128, 512
    kwargs = config.rollout.val_kwargs
    kwargs.do_sample, kwargs.temperature, kwargs.n, kwargs.greedy_too = True, 1.0, given.n, True
    config.reward.num_workers, config.trainer.val_only = 0, True
    return config


def main(argv: list[str]) -> None:
    """Runs all cases and prints a line for each."""
    from tests.trainer.answering import answering
    from trainer.observe.final_report import FitResult

    ways = {"model": None, "data": None, "engine": "hf", "prompts": 256, "n": 4, "ranks": "1,2,3", "sizes": "1,7,64,0"}
    given = options("validation", __doc__, argv, **ways)
    if given.model is None or given.data is None:
        from recipes.quickstart.recipe import overrides, prepare
        from verl_lite.config import load_config

        quickstart = load_config([], recipe_loader=lambda name: overrides()).config
        prepare(quickstart)
        given.model, given.data = quickstart.model.path, quickstart.data.val_files[0]
    config = config_of(given)
    first: tuple[dict[str, float], list[dict[str, Any]]] | None = None
    print(f"{given.engine}: {given.prompts} prompts x ({given.n} sampled + 1 greedy), {Path(given.model).name}")
    print(f"{'ranks':>5} {'batch':>6} {'sampled differ':>15} {'greedy differ':>14} {'numbers differ':>15} {'cpu s':>7}")
    for ranks in map(int, given.ranks.split(",")):
        with tempfile.TemporaryDirectory() as folder, answering(config, Path(folder), ranks) as trainer:
            for size in sorted(map(int, given.sizes.split(",")), key=lambda size: size or 1 << 60, reverse=True):
                config.data.val_batch_size, trainer.samples.rows = size or None, []  # type: ignore[attr-defined]
                began = resource.getrusage(resource.RUSAGE_SELF).ru_utime
                metrics = trainer.validate(FitResult())
                spent = resource.getrusage(resource.RUSAGE_SELF).ru_utime - began
                rows = [asdict(row) for row in trainer.samples.rows]  # type: ignore[attr-defined]
                first = first or (metrics, rows)
                differ = [mine["output"] != theirs["output"] for mine, theirs in zip(rows, first[1], strict=True)]
                sampled = given.prompts * given.n
                numbers = sum(metrics[name] != first[0].get(name) for name in metrics)
                print(
                    f"{ranks:>5} {size or 'all':>6} {f'{sum(differ[:sampled])} of {sampled}':>15} "
                    f"{f'{sum(differ[sampled:])} of {given.prompts}':>14} {f'{numbers} of {len(metrics)}':>15} "
                    f"{spent:>7.1f}",
                    flush=True,
                )
