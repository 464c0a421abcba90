"""`python -m recipes.seeds RUN [RUN ...]`: the result of a recipe over several seeds, as a table and a picture.

RUN is the folder of a finished run. The runs have the same settings except `trainer.seed`. The table has the
validation of each step at which all runs were validated: the mean over the runs with its 95% interval (Student's t).
For a single run the interval is the one of its questions. The picture shows the reward of the training steps and the
validation.

    --out FILE     the picture (seeds.png in the current folder)
    --no-time      no times in the table, for a machine that did other work, too
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from recipes.curves import caption, draw_band, interval, markdown_table, new_figure, style
from trainer.cli import command, leave
from trainer.observe.run_data import RecordedRun, read_run
from verl_lite.errors import UserError

REWARD = "critic/score/mean"
SECONDS = "timing_s/step"
VALIDATION = re.compile(r"val-(?:core|aux)/(?P<label>.+/(?:reward|acc)/mean@\d+)")
"""The names of the validation's mean rewards and accuracies, such as `val-core/SOURCE/reward/mean@1` (sampled) and
`val-aux/SOURCE/greedy/reward/mean@1`."""

FREE = {
    "trainer.seed",
    "trainer.default_local_dir",
    "trainer.experiment_name",
    "trainer.project_name",
    "trainer.logger",
    "trainer.save_freq",
    "trainer.max_actor_ckpt_to_keep",
    "trainer.resume_mode",
}
"""Options that may differ between the runs: the seed, and those that do not change what is learned."""


def read_runs(folders: Sequence[Path]) -> list[RecordedRun]:
    """Reads the runs and checks that they have ended, and that they differ in the seed and in nothing else.

    Raises:
        UserError: Otherwise; the message names the runs, and the options in which they differ.
    """
    runs = [read_run(folder) for folder in folders]
    for run in runs:
        # A run that a callback has ended has a result. A run without trainer.total_training_steps does not say whether
        # it is complete.
        if run.state in ("running", "stopped"):
            raise UserError(
                f"{run.folder}: this run is {run.state} at step {run.last_step} of {run.total_steps}. Finished runs "
                "are expected; a stopped one continues with its command and trainer.resume_mode=auto"
            )

    first = runs[0]
    run_of_seed = {_option(first, "trainer.seed"): first}
    for run in runs[1:]:
        seed = _option(run, "trainer.seed")
        if seed in run_of_seed:
            raise UserError(
                f"{run.folder}: trainer.seed={seed}, which {run_of_seed[seed].folder} has, too. Runs with different "
                "seeds are expected, because an interval over equal runs says nothing"
            )
        run_of_seed[seed] = run
        different = _different_options(first, run)
        if different:
            raise UserError(
                f"{run.folder}: its settings differ from those of {first.folder}: {'; '.join(different)}. Runs that "
                "differ in trainer.seed alone are expected; trainer.report compares others"
            )
    return runs


def _option(run: RecordedRun, key: str) -> str:
    """Returns the text of an option in the run's configuration, `missing` if it has none."""
    option = run.config.get(key)
    return "missing" if option is None else option.value


def _different_options(one: RecordedRun, other: RecordedRun) -> list[str]:
    """Returns the options with different values, as `key=value of one, value of other`."""
    different = []
    for key in sorted({*one.config, *other.config} - FREE):
        values = (_option(one, key), _option(other, key))
        if values[0] != values[1]:
            different.append(f"{key}={values[0]}, {values[1]}")
    return different


# --------------------------------------------------------------------------------------------------------------- table

Validation = Mapping[str, Mapping[int, Sequence[float]]]
"""By label and step: the values of the runs."""


def validations(runs: Sequence[RecordedRun]) -> Validation:
    """Returns the values of all runs, for the steps at which each of them was validated."""
    values_of: dict[str, dict[int, list[float]]] = {}
    for step, metrics in runs[0].steps.items():
        for name in metrics:
            match = VALIDATION.fullmatch(name)
            if match is None:
                continue
            values = []
            for run in runs:
                values_at_step = run.steps.get(step, {})
                if name in values_at_step:
                    values.append(values_at_step[name])
            if len(values) == len(runs):
                values_of.setdefault(match["label"], {})[step] = values
    return values_of


