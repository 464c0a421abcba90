"""What a sweep says at its end: the best trials, whether the best is better than the second, what failed, and the
command that trains the best."""

from __future__ import annotations

import io
import math
import shlex
import statistics
from collections import Counter
from collections.abc import Sequence

import rich.console
from rich.table import Table

from trainer.evaluate.intervals import student_t
from trainer.sweeps.space import Value
from trainer.sweeps.study import Study, Trial

_SHOWN = 10


def summary(study: Study, go_on: str) -> str:
    """All of it as text. go_on: the command that goes on with the study."""
    counts = Counter(trial.state for trial in study.trials)
    question, finished = study.question, study.finished()
    pruned, failed = ([t for t in study.trials if t.state == state] for state in ("pruned", "failed"))
    lines = [", ".join(f"{count} {state}" for state, count in counts.items()) or "no trials"]
    if finished or pruned:
        names = [parameter.name for parameter in study.question.space]
        table = Table("trial", f"{question.metric} ({question.mode}, {question.take})", *names, box=None)
        for trial in (*finished, *pruned)[:_SHOWN]:
            note = " (pruned)" if trial.state == "pruned" else ""
            table.add_row(str(trial.number), shown_value(trial) + note, *(_short(trial.parameters[n]) for n in names))
        lines += ["", _text(table)]
    if len(finished) > 1:
        lines.append(compare(*finished[:2]))
    if finished:
        lines += ["", f"To train trial {finished[0].number} in full:", *(f"  {one}" for one in finished[0].commands)]
    for trial in failed[:_SHOWN]:
        error = trial.error.replace("\n", "\n    ")
        lines.append(f"trial {trial.number} failed: {error}\n    it printed {trial.runs[0].log}")
    if failed:
        lines.append(f"Failed trials once more: {go_on} --again")
    if counts["running"] or counts["waiting"]:
        lines.append(f"To go on: {go_on}")
    lines.append(f"All trials with their commands: {study.folder / 'trials.csv'}")
    lines.append(f"As a page, with curves: python -m trainer.report {shlex.quote(str(study.folder))}")
    return "\n".join(lines)


def shown_value(trial: Trial) -> str:
    """`0.43 +- 0.02 (3 seeds)`."""
    value = "-" if trial.value is None else f"{trial.value:.4g}"
    return value if trial.half_width is None else f"{value} +- {trial.half_width:.2g} ({len(trial.values)} seeds)"


def compare(best: Trial, second: Trial) -> str:
    """Whether the seeds tell the two apart."""
    names = f"Trial {best.number} against trial {second.number}"
    found = difference(best.values, second.values)
    if found is None:
        return f"{names}: with one run each nobody knows whether the difference is more than chance; --seeds 3 tells"
    mean, width = abs(found[0]), found[1]
    told = "more than chance explains" if mean > width else "not told apart by these seeds"
    return f"{names}: a difference of {mean:.3g} +- {width:.2g} (95%, {len(best.values)} seeds each): {told}"


def difference(first: Sequence[float], second: Sequence[float]) -> tuple[float, float] | None:
    """The difference of two means and half the width of its 95% interval by Welch; None with fewer than two values on
    a side.

    Degrees of freedom after Welch and Satterthwaite, rounded down. The best of many trials is best partly by luck,
    which this interval does not know.
    """
    if min(len(first), len(second)) < 2:
        return None
    shares = [statistics.variance(values) / len(values) for values in (first, second)]
    mean = statistics.mean(first) - statistics.mean(second)
    if not sum(shares):
        return mean, 0.0
    counts = (len(first), len(second))
    freedom = sum(shares) ** 2 / sum(share**2 / (n - 1) for share, n in zip(shares, counts, strict=True))
    return mean, student_t(max(1, math.floor(freedom + 1e-9))) * math.sqrt(sum(shares))


def _short(value: Value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _text(table: Table) -> str:
    text = io.StringIO()
    rich.console.Console(file=text, width=200).print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())
