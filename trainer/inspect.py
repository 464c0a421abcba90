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
from trainer.console import Terminal, format_seconds
from trainer.final_report import shortened, validation_means, validation_table
from trainer.reports.findings import findings_table
from trainer.reports.health import findings_of, number
from trainer.reports.page_data import panels_of
from trainer.reports.run_data import Answer, Run, chosen, read_run, run_titles, stage_seconds
from verl_lite.errors import printable

EVERY_S = 2.0
_BARS = "▁▂▃▄▅▆▇█"
_MOST_CHARACTERS = 4000
_MOST_REQUESTS, _REQUEST_CHARACTERS = 40, 240


@command
def main(argv: list[str]) -> int:
    """Runs the command and returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m trainer.inspect", description="Shows a run in the terminal.")
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--best", action="store_true", help="show the samples with the highest scores, newest first")
    mode.add_argument("--worst", action="store_true", help="show failed samples and those with the lowest scores")
    mode.add_argument("--follow", action="store_true", help="redraw the overview while the run continues")
    parser.add_argument("--grep", metavar="TEXT", help="samples with this text in prompt, answer, ground truth or uid")
    parser.add_argument("--count", type=int, default=10, metavar="N", help="number of samples to show (10)")
    given = parser.parse_args(argv)
    folder = given.run.expanduser()
    folder = folder.parent if folder.is_file() else folder
    run, console = read_run(folder), Terminal()
    order = "best" if given.best else "worst" if given.worst else ""
    if order or given.grep:
        found, total = chosen(folder, order, given.grep or "", given.count)
        console.print(*map(_panel, found), f"{len(found)} of {total:,} matching samples")
    elif given.follow:  # Ctrl-C ends this command, not the run
        with suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
            live.update(overview(run, console.width), refresh=True)
            while run.is_running:
                time.sleep(EVERY_S)
                run = read_run(run.folder)
                live.update(overview(run, console.width), refresh=True)
    else:
        console.print(overview(run, console.width))
    return 0


def overview(run: Run, width: int) -> RenderableType:
    """Returns the overview of a run, laid out for a terminal that is `width` characters wide."""
    styles = {"running": "bold cyan", "finished": "bold green", "ended early": "bold green"}
    style = styles.get(run.state, "bold yellow")
    of = f" of {run.total_steps}" if run.total_steps is not None else ""
    status = f"step {run.last_step}{of}, {format_seconds(run.seconds())} in steps, last written "
    status += f"{format_seconds(max(0.0, time.time() - run.modified))} ago\n{run.folder}"
    heading = Text.assemble((run_titles([run])[0], "bold"), "  ", (run.state, style), "  ", status)
    parts: list[RenderableType] = [heading]
    validated = {step: metrics for step, metrics in run.steps.items() if validation_means(metrics)}
    if validated:
        parts.append(validation_table({f"step {at}": validated[at] for at in (min(validated), max(validated))}))
    table, series = _table("Curves"), run.series()
    for name in (name for _, _, names in panels_of(series) for name in names if len(series.get(name, ())) > 1):
        values = [value for _, value in series[name]]
        trend = Text(sparkline(values, max(10, min(60, width - 62))), style="cyan")
        table.add_row(name, number(values[0]), trend, Text(number(values[-1]), style="bold"))
    parts.append(table)
    table, (_, stages) = _table("Time"), stage_seconds(run.steps, 1)
    whole = sum(mean for (mean,) in stages.values())
    for name, (mean,) in sorted(stages.items(), key=lambda item: -item[1][0]):
        share = Text("█" * round(40 * mean / whole), style="cyan")
        table.add_row(name, f"{mean:.3g} s", f"{mean / whole:.0%}", share)
    return Group(*(Padding(part, (0, 0, 1, 0)) for part in (*parts, table)), findings_table(findings_of(run)))


def sparkline(values: Sequence[float], width: int) -> str:
    """Draws a series as at most `width` block characters, each for the mean of its share of the values."""
    count = min(width, len(values))
    edges = [round(place * len(values) / count) for place in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in zip(edges, edges[1:], strict=False)]
    low, high = min(means), max(means)
    return "".join(_BARS[min(7, int((mean - low) / (high - low or 1.0) * 8))] for mean in means)


def _table(title: str) -> Table:
    style = {"title_justify": "left", "title_style": "bold"}
    return Table(box=None, padding=(0, 1), title=title, show_header=False, **style)  # type: ignore[arg-type]


def _panel(answer: Answer) -> Panel:
    score = ("timed out" if answer.timed_out else "failed") if answer.score is None else number(answer.score)
    heading = f"step {answer.step}, score {score}, {answer.response_length} tokens, {answer.finish_reason}"
    reward = ", ".join(f"{name} {number(x) if isinstance(x, float) else x}" for name, x in answer.parts.items())
    images = ("images", ", ".join(answer.images))
    parts = [*answer.prompt, images, ("ground truth", answer.gts), (heading, answer.output), ("reward", reward)]
    shown = [Text.assemble((f"{name}: ", "bold"), shortened(text, _MOST_CHARACTERS)) for name, text in parts if text]
    trees = [_tree(answer, score)] if answer.requests else []
    return Panel(Group(*shown, *trees), title=Text(shortened(f"{answer.kind}, {answer.uid}")), title_align="left")


def _tree(answer: Answer, score: str) -> Tree:
    """Returns the first requests of an episode as a tree, with the beginnings of their messages."""
    tree = Tree(Text(f"{answer.total_requests:,} requests, reward {score}", style="bold"))
    above, shown = [tree], answer.requests[:_MOST_REQUESTS]
    for request in shown:
        # escaped here, because rich would measure the lines of the tree before Terminal escapes them
        reason = f", discarded: {printable(request.discarded)}" * bool(request.discarded)
        start = f"#{request.number} {request.start}".strip()
        label = Text.assemble((start, "bold"), f" {printable(request.facts)}", (reason, "yellow"))
        for role, text in request.messages:
            line = printable(" ".join(text.split()))
            more = " ..." * (len(line) > _REQUEST_CHARACTERS)
            label.append(f"\n{printable(role)}: ", "bold").append(f"{line[:_REQUEST_CHARACTERS]}{more}", "default")
        del above[request.depth + 1 :]
        above.append(above[-1].add(label))
    if left := answer.total_requests - len(shown):
        tree.add(f"{left:,} more requests")
    return tree


if __name__ == "__main__":
    raise SystemExit(main())
