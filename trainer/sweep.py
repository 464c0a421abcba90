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
    from trainer.sweeps.study import Study
    from trainer.sweeps.study_spec import Options

_MOST_ROWS = 20


@command
def main(argv: list[str]) -> int:
    """Runs the command and returns its exit status."""
    from trainer.sweeps.study import locked
    from trainer.sweeps.study_spec import combinations, read_options
    from trainer.sweeps.sweep_checks import check_sweep, load

    options = read_options(argv)
    study = asked_study(options)
    trainer = load(study.spec, next(combinations(study.spec.space, corners=True))).trainer
    from trainer.sweeps.tuning import places, run_study  # imported here, because importing Ray and Tune takes seconds

    with places(options, trainer.device, tell) as place:
        check_sweep(study.spec, study.search, place.gpus)
        with locked(study.folder, trainer.umask):
            study = asked_study(options)  # another sweep may have changed the study before the lock was taken
            study.save()
            tell(f"study {study.folder}; the same command continues it")
            try:
                run_study(study, place, options, tell)
            finally:
                study.write_csv()
                print(f"\n{summary(study, shlex.join(['python', '-m', 'trainer.sweep', *argv]))}", flush=True)
    return int(any(trial.state == "failed" for trial in study.trials))


def asked_study(options: Options) -> Study:
    """Returns the study of the command line: a new study, or the existing study with the search of this command."""
    from trainer.sweeps.study import DESCRIPTION, Study
    from trainer.sweeps.study_spec import Search, read_files

    spec = options.spec
    if spec is not None and not (options.folder / DESCRIPTION).exists():
        return Study(options.folder, spec, options.search or Search())
    study = Study.load(options.folder)
    study.refuse_another(spec or dataclasses.replace(study.spec, files=read_files(study.spec.files)))
    study.search = options.search or study.search
    return study


def summary(study: Study, go_on: str) -> str:
    """Returns the text at the end of a sweep: the best trials, failures, the command that trains the best trial, and
    `go_on`, the command that continues the study."""
    from rich.table import Table

    from trainer.observe.console import Terminal

    counts = Counter(trial.state for trial in study.trials)
    spec = study.spec
    finished = study.finished()
    names = [parameter.name for parameter in spec.space]
    table = Table("trial", f"{spec.metric} ({spec.mode})", *names, box=None)
    for trial in (*finished, *(trial for trial in study.trials if trial.state == "pruned"))[:_MOST_ROWS]:
        value = "-" if trial.value is None else f"{trial.value:.4g}"
        if trial.half_width is not None:
            value += f" +- {trial.half_width:.2g} ({len(trial.values)} seeds)"
        pruned = " (pruned)" if trial.state == "pruned" else ""
        texts = [f"{x:.4g}" if isinstance(x, float) else str(x) for x in (trial.parameters[name] for name in names)]
        table.add_row(str(trial.number), value + pruned, *texts)
    text = io.StringIO()
    Terminal(file=text, width=200).print(table)
    lines = [", ".join(f"{count} {state}" for state, count in counts.items()) or "no trials", ""]
    lines += [line.rstrip() for line in text.getvalue().splitlines()]
    for best in finished[:1]:
        lines += ["", f"To train trial {best.number} in full:", *(f"  {command}" for command in best.commands)]
    for trial in [trial for trial in study.trials if trial.state == "failed"][:_MOST_ROWS]:
        lines += [f"trial {trial.number} failed: {trial.error}", f"    its output is in {trial.folder}"]
    if counts["running"] or counts["waiting"]:
        lines.append(f"To continue: {go_on}")
    lines.append(f"All trials with their commands: {study.folder / 'trials.csv'}")
    lines.append(f"As a page, with curves: python -m trainer.report {shlex.quote(str(study.folder))}")
    return printable("\n".join(lines))


def tell(text: str) -> None:
    """Prints a line with the time of day."""
    print(f"{time.strftime('%H:%M:%S')} {printable(text)}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
