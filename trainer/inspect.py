"""`python -m trainer.inspect RUN [--best | --worst] [--grep TEXT] [--follow]`: shows a run in the terminal.

RUN is the folder of a running, killed or finished run of any training command. By default the command shows an
overview: state and time, the first and last validation, curves, time by stage, and findings on the health of the run.
With --best, --worst or --grep it prints --count matching samples instead; episodes of programs have a tree of requests.
--follow redraws the overview until the run ends or the user presses Ctrl-C. `python -m trainer.report` shows the same
and more in a browser.
"""

import argparse
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from trainer.cli import command
from trainer.observe.console import Terminal, format_seconds
from trainer.observe.final_report import shortened, validation_means, validation_table
from trainer.observe.findings import findings_table
from trainer.observe.health import findings_of
from trainer.observe.health_checks import number
from trainer.observe.page_charts import panels_of
from trainer.observe.recorded_answers import RecordedAnswer, RecordedRequest, chosen
from trainer.observe.run_data import RecordedRun, read_run, run_titles, stage_seconds
from verl_lite.errors import printable

EVERY_S = 2.0
_BARS = "▁▂▃▄▅▆▇█"
_STATE_STYLES = {"running": "bold cyan", "finished": "bold green", "ended early": "bold green"}
_MOST_CHARACTERS = 4000
_MOST_REQUESTS, _REQUEST_CHARACTERS = 40, 240


@command
def main(argv: list[str]) -> int:
    """Runs the command and returns its exit status."""
    options = _parser().parse_args(argv)
    folder = options.run.expanduser()
    if folder.is_file():
        folder = folder.parent
    run = read_run(folder)
    console = Terminal()

    order = ""
    if options.best:
        order = "best"
    elif options.worst:
        order = "worst"
    if order or options.grep:
        answers, total = chosen(folder, order, options.grep or "", options.count)
        console.print(*map(_answer_panel, answers), f"{len(answers)} of {total:,} matching samples")
    elif options.follow:
        _follow(run, console)
    else:
        console.print(overview(run, console.width))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m trainer.inspect", description="Shows a run in the terminal.")
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--best", action="store_true", help="show the samples with the highest scores, newest first")
    mode.add_argument("--worst", action="store_true", help="show failed samples and those with the lowest scores")
    mode.add_argument("--follow", action="store_true", help="redraw the overview while the run continues")
    parser.add_argument("--grep", metavar="TEXT", help="samples with this text in prompt, answer, ground truth or uid")
    parser.add_argument("--count", type=int, default=10, metavar="N", help="number of samples to show (10)")
    return parser


def _follow(run: RecordedRun, console: Terminal) -> None:
    """Redraws the overview until the run ends. Ctrl-C ends this command, not the run."""
    with suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        live.update(overview(run, console.width), refresh=True)
        while run.is_running:
            time.sleep(EVERY_S)
            run = read_run(run.folder)
            live.update(overview(run, console.width), refresh=True)


def overview(run: RecordedRun, width: int) -> RenderableType:
    """Returns the overview of a run, laid out for a terminal that is `width` characters wide."""
    parts: list[RenderableType] = [_heading(run)]
    validated_steps = [step for step, metrics in run.steps.items() if validation_means(metrics)]
    if validated_steps:
        first = min(validated_steps)
        last = max(validated_steps)
        parts.append(validation_table({f"step {first}": run.steps[first], f"step {last}": run.steps[last]}))
    parts += [_curves(run, width), _stage_times(run)]
    with_space_below = [Padding(part, (0, 0, 1, 0)) for part in parts]
    return Group(*with_space_below, findings_table(findings_of(run)))


def _heading(run: RecordedRun) -> Text:
    style = _STATE_STYLES.get(run.state, "bold yellow")
    total_steps_text = "" if run.total_steps is None else f" of {run.total_steps}"
    # the clock of another machine may be ahead
    seconds_ago = max(0.0, time.time() - run.modified)
    facts = f"step {run.last_step}{total_steps_text}, {format_seconds(run.seconds())} in steps, "
    facts += f"last written {format_seconds(seconds_ago)} ago\n{run.folder}"
    return Text.assemble((run_titles([run])[0], "bold"), "  ", (run.state, style), "  ", facts)


