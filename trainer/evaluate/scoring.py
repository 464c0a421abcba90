"""Scores of saved answers by any reward, and their comparison with the saved scores."""

import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import pyarrow
from omegaconf import OmegaConf
from rich.table import Table

from trainer.evaluate.saved_answers import SavedAnswer, read_saved
from trainer.observe.console import Console
from trainer.observe.final_report import titled_table
from trainer.recipe import load_recipe
from trainer.validation.sample_files import as_text, reward_columns, write_table
from verl_lite.config import ConfigError, PPOConfig, ScoreConfig, load_config, load_schema
from verl_lite.config.checks import reward_problems, section_problems
from verl_lite.errors import UserError, printable
from verl_lite.rewards import RewardItem, RewardResult, reward_modules
from workers.rewards.reward_pool import RewardPool

SHORT = "reward="
# options of section reward that change the scores of training, not the reward itself
_ONLY_TRAINING = ("overlong_buffer", "function_weight")
# options that choose the reward, which reward=NAME replaces
_REWARD_CHOICE = ("functions", "custom_reward_function", "remote", "reward_kwargs", "batch_size")
_COUNTS_AND_MEANS = (
    "answers",
    "mean before",
    "mean now",
    "same",
    "higher",
    "lower",
    "none before",
    "failed now",
)
"""Columns of the table after the data source."""
_TOLERANCE = 1e-6
"""Scores with a smaller difference count as equal, because scores are saved in single precision."""


def score(target: Path, overrides: list[str]) -> int:
    """Scores the saved answers of a file or folder, prints a comparison and writes the file of scores.

    Args:
        target: see `read_saved`.
        overrides: the user's options.

    Returns:
        The exit status: 1 if the share of failed rewards exceeds reward.max_error_rate.

    Raises:
        UserError: for invalid files or options.
    """
    run = run_config(target)
    config = score_config(run, overrides)
    console = Console()
    answers = read_saved(target, run, config)
    console.print(f"{len(answers)} answers")
    _note_differences(console, answers, run)

    path = _output_file(target, config)
    _require_writable(path)
    results = _score_all([answer.item for answer in answers], config)
    console.print(comparison_table(answers, results))
    write_scores(path, answers, results)
    console.print(f"all scores: {path}")

    errors = [result.error for result in results if result.failed]
    if errors:
        first = printable(str(errors[0]))
        print(f"\n{len(errors)} of {len(results)} rewards failed. The first one:\n{first}", file=sys.stderr)
    allowed = config.reward.max_error_rate * len(results)
    return int(len(errors) > allowed)


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


