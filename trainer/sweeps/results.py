"""What a sweep says at its end: the best trials, whether the best is better than the second, what failed, and how to
reproduce each."""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Sequence

from trainer.evaluate.intervals import student_t
from trainer.sweeps.runner import shown_values
from trainer.sweeps.study import StudyRecord, TrialRecord
from trainer.sweeps.table import shown_value

_SHOWN = 5


def summary(record: StudyRecord) -> str:
    """All of it as text."""
    counts = {
        state: sum(trial.state == state for trial in record.trials)
        for state in ("complete", "pruned", "failed", "running", "waiting")
    }
    lines = [", ".join(f"{count} {state}" for state, count in counts.items() if count) or "no trials"]
    finished = record.finished()
    if finished:
        lines.append(
            f"\nBest by {record.question.metric} ({record.question.mode}, {record.question.take} of each run):"
        )
        for trial in finished[:_SHOWN]:
            lines.append(f"  trial {trial.number}: {shown_value(trial)}  {shown_values(trial.parameters)}")
        if len(finished) > 1:
            lines.append("\n" + compare(*finished[:2]))
        lines.append(f"\nTo run trial {finished[0].number} again:")
        lines += [f"  {shlex.join(run.command)}" for run in finished[0].runs]
    failed = [trial for trial in record.trials if trial.state == "failed"]
    if failed:
        lines.append("\nFailed:")
        lines += [
            f"  trial {trial.number} ({shown_values(trial.parameters)}): {trial.error}" for trial in failed[:_SHOWN]
        ]
        if len(failed) > _SHOWN:
            lines.append(f"  and {len(failed) - _SHOWN} more, see trials.csv")
        lines.append(f"  once more: python -m trainer.sweep --study {shlex.quote(str(record.folder))} --again")
    if counts["running"] or counts["waiting"]:
        lines.append(f"\nTo go on:\n  python -m trainer.sweep --study {shlex.quote(str(record.folder))}")
    lines.append(f"\nAll trials, with commands: {record.folder / 'trials.csv'}")
    return "\n".join(lines)


def compare(best: TrialRecord, second: TrialRecord) -> str:
    """Whether the seeds tell the two apart."""
    names = f"Trial {best.number} against trial {second.number}"
    found = difference(best.values, second.values)
    if found is None:
        return (
            f"{names}: a difference of {abs((best.value or 0) - (second.value or 0)):.3g}; with one run each nobody "
            "knows whether it is more than chance. seeds=3 or more tells"
        )
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
