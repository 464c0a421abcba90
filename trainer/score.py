"""`python -m trainer.score RUN_OR_FILE [reward=NAME] [key=value ...]`: rescores saved answers with a reward function,
without a model.

RUN_OR_FILE is a run folder, a folder given as trainer.rollout_data_dir or trainer.validation_data_dir, or a jsonl or
parquet file of answers, such as `trainer.main_generate` writes. reward=NAME applies a registered reward to all rows;
reward=FILE.py or FILE.py:FUNCTION applies your own function. All reward.* options work as in training. Without them, a
run is scored by its own reward, and the rows of a file by the reward of their data_source. The command prints a
comparison of saved and new scores and writes all of them to a parquet file next to the input (or to --out FILE).
`--help-config` lists the options.

Rewards run in supervised processes, as in training. The new score is that of the reward function alone, without reward
model and without the penalty for long answers. Exit status: 1 if the share of failed rewards exceeds
reward.max_error_rate; otherwise see `trainer.cli`.
"""

import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow
from omegaconf import OmegaConf
from rich.table import Table

from trainer.cli import command, out_as_word
from trainer.data.sources import parse_json, read_rows
from trainer.evaluate.sample import valid_image_names
from trainer.evaluate.sample_files import FOLDER, IMAGES, JSON, TRAIN, VAL, as_text, reward_columns, write_table
from trainer.final_report import titled_table
from verl_lite.config import ConfigError, PPOConfig, ScoreConfig, help_config, load_config, load_schema
from verl_lite.config.checks import reward_problems, section_problems
from verl_lite.errors import UserError, printable
from verl_lite.rewards import RewardItem, RewardResult, reward_modules

USAGE = "usage: python -m trainer.score RUN_OR_FILE [reward=NAME] [reward.KEY=VALUE ...] [--out FILE.parquet]"
SHORT = "reward="
SUFFIXES = (".jsonl", ".parquet")
_ONLY_TRAINING = ("overlong_buffer", "function_weight")
_REWARD_CHOICE = ("functions", "custom_reward_function", "remote", "reward_kwargs", "batch_size")
_TOLERANCE = 1e-6
"""Scores with a smaller difference count as equal, because scores are saved in single precision."""


@dataclass(frozen=True)
class SavedAnswer:
    """A saved answer.

    item: input of the reward function; its key is the index of the answer. Its images are the copies in samples/images
    of the run, of at most 512 x 512 pixels, or none if one was deleted. score: the saved score; None if there is none
    or the reward failed.
    """

    item: RewardItem
    uid: str
    step: int | None
    score: float | None


@command
def main(argv: list[str]) -> int:
    """Runs the command and returns its exit status."""
    if "--help" in argv or "-h" in argv:
        print(__doc__)
    elif "--help-config" in argv:
        print(help_config(ScoreConfig))
    elif not argv or argv[0].startswith("-") or "=" in argv[0]:
        raise UserError(USAGE)
    else:
        return score(Path(argv[0]).expanduser(), out_as_word(argv[1:], "out"))
    return 0


def score(target: Path, overrides: list[str]) -> int:
    """Scores the saved answers of `target` and returns the exit status. Raises UserError for invalid files or
    options."""
    from trainer.console import Console
    from workers.rewards.reward_pool import RewardPool

    run = run_config(target)
    config = score_config(run, overrides)
    console = Console()
    answers = read_saved(target, run, config)
    console.print(f"{len(answers)} answers")
    for name, meaning in (("prompt", "prompt as chat messages"), ("ground_truth", "ground truth")):
        if lacking := sum(getattr(answer.item, name) is None for answer in answers):
            console.note(f"{lacking} answers have no {meaning}: a reward that reads it gets None")
    if run is not None and (run.reward_model.enable or run.reward.overlong_buffer.enable):
        console.note("saved scores include the reward model and the penalty for long answers; new scores do not")
    stem = target / "answers" if target.is_dir() else target.with_suffix("")
    stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(2).hex()}"
    path = Path(config.out or f"{stem}-scored-{stamp}.parquet").expanduser()
    pool = RewardPool(config.reward, config.reward.num_workers, modules=reward_modules())
    items = [answer.item for answer in answers]
    try:
        pool.dry_run([], sorted({item.data_source for item in items}))
        pool.submit(items)
        results = list(pool.collect(item.key for item in items).values())
    finally:
        pool.close()
    console.print(comparison_table(answers, results))
    write_scores(path, answers, results)
    console.print(f"all scores: {path}")
    failed = [result for result in results if result.failed]
    if failed:
        first = printable(str(failed[0].error))
        print(f"\n{len(failed)} of {len(results)} rewards failed. The first one:\n{first}", file=sys.stderr)
    return int(len(failed) > config.reward.max_error_rate * len(results))


