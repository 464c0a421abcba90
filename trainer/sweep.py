"""`python -m trainer.sweep key=a,b key=log(1e-7,1e-5) ... --metric NAME`: runs trainer.main_ppo with many settings.

SWEEPS.md is the guide.
"""

from __future__ import annotations

import dataclasses
import io
import shlex
import time
from collections import Counter
from typing import TYPE_CHECKING

from trainer.cli import command
from verl_lite.errors import printable

if TYPE_CHECKING:
    from trainer.sweeps.study import Study, Trial
    from trainer.sweeps.study_spec import StudyOptions

_MOST_ROWS = 20


@command
def main(argv: list[str]) -> int:
    """Runs the command and returns its exit status."""
    from trainer.sweeps.study import locked
    from trainer.sweeps.study_spec import combinations, read_options
    from trainer.sweeps.sweep_checks import check_sweep, load

    options = read_options(argv)
    study = requested_study(options)
    # device and umask of the first trial count for all; with `corners`, a range has a first value, too
    first_parameters = next(combinations(study.spec.space, corners=True))
    trainer = load(study.spec, first_parameters).trainer
    # imports Ray and Tune, which takes seconds, after the cheap checks
    from trainer.sweeps.tuning import places, run_study

    # starts Ray, or joins the cluster of the options
    with places(options, trainer.device, tell) as trial_devices:
        check_sweep(study.spec, study.search, trial_devices.gpus)
        with locked(study.folder, trainer.umask):
            # another sweep may have changed the study before the lock was taken
            study = requested_study(options)
            study.save()
            tell(f"study {study.folder}; the same command continues it")
            try:
                run_study(study, trial_devices, options, tell)
            finally:
                study.write_csv()
                same_command = shlex.join(["python", "-m", "trainer.sweep", *argv])
                print(f"\n{summary(study, same_command)}", flush=True)
    has_failures = any(trial.state == "failed" for trial in study.trials)
    return int(has_failures)


def requested_study(options: StudyOptions) -> Study:
    """Returns the study of the command line: a new study, or the existing study with the search of this command."""
    from trainer.sweeps.study import DESCRIPTION, Study
    from trainer.sweeps.study_spec import Search, read_files

    spec = options.spec
    is_new = not (options.folder / DESCRIPTION).exists()
    if spec is not None and is_new:
        return Study(options.folder, spec, options.search or Search())

    study = Study.load(options.folder)
    if spec is None:
        # the files of the study may have changed since it began
        files_now = read_files(study.spec.files)
        spec = dataclasses.replace(study.spec, files=files_now)
    study.refuse_another(spec)
    if options.search is not None:
        study.search = options.search
    return study


def summary(study: Study, go_on: str) -> str:
    """Returns the text at the end of a sweep: the best trials, failures, the command that trains the best trial, and
    `go_on`, the command that continues the study."""
    from rich.table import Table

    from trainer.observe.console import Terminal

    # the best trial first
    finished = study.finished()
    pruned = [trial for trial in study.trials if trial.state == "pruned"]
    failed = [trial for trial in study.trials if trial.state == "failed"]
    spec = study.spec
    names = [parameter.name for parameter in spec.space]
    metric = f"{spec.metric} ({spec.mode})"
    table = Table("trial", metric, *names, box=None)
    trials_with_values = [*finished, *pruned]
    for trial in trials_with_values[:_MOST_ROWS]:
        table.add_row(*_table_row(trial, names))
    text = io.StringIO()
    Terminal(file=text, width=200).print(table)

    counts = Counter(trial.state for trial in study.trials)
    counts_text = ", ".join(f"{count} {state}" for state, count in counts.items())
    lines = [counts_text or "no trials", ""]
    for line in text.getvalue().splitlines():
        lines.append(line.rstrip())
    if finished:
        best = finished[0]
        lines += ["", f"To train trial {best.number} in full:"]
        for command_line in best.commands:
            lines.append(f"  {command_line}")
    for trial in failed[:_MOST_ROWS]:
        lines.append(f"trial {trial.number} failed: {trial.error}")
        lines.append(f"    its output is in {trial.folder}")
    if counts["running"] or counts["waiting"]:
        lines.append(f"To continue: {go_on}")
    lines.append(f"All trials with their commands: {study.folder / 'trials.csv'}")
    lines.append(f"As a page, with curves: python -m trainer.report {shlex.quote(str(study.folder))}")
    return printable("\n".join(lines))


def _table_row(trial: Trial, names: list[str]) -> list[str]:
    """Returns the number of a trial, its value, and its parameters in the order of `names`."""
    value = "-" if trial.value is None else f"{trial.value:.4g}"
    if trial.half_width is not None:
        value += f" +- {trial.half_width:.2g} ({len(trial.values)} seeds)"
    if trial.state == "pruned":
        value += " (pruned)"
    row = [str(trial.number), value]
    for name in names:
        parameter = trial.parameters[name]
        parameter_text = str(parameter)
        if isinstance(parameter, float):
            parameter_text = f"{parameter:.4g}"
        row.append(parameter_text)
    return row


def tell(text: str) -> None:
    """Prints a line with the time of day."""
    now = time.strftime("%H:%M:%S")
    print(f"{now} {printable(text)}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
