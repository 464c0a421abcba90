"""What is wrong with a run, in sentences: pure functions of its numbers, for `trainer.inspect` and `trainer.report`.

Takes series, (step, value) by metric name; gives `Finding`s, graded `ok`, `look` (worth a look) or `bad`. The healthy
ranges are those that the code declares beside its metrics (`verl_lite.metric_docs`): none is repeated here. What no
range of one value can say is judged in `trainer.reports.health_trends`.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from trainer.metrics_reference import Reference
from trainer.reports.findings import BAD, GRADES, LOOK, OK, Finding, Points, Series, number
from trainer.reports.health_trends import trends
from verl_lite.metric_docs import Health

LASTING = 0.1  # of a run's steps: outside in so many it is no stray step
_LATE = 0.1  # of the steps, at the end: how the run is now
_FEW = 3
_EARLY = 0.75  # of the steps: what was mended before is past

Options = Mapping[str, str]


def judge(series: Series, options: Options | None = None, reference: Reference | None = None) -> list[Finding]:
    """All findings of a run, the worst first. options: its configuration by dotted key, to name the keys that it has
    with their values; reference: the declared ranges, those of the project for None."""
    found = in_ranges(series, reference or Reference.read()) + trends(series)
    found = [replace(finding, keys=_own_keys(finding.keys, options)) for finding in found]
    return sorted(found, key=lambda finding: GRADES.index(finding.grade))


def worst(findings: Sequence[Finding], count: int) -> list[Finding]:
    """The first `count` of those that are not ok."""
    return [finding for finding in findings if finding.grade != OK][:count]


def in_ranges(series: Series, reference: Reference) -> list[Finding]:
    """The metrics against their declared ranges; metrics of one declaration that fare alike are one finding."""
    found: dict[tuple[int, Health, str], list[Finding]] = {}
    for name, points in series.items():
        entry = reference.find(name)
        for health in entry.doc.ranges if entry is not None and points else ():
            finding = in_range(name, points, health)
            found.setdefault((id(entry), health, finding.grade), []).append(finding)
    return [_joined(own) for own in found.values()]


def in_range(name: str, points: Points, health: Health) -> Finding:
    """One metric against one range.

    bad: beyond the alarm in a tenth of the steps, or at the end (median of the last tenth). look: the same for the
    range, one step beyond the alarm, or one step outside a range that ends at 0. What was outside only in the first
    three quarters of the run is never bad.
    """
    start = points[0][1]
    judged = [health.judge(value, start) for _, value in points]
    outside = [point for point, word in zip(points, judged, strict=True) if word != OK]
    if not outside:
        return Finding(OK, name, f"{name} stays {_range_words(health)}", healthy=health.shown)
    alarms = judged.count("alarm")
    late = points[-max(_FEW, round(_LATE * len(points))) :]
    now = health.judge(statistics.median(value for _, value in late), start)
    is_past = outside[-1][0] <= points[0][0] + _EARLY * (points[-1][0] - points[0][0]) and now == OK
    if not is_past and (alarms >= LASTING * len(points) or now == "alarm"):
        grade = BAD
    elif len(outside) >= LASTING * len(points) or now != OK or alarms or 0.0 in (health.low, health.high):
        grade = LOOK
    else:
        few = f"{len(outside)} stray of {len(points)} steps outside ({_steps_words(outside)})"
        return Finding(OK, name, f"{name} stays {_range_words(health)}, {few}", healthy=health.shown)
    return Finding(
        grade,
        name,
        _outside_words(name, points, outside, health, is_past),
        tuple(step for step, _ in outside),
        health.cause,
        health.change,
        health.keys,
        health.shown,
    )


def _outside_words(name: str, points: Points, outside: Points, health: Health, is_past: bool) -> str:
    start = points[0][1]
    scale = start if health.of_start and start else 1.0
    middle = [bound for bound in (health.low, health.high) if bound is not None]
    worst_step, extreme = max(outside, key=lambda point: min(abs(point[1] / scale - bound) for bound in middle))
    is_low = health.low is not None and extreme / scale < health.low
    bound = health.low if is_low else health.high
    assert bound is not None
    limit = f"{number(bound)} times its first value {number(start)}" if health.of_start else number(bound)
    side = "below" if is_low else "above"
    text = f"{name} is {side} {limit} in {len(outside)} of {len(points)} steps ({_steps_words(outside)})"
    text += f": {number(extreme)} at step {worst_step}"
    last_step, last = points[-1]
    if last_step != worst_step:
        text += f", {number(last)} at the end"
    return text + (f"; not since step {outside[-1][0]}" if is_past else "")


def _range_words(health: Health) -> str:
    of_start = " times its first value" if health.of_start else ""
    if health.low is None or health.high is None:
        word, bound = ("at", health.high) if health.low is None else ("at", health.low)
        beyond = "below" if health.low is None else "above"
        return f"{word} or {beyond} {bound:g}{of_start}"
    return f"within {health.low:g} and {health.high:g}{of_start}"


def _steps_words(points: Points) -> str:
    steps = [step for step, _ in points]
    if len(steps) <= _FEW:
        return f"step{'s' * (len(steps) > 1)} {', '.join(map(str, steps))}"
    return f"steps {steps[0]} to {steps[-1]}"


def _joined(findings: list[Finding]) -> Finding:
    """Several of one declaration and grade as one: the first by the number of steps, with the names of the others."""
    first, *others = sorted(findings, key=lambda finding: -len(finding.steps))
    if not others:
        return first
    names = ", ".join(finding.metric for finding in others[:_FEW])
    more = f" and {len(others) - _FEW} more" if len(others) > _FEW else ""
    return replace(first, text=f"{first.text}; so {'does' if len(others) == 1 else 'do'} {names}{more}")


def _own_keys(keys: tuple[str, ...], options: Options | None) -> tuple[str, ...]:
    """The keys as this run has them, with the value that it has: declarations name those of `trainer.main_ppo`, other
    commands have some without the role in front. Without options the keys as they are."""
    if not options:
        return keys
    own = []
    for key in keys:
        name = next((name for name in (key, key.partition(".")[2]) if name in options), None)
        own += [] if name is None else [f"{name}={options[name]}"]
    return tuple(dict.fromkeys(own))
