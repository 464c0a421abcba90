"""The report at the end of a run: validation before and after training, samples, file locations, next commands."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trainer.validation.metrics import INTERVAL
from trainer.validation.sample import Sample

_TEXT_SHOWN = 300
_EARLY_END = "ended_early"  # a file of the run folder with the step after which a callback ended the run
_MEAN = re.compile(r"val-(?:core|aux)/(?P<source>.+?)/(?P<greedy>greedy/)?(?P<variable>[^/]+)/mean@(?P<n>\d+)")


@dataclass
class FitResult:
    """Result of a run: validation metrics before and after, samples of the last validation, the last checkpoint.

    before_step: step of the first validation, which is not 0 in a run that resumes another one. stopped: True if the
    user ended the run before its last step.
    """

    before: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    checkpoint: Path | None = None
    stopped: bool = False
    before_step: int = 0


def write_early_end(run_dir: Path, step: int) -> None:
    """Notes in the run folder that a callback, such as early stopping, has ended the run after this step."""
    (run_dir / _EARLY_END).write_text(f"{step}\n", encoding="utf-8")


def read_early_end(run_dir: Path) -> int | None:
    """Returns the step after which a callback ended the run; None if none did. The run may have continued since."""
    file = run_dir / _EARLY_END
    text = file.read_text(encoding="utf-8", errors="replace").strip() if file.is_file() else ""
    return int(text) if text.isascii() and text.isdigit() else None


def final_report(
    result: FitResult, run_dir: Path, pictures: Mapping[str, Path | None], commands: Mapping[str, str]
) -> RenderableType:
    """Returns the report of an ended run as arguments for `Console.print`.

    pictures: paths of pictures, by name. commands: next commands, by their label.
    """
    parts: list[RenderableType] = []
    if result.after or result.before:
        is_one = dict(result.before) == dict(result.after)
        first = f"step {result.before_step}" if result.before_step else "before"
        moments = {"mean": result.after} if is_one else {first: result.before, "after": result.after}
        parts += [Text(), validation_table(moments)]
    if result.samples:
        table = titled_table("Samples of the last validation")
        for name in ("data source", "prompt", "answer", "expected", "score"):
            table.add_column(name, overflow="fold", justify="right" if name == "score" else "left")
        for sample in result.samples:
            score = Text("failed", style="red") if sample.score is None else Text(f"{sample.score:.2f}")
            texts = (sample.data_source, sample.input, sample.output, sample.gts)
            joined = (" ↵ ".join(filter(None, map(str.strip, text.split("\n")))) for text in texts)
            table.add_row(*map(shortened, joined), score)
        parts += [Text(), table]
    places = {"run folder": run_dir, "metrics": run_dir / "metrics.jsonl", **pictures}
    places |= {"results": run_dir / "results.json", "tensorboard": run_dir / "tensorboard"}
    places["checkpoint"] = result.checkpoint
    named = {name: str(path) for name, path in places.items() if path and path.exists()}
    for title, lines in (("Where things are", named), ("What to do next", commands)):
        if lines:
            parts += [Text(), Text(title, style="bold")]
        # not cut off where the terminal is narrower: it may be copied
        parts += [Text(f"  {name:<12} {text}", no_wrap=True, overflow="ignore") for name, text in lines.items()]
    return Group(*parts)


@dataclass(frozen=True)
class ValidationMean:
    """One mean of a validation.

    name: variable and number of samples, such as `acc mean@4`. metric: logged name of the mean. interval: logged name
    of half the width of its 95% interval. half_width: value of that metric; None if it is absent.
    """

    source: str
    greedy: bool
    variable: str
    name: str
    value: float
    metric: str
    interval: str
    half_width: float | None = None


def validation_means(metrics: Mapping[str, float]) -> list[ValidationMean]:
    """Returns the core variable's mean for each data source, sampled (val-core/{source}/{measure}/mean@N) and greedy
    (val-aux/{source}/greedy/...); the core variable is `acc` if present, else `reward`."""
    found = [mean for mean in all_validation_means(metrics) if mean.greedy or mean.metric.startswith("val-core/")]
    with_acc = {mean.source for mean in found if mean.variable == "acc"}
    return [mean for mean in found if mean.variable == ("acc" if mean.source in with_acc else "reward")]


def shown_means(metrics: Mapping[str, float]) -> list[ValidationMean]:
    """Returns `validation_means`; for training without a rollout, the metrics val/<name> as data sources <name>, and
    DPO's accuracy and margin."""
    names = [name for name in metrics if re.fullmatch("val/([^/]+|rewards/(accuracies|margins))", name)]
    rows = [ValidationMean(x[4:], False, x[4:], "mean", metrics[x], x, "") for x in names]
    return validation_means(metrics) or rows