def table(runs: Sequence[RecordedRun], with_time: bool = True) -> str:
    """Returns the validation by step, and the times of the runs.

    Args:
        runs: The runs.
        with_time: Whether the median time of a step and the time of a run are in the table.
    """
    by_label = validations(runs)
    all_steps: set[int] = set()
    for by_step in by_label.values():
        all_steps |= by_step.keys()
    steps = sorted(all_steps)

    rows = [["step", *map(str, steps)]]
    for label, by_step in by_label.items():
        cells = [label]
        for step in steps:
            cells.append(_cell(runs, label, step, by_step.get(step)))
        rows.append(cells)
    lines = [markdown_table(rows), "", _caption_of_table(runs)]
    if with_time:
        lines.append(_times(runs))
    return "\n".join(lines)


def _cell(runs: Sequence[RecordedRun], label: str, step: int, values: Sequence[float] | None) -> str:
    """Returns the mean of the runs' values with its interval, as text."""
    if values is None:
        return ""
    mean, half = _mean_and_half(runs, label, step, values)
    # distances in characters need no thousandths
    digits = 3 if abs(mean) < 10 else 1
    if half is None:
        return f"{mean:.{digits}f}"
    return f"{mean:.{digits}f} ± {half:.{digits}f}"


def _mean_and_half(
    runs: Sequence[RecordedRun], label: str, step: int, values: Sequence[float]
) -> tuple[float, float | None]:
    """Returns the mean of the runs' values and half of its 95% interval, which is over the runs.

    The interval of a single run is over its questions; None if the run did not log it.
    """
    if len(runs) == 1:
        return values[0], runs[0].steps[step].get(f"val-aux/{label}/ci95")
    return interval(values)


def _caption_of_table(runs: Sequence[RecordedRun]) -> str:
    if len(runs) == 1:
        return f"One run, trainer.seed={_option(runs[0], 'trainer.seed')}; 95% intervals of the questions."
    seeds = ", ".join(_option(run, "trainer.seed") for run in runs)
    return f"Mean of {len(runs)} runs, trainer.seed={seeds}; 95% intervals over the runs (Student's t)."


def _times(runs: Sequence[RecordedRun]) -> str:
    seconds: list[float] = []
    for run in runs:
        for metrics in run.steps.values():
            if SECONDS in metrics:
                seconds.append(metrics[SECONDS])
    minutes = statistics.fmean(run.seconds() / 60 for run in runs)
    return f"A step took {statistics.median(seconds):.1f} s (median), a run {minutes:.0f} minutes with its validation."


# ------------------------------------------------------------------------------------------------------------- picture


def draw(runs: Sequence[RecordedRun], file: Path) -> None:
    """Draws the reward of the training steps, and on the right the validation, with 95% intervals as in the table."""
    from matplotlib.ticker import MaxNLocator

    figure = new_figure(width=11)
    training, validation = figure.subplots(1, 2, sharey=True)

    training.set(title="Reward in training", xlabel="training step", ylabel="mean reward")
    steps = []
    for step in runs[0].steps:
        # a file can lack a line, for example after a full disk
        if all(REWARD in run.steps.get(step, {}) for run in runs):
            steps.append(step)
    rewards = []
    for run in runs:
        rewards.append([run.steps[step][REWARD] for step in steps])
    draw_band(training, steps, rewards, "sampled answers")

    validation.set(title="Validation", xlabel="training step")
    for label, by_step in validations(runs).items():
        means = []
        halves = []
        for step, values in by_step.items():
            mean, half = _mean_and_half(runs, label, step, values)
            means.append(mean)
            halves.append(half or 0.0)
        validation.errorbar(list(by_step), means, yerr=halves, marker="o", markersize=4, capsize=3, label=label)
    validation.legend(frameon=False, fontsize=8)

    for panel in (training, validation):
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        style(panel)
    figure.suptitle(caption(len(steps), len(runs)), fontsize=10)
    try:
        figure.savefig(file, dpi=110)
    except (OSError, ValueError) as error:
        raise UserError(f"--out {file}: the picture cannot be written ({error})") from error


def _read_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.seeds", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--out", type=Path, default=Path("seeds.png"))
    parser.add_argument("--no-time", action="store_true")
    return parser.parse_args(argv)


@command
def main(argv: list[str]) -> int:
    """Prints the table, draws the picture, and returns the exit status."""
    arguments = _read_arguments(argv)
    runs = read_runs(arguments.runs)
    print(table(runs, with_time=not arguments.no_time))
    draw(runs, arguments.out)
    print(f"\n{arguments.out}")
    return 0


if __name__ == "__main__":
    leave(main())
