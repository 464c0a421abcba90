"""`python -m trainer.score RUN_OR_FILE [reward=NAME] [key=value ...]`: scores saved answers anew, without a model.

RUN_OR_FILE is a run folder, a folder that trainer.rollout_data_dir or trainer.validation_data_dir named, or a jsonl or
parquet file of answers, as `trainer.main_generate` writes it. reward=NAME takes a registered reward for all rows,
reward=FILE.py or FILE.py:FUNCTION one of your own; every reward.* option can be given as for training. Without any, a
run is scored by its own reward, and a file by data_source. Prints the saved scores against the new ones, and writes all
of them to a parquet file beside (out=FILE names another). `--help-config` lists the options.

Rewards run in supervised processes, as in training. The score is that of the reward function: no reward model, no
penalty of long answers. Exit status 1 if more than reward.max_error_rate of the rewards failed; else see
`trainer.cli`.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import OmegaConf

from trainer.cli import command
from verl_lite.config import ConfigError, PPOConfig, ScoreConfig, help_config, load_config, load_schema
from verl_lite.config.checks import reward_problems, section_problems
from verl_lite.errors import UserError
from verl_lite.rewards import RewardResult, reward_modules

if TYPE_CHECKING:
    from trainer.evaluate.rescoring import SavedAnswers

USAGE = "usage: python -m trainer.score RUN_OR_FILE [reward=NAME] [reward.KEY=VALUE ...] [out=FILE.parquet]"
REWARD = "reward="
ONLY_TRAINING = ("overlong_buffer", "function_weight")


@command
def main(argv: list[str]) -> int:
    """The command; returns the exit status."""
    if "--help" in argv or "-h" in argv:
        print(__doc__)
        return 0
    if "--help-config" in argv:
        print(help_config(ScoreConfig))
        return 0
    if not argv or argv[0].startswith("-") or "=" in argv[0]:
        print(USAGE, file=sys.stderr)
        return 2
    return score(Path(argv[0]).expanduser(), argv[1:])


def score(target: Path, overrides: list[str]) -> int:
    """The whole command; returns the exit status. Raises UserError for what cannot be read or scored."""
    from trainer.console import Console
    from trainer.evaluate.rescoring import changed_table, comparison_table, extras_line, read_saved, write_scores

    run = run_config(target)
    config = score_config(run, overrides)
    console = Console()
    saved = read_saved(target, run, config)
    console.print(f"{len(saved.answers)} answers of {saved.origin}")
    for note in [*saved.notes, *_other_terms(run)]:
        console.note(note)
    path = Path(config.out).expanduser() if config.out else _beside(target)
    results = score_answers(saved, config)
    console.print(comparison_table(saved.answers, results))
    if line := extras_line(results):
        console.print(f"new means: {line}")
    changed = changed_table(saved.answers, results, config.shown)
    if changed is not None:
        console.print(changed)
    write_scores(path, saved.answers, results)
    console.print(f"all scores: {path}")
    return _ending(results, config)


def run_config(target: Path) -> PPOConfig | None:
    """The configuration of a run folder; None of anything else. Raises UserError for a run of agents."""
    file = target / "config.yaml"
    if not file.is_file():
        return None
    config = load_config(["--config", str(file)]).config
    if config.is_agentic:
        raise UserError(f"{target}: environments gave the rewards of this run, and no function could give them anew")
    return config


def score_config(run: PPOConfig | None, overrides: list[str]) -> ScoreConfig:
    """The options: those of the run's own reward, and over them the command line. Raises UserError for wrong ones."""
    given, replaces = _spelt_out(overrides)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.yaml"
        _write_own_settings(file, run, replaces)
        config = load_schema(["--config", str(file), *given], ScoreConfig).config
    if config.recipe is not None:
        from trainer.recipe import load_recipe

        load_recipe(config.recipe)  # importing it registers its rewards
    problems = [*section_problems(config), *reward_problems(config.reward)]
    if config.out is not None and (not config.out.endswith(".parquet") or Path(config.out).expanduser().exists()):
        problems.append(f"out={config.out}: the name of a new .parquet file is expected")
    if config.rows == 0 or config.rows < -1:
        problems.append(f"rows={config.rows}: -1 (all) or at least 1 is expected")
    if problems:
        raise ConfigError(problems)
    return config


def score_answers(saved: SavedAnswers, config: ScoreConfig) -> list[RewardResult]:
    """A result for each answer, from supervised reward processes. Raises UserError for a data source without reward."""
    from workers.rewards.pool import RewardPool

    pool = RewardPool(config.reward, config.reward.num_workers, modules=reward_modules())
    items = [answer.item for answer in saved.answers]
    try:
        pool.dry_run([], sorted({item.data_source for item in items}))
        pool.submit(items)
        return list(pool.collect(item.key for item in items).values())
    finally:
        pool.close()


def _spelt_out(overrides: list[str]) -> tuple[list[str], bool]:
    """The command line without the short form reward=NAME; whether it was there, and so replaces the run's reward."""
    short = [item for item in overrides if item.startswith(REWARD)]
    rest = [item for item in overrides if not item.startswith(REWARD)]
    if not short:
        return rest, False
    name = short[-1].removeprefix(REWARD)
    file = re.fullmatch(r"(pkg://[\w.]+|.*\.py)(?::(\w+))?", name)
    if file is None:
        label = re.sub(r"\W+", "_", name.rpartition("/")[2])
        return [f"reward.functions.{label}.reward={name}", *rest], True
    named = [f"reward.custom_reward_function.path={file[1]}"]
    named += [f"reward.custom_reward_function.name={file[2]}"] if file[2] else []
    return [*named, *rest], True


def _write_own_settings(file: Path, run: PPOConfig | None, replaces: bool) -> None:
    """What a run's reward was, as the first layer of options. replaces: another one is named, so only its limits."""
    if run is None:
        file.write_text("{}")
        return
    reward = {name: value for name, value in asdict(run.reward).items() if name not in ONLY_TRAINING}
    if replaces:
        for name in ("functions", "custom_reward_function", "remote", "reward_kwargs", "batch_size"):
            del reward[name]
    OmegaConf.save(OmegaConf.create({"reward": reward, "recipe": run.recipe}), file)


def _other_terms(run: PPOConfig | None) -> list[str]:
    """What the saved scores of a run have in them, and the new ones have not."""
    notes = []
    if run is not None and run.reward_model.enable:
        notes.append("saved scores have the reward model's in them (reward_model.enable=true); the new ones have not")
    if run is not None and run.reward.overlong_buffer.enable:
        notes.append("saved scores of training have the penalty of long answers in them (reward.overlong_buffer)")
    return notes


def _beside(target: Path) -> Path:
    stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(2).hex()}"
    folder, name = (target, "answers") if target.is_dir() else (target.parent, target.stem)
    return folder / f"{name}-scored-{stamp}.parquet"


def _ending(results: list[RewardResult], config: ScoreConfig) -> int:
    failed = [result for result in results if result.failed]
    if not failed:
        return 0
    print(f"\n{len(failed)} of {len(results)} rewards failed. The first one:\n{failed[0].error}", file=sys.stderr)
    return int(len(failed) > config.reward.max_error_rate * len(results))


if __name__ == "__main__":
    sys.exit(main())
