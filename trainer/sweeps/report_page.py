"""The page of a study: what came out, what it depends on, and every trial with the command that reproduces it.

Takes what `read_study` gives and the pictures of it; gives one HTML document. A study without anything to show has a
page that says what is missing.
"""

from __future__ import annotations

import math
import shlex
from pathlib import Path

from trainer.console import format_seconds
from trainer.reports.pages.page import Cell, Html, command, element, folded, join, page, section, table, text
from trainer.sweeps.importance import Importance
from trainer.sweeps.pictures import Picture, is_number
from trainer.sweeps.results import compare
from trainer.sweeps.runner import shown_values
from trainer.sweeps.study import StudyRecord, TrialRecord
from trainer.sweeps.table import shown_value

_BEST_SHOWN = 5
_HERE = Path(__file__).parent


def report_page(record: StudyRecord, importance: Importance, pictures: list[Picture]) -> str:
    """The document."""
    parts = [
        _question(record),
        _facts(record),
        _best(record),
        _charts(
            "Learning curves", [picture for picture in pictures if picture.name == "curves"], missing_curves(record)
        ),
        _dependence(record, importance, pictures),
        _trials(record),
        element("p", id="note", hidden=""),
    ]
    told = {f"trial-{trial.number}": in_a_line(trial) for trial in record.trials}
    return page(
        f"Sweep {record.folder.name}",
        *parts,
        data={"trials": told},
        scripts=[_HERE / "report.js"],
        styles=[_HERE / "report.css"],
    )


def in_a_line(trial: TrialRecord) -> str:
    """`trial 3 (pruned): 0.41, lr=3e-4, n=4`."""
    value = shown_value(trial)
    return f"trial {trial.number} ({trial.state}): {f'{value}, ' if value else ''}{shown_values(trial.parameters)}"


def _question(record: StudyRecord) -> Html:
    asked, plan = record.question, record.plan
    how = {"grid": "all combinations", "random": "random combinations", "optuna": "chosen by Optuna's TPE"}[plan.kind]
    seeds = "" if asked.seeds is None else f", seeds {', '.join(map(str, asked.seeds))}"
    pruner = "" if plan.pruner == "none" else f", pruner {plan.pruner}"
    take = "the last value" if asked.take == "last" else "the best value"
    wanted = "highest" if asked.mode == "max" else "lowest"
    lines = [
        element("p", element("code", text(asked.command)), text(f": {how}{seeds}{pruner}. Compared by "),
                element("code", text(asked.metric)), text(f", {take} of a run, the {wanted} wins.")),
        element("p", text(str(record.folder)), class_="soft"),
    ]  # fmt: skip
    fixed = [*(f"--config {name}" for name in asked.files), *asked.settings]
    if fixed:
        lines.append(folded(f"{len(fixed)} settings of all runs", command("\n".join(fixed))))
    return join(lines)


def _facts(record: StudyRecord) -> Html:
    states = [trial.state for trial in record.trials]
    runs = [run for trial in record.trials for run in trial.runs]
    facts: dict[str, object] = {"trials": len(states)}
    facts |= {state: states.count(state) for state in sorted(set(states))}
    facts["runs"] = sum(bool(run.attempts) for run in runs)
    facts["time of runs, together"] = format_seconds(sum(run.seconds for run in runs))
    shown = [element("div", element("dt", text(name)), element("dd", text(fact))) for name, fact in facts.items()]
    return element("dl", *shown, class_="facts")


def _best(record: StudyRecord) -> Html:
    finished = record.finished()
    if not finished:
        return section("Best trials", element("p", text(nothing_finished(record))))
    parts = []
    if len(finished) > 1:
        parts.append(element("p", text(compare(*finished[:2]) + ".")))
        parts.append(element("p", text("The best of many is best partly by luck: run it with new seeds before you "
                                       "believe the number."), class_="soft"))  # fmt: skip
    else:
        parts.append(element("p", text("One trial is complete: there is nothing to compare it with.")))
    for place, trial in enumerate(finished[:_BEST_SHOWN], start=1):
        title = f"{place}. trial {trial.number}: {shown_value(trial)}, {shown_values(trial.parameters)}"
        how = "The command that reproduces it" + (", with each seed:" if len(trial.runs) > 1 else ":")
        inside = join([element("p", text(how), class_="soft"), *_commands(trial)])
        parts.append(join([element("p", element("b", text(title))), inside]) if place == 1 else folded(title, inside))
    return section("Best trials", *parts, key="best")


def _commands(trial: TrialRecord) -> list[Html]:
    return [command(shlex.join(run.command)) for run in trial.runs]