def run_config(target: Path) -> PPOConfig | None:
    """Returns the configuration of a run folder, or None for any other path. Raises UserError for an agentic run."""
    file = target / "config.yaml"
    if not file.is_file():
        return None
    config = load_config(["--config", str(file)]).config
    if config.is_agentic:
        raise UserError(
            f"{target}: the rewards of this run belong to episodes of an agent; no reward function can rescore it"
        )
    return config


def score_config(run: PPOConfig | None, overrides: list[str]) -> ScoreConfig:
    """Returns the options of the run's own reward, overridden by the command line; reward=NAME there replaces the
    reward. Raises UserError for invalid options."""
    short = [item.removeprefix(SHORT) for item in overrides if item.startswith(SHORT)]
    given = [item for item in overrides if not item.startswith(SHORT)]
    run_settings: dict[str, Any] = {}
    if run is not None:
        left_out = {*_ONLY_TRAINING, *(_REWARD_CHOICE if short else ())}
        reward = {name: value for name, value in asdict(run.reward).items() if name not in left_out}
        run_settings = {"reward": reward, "recipe": run.recipe}
    for name in short[-1:]:
        file = re.fullmatch(r"(pkg://[\w.]+|.*\.py)(?::(\w+))?", name)
        if file is None:
            label = re.sub(r"\W+", "_", name.rpartition("/")[2])
            given.insert(0, f"reward.functions.{label}.reward={name}")
        else:
            parts = {"path": file[1], "name": file[2]}
            given = [f"reward.custom_reward_function.{key}={text}" for key, text in parts.items() if text] + given
    with tempfile.TemporaryDirectory() as folder:
        OmegaConf.save(OmegaConf.create(run_settings), Path(folder) / "run.yaml")
        config = load_schema(["--config", f"{folder}/run.yaml", *given], ScoreConfig).config
    if config.recipe is not None:
        from trainer.recipe import load_recipe

        load_recipe(config.recipe)  # importing it registers its rewards
    problems = [*section_problems(config), *reward_problems(config.reward)]
    if config.out is not None and (not config.out.endswith(".parquet") or Path(config.out).expanduser().exists()):
        problems.append(f"--out {config.out}: expected the name of a new .parquet file")
    if problems:
        raise ConfigError(problems)
    return config


def read_saved(target: Path, run: PPOConfig | None, config: ScoreConfig) -> list[SavedAnswer]:
    """Reads the saved answers of `target`. run: the configuration, if `target` is a run folder.

    A row was written by `trainer.evaluate.sample_files` or `trainer.main_generate`, or has an answer (`output`,
    `response`, or a list `responses`), a `data_source`, and a ground truth (`ground_truth`, `reward_model` with that
    entry, or `gts`). Optional entries are prompt, extra_info, uid, step and score.

    Raises:
        UserError: for unreadable files, and for rows without answer or data_source; the message names the row.
    """
    answers: list[SavedAnswer] = []
    for file in _files(target, run):
        for number, row in enumerate(_rows(file)):
            answers += _answers(row, len(answers), f"row {number} of {file}", config, file.parent.parent / IMAGES)
    if not answers:
        raise UserError(f"{target} contains no answers")
    return answers


def _files(target: Path, run: PPOConfig | None) -> list[Path]:
    """Returns the files to read. Files that are named by step are in the order of steps."""
    if target.is_file() and target.suffix in SUFFIXES:
        return [target]
    folders = [target]
    if run is not None:
        given = (run.trainer.rollout_data_dir, run.trainer.validation_data_dir)
        folders = [Path(folder).expanduser() for folder in given if folder]
        folders += [target / FOLDER / kind for kind in (TRAIN, VAL)]
    for folder in folders:
        found = [file for file in folder.glob("*") if file.suffix in SUFFIXES and "-scored-" not in file.name]
        if found:
            return sorted(found, key=lambda file: (int(file.stem) if file.stem.isdigit() else -1, file.name))
    raise UserError(
        f"{target} contains no saved answers: give a .jsonl or .parquet file, a folder of them, or a run folder (a run "
        "keeps its answers unless trainer.samples_max_mb=0 and no trainer.rollout_data_dir=FOLDER is set)"
    )


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    """Yields the rows of a file. A column NAME_json, in which `trainer.evaluate.sample_files` stores values of any
    shape, is decoded as NAME."""
    if file.suffix == ".parquet":
        rows = iter(read_rows(str(file), "RUN_OR_FILE"))
    else:
        *lines, last = file.read_text(encoding="utf-8").split("\n")  # a killed run can leave an incomplete last line
        if last.strip().endswith("}"):
            lines.append(last)
        named = enumerate(lines, start=1)
        rows = (parse_json(line, f"{file}, line {number}", "an answer per line") for number, line in named if line)
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise UserError(f"row {index} of {file}: found {row!r:.100}, expected an object with named entries")
        packed = {name: text for name, text in row.items() if name.endswith(JSON) and isinstance(text, str)}
        yield row | {name.removesuffix(JSON): json.loads(text) for name, text in packed.items()}


