"""`python -m trainer.sweep key=a,b key=log(1e-7,1e-5) ... --metric NAME`: many runs of a command over settings.

A grid, `--random N` or `--optuna N` with ASHA, seeds as replicas; on this machine, or on a cluster. What was
interrupted, kill -9 included, goes on with the same command. Guide: SWEEPS.md beside this file.

Exit status: 0 all trials are done, 1 some failed, 2 wrong input (before anything runs, where it can be known), 130
stopped.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
import time
from typing import TYPE_CHECKING

from trainer.cli import command

if TYPE_CHECKING:
    from trainer.sweeps.options import Options
    from trainer.sweeps.study import Study


@command
def main(argv: list[str]) -> int:
    """The command; returns the exit status."""
    from trainer.sweeps.options import read_options
    from trainer.sweeps.results import summary
    from trainer.sweeps.space import combinations
    from trainer.sweeps.study import locked
    from trainer.sweeps.target import check, find_target

    options = read_options(argv)
    study, resources = find_study(options), options.resources
    target = find_target(study.question)
    loaded = target.load(next(combinations(study.question.space, corners=True)))
    device = "cpu" if loaded is None and resources.slots else "auto" if loaded is None else loaded.config.trainer.device
    from trainer.sweeps.tuning import places, run_study  # Ray and Tune: only now, since importing them takes a while

    with places(resources, device, tell) as gpus:
        target = dataclasses.replace(target, gpus=gpus)
        skipped = check(target, study.search, skip_invalid=options.skip_invalid)
        if skipped:
            tell(f"{len(skipped)} combinations are left out: the command would refuse them")
        study.save()
        with locked(study.folder):
            go_on = shlex.join(["python", "-m", "trainer.sweep", "--study", str(study.folder), *resources.words()])
            tell(f"study {study.folder}; to go on with it: {go_on}")
            try:
                more = {"skip_invalid": options.skip_invalid, "again": options.again}
                run_study(study, target, resources, tell, skipped=skipped, **more)
            finally:
                study.write_csv()
                print(f"\n{summary(study, go_on)}", flush=True)
    return int(any(trial.state == "failed" for trial in study.trials))


def find_study(options: Options) -> Study:
    """The study that is asked for, new or as it was begun, with the search of now."""
    from trainer.sweeps.options import Question, Search
    from trainer.sweeps.study import Study, usual_folder

    question = options.question
    folder = options.folder or usual_folder(question or Question())
    if question is not None and not (folder / "study.json").exists():
        return Study(folder, question, options.search or Search(), os.getcwd())
    study = Study.load(folder)
    study.refuse_another(question or study.question)  # its files may have changed
    if options.search is not None:
        known, wanted = study.search.trials, options.search.trials
        most = max(known, wanted) if known is not None and wanted is not None else wanted
        study.search = dataclasses.replace(options.search, trials=most)
    return study


def tell(text: str) -> None:
    """A line with the time of day."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
