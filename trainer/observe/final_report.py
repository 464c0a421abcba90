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
# a file of the run folder with the step after which a callback ended the run
_EARLY_END = "ended_early"
_MEAN = re.compile(r"val-(?:core|aux)/(?P<source>.+?)/(?P<greedy>greedy/)?(?P<variable>[^/]+)/mean@(?P<n>\d+)")


@dataclass
class FitResult:
    """The result of a run.

    Attributes:
        before, after: Metrics of the first and of the last validation.
        samples: Samples of the last validation.
        checkpoint: The last checkpoint.
        stopped: True if the user ended the run before its last step.
        before_step: Step of the first validation, which is not 0 in a run that resumes another one.
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
    if not file.is_file():
        return None
    text = file.read_text(encoding="utf-8", errors="replace").strip()
    # isdigit alone also accepts characters such as a superscript 2, which int refuses
    is_number = text.isascii() and text.isdigit()
    return int(text) if is_number else None


def final_report(
    result: FitResult, run_dir: Path, pictures: Mapping[str, Path | None], commands: Mapping[str, str]
) -> RenderableType:
    """Returns the report of an ended run as arguments for `Console.print`.

    Args:
        result: The result of the run.
        run_dir: The run folder.
        pictures: Paths of pictures, by name.
        commands: Next commands, by their label.
    """
    parts: list[RenderableType] = []
    if result.after or result.before:
        parts += [Text(), validation_table(_columns_of_validations(result))]
    if result.samples:
        parts += [Text(), _samples_table(result.samples)]

    paths: dict[str, Path | None] = {
        "run folder": run_dir,
        "metrics": run_dir / "metrics.jsonl",
        **pictures,
        "results": run_dir / "results.json",
        "tensorboard": run_dir / "tensorboard",
        "checkpoint": result.checkpoint,
    }
    existing_paths = {}
    for name, path in paths.items():
        if path is not None and path.exists():
            existing_paths[name] = str(path)
    parts += _titled_lines("Where things are", existing_paths)
    parts += _titled_lines("What to do next", commands)
    return Group(*parts)


def _columns_of_validations(result: FitResult) -> dict[str, dict[str, float]]:
    """Returns the metrics of the first and of the last validation by the title of their column."""
    # one validation is both the first and the last
    if result.before == result.after:
        return {"mean": result.after}
    first_title = "before"
    if result.before_step:
        first_title = f"step {result.before_step}"
    return {first_title: result.before, "after": result.after}


def _samples_table(samples: Sequence[Sample]) -> Table:
    """Returns a table of samples, each text in one line and cut after `_TEXT_SHOWN` characters."""
    table = titled_table("Samples of the last validation")
    for title in ("data source", "prompt", "answer", "expected"):
        table.add_column(title, overflow="fold")
    table.add_column("score", overflow="fold", justify="right")

    for sample in samples:
        score = Text("failed", style="red")
        if sample.score is not None:
            score = Text(f"{sample.score:.2f}")
        table.add_row(
            _in_cell(sample.data_source),
            _in_cell(sample.input),
            _in_cell(sample.output),
            _in_cell(sample.gts),
            score,
        )
    return table


def _in_cell(text: str) -> str:
    """Returns a text in one line, with arrows for line breaks and without blank lines, and cut if it is long."""
    lines = []
    for line in text.split("\n"):
        line = line.strip()
        if line:
            lines.append(line)
    return shortened(" ↵ ".join(lines))


def _titled_lines(title: str, lines: Mapping[str, str]) -> list[Text]:
    """Returns a heading, followed by a line for each name with its text. Returns no heading without lines."""
    if not lines:
        return []
    texts = [Text(), Text(title, style="bold")]
    for name, text in lines.items():
        line = f"  {name:<12} {text}"
        # not cut off where the terminal is narrower: it may be copied
        texts.append(Text(line, no_wrap=True, overflow="ignore"))
    return texts


@dataclass(frozen=True)
class ValidationMean:
    """One mean of a validation.

    Attributes:
        name: Variable and number of samples, such as `acc mean@4`.
        metric: Logged name of the mean.
        interval: Logged name of half the width of its 95% interval.
        half_width: Value of that metric; None if it is absent.
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
    core_means = []
    sources_with_acc = set()
    for mean in all_validation_means(metrics):
        if mean.greedy or mean.metric.startswith("val-core/"):
            core_means.append(mean)
            if mean.variable == "acc":
                sources_with_acc.add(mean.source)

    means = []
    for mean in core_means:
        core_variable = "acc" if mean.source in sources_with_acc else "reward"
        if mean.variable == core_variable:
            means.append(mean)
    return means