def _require_writable(path: Path) -> None:
    """Creates the folder of a file that is written at the end. Raises UserError now if that would fail: the scores may
    take hours."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UserError(
            f"--out {path} cannot be written ({error.strerror}): name a file in a folder of yours"
        ) from error


def score_config(run: PPOConfig | None, overrides: list[str]) -> ScoreConfig:
    """Returns the options of the run's own reward, overridden by the command line.

    Args:
        run: configuration of the run, if the target is a run folder.
        overrides: the user's options. The last reward=NAME replaces the reward of the run.

    Raises:
        UserError: for invalid options.
    """
    reward_name = None
    options = []
    for item in overrides:
        if item.startswith(SHORT):
            reward_name = item.removeprefix(SHORT)
        else:
            options.append(item)
    if reward_name is not None:
        # before the other options, which can change parts of this reward
        options = [*_reward_options(reward_name), *options]
    run_settings = {}
    if run is not None:
        run_settings = _run_settings(run, replaces_reward=reward_name is not None)
    # as a file, which the options of the command line override
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.yaml"
        OmegaConf.save(OmegaConf.create(run_settings), file)
        arguments = ["--config", str(file), *options]
        config = load_schema(arguments, ScoreConfig).config
    if config.recipe is not None:
        # importing it registers its rewards
        load_recipe(config.recipe)

    problems = [*section_problems(config), *reward_problems(config.reward)]
    if config.out is not None and not _is_new_parquet(config.out):
        problems.append(f"--out {config.out}: expected the name of a new .parquet file")
    if problems:
        raise ConfigError(problems)
    return config


def _is_new_parquet(path: str) -> bool:
    if not path.endswith(".parquet"):
        return False
    # an existing file is never overwritten
    return not Path(path).expanduser().exists()


def _reward_options(name: str) -> list[str]:
    """Returns the options for which reward=NAME, reward=FILE.py or reward=FILE.py:FUNCTION is short."""
    file = re.fullmatch(r"(pkg://[\w.]+|.*\.py)(?::(\w+))?", name)
    if file is None:
        # a label is a part of option keys and of names of metrics
        _, _, last_part = name.rpartition("/")
        label = re.sub(r"\W+", "_", last_part)
        return [f"reward.functions.{label}.reward={name}"]
    path, function = file.groups()
    options = [f"reward.custom_reward_function.path={path}"]
    if function:
        options.append(f"reward.custom_reward_function.name={function}")
    return options


def _run_settings(run: PPOConfig, replaces_reward: bool) -> dict[str, object]:
    """Returns the settings of a run that apply to saved answers.

    Args:
        run: configuration of the run.
        replaces_reward: True to leave out its reward. Other settings, such as time limits, stay.
    """
    reward = asdict(run.reward)
    for name in _ONLY_TRAINING:
        del reward[name]
    if replaces_reward:
        for name in _REWARD_CHOICE:
            del reward[name]
    return {"reward": reward, "recipe": run.recipe}


def _note_differences(console: Console, answers: Sequence[SavedAnswer], run: PPOConfig | None) -> None:
    """Notes inputs that the reward would have in training and that are not saved."""
    without_prompt = 0
    without_truth = 0
    for answer in answers:
        without_prompt += answer.item.prompt is None
        without_truth += answer.item.ground_truth is None
    for name, count in (("prompt as chat messages", without_prompt), ("ground truth", without_truth)):
        if count:
            console.note(f"{count} answers have no {name}: a reward that reads it gets None")
    if run is None:
        return
    if run.reward_model.enable or run.reward.overlong_buffer.enable:
        console.note("saved scores include the reward model and the penalty for long answers; new scores do not")


def _output_file(target: Path, config: ScoreConfig) -> Path:
    """Returns the file of scores: the one that the user chose, else a new file next to the answers."""
    if config.out:
        return Path(config.out).expanduser()
    stem = target / "answers" if target.is_dir() else target.with_suffix("")
    # random digits, because two commands can start in the same second
    random_digits = os.urandom(2).hex()
    seconds = time.strftime("%Y%m%d-%H%M%S")
    return Path(f"{stem}-scored-{seconds}-{random_digits}.parquet").expanduser()


def _score_all(items: Sequence[RewardItem], config: ScoreConfig) -> list[RewardResult]:
    """Scores the items in reward processes. Raises UserError if a data source has no reward."""
    pool = RewardPool(config.reward, config.reward.num_workers, modules=reward_modules())
    try:
        # an unknown data source ends the command before the first reward is computed
        sources = {item.data_source for item in items}
        pool.dry_run([], sorted(sources))
        pool.submit(items)
        # in the order of the keys
        results_by_key = pool.collect(item.key for item in items)
        return list(results_by_key.values())
    finally:
        pool.close()


@dataclass(frozen=True)
class _Comparison:
    """The saved and the new score of an answer; None: the answer has no such score, or the reward failed."""

    before: float | None
    now: float | None


def comparison_table(answers: Sequence[SavedAnswer], results: Sequence[RewardResult]) -> Table:
    """Returns a table with one line per data source.

    Among the answers with both scores it counts equal, higher and lower new scores. "none before" counts answers
    without a saved score, for example because the reward failed.
    """
    table = titled_table("Saved scores and new ones")
    table.add_column("data source", no_wrap=True)
    for title in _COUNTS_AND_MEANS:
        table.add_column(title, justify="right")

    comparisons_by_source: dict[str, list[_Comparison]] = {}
    for answer, result in zip(answers, results, strict=True):
        comparison = _Comparison(answer.score, _new_score(result))
        comparisons = comparisons_by_source.setdefault(answer.item.data_source, [])
        comparisons.append(comparison)
    for source, comparisons in sorted(comparisons_by_source.items()):
        table.add_row(source, *_counts_and_means(comparisons))
    return table


def _new_score(result: RewardResult) -> float | None:
    """Returns the score of a result; None if the reward failed."""
    if result.failed:
        return None
    return result.score


def _counts_and_means(comparisons: Sequence[_Comparison]) -> list[str]:
    """Returns the entries of a data source in the columns _COUNTS_AND_MEANS of the table."""
    before = []
    now = []
    num_same = 0
    num_higher = 0
    num_lower = 0
    for comparison in comparisons:
        if comparison.before is not None:
            before.append(comparison.before)
        if comparison.now is not None:
            now.append(comparison.now)
        if comparison.before is None or comparison.now is None:
            continue
        change = comparison.now - comparison.before
        if abs(change) <= _TOLERANCE:
            num_same += 1
        elif change > 0:
            num_higher += 1
        else:
            num_lower += 1

    same_text = "-"
    num_compared = num_same + num_higher + num_lower
    if num_compared:
        same_text = f"{num_same} ({num_same / num_compared:.1%})"
    return [
        str(len(comparisons)),
        _mean_as_text(before),
        _mean_as_text(now),
        same_text,
        str(num_higher),
        str(num_lower),
        str(len(comparisons) - len(before)),
        str(len(comparisons) - len(now)),
    ]


def _mean_as_text(scores: Sequence[float]) -> str:
    if not scores:
        return "-"
    return f"{fmean(scores):.4f}"


def write_scores(path: Path, answers: Sequence[SavedAnswer], results: Sequence[RewardResult]) -> None:
    """Writes a parquet file with one row per answer, in order. The write is atomic.

    Columns: uid, step, data_source, response, ground_truth (as text), score_before, score, failed, timed_out, error,
    and reward/<name> for each further value that the reward returned.
    """
    rows = []
    for answer, result in zip(answers, results, strict=True):
        row = {
            "uid": as_text(answer.uid),
            "step": answer.step,
            "data_source": as_text(answer.item.data_source),
            "response": as_text(answer.item.solution_str),
            "ground_truth": as_text(answer.item.ground_truth),
            "score_before": answer.score,
            "score": _new_score(result),
            "failed": result.failed,
            "timed_out": result.timed_out,
            "error": as_text(result.error),
        }
        rows.append(row)
    table = pyarrow.Table.from_pylist(rows)
    extras = [result.extra for result in results]
    for name, column in reward_columns(extras).items():
        table = table.append_column(name, column)
    write_table(table, path)
