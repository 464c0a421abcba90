"""Checks a sweep before any run starts."""

import difflib
import itertools
import math
from contextlib import suppress

from trainer.metric_docs import find, metrics
from trainer.recipe import prepare_recipe, recipe_overrides
from trainer.resources import resolve_slots
from trainer.sweeps.study_spec import MOST_LISTED, Search, StudySpec, Value, combinations
from trainer.tracking import check_trackers
from verl_lite.config import ConfigError, PPOConfig, load_config
from verl_lite.config.checks import validate
from verl_lite.errors import UserError

OWN_KEYS = ("trainer.default_local_dir", "trainer.experiment_name", "trainer.resume_mode", "trainer.resume_from_path")
"""Keys that the sweep sets for each run."""

_MOST_CHECKED = 256
"""Combinations that are checked before the start. All others are checked before they run."""


def load(spec: StudySpec, values: dict[str, Value]) -> PPOConfig:
    """Loads the configuration of a trial. Raises ConfigError."""
    return load_config(spec.command(values), recipe_loader=recipe_overrides).config


def problem(spec: StudySpec, values: dict[str, Value], gpus: int | None) -> str:
    """Returns the error that the command would report for a combination; empty if it would start. gpus: GPUs of each
    run; None = CPU."""
    from workers.rollout.base import engine_names  # imports transformers, which takes seconds

    try:
        config = load(spec, values)
        config.trainer.n_gpus_per_node = config.trainer.n_gpus_per_node or gpus
        check_trackers(config.trainer.logger)
        validate(config, engines=engine_names(), slots=resolve_slots(config), available=gpus)
    except UserError as error:
        return str(error).replace(" (command line)", "")
    return ""


def planned(spec: StudySpec, search: Search) -> list[dict[str, Value]] | None:
    """Returns all combinations of the space, or None if trials are drawn because the space is infinite or very
    large."""
    size = math.prod(MOST_LISTED + 1 if (v := p.values()) is None else len(v) for p in spec.space)
    is_drawn = search.kind == "optuna" or (search.kind == "random" and size > MOST_LISTED)
    return None if is_drawn else list(combinations(spec.space))


def check_sweep(spec: StudySpec, search: Search, gpus: int | None) -> None:
    """Checks everything that can be checked before a sweep starts, and prepares the recipes. Raises UserError."""
    values = [(parameter, value) for parameter in spec.space for value in parameter.values(ends=True) or ()]
    ends = [word for parameter, value in values for word in parameter.words(value)]
    keys = dict.fromkeys(word.partition("=")[0].lstrip("+~") for word in (*spec.words, *ends))
    problems = [f"{key}: the sweep sets this key for each run; remove it" for key in keys if key in OWN_KEYS]
    if spec.seeds is not None and "trainer.seed" in keys:
        problems.append("trainer.seed is given, but --seeds sets it for each run: remove one of them")
    if not spec.space and (spec.seeds is None or search.kind != "grid"):
        problems.append("there is nothing to vary: give a key several values (KEY=A,B), a range, or --seeds 3")
    if not spec.metric:
        problems.append("--metric is not given: name the metric to compare, such as val-core/gsm8k/acc/mean@1")
    if problems:
        raise UserError("\n".join(problems))
    plan = planned(spec, search) or combinations(spec.space, corners=True)
    looked_at = list(itertools.islice(plan, _MOST_CHECKED))
    prepared: set[str | None] = set()
    for chosen in looked_at:
        with suppress(ConfigError):  # reported below
            if (config := load(spec, chosen)).recipe not in prepared:
                prepared.add(config.recipe)
                prepare_recipe(config)  # model and data are created once, not by all runs at the same time
    refused = {str(values): text for values in looked_at if (text := problem(spec, values, gpus))}
    if refused:
        shown = [f"{values}:\n  {text}" for values, text in list(refused.items())[:3]]
        raise UserError("\n".join([f"{len(refused)} of {len(looked_at)} combinations would be refused:", *shown]))
    config, metric = load(spec, looked_at[0]), spec.metric
    check_metric_name(metric, config)
    is_validated = config.trainer.test_freq != 0 and bool(config.data.val_files or config.agentic.val_batch_size)
    if metric.startswith("val-") and not is_validated:
        raise UserError(f"--metric {metric}: nothing is validated: set data.val_files and trainer.test_freq=20")
    number, answers = metric.rpartition("@")[2], config.rollout.val_kwargs.n
    if metric.startswith("val-core/") and number.isdigit() and int(number) != answers:
        raise UserError(f"--metric {metric}: rollout.val_kwargs.n={answers}, so a run logs ...@{answers}")


def check_metric_name(metric: str, config: PPOConfig) -> None:
    """Raises UserError for a metric that no run logs.

    That is an undocumented name in a family without user metrics, or one that is very similar to a documented name.
    Other names can come from user code. A `*` in the name can stand for several parts.
    """
    if find(metric) is not None or find(metric.replace("*", "*/*")) is not None:
        return
    known = [name for documented in metrics() for name in documented.names]
    family, _, rest = metric.partition("/")
    families = {name.partition("/")[0] for name in known if "/" in name}
    near = difflib.get_close_matches(metric, known, n=1, cutoff=0.9)
    if family in ("val-core", "val-aux"):
        from trainer.data.sources import read_rows  # imports transformers, which takes seconds

        rows = (row for path in config.data.val_files for row in read_rows(path, "data.val_files"))
        sources = sorted({str(row.get("data_source")) for row in rows}) or ["{data_source}"]
        names = [name for name in known if name.startswith(f"{family}/") and name.endswith("mean@{N}")]
        answers = str(config.rollout.val_kwargs.n)
        near = [name.replace("{data_source}", one).replace("{N}", answers) for name in names for one in sources]
        near = [name.replace("{variable}", value) for name in near for value in ("acc", "reward")]
    elif rest and family not in families:
        near = near or [f"{found}/{rest}" for found in difflib.get_close_matches(family, families, n=1, cutoff=0.6)]
    if near:
        raise UserError(
            f"--metric {metric}: no such metric; did you mean {', '.join(near)}? METRICS.md lists all metrics"
        )