def all_validation_means(metrics: Mapping[str, float]) -> list[ValidationMean]:
    """Returns the means of all variables of each data source, sampled and greedy."""
    found = []
    for match, value in [(_MEAN.fullmatch(name), value) for name, value in metrics.items()]:
        if match is not None:
            source = match["source"]
            variable = match["variable"]
            metric = match.string
            interval = metric.replace("val-core/", "val-aux/", 1) + INTERVAL
            name, half = f"{variable} mean@{match['n']}", metrics.get(interval)
            found.append(ValidationMean(source, bool(match["greedy"]), variable, name, value, metric, interval, half))
    return found


def validation_line(metrics: Mapping[str, float]) -> str:
    """Returns the means of `shown_means` in one line: `sort 0.64 (greedy 0.90), add 0.53 (greedy 0.71)`."""
    means = shown_means(metrics)
    shown = {mean.source: f"{mean.source} {mean.value:.3f}" for mean in means if not mean.greedy}
    for mean in means:
        if mean.greedy:
            shown[mean.source] = f"{shown.get(mean.source, mean.source)} (greedy {mean.value:.3f})"
    return ", ".join(shown.values())


def validation_table(evaluations: Mapping[str, Mapping[str, float]]) -> Table:
    """Returns a table of validation means by data source. evaluations: metrics of each column, by its title."""
    columns = {name: shown_means(metrics) for name, metrics in evaluations.items()}
    means = [mean for found in columns.values() for mean in found]
    table = titled_table(f"Validation: {', '.join(sorted({x.name + ' (greedy)' * x.greedy for x in means}))}")
    has_sources = any(mean.metric.startswith("val-") for mean in means)
    table.add_column("data source" if has_sources else "metric", no_wrap=True)
    for name in columns:
        table.add_column(name, no_wrap=True, justify="right")
    for greedy in sorted({mean.greedy for mean in means}):
        sources = sorted({mean.source for mean in means if mean.greedy == greedy})
        for source in [*sources, *(["mean of sources"] if has_sources and len(sources) > 1 else [])]:
            names = sources if source == "mean of sources" else [source]
            own = [[x for x in found if x.greedy == greedy and x.source in names] for found in columns.values()]
            style = "bold" if source == "mean of sources" else None
            table.add_row(source + " (greedy)" * greedy, *map(_cell, own), style=style)
    return table


def _cell(means: Sequence[ValidationMean]) -> str:
    """Returns the average of the means, with half of its 95% interval if each has one: `0.871 ±0.020`."""
    if not means:
        return "-"
    halves = [mean.half_width for mean in means if mean.half_width is not None]
    interval = f" ±{math.hypot(*halves) / len(means):.3f}" if len(halves) == len(means) else ""
    return f"{sum(mean.value for mean in means) / len(means):.3f}{interval}"


def titled_table(title: str) -> Table:
    """Returns an empty table in the style of the reports."""
    return Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")


def shortened(text: str, limit: int = _TEXT_SHOWN) -> str:
    """Returns the text; if it exceeds `limit` characters, its beginning and its length."""
    return text if len(text) <= limit else f"{text[:limit]} ... ({len(text)} characters)"
