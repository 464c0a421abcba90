"""The end of a run on one screen: validation before and after, samples, where things are, and what to type next."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trainer.evaluate.metrics import INTERVAL, MEAN_OF_SOURCES
from trainer.evaluate.sample import Sample

_TEXT_SHOWN = 300
_MEAN = re.compile(r"val-(?P<rank>core|aux)/(?P<source>.+?)/(?P<greedy>greedy/)?(?P<variable>[^/]+)/mean@(?P<n>\d+)")


class Outcome(Protocol):
    """What a run left: validation metrics before and after, samples of the last validation, the last checkpoint."""

    before: dict[str, float]
    after: dict[str, float]
    samples: list[Sample]
    checkpoint: Path | None


def final_report(
    result: Outcome, run_dir: Path, pictures: Mapping[str, Path | None], commands: Mapping[str, str]
) -> RenderableType:
    """Everything to show when a run has ended, for `Console.print`.

    pictures: by name. commands: what to do next with a checkpoint, by the word for it.
    """
    parts: list[RenderableType] = [Text()]
    if result.after or result.before:
        parts += [validation_table(result.before, result.after), Text()]
    if result.samples:
        parts += [samples_table(result.samples), Text()]
    return Group(*parts, *_places(result, run_dir, pictures, commands))


@dataclass(frozen=True)
class ValidationMean:
    """One number of a validation. metric: as it is logged; interval: the metric of half of its 95% interval, whose
    value is half_width, None where there is none."""

    source: str
    greedy: bool
    variable: str
    samples: int
    value: float
    metric: str
    half_width: float | None = None

    @property
    def name(self) -> str:
        """The measure and over how many samples, `acc mean@4`."""
        return f"{self.variable} mean@{self.samples}"

    @property
    def interval(self) -> str:
        return _interval_of(self.metric)


def validation_means(metrics: Mapping[str, float]) -> list[ValidationMean]:
    """The core measure of each data source, sampled (val-core/{source}/{measure}/mean@N) and greedy
    (val-aux/{source}/greedy/...), where `acc` is the core measure if there is one, else `reward`."""
    found = [mean for mean in all_validation_means(metrics) if mean.greedy or mean.metric.startswith("val-core/")]
    with_acc = {mean.source for mean in found if mean.variable == "acc"}
    return [mean for mean in found if mean.variable == ("acc" if mean.source in with_acc else "reward")]


def all_validation_means(metrics: Mapping[str, float]) -> list[ValidationMean]:
    """The means of every measure of each data source, sampled and greedy."""
    matches = [(match, value) for key, value in metrics.items() if (match := _MEAN.fullmatch(key)) is not None]
    return [
        ValidationMean(
            match["source"],
            bool(match["greedy"]),
            match["variable"],
            int(match["n"]),
            value,
            match.string,
            metrics.get(_interval_of(match.string)),
        )
        for match, value in matches
        if match["source"] != MEAN_OF_SOURCES
    ]


def _interval_of(metric: str) -> str:
    return metric.replace("val-core/", "val-aux/", 1) + INTERVAL


def validation_line(metrics: Mapping[str, float]) -> str:
    """The same numbers in one line, `sort 0.64 (greedy 0.90), add 0.53 (greedy 0.71)`; empty if there are none."""
    means = validation_means(metrics)
    shown: dict[str, str] = {mean.source: f"{mean.source} {mean.value:.3f}" for mean in means if not mean.greedy}
    for mean in means:
        if mean.greedy:
            shown[mean.source] = f"{shown.get(mean.source, mean.source)} (greedy {mean.value:.3f})"
    return ", ".join(shown.values())


def validation_table(before: Mapping[str, float], after: Mapping[str, float]) -> Table:
    """Validation by data source, before and after training; one column where there was no training between."""
    moments = [("before", validation_means(before)), ("after", validation_means(after))]
    if dict(before) == dict(after):
        moments = [("", moments[0][1])]
    means = [mean for _, found in moments for mean in found]
    ways = [greedy for greedy in (False, True) if any(mean.greedy == greedy for mean in means)]
    named = [sorted({mean.name for mean in means if mean.greedy == greedy}) for greedy in ways]
    titles = [", ".join(names) + " (greedy)" * greedy for greedy, names in zip(ways, named, strict=True)]
    table = titled_table("Validation: " + "; ".join(titles))
    table.add_column("data source", no_wrap=True)
    for greedy in ways:
        for moment, _ in moments:
            table.add_column(f"{'greedy ' * greedy}{moment}".strip() or "mean", justify="right")
    sources = sorted({mean.source for mean in means})
    for source in [*sources, *([None] if len(sources) > 1 else [])]:
        cells = []
        for greedy in ways:
            for _, found in moments:
                cells.append(_cell([mean for mean in found if mean.greedy == greedy and source in (mean.source, None)]))
        table.add_row(source or "mean of sources", *cells, style="bold" if source is None else None)
    return table


def steps_table(evaluations: Sequence[tuple[str, Mapping[str, float]]]) -> Table:
    """Several evaluations, a line each; evaluations: name and numbers, in the order of the lines."""
    means = [(name, validation_means(metrics)) for name, metrics in evaluations]
    columns = sorted({(mean.greedy, mean.source) for _, found in means for mean in found})
    named = sorted({mean.name for _, found in means for mean in found})
    table = titled_table(f"Evaluations: {', '.join(named)}")
    table.add_column("checkpoint", no_wrap=True)
    for greedy, source in columns:
        table.add_column(f"{'greedy ' * greedy}{source}", justify="right")
    for name, found in means:
        table.add_row(name, *(_cell([x for x in found if (x.greedy, x.source) == column]) for column in columns))
    return table


def _cell(means: Sequence[ValidationMean]) -> str:
    """The mean of these numbers, and of independent ones half of its 95% interval: `0.871 ±0.020`."""
    if not means:
        return "-"
    text = f"{sum(mean.value for mean in means) / len(means):.3f}"
    halves = [mean.half_width for mean in means if mean.half_width is not None]
    return f"{text} ±{math.hypot(*halves) / len(means):.3f}" if len(halves) == len(means) else text


def samples_table(samples: Sequence[Sample]) -> Table:
    """Prompts, the policy's answers and their scores."""
    table = titled_table("Samples of the last validation")
    table.add_column("data source", no_wrap=True)
    for name in ("prompt", "answer", "expected"):
        table.add_column(name, overflow="fold")
    table.add_column("score", justify="right")
    for sample in samples:
        score = Text("failed", style="red") if sample.score is None else Text(f"{sample.score:.2f}")
        table.add_row(
            *(one_line(text) for text in (sample.data_source, sample.input, sample.output, sample.gts)), score
        )
    return table