def _answers(row: dict[str, Any], key: int, where: str, config: ScoreConfig, images: Path) -> list[SavedAnswer]:
    """Returns the answers of a row. key: key of the row's first answer. images: folder of the run's images."""
    answer = _first_value(row.get("response"), row.get("output"), row.get("responses"))
    texts: list[Any] = answer if isinstance(answer, list) else [answer]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise UserError(
            f"{where} has no answer: expected a text `response` (or `output`), or a list of texts `responses`; its "
            f"entries are {', '.join(row)}"
        )
    source = row.get("data_source") or config.data_source
    if not isinstance(source, str):
        raise UserError(f"{where} has no data_source: set data_source=NAME for all rows without one")
    style = row.get("reward_model")
    nested = style.get("ground_truth") if isinstance(style, dict) else None
    truth = _first_value(row.get("ground_truth"), nested, row.get("gts"))
    prompt = row.get("prompt")
    extra_info = row.get("extra_info")
    scored_row = {
        "data_source": source,
        "reward_model": {"ground_truth": truth},
        "extra_info": extra_info if isinstance(extra_info, dict) else None,
        "prompt": prompt if isinstance(prompt, list) and prompt else None,
    }

    image_files = [images / name for name in valid_image_names(row.get("images"))]
    encoded: list[bytes] = []
    if all(file.is_file() for file in image_files):
        encoded = [file.read_bytes() for file in image_files]

    saved_step = row.get("step")
    saved_score = row.get("score")
    step = saved_step if isinstance(saved_step, int) else None
    score = float(saved_score) if isinstance(saved_score, int | float) else None
    uid = str(row.get("uid", where))
    answers = []
    for number, text in enumerate(texts):
        item = RewardItem.of_row(key + number, scored_row, text, encoded)
        answers.append(SavedAnswer(item, uid, step, score))
    return answers


def _first_value(*values: Any) -> Any:
    """Returns the first value that is not None, or None."""
    return next((value for value in values if value is not None), None)


def comparison_table(answers: Sequence[SavedAnswer], results: Sequence[RewardResult]) -> Table:
    """Returns a table with one line per data source. Among the answers with both scores it counts equal, higher and
    lower new scores. "none before" counts answers without a saved score, for example because the reward failed."""
    table = titled_table("Saved scores and new ones")
    table.add_column("data source", no_wrap=True)
    for name in ("answers", "mean before", "mean now", "same", "higher", "lower", "none before", "failed now"):
        table.add_column(name, justify="right")
    for source in sorted({answer.item.data_source for answer in answers}):
        own = [pair for pair in zip(answers, results, strict=True) if pair[0].item.data_source == source]
        pairs = [(old.score, None if new.failed else new.score) for old, new in own]
        before, now = ([score for score in scores if score is not None] for scores in zip(*pairs, strict=True))
        changes = [new - old for old, new in pairs if old is not None and new is not None]
        same = sum(abs(x) <= _TOLERANCE for x in changes)
        higher = sum(x > _TOLERANCE for x in changes)
        table.add_row(
            source,
            str(len(pairs)),
            *(f"{fmean(scores):.4f}" if scores else "-" for scores in (before, now)),
            f"{same} ({same / len(changes):.1%})" if changes else "-",
            *map(str, (higher, len(changes) - same - higher, len(pairs) - len(before), len(pairs) - len(now))),
        )
    return table


def write_scores(path: Path, answers: Sequence[SavedAnswer], results: Sequence[RewardResult]) -> None:
    """Writes a parquet file with one row per answer, in order. The write is atomic.

    Columns: uid, step, data_source, response, ground_truth (as text), score_before, score, failed, timed_out, error,
    and reward/<name> for each further value that the reward returned.
    """
    columns: dict[str, Any] = {
        "uid": [as_text(answer.uid) for answer in answers],
        "step": [answer.step for answer in answers],
        "data_source": [as_text(answer.item.data_source) for answer in answers],
        "response": [as_text(answer.item.solution_str) for answer in answers],
        "ground_truth": [as_text(answer.item.ground_truth) for answer in answers],
        "score_before": [answer.score for answer in answers],
        "score": [None if result.failed else result.score for result in results],
        "failed": [result.failed for result in results],
        "timed_out": [result.timed_out for result in results],
        "error": [as_text(result.error) for result in results],
    }
    write_table(pyarrow.table(columns | reward_columns([result.extra for result in results])), path)


if __name__ == "__main__":
    sys.exit(main())
