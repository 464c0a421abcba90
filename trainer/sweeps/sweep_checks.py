"""Checks a sweep before any run starts."""

import difflib
import itertools
from collections.abc import Sequence
from contextlib import suppress

from trainer.launch.resources import resolve_slots
from trainer.observe.metric_docs import find, metrics
from trainer.observe.tracking import check_trackers
from trainer.recipe import prepare_recipe, recipe_overrides
from trainer.sweeps.study_spec import MOST_LISTED, Search, StudySpec, Value, combinations
from verl_lite.config import ConfigError, PPOConfig, load_config
from verl_lite.config.checks import validate
from verl_lite.errors import UserError

OWN_KEYS = ("trainer.default_local_dir", "trainer.experiment_name", "trainer.resume_mode", "trainer.resume_from_path")
"""Keys that the sweep sets for each run."""

_MOST_CHECKED = 256
"""Combinations that are checked before the start. All others are checked before they run."""

_MOST_REFUSALS = 3
"""Refused combinations in a message."""


def load(spec: StudySpec, values: dict[str, Value]) -> PPOConfig:
    """Returns the configuration of a trial with these values. Raises ConfigError if it is invalid."""
    return load_config(spec.command(values), recipe_loader=recipe_overrides).config


def problem(spec: StudySpec, values: dict[str, Value], gpus: int | None) -> str:
    """Returns the error that the command would report for a combination; empty if it would start.

    Args:
        spec: The specification of the study.
        values: The combination.
        gpus: GPUs of each run; None for a CPU.
    """
    # imports transformers, which takes seconds
    from workers.engines.base import engine_names

    try:
        config = load(spec, values)
        # null would mean all GPUs, but the sweep gives each run this number
        if not config.trainer.n_gpus_per_node:
            config.trainer.n_gpus_per_node = gpus
        check_trackers(config.trainer.logger, config.trainer.project_name)
        slots = resolve_slots(config)
        validate(config, engines=engine_names(), slots=slots, available=gpus)
    except UserError as error:
        return str(error).replace(" (command line)", "")
    return ""


def planned(spec: StudySpec, search: Search) -> list[dict[str, Value]] | None:
    """Returns all combinations of the space, or None if trials are drawn because the space is infinite or very
    large."""
    if search.kind == "optuna":
        return None
    size = 1
    for parameter in spec.space:
        values = parameter.values()
        # an infinite range alone makes the space too large
        if values is None:
            size *= MOST_LISTED + 1
        else:
            size *= len(values)
    # for a grid, `combinations` refuses such a space
    if search.kind == "random" and size > MOST_LISTED:
        return None
    return list(combinations(spec.space))


def check_sweep(spec: StudySpec, search: Search, gpus: int | None) -> None:
    """Checks a sweep before its first run, and prepares the recipes of its runs.

    Raises:
        UserError: If the sweep has nothing to vary, the command would refuse a run, or no run logs the metric.
    """
    _check_words(spec, search)
    # a space that cannot be listed is checked at its corners
    plan = planned(spec, search) or combinations(spec.space, corners=True)
    checked = list(itertools.islice(plan, _MOST_CHECKED))
    _prepare_recipes(spec, checked)
    _check_combinations(spec, checked, gpus)
    first_config = load(spec, checked[0])
    _check_metric(spec.metric, first_config)


def _check_words(spec: StudySpec, search: Search) -> None:
    """Raises UserError for options that contradict each other or are missing."""
    keys = _keys(spec)
    problems = []
    for key in keys:
        if key in OWN_KEYS:
            problems.append(f"{key}: the sweep sets this key for each run; remove it")
    if spec.seeds is not None and "trainer.seed" in keys:
        problems.append("trainer.seed is given, but --seeds sets it for each run: remove one of them")
    # seeds alone are a grid of one trial; a search has nothing to choose
    repeats_one_trial = spec.seeds is not None and search.kind == "grid"
    if not spec.space and not repeats_one_trial:
        problems.append("there is nothing to vary: give a key several values (KEY=A,B), a range, or --seeds 3")
    if not spec.metric:
        problems.append("--metric is not given: name the metric to compare, such as val-core/gsm8k/acc/mean@1")
    if problems:
        raise UserError("\n".join(problems))


def _keys(spec: StudySpec) -> list[str]:
    """Returns the keys that the words of the sweep, or a choice of a parameter, set."""
    words = list(spec.words)
    for parameter in spec.space:
        for value in parameter.values(ends=True) or ():
            words += parameter.words(value)

    keys: dict[str, None] = {}  # in order, each once
    for word in words:
        key, _, _ = word.partition("=")
        keys[key.lstrip("+~")] = None
    return list(keys)