def shown_means(metrics: Mapping[str, float]) -> list[ValidationMean]:
    """Returns the means that tables and lines show.

    These are those of `validation_means`. Training without a rollout has none, and validates metrics val/<name>, DPO's
    accuracy and margin among them. Each becomes a data source of the name <name>.
    """
    means = validation_means(metrics)
    if means:
        return means
    for metric, value in metrics.items():
        if re.fullmatch("val/([^/]+|rewards/(accuracies|margins))", metric):
            name = metric.removeprefix("val/")
            mean = ValidationMean(
                source=name,
                greedy=False,
                variable=name,
                name="mean",
                value=value,
                metric=metric,
                interval="",
            )
            means.append(mean)
    return means


def all_validation_means(metrics: Mapping[str, float]) -> list[ValidationMean]:
    """Returns the means of all variables of each data source, sampled and greedy."""
    means = []
    for metric, value in metrics.items():
        match = _MEAN.fullmatch(metric)
        if match is None:
            continue
        # intervals are never among the headline metrics
        interval = metric.replace("val-core/", "val-aux/", 1) + INTERVAL
        variable = match["variable"]
        mean = ValidationMean(
            source=match["source"],
            greedy=bool(match["greedy"]),
            variable=variable,
            name=f"{variable} mean@{match['n']}",
            value=value,
            metric=metric,
            interval=interval,
            half_width=metrics.get(interval),
        )
        means.append(mean)
    return means


def validation_line(metrics: Mapping[str, float]) -> str:
    """Returns the means of `shown_means` in one line: `sort 0.64 (greedy 0.90), add 0.53 (greedy 0.71)`."""
    means = shown_means(metrics)
    text_by_source = {}
    for mean in means:
        if not mean.greedy:
            text_by_source[mean.source] = f"{mean.source} {mean.value:.3f}"
    # a validation with greedy answers only has no text yet
    for mean in means:
        if mean.greedy:
            text = text_by_source.get(mean.source, mean.source)
            text_by_source[mean.source] = f"{text} (greedy {mean.value:.3f})"
    return ", ".join(text_by_source.values())


def validation_table(evaluations: Mapping[str, Mapping[str, float]]) -> Table:
    """Returns a table of validation means by data source.

    Args:
        evaluations: Metrics of each column, by the title of the column.
    """
    columns = [shown_means(metrics) for metrics in evaluations.values()]
    variables: set[str] = set()
    sources_by_kind: dict[bool, set[str]] = {}
    has_sources = False
    for means in columns:
        for mean in means:
            variables.add(mean.name + _suffix(mean.greedy))
            sources = sources_by_kind.setdefault(mean.greedy, set())
            sources.add(mean.source)
            # training without a rollout validates metrics such as val/loss, which have no data source
            has_sources = has_sources or mean.metric.startswith("val-")

    table = titled_table(f"Validation: {', '.join(sorted(variables))}")
    table.add_column("data source" if has_sources else "metric", no_wrap=True)
    for title in evaluations:
        table.add_column(title, no_wrap=True, justify="right")

    for greedy, sources in sorted(sources_by_kind.items()):
        suffix = _suffix(greedy)
        for source in sorted(sources):
            cells = _cells(columns, greedy, source)
            table.add_row(source + suffix, *cells)
        if has_sources and len(sources) > 1:
            cells = _cells(columns, greedy)
            table.add_row("mean of sources" + suffix, *cells, style="bold")
    return table


def _suffix(greedy: bool) -> str:
    return " (greedy)" if greedy else ""


def _cells(columns: Sequence[Sequence[ValidationMean]], greedy: bool, source: str | None = None) -> list[str]:
    """Returns the cells of a row: for each column the average of its greedy or sampled means, of one source or all."""
    cells = []
    for means in columns:
        averaged = []
        for mean in means:
            if mean.greedy == greedy and source in (None, mean.source):
                averaged.append(mean)
        cells.append(_cell(averaged))
    return cells


def _cell(means: Sequence[ValidationMean]) -> str:
    """Returns the average of the means, with half of its 95% interval if each has one: `0.871 ±0.020`."""
    if not means:
        return "-"
    count = len(means)
    average = sum(mean.value for mean in means) / count
    half_widths = [mean.half_width for mean in means if mean.half_width is not None]
    # a source with a single prompt has no interval, and then the average has none
    if len(half_widths) < count:
        return f"{average:.3f}"
    # the errors of the sources are independent
    half_width = math.hypot(*half_widths) / count
    return f"{average:.3f} ±{half_width:.3f}"


def titled_table(title: str) -> Table:
    """Returns an empty table in the style of the reports."""
    return Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")


def shortened(text: str, limit: int = _TEXT_SHOWN) -> str:
    """Returns the text; if it exceeds `limit` characters, its beginning and its length."""
    if len(text) <= limit:
        return text
    return f"{text[:limit]} ... ({len(text)} characters)"
