"""A run as a terminal shows it: headline, sparklines, time by stage, findings, samples; for `rich`.

What models wrote is printed without control characters (`trainer.final_report.printable`).
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from trainer.console import format_seconds
from trainer.final_report import one_line, printable, validation_means, validation_table
from trainer.reports.health import BAD, LOOK, OK, Finding, Points, judge, number
from trainer.reports.run_data import METRICS, Run, read_failure, read_run
from trainer.reports.run_samples import Answer
from trainer.reports.sample_choice import Changed, Choice, changed, chosen

CURVES = (
    "critic/score/mean",
    "actor/face_score",
    "train/loss",
    "env/success",
    "response_length/mean",
    "actor/entropy",
    "actor/kl_loss",
    "actor/pg_clipfrac",
    "actor/grad_norm",
    "train/grad_norm",
    "frac_reward_zero_std",
    "training/rollout_probs_diff_mean",
    "perf/throughput",
    "actor/perf/host_rss_gb",
)
_BARS = "▁▂▃▄▅▆▇█"
_STYLES = {BAD: "bold red", LOOK: "yellow", OK: "green"}
_STAGE = "timing_s/"
_OUTSIDE = ("testing", "save_checkpoint")
_WIDE, _BESIDE, _BESIDE_NARROW = 100, 84, 62  # columns that a line of the curves takes beside its course
_TEXT = 4000
_TEXT_OF_MANY = 160


def overview(run: Run, width: int, samples: int) -> RenderableType:
    """The whole run. width: of the terminal. samples: how many best, worst and changed answers; 0 = none."""
    options = {key: value.value for key, value in run.config.items()}
    parts: list[RenderableType] = [headline(run)]
    if (failure := read_failure(run)) is not None:
        told = Text.assemble(
            (f"ended with an error in step {failure.step}: ", "bold red"), printable(failure.message, _TEXT)
        )
        parts.append(told.append(f"\nrun that step again under a debugger: {failure.replay}", "not bold default"))
    parts += [part for part in (_validation(run), curves(run, width), stages(run)) if part is not None]
    parts += [findings_shown(judge(run.all_series(), options))]
    if samples:
        parts += _some_samples(run, samples)
    return Group(*(Padding(part, (0, 0, 1, 0)) for part in parts))


def headline(run: Run) -> Text:
    """Name, state, steps and time."""
    of = f" of {run.total_steps}" if run.total_steps is not None else ""
    facts = [f"step {run.last_step}{of}"]
    if seconds := run.seconds():
        facts.append(f"{format_seconds(seconds)} in steps")
    ago = max(0.0, time.time() - run.modified)
    facts.append(f"last written {format_seconds(ago)} ago")
    style = {"running": "bold cyan", "finished": "bold green", "stopped": "bold yellow"}.get(run.state, "bold")
    return Text.assemble((run.name, "bold"), "  ", (run.state, style), "  ", ", ".join(facts), f"\n{run.folder}")


def curves(run: Run, width: int) -> Table | None:
    """A line for each of the chief metrics: first value, course, last value."""
    found = [(name, run.series(name)) for name in CURVES]
    found = [(name, points) for name, points in found if len(points) > 1]
    if not found:
        return None
    table = Table(box=None, padding=(0, 1), title="Curves", title_justify="left", title_style="bold", show_header=False)
    for name, points in found:
        values = [value for _, value in points]
        course = sparkline(points, max(10, min(60, width - (_BESIDE if width >= _WIDE else _BESIDE_NARROW))))
        span = f"{number(min(values))} to {number(max(values))}" if width >= _WIDE else ""
        table.add_row(name, number(values[0]), Text(course, style="cyan"), Text(number(values[-1]), style="bold"), span)
    return table


def sparkline(points: Points, width: int) -> str:
    """The course of a series as bars, the mean of the steps that fall on each."""
    values = [value for _, value in points]
    count = min(width, len(values))
    edges = [round(place * len(values) / count) for place in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in zip(edges, edges[1:], strict=False)]
    low, high = min(means), max(means)
    if high == low:
        return _BARS[0] * count
    return "".join(_BARS[min(len(_BARS) - 1, int((mean - low) / (high - low) * len(_BARS)))] for mean in means)


def stages(run: Run) -> Table | None:
    """Where the time went, over the whole run."""
    names = [name for name in run.names if name.startswith(_STAGE) and name != f"{_STAGE}step"]
    seconds = {name.removeprefix(_STAGE): sum(value for _, value in run.series(name)) for name in names}
    if not seconds:
        return None
    inside = sum(spent for name, spent in seconds.items() if name not in _OUTSIDE)
    steps = run.series(f"{_STAGE}step")
    seconds["other"] = max(0.0, sum(value for _, value in steps) - inside)
    whole = sum(seconds.values()) or 1.0
    table = Table(box=None, padding=(0, 1), title="Time", title_justify="left", title_style="bold", show_header=False)
    for name, spent in sorted(seconds.items(), key=lambda item: -item[1]):
        if spent >= 0.005 * whole:
            bar = "█" * round(40 * spent / whole)
            table.add_row(name, format_seconds(spent), Text(f"{spent / whole:.0%}", justify="right"), Text(bar, "cyan"))
    return table


def findings_shown(findings: Sequence[Finding], most: int | None = None, run: str = "RUN") -> RenderableType:
    """What is not fine, the worst first, and how many checks are. most: how many are shown at most. run: where the
    others are to be seen."""
    found = [finding for finding in findings if finding.grade != OK]
    table = Table.grid(padding=(0, 1))
    for finding in found[:most]:
        told = Text.assemble(printable(finding.text, _TEXT), "\n", (f"likely: {finding.cause}", "dim"))
        told.append(f"\nto do:  {finding.advice}", "dim")
        table.add_row(Text(finding.grade, _STYLES[finding.grade]), told)
    if len(found[:most]) < len(found):
        table.add_row("", Text(f"and {len(found[most:])} more: python -m trainer.inspect {shlex.quote(run)}", "dim"))
    table.add_row(Text(OK, _STYLES[OK]), f"{len(findings) - len(found)} checks are fine")
    return Group(Text("Findings", style="bold"), table)


def closing_findings(run_dir: Path) -> RenderableType | None:
    """The worst two findings on a run that has ended; None where there is nothing to say, or no metrics were kept."""
    if not (run_dir / METRICS).is_file():
        return None
    run = read_run(run_dir)
    findings = judge(run.all_series(), {key: value.value for key, value in run.config.items()})
    return findings_shown(findings, 2, str(run_dir)) if any(finding.grade != OK for finding in findings) else None


def samples_shown(answers: Sequence[Answer], total: int) -> RenderableType:
    """Answers as they were written."""
    if not answers:
        return Text("no samples fit; a run keeps them unless trainer.samples_max_mb=0")
    return Group(*(_panel(answer) for answer in answers), Text(f"{len(answers)} of {total:,} that fit", style="dim"))


def changed_samples(pairs: Sequence[Changed]) -> RenderableType:
    """Prompts with an answer before and after."""
    if not pairs:
        return Text("no prompt was answered at several steps with another score")
    return Group(*(_changed_panel(pair) for pair in pairs))


# -------------------------------------------------------------------------------------------------------- parts


def _validation(run: Run) -> Table | None:
    validated = [metrics for metrics in run.steps.values() if validation_means(metrics)]
    return validation_table(validated[0], validated[-1]) if validated else None


def _some_samples(run: Run, count: int) -> list[RenderableType]:
    best, total = chosen(run.folder, Choice(order="best", is_mixed=True), count)
    if not total:
        return [Text("No samples are kept in this run folder.", style="dim")]
    worst, _ = chosen(run.folder, Choice(order="worst", is_mixed=True), count)
    table = Table(title=f"Samples, {total:,} in all", box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    for name in ("", "step", "prompt", "answer", "score"):
        table.add_column(name, overflow="fold")
    for word, answers in (("best", best), ("worst", worst)):
        for answer in answers:
            table.add_row(word, *_brief(answer))
    for pair in changed(run.folder, Choice(), count):
        table.add_row("before", *_brief(pair.first))
        table.add_row("after", *_brief(pair.last))
    hint = Text("more: --best, --worst, --changed, --step N, --grep TEXT, --uid UID", style="dim")
    return [Group(table, hint)]


def _brief(answer: Answer) -> tuple[RenderableType, ...]:
    return (
        f"{answer.step} {answer.kind}",
        one_line(answer.last_message, _TEXT_OF_MANY),
        one_line(answer.output, _TEXT_OF_MANY),
        _score(answer),
    )


def _score(answer: Answer) -> Text:
    if answer.score is None:
        return Text("late" if answer.timed_out else "failed", style="red")
    return Text(number(answer.score))


def _panel(answer: Answer) -> Panel:
    parts = [Text.assemble((f"{role}: ", "bold"), printable(text, _TEXT)) for role, text in answer.prompt]
    parts.append(Text.assemble(("answer: ", "bold"), printable(answer.output, _TEXT)))
    if answer.gts:
        parts.append(Text.assemble(("ground truth: ", "bold"), printable(answer.gts)))
    if answer.parts:
        told = ", ".join(f"{name} {number(x) if isinstance(x, float) else x}" for name, x in answer.parts.items())
        parts.append(Text.assemble(("reward: ", "bold"), printable(told)))
    return Panel(Group(*parts), title=printable(_tell(answer)), title_align="left", box=box.ROUNDED)


def _tell(answer: Answer) -> str:
    return (
        f"{answer.kind}, step {answer.step}, {answer.uid}, answer {answer.sample + 1}: score {_score(answer).plain}, "
        f"{answer.response_length} tokens, {answer.finish_reason}"
    )


def _changed_panel(pair: Changed) -> Panel:
    parts = [Text.assemble(("prompt: ", "bold"), printable(pair.first.last_message, _TEXT))]
    if pair.first.gts:
        parts.append(Text.assemble(("ground truth: ", "bold"), printable(pair.first.gts)))
    for answer in (pair.first, pair.last):
        head = f"step {answer.step}, score {_score(answer).plain}: "
        parts.append(Text.assemble((head, "bold"), printable(answer.output, _TEXT)))
    title = f"{pair.change:+.3g}  {pair.first.kind}, {pair.first.uid}"
    return Panel(Group(*parts), title=printable(title), title_align="left", box=box.ROUNDED)