def _curves(run: RecordedRun, width: int) -> Table:
    """Returns the curves of the metrics that have a chart on the report page, with their first and last values."""
    table = _table("Curves")
    series = run.series()
    for panel in panels_of(series):
        for name in panel.labels:
            values = [value for _, value in series.get(name, ())]
            if len(values) > 1:
                curve = Text(sparkline(values, max(10, min(60, width - 62))), style="cyan")
                table.add_row(name, number(values[0]), curve, Text(number(values[-1]), style="bold"))
    return table


def _stage_times(run: RecordedRun) -> Table:
    """Returns the mean time of each stage of a step and its share, the longest first."""
    table = _table("Time")
    _, bars = stage_seconds(run.steps, 1)
    # one bar of the chart stands for the whole run
    seconds_by_stage = {stage: seconds_of_bars[0] for stage, seconds_of_bars in bars.items()}
    total = sum(seconds_by_stage.values())
    for stage, seconds in sorted(seconds_by_stage.items(), key=lambda item: -item[1]):
        bar = Text("█" * round(40 * seconds / total), style="cyan")
        table.add_row(stage, f"{seconds:.3g} s", f"{seconds / total:.0%}", bar)
    return table


def sparkline(values: Sequence[float], width: int) -> str:
    """Draws a series as at most `width` block characters, each for the mean of its share of the values."""
    count = min(width, len(values))
    edges = [round(index * len(values) / count) for index in range(count + 1)]
    means = []
    for start, stop in zip(edges, edges[1:], strict=False):
        means.append(sum(values[start:stop]) / (stop - start))

    low = min(means)
    # of a constant series: any height, because all values are at the bottom
    height = max(means) - low or 1.0
    curve = ""
    for mean in means:
        level = int((mean - low) / height * len(_BARS))
        # the largest value would be one level above the last bar
        curve += _BARS[min(level, len(_BARS) - 1)]
    return curve


def _table(title: str) -> Table:
    return Table(box=None, padding=(0, 1), title=title, show_header=False, title_justify="left", title_style="bold")


def _answer_panel(answer: RecordedAnswer) -> Panel:
    if answer.score is not None:
        score = number(answer.score)
    elif answer.timed_out:
        score = "timed out"
    else:
        score = "failed"
    heading = f"step {answer.step}, score {score}, {answer.response_length} tokens, {answer.finish_reason}"
    reward_parts = []
    for name, value in answer.parts.items():
        reward_parts.append(f"{name} {number(value) if isinstance(value, float) else value}")

    named_texts = [
        *answer.prompt,
        ("images", ", ".join(answer.images)),
        ("ground truth", answer.gts),
        (heading, answer.output),
        ("reward", ", ".join(reward_parts)),
    ]
    contents: list[RenderableType] = []
    for name, text in named_texts:
        if text:
            contents.append(Text.assemble((f"{name}: ", "bold"), shortened(text, _MOST_CHARACTERS)))
    if answer.requests:
        contents.append(_request_tree(answer, score))
    return Panel(Group(*contents), title=Text(shortened(f"{answer.kind}, {answer.uid}")), title_align="left")


def _request_tree(answer: RecordedAnswer, score: str) -> Tree:
    """Returns the first requests of an episode as a tree, with the beginnings of their messages."""
    tree = Tree(Text(f"{answer.total_requests:,} requests, reward {score}", style="bold"))
    requests = answer.requests[:_MOST_REQUESTS]
    # the path to the newest request: the tree, then one request of each depth
    path = [tree]
    for request in requests:
        del path[request.depth + 1 :]
        node = path[-1].add(_request_label(request))
        path.append(node)
    num_more = answer.total_requests - len(requests)
    if num_more:
        tree.add(f"{num_more:,} more requests")
    return tree


def _request_label(request: RecordedRequest) -> Text:
    # escaped here, because rich would measure the lines of the tree before Terminal escapes them
    start = f"#{request.number} {request.start}".strip()
    label = Text.assemble((start, "bold"), f" {printable(request.facts)}")
    if request.discarded:
        label.append(f", discarded: {printable(request.discarded)}", "yellow")
    for role, text in request.messages:
        line = printable(" ".join(text.split()))
        if len(line) > _REQUEST_CHARACTERS:
            line = f"{line[:_REQUEST_CHARACTERS]} ..."
        label.append(f"\n{printable(role)}: ", "bold").append(line, "default")
    return label


if __name__ == "__main__":
    raise SystemExit(main())