def _prepare_recipes(spec: StudySpec, trials: Sequence[dict[str, Value]]) -> None:
    """Creates the models and data of the recipes once, so that the runs do not do it all at the same time."""
    prepared: set[str | None] = set()
    for values in trials:
        # reported by `_check_combinations`
        with suppress(ConfigError):
            config = load(spec, values)
            if config.recipe not in prepared:
                prepared.add(config.recipe)
                prepare_recipe(config)


def _check_combinations(spec: StudySpec, trials: Sequence[dict[str, Value]], gpus: int | None) -> None:
    """Raises UserError if the command would refuse some of the combinations. The message has the first three."""
    refusals = []
    for values in trials:
        refusal = problem(spec, values, gpus)
        if refusal:
            refusals.append(f"{values}:\n  {refusal}")
    if refusals:
        head = f"{len(refusals)} of {len(trials)} combinations would be refused:"
        lines = [head, *refusals[:_MOST_REFUSALS]]
        raise UserError("\n".join(lines))


def _check_metric(metric: str, config: PPOConfig) -> None:
    """Raises UserError if the runs of this configuration do not log the metric."""
    check_metric_name(metric, config)
    if not metric.startswith("val-"):
        return
    has_validation_data = bool(config.data.val_files or config.agentic.val_batch_size)
    if config.trainer.test_freq == 0 or not has_validation_data:
        raise UserError(f"--metric {metric}: nothing is validated: set data.val_files and trainer.test_freq=20")

    _, _, number = metric.rpartition("@")
    answers = config.rollout.val_kwargs.n
    # the headline metrics are those of all answers; val-aux also has smaller numbers
    is_headline = metric.startswith("val-core/")
    if is_headline and number.isdecimal() and int(number) != answers:
        raise UserError(f"--metric {metric}: rollout.val_kwargs.n={answers}, so a run logs ...@{answers}")


def check_metric_name(metric: str, config: PPOConfig) -> None:
    """Raises UserError for a metric that no run logs.

    That is an undocumented name in a family without user metrics, or one that is very similar to a documented name.
    Other names can come from user code. A `*` in the name can stand for several parts.
    """
    with_slash = metric.replace("*", "*/*")
    if find(metric) is not None or find(with_slash) is not None:
        return
    documented_names: list[str] = []
    for documented in metrics():
        documented_names += documented.names

    family = metric.partition("/")[0]
    if family in ("val-core", "val-aux"):
        suggestions = _means_of_validation(family, documented_names, config)
    else:
        suggestions = _similar_names(metric, documented_names)
    if suggestions:
        raise UserError(
            f"--metric {metric}: no such metric; did you mean {', '.join(suggestions)}? METRICS.md lists all metrics"
        )


def _similar_names(metric: str, documented_names: Sequence[str]) -> list[str]:
    """Returns the documented name that is very similar, or the name with the family that is similar to an unknown one;
    nothing if the name can come from user code."""
    similar_names = difflib.get_close_matches(metric, documented_names, n=1, cutoff=0.9)
    if similar_names:
        return similar_names

    family, _, rest = metric.partition("/")
    families = set()
    for name in documented_names:
        documented_family, slash, _ = name.partition("/")
        if slash:
            families.add(documented_family)
    if not rest or family in families:
        return []
    similar_families = difflib.get_close_matches(family, families, n=1, cutoff=0.6)
    return [f"{similar}/{rest}" for similar in similar_families]


def _means_of_validation(family: str, documented_names: Sequence[str], config: PPOConfig) -> list[str]:
    """Returns the names of the means that a run logs about its validation data.

    Args:
        family: `val-core` or `val-aux`.
        documented_names: All names in METRICS.md.
        config: Configuration of the run.
    """
    # imports transformers, which takes seconds
    from trainer.data.sources import read_rows

    sources = set()
    for path in config.data.val_files:
        for row in read_rows(path, "data.val_files"):
            sources.add(str(row.get("data_source")))
    # without files the placeholder itself, which shows the form of the name
    listed_sources = sorted(sources) or ["{data_source}"]

    answers = str(config.rollout.val_kwargs.n)
    names = []
    for documented in documented_names:
        if not documented.startswith(f"{family}/") or not documented.endswith("mean@{N}"):
            continue
        for source in listed_sources:
            name = documented.replace("{data_source}", source)
            name = name.replace("{N}", answers)
            for variable in ("acc", "reward"):
                names.append(name.replace("{variable}", variable))
    return names
