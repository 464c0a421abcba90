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
from functools import partial
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
"""Seconds between two drawings of the overview with --follow."""
_BARS = "▁▂▃▄▅▆▇█"
_STATE_STYLES = {"running": "bold cyan", "finished": "bold green", "ended early": "bold green"}
_MOST_CHARACTERS = 4000
"""Characters of each text of a sample."""
_MOST_REQUESTS = 40
"""Requests of an episode."""
_REQUEST_CHARACTERS = 240
"""Characters of each message of a request."""


@command
def main(argv: list[str]) -> int:
    """Runs the command and returns its exit status."""
    options = _parser().parse_args(argv)
    folder = options.run.expanduser()
    # the file metrics.jsonl names its run, too
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
        for answer in answers:
            console.print(_answer_panel(answer))
        console.print(f"{len(answers)} of {total:,} matching samples")
    elif options.follow:
        _follow(run, console)
    else:
        console.print(overview(run, console.width))
    return 0


def _parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(prog="python -m trainer.inspect", description="Shows a run in the terminal.")
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run")
    mode = parser.add_mutually_exclusive_group()
    add_flag = partial(mode.add_argument, action="store_true")
    add_flag("--best", help="show the samples with the highest scores, newest first")
    add_flag("--worst", help="show failed samples and those with the lowest scores")
    add_flag("--follow", help="redraw the overview while the run continues")
    parser.add_argument("--grep", metavar="TEXT", help="samples with this text in prompt, answer, ground truth or uid")
    parser.add_argument("--count", type=int, default=10, metavar="N", help="number of samples to show (10)")
    return parser


def _follow(run: RecordedRun, console: Terminal) -> None:
    """Redraws the overview until the run ends. Ctrl-C ends this command, not the run."""
    # cropped, because rich cannot redraw lines that have left the terminal
    screen = Live(console=console, auto_refresh=False, vertical_overflow="crop")
    with suppress(KeyboardInterrupt), screen as live:
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
        compared = {}
        for step in (min(validated_steps), max(validated_steps)):
            compared[f"step {step}"] = run.steps[step]
        parts.append(validation_table(compared))
    parts.append(_curves(run, width))
    parts.append(_stage_times(run))

    with_space_below = [Padding(part, (0, 0, 1, 0)) for part in parts]
    findings = findings_table(findings_of(run))
    return Group(*with_space_below, findings)


def _heading(run: RecordedRun) -> Text:
    """Returns the title of a run, its state, its step and its times."""
    [title] = run_titles([run])
    style = _STATE_STYLES.get(run.state, "bold yellow")
    facts = f"step {run.last_step}"
    if run.total_steps is not None:
        facts += f" of {run.total_steps}"
    # the clock of another machine may be ahead
    seconds_ago = max(0.0, time.time() - run.modified)
    facts += f", {format_seconds(run.seconds())} in steps, last written {format_seconds(seconds_ago)} ago"
    facts += f"\n{run.folder}"
    styled_title = (title, "bold")
    styled_state = (run.state, style)
    return Text.assemble(styled_title, "  ", styled_state, "  ", facts)


def _curves(run: RecordedRun, width: int) -> Table:
    """Returns the curves of the metrics that have a chart on the report page, with their first and last values."""
    table = _table("Curves")
    # the other columns of the table take the rest
    curve_width = max(10, min(60, width - 62))
    series = run.series()
    for panel in panels_of(series):
        for name in panel.labels:
            values = [value for _, value in series.get(name, ())]
            if len(values) > 1:
                first_value = number(values[0])
                last_value = Text(number(values[-1]), style="bold")
                curve = Text(sparkline(values, curve_width), style="cyan")
                table.add_row(name, first_value, curve, last_value)
    return table


def _stage_times(run: RecordedRun) -> Table:
    """Returns the mean time of each stage of a step and its share, the longest first."""
    table = _table("Time")
    _, bars = stage_seconds(run.steps, 1)
    # one bar of the chart stands for the whole run
    seconds_by_stage = {stage: seconds_of_bars[0] for stage, seconds_of_bars in bars.items()}
    total = sum(seconds_by_stage.values())
    longest_first = sorted(seconds_by_stage, key=lambda stage: -seconds_by_stage[stage])
    for stage in longest_first:
        seconds = seconds_by_stage[stage]
        bar_width = round(40 * seconds / total)
        bar = Text("█" * bar_width, style="cyan")
        table.add_row(stage, f"{seconds:.3g} s", f"{seconds / total:.0%}", bar)
    return table


def sparkline(values: Sequence[float], width: int) -> str:
    """Draws a series as at most `width` block characters, each for the mean of its share of the values."""
    count = min(width, len(values))
    means = []
    for index in range(count):
        start = round(index * len(values) / count)
        stop = round((index + 1) * len(values) / count)
        means.append(sum(values[start:stop]) / (stop - start))

    low = min(means)
    # of a constant series: any height, because all values are at the bottom
    height = max(means) - low or 1.0
    highest_level = len(_BARS) - 1
    curve = ""
    for mean in means:
        level = int((mean - low) / height * len(_BARS))
        # the largest value would be one level above the last bar
        curve += _BARS[min(level, highest_level)]
    return curve


def _table(title: str) -> Table:
    """Returns a table with this title and without lines."""
    return Table(
        box=None,
        padding=(0, 1),
        title=title,
        show_header=False,
        title_justify="left",
        title_style="bold",
    )


def _answer_panel(answer: RecordedAnswer) -> Panel:
    """Returns a sample: its prompt, answer, score and reward, and the requests of an episode."""
    if answer.score is not None:
        score = number(answer.score)
    elif answer.timed_out:
        score = "timed out"
    else:
        score = "failed"
    heading = f"step {answer.step}, score {score}, {answer.response_length} tokens, {answer.finish_reason}"
    reward_parts = []
    for name, value in answer.parts.items():
        value_text = number(value) if isinstance(value, float) else value
        reward_parts.append(f"{name} {value_text}")

    named_texts = [
        *answer.prompt,
        ("images", ", ".join(answer.images)),
        ("ground truth", answer.gts),
        (heading, answer.output),
        ("reward", ", ".join(reward_parts)),
    ]
    contents: list[RenderableType] = []
    for name, text in named_texts:
        # a sample may have no images, no ground truth and no parts of the reward
        if text:
            styled_name = (f"{name}: ", "bold")
            contents.append(Text.assemble(styled_name, shortened(text, _MOST_CHARACTERS)))
    if answer.requests:
        contents.append(_request_tree(answer, score))
    title = shortened(f"{answer.kind}, {answer.uid}")
    return Panel(Group(*contents), title=Text(title), title_align="left")


def _request_tree(answer: RecordedAnswer, score: str) -> Tree:
    """Returns the first requests of an episode as a tree, with the beginnings of their messages."""
    tree = Tree(Text(f"{answer.total_requests:,} requests, reward {score}", style="bold"))
    requests = answer.requests[:_MOST_REQUESTS]
    # the path to the newest request: the tree, then one request of each depth
    path = [tree]
    for request in requests:
        # ends with the parent of the request
        del path[request.depth + 1 :]
        node = path[-1].add(_request_label(request))
        path.append(node)
    num_more = answer.total_requests - len(requests)
    if num_more:
        tree.add(f"{num_more:,} more requests")
    return tree


def _request_label(request: RecordedRequest) -> Text:
    """Returns the number of a request, its facts, and the beginnings of its messages, one on each line."""
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