def titled_table(title: str) -> Table:
    """An empty table as the reports of a run have it."""
    return Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")


def printable(text: str, limit: int | None = _TEXT_SHOWN) -> Text:
    """Text of a model as it may go to a terminal: no control characters, and not too long. None = however long."""
    shown = "".join(
        letter if letter.isprintable() or letter == "\n" else "\N{REPLACEMENT CHARACTER}" for letter in text
    )
    return Text(shown if limit is None or len(shown) <= limit else f"{shown[:limit]} ... ({len(shown)} characters)")


def one_line(text: str, limit: int = _TEXT_SHOWN) -> Text:
    """The same in a table, whose row it does not make higher than its length does: line ends are shown as a sign."""
    return printable(re.sub(r"\s*\n\s*", " \N{DOWNWARDS ARROW WITH CORNER LEFTWARDS} ", text.strip()), limit)


def _places(
    result: Outcome, run_dir: Path, pictures: Mapping[str, Path | None], commands: Mapping[str, str]
) -> list[Text]:
    places = {"run folder": run_dir, "metrics": run_dir / "metrics.jsonl", **pictures}
    places |= {"results": run_dir / "results.json", "tensorboard": run_dir / "tensorboard"}
    places["checkpoint"] = result.checkpoint
    lines = [Text("Where things are", style="bold")]
    lines += [_whole(f"  {name:<12} {path}") for name, path in places.items() if path and path.exists()]
    if result.checkpoint is not None:
        lines += [Text(), Text("What to do next", style="bold")]
        lines += [_whole(f"  {word:<12} {command}") for word, command in commands.items()]
    return lines


def _whole(text: str) -> Text:
    """A line that is not cut off where the terminal is narrower: it may be copied."""
    return Text(text, no_wrap=True, overflow="ignore")