def nothing_finished(record: StudyRecord) -> str:
    """Why there is no best trial, and what to do."""
    again = f"python -m trainer.sweep --study {shlex.quote(str(record.folder))}"
    states = [trial.state for trial in record.trials]
    if not states:
        return f"The study has no trials yet. To begin: {again}"
    if set(states) <= {"waiting", "running"}:
        return f"No trial is finished yet. To go on: {again}"
    seen = [
        value for trial in record.trials for run in trial.runs for value in run.history(record.question.metric).values()
    ]
    if seen and not any(is_number(value) for value in seen):
        return (
            f"No trial is complete: {record.question.metric} is not a number (nan or inf) in every step of every run."
        )
    failed = next((trial for trial in record.trials if trial.state == "failed"), None)
    why = "" if failed is None else f" Trial {failed.number}: {failed.error}."
    return f"No trial is complete.{why} Those that failed, once more: {again} --again"


def missing_curves(record: StudyRecord) -> str:
    return f"No run has logged {record.question.metric} as a number."


def _charts(title: str, pictures: list[Picture], otherwise: str) -> Html:
    if not pictures:
        return section(title, element("p", text(otherwise)))
    return section(title, *(element("p", text(picture.told)) for picture in pictures), _drawn(pictures))


def _drawn(pictures: list[Picture]) -> Html:
    frames = [
        element("div", Html(picture.svg()), class_="card chart wide" if picture.broad else "card chart", role="img",
                aria_label=picture.told)
        for picture in pictures
    ]  # fmt: skip
    return element("div", *frames, class_="charts")


def _dependence(record: StudyRecord, importance: Importance, pictures: list[Picture]) -> Html:
    named = {picture.name: picture for picture in pictures}
    parts = []
    if "parallel" in named:
        parts += [element("p", text(named["parallel"].told)), _drawn([named["parallel"]])]
    note = importance.note if importance.shares else f"Importance of the parameters is not told. {importance.note}"
    parts.append(element("p", text(note)))
    rest = [picture for picture in pictures if picture.name not in ("curves", "parallel")]
    if any(picture.name.startswith("slice") for picture in rest):
        told = "The value against each parameter; bars are 95% intervals over seeds (Student's t)."
        if all(trial.half_width is None for trial in record.finished()):
            told = "The value against each parameter. With one run each there are no intervals: seeds=3 gives some."
        parts.append(element("p", text(told)))
    return section("What it depends on", *parts, _drawn(rest))


# --------------------------------------------------------------------------------------------------------- all trials


def _trials(record: StudyRecord) -> Html:
    if not record.trials:
        return section("All trials", element("p", text("There are none.")))
    names = [parameter.name for parameter in record.question.space.parameters]
    columns = ["trial", "state", "value", *names, "steps", "time", "cause of failure", "folder and commands"]
    rows = [_row(record, trial, names) for trial in record.trials]
    hint = "A click on a heading sorts; a click on a row, or on a line of a picture, marks the trial everywhere."
    return section(
        "All trials",
        element("p", text(hint), class_="soft"),
        table(columns, rows, [f"trial-{trial.number}" for trial in record.trials]),
        element("p", text("The same as a file: trials.csv"), class_="soft"),
        key="trials",
    )


def _row(record: StudyRecord, trial: TrialRecord, names: list[str]) -> list[Cell]:
    tone = {"complete": "ok", "failed": "bad"}.get(trial.state, "soft")
    value = trial.value if trial.value is not None and math.isfinite(trial.value) else ""
    seconds = sum(run.seconds for run in trial.runs)
    steps = max((max(run.metrics(), default=0) for run in trial.runs), default=0)
    attempts = sum(len(run.attempts) for run in trial.runs) - sum(bool(run.attempts) for run in trial.runs)
    cause = "; ".join(filter(None, [trial.error, f"{attempts} repeated" if attempts else ""]))
    folders = [element("p", element("code", text(run.folder))) for run in trial.runs]
    more = folded("show", join([*folders, *_commands(trial)])) if trial.runs else Html("")
    shown = [trial.parameters.get(name, "") for name in names]
    return [
        Cell(text(trial.number)),
        Cell(element("span", text(trial.state), class_=tone)),
        Cell(text(shown_value(trial)), value),
        *(Cell(text(f"{each:.4g}" if isinstance(each, float) else each), each) for each in shown),
        Cell(text(steps or "")),
        Cell(text(format_seconds(seconds) if seconds else ""), round(seconds, 1)),
        Cell(text(cause)),
        Cell(more),
    ]
