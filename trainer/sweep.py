"""`python -m trainer.sweep key=a,b key=log(1e-7,1e-5) ... --metric NAME`: many runs of a command over settings.

A grid, `--random N` or `--optuna N` with a pruner; each trial in processes and a folder of its own, on devices that
others use too; what fails is run again by its cause, what was interrupted goes on. Guide: SWEEPS.md beside this file.

Exit status: 0 all trials are done, 1 some failed, 2 wrong input (before anything runs, where it can be known), 130
stopped.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.environment import prepare_driver

if TYPE_CHECKING:
    from trainer.sweeps.engine import Engine
    from trainer.sweeps.options import Means, Options, Plan
    from trainer.sweeps.slots import Pool
    from trainer.sweeps.study import Study
    from trainer.sweeps.table import SweepView
    from trainer.sweeps.targets import Target
    from trainer.sweeps.trial import Launcher, LocalLauncher

FAILED = 1


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    prepare_driver()
    from trainer.ending import run_command

    return run_command(lambda: sweep(sys.argv[1:] if argv is None else argv))


def sweep(argv: list[str]) -> int:
    """The whole command; returns the exit status."""
    from trainer.sweeps.checks import Combinations, check_question
    from trainer.sweeps.engine import Engine, make_pruner
    from trainer.sweeps.options import read_options
    from trainer.sweeps.table import SweepView
    from trainer.sweeps.targets import find_target

    options = read_options(argv)
    study = find_study(options)
    question, view = study.question, SweepView()
    target = find_target(question.command, question.options)
    check_question(question, target, study.plan)
    make_pruner(study.plan)
    first = next(question.space.corners(1))
    with places(options.means, Combinations(question, target, None).config(first), study, view) as (
        pool,
        launcher,
        devices,
    ):
        combinations = Combinations(question, target, devices, skip_invalid=options.skip_invalid)
        refused = combinations.check(study.plan)
        if refused:
            view.event(f"{len(refused)} combinations are left out: the command would refuse them")
        combinations.check_metric(combinations.first(study.plan, refused))
        keep(study)
        engine = Engine(study)
        new = engine.plan(options.add, options.again, lambda values: values in refused)
        view.event(
            f"study {study.folder}: {len(engine.trials())} trials, {new} of them new, {pool.size} runs at a time"
        )
        work(study, engine, pool, launcher, target, combinations, options, view)
    return conclude(study, view)


def find_study(options: Options) -> Study:
    """The study that is asked for, new or as it was begun, with the plan of now."""
    from trainer.sweeps.engine import storage_for
    from trainer.sweeps.options import Plan
    from trainer.sweeps.study import DESCRIPTION, Study, refuse_another_question, usual_folder

    question = options.question
    if question is None:
        assert options.study is not None, "checked when the command line was read"
        study = Study.load(options.study)
        refuse_another_question(study, study.question)  # its files may have changed
    else:
        folder = options.study or usual_folder(question)
        if not (folder / DESCRIPTION).exists():
            plan = options.plan or Plan()
            return Study(folder, question, plan, storage_for(folder.parent, options.storage), os.getcwd())
        study = Study.load(folder)
        refuse_another_question(study, question)
    if options.plan is not None:
        study.plan = _later_plan(study.plan, options.plan)
    return study


def keep(study: Study) -> None:
    """Writes the description of a study. Raises UserError if another sweep has just begun the folder with another
    question, or if nothing can be written there."""
    from trainer.sweeps.engine import locked
    from trainer.sweeps.study import DESCRIPTION, refuse_another_question
    from verl_lite.errors import UserError

    try:
        with locked(study.folder):
            if (study.folder / DESCRIPTION).exists():
                refuse_another_question(study, study.question)
            study.save()
    except OSError as error:
        raise UserError(
            f"--study {study.folder}: nothing can be written there: {error.strerror}; choose another folder"
        ) from None


def _later_plan(before: Plan, now: Plan) -> Plan:
    """The plan of a study that goes on: as many trials as it had, or more."""
    if now.trials is None or before.trials is None:
        return now
    return dataclasses.replace(now, trials=max(now.trials, before.trials))


@contextmanager
def places(
    means: Means, config: dict[str, Any], study: Study, view: SweepView
) -> Iterator[tuple[Pool, Launcher, int | None]]:
    """Places for runs, who starts them there, and how many GPUs each has (None = on a CPU): on this machine, or with
    `--ray` on those of a cluster. Raises UserError for what is not there."""
    from trainer.sweeps.trial import LocalLauncher
    from verl_lite.errors import UserError

    if means.ray is None:
        launcher = LocalLauncher(Path(study.cwd))
        pool, devices = make_pool(means, config, study, launcher)
        yield pool, launcher, devices
        return
    try:
        from trainer.sweeps.ray_places import RayPool
    except ImportError as error:
        raise UserError(f"--ray needs Ray: pip install 'ray>=2.55' ({error})") from None
    device = config.get("trainer.device", "auto")
    found = RayPool(
        means.ray,
        gpus=0 if device == "cpu" else means.per_trial,
        needed=device not in ("auto", "cpu"),
        cores=means.threads,
        cwd=Path(study.cwd),
        most=means.slots,
        tell=view.event,
    )
    try:
        yield found, found, found.gpus or None
    finally:
        found.close()


def make_pool(means: Means, config: dict[str, Any], study: Study, launcher: LocalLauncher) -> tuple[Pool, int | None]:
    """Places for runs, and how many GPUs each has (None = on a CPU). Raises UserError for devices that are not
    there."""
    from trainer.sweeps.slots import CpuPool, GpuPool, choose_devices
    from verl_lite.device import device_type
    from verl_lite.errors import UserError
    from verl_lite.machine.gpus import list_gpus

    device = str(config.get("trainer.device", "auto"))
    asks_for_cores = not config and means.slots is not None  # a command whose words are not looked at
    if asks_for_cores or device_type(device) == "cpu":
        if means.devices is not None:
            raise UserError(
                f"--devices {','.join(means.devices)}: no GPU can be used here (trainer.device={device}); leave "
                "--devices out; --slots says how many runs there are at a time"
            )
        return CpuPool(means.slots or 1, means.threads), None
    gpus = list_gpus()
    if gpus is None:
        raise UserError("sweeps on GPUs look at who uses them: install nvidia-ml-py, or set trainer.device=cpu")
    if means.slots is not None:
        raise UserError(
            f"--slots {means.slots} counts runs on a CPU, and these have GPUs: set trainer.device=cpu, or share "
            f"devices with --share {1 / means.slots:.3g}"
        )
    given = config.get("trainer.n_gpus_per_node")
    if isinstance(given, int) and given != means.per_trial:
        raise UserError(f"trainer.n_gpus_per_node={given}, and a run gets {means.per_trial}: give --per-trial {given}")
    pool = GpuPool(
        choose_devices(means.devices, gpus),
        per_trial=means.per_trial,
        share=means.share,
        threads=means.threads,
        run=str(study.folder),
        own=launcher.own,
    )
    return pool, means.per_trial


def work(
    study: Study,
    engine: Engine,
    pool: Pool,
    launcher: Launcher,
    target: Target,
    combinations: Any,
    options: Options,
    view: SweepView,
) -> None:
    """Runs trials until none is left. What this process starts ends with it, kill -9 included."""
    from trainer.sweeps.owners import Sweeper
    from trainer.sweeps.runner import Runner
    from verl_lite.single_controller.guard import guarded

    with guarded(), Sweeper(study.folder, options.stale_s) as sweeper, view:
        runner = Runner(study, engine, sweeper, pool, launcher, target, combinations, options.means, view)
        try:
            runner.work()
        except KeyboardInterrupt:
            view.event(f"to go on: python -m trainer.sweep --study {study.folder}")
            raise


def conclude(study: Study, view: SweepView) -> int:
    """Writes the report, prints the best trials, and gives the exit status."""
    from trainer.sweep_report import write_report
    from trainer.sweeps.results import summary
    from trainer.sweeps.study import read_study

    page = write_report(study.folder)[0]
    record = read_study(study.folder)
    view.print(f"\n{summary(record)}\nThe same with pictures: {page}")
    return FAILED if any(trial.state == "failed" for trial in record.trials) else 0


if __name__ == "__main__":
    sys.exit(main())
