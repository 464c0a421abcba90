"""`python -m trainer.sweep` from its words to its report: the question is checked, then trials run where there is room.

Nothing is written before all has been checked.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer.sweep_report import write_report
from trainer.sweeps.checks import Combinations, check_question
from trainer.sweeps.engine import Engine, locked, make_pruner, storage_for
from trainer.sweeps.options import Means, Options, Plan, Question, read_options
from trainer.sweeps.owners import Sweeper
from trainer.sweeps.results import summary
from trainer.sweeps.runner import Runner
from trainer.sweeps.slots import CpuPool, GpuPool, Pool, choose_devices
from trainer.sweeps.study import DESCRIPTION, Study, read_study, refuse_another_question, usual_folder
from trainer.sweeps.table import SweepView
from trainer.sweeps.targets import find_target
from trainer.sweeps.trial import Launcher, LocalLauncher
from verl_lite.device import device_type
from verl_lite.errors import ClusterLostError, UserError
from verl_lite.machine.gpus import list_gpus
from verl_lite.single_controller.guard import guarded

FAILED = 1


def sweep(argv: list[str]) -> int:
    """The whole command; returns the exit status."""
    options = read_options(argv)
    study = find_study(options)
    question, view = study.question, SweepView()
    target = find_target(question.command, question.options)
    check_question(question, target, study.plan)
    make_pruner(study.plan)
    config = Combinations(question, target, None).config(next(question.space.corners(1)))
    with places(options.means, config, study, view) as (pool, launcher, devices):
        combinations = Combinations(question, target, devices, skip_invalid=options.skip_invalid)
        refused = combinations.check(study.plan)
        if refused:
            view.event(f"{len(refused)} combinations are left out: the command would refuse them")
        combinations.check_metric(combinations.first(study.plan, refused))
        keep(study)
        engine = Engine(study)
        new = engine.plan(options.add, options.again, refused)
        view.event(
            f"study {study.folder}: {len(engine.trials())} trials, {new} of them new, {pool.size} runs at a time"
        )
        with guarded(), Sweeper(study.folder, options.stale_s) as sweeper, view:
            work(Runner(study, engine, sweeper, pool, launcher, target, combinations, options.means, view))
    page = write_report(study.folder)[0]
    record = read_study(study.folder)
    view.print(f"\n{summary(record)}\nThe same with pictures: {page}")
    return FAILED if any(trial.state == "failed" for trial in record.trials) else 0


def find_study(options: Options) -> Study:
    """The study that is asked for, new or as it was begun, with the plan of now: as many trials as it had, or more."""
    question = options.question
    folder = options.study or usual_folder(question or Question())
    if question is not None and not (folder / DESCRIPTION).exists():
        return Study(folder, question, options.plan or Plan(), storage_for(folder.parent, options.storage), os.getcwd())
    study = Study.load(folder)
    refuse_another_question(study, question or study.question)  # its files may have changed
    if options.storage not in ("auto", study.storage):
        raise UserError(f"--storage {options.storage}: {folder} was begun with {study.storage}; leave it out")
    if options.plan is not None:
        known, wanted = study.plan.trials, options.plan.trials
        most = max(known, wanted) if known is not None and wanted is not None else wanted
        study.plan = dataclasses.replace(options.plan, trials=most)
    return study


def keep(study: Study) -> None:
    """Writes the description of a study. Raises UserError if another sweep has just begun the folder with another
    question, or if nothing can be written there."""
    try:
        with locked(study.folder):
            if (study.folder / DESCRIPTION).exists():
                refuse_another_question(study, study.question)
            study.save()
    except OSError as error:
        raise UserError(
            f"--study {study.folder}: nothing can be written there: {error.strerror}; choose another folder"
        ) from None


@contextmanager
def places(
    means: Means, config: Mapping[str, Any], study: Study, view: SweepView
) -> Iterator[tuple[Pool, Launcher, int | None]]:
    """Places for runs, who starts them there, and how many GPUs each has (None = on a CPU): on this machine, or with
    `--ray` on those of a cluster. Raises UserError for what is not there."""
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


def make_pool(
    means: Means, config: Mapping[str, Any], study: Study, launcher: LocalLauncher
) -> tuple[Pool, int | None]:
    """Places for runs on this machine, and how many GPUs each has (None = on a CPU). Raises UserError for devices that
    are not there."""
    device = str(config.get("trainer.device", "auto"))
    asks_for_cores = not config and means.slots is not None  # a command whose words are not looked at
    if asks_for_cores or device_type(device) == "cpu":
        words = Means(devices=means.devices, per_trial=means.per_trial, share=means.share).words()
        if words:
            raise UserError(
                f"{' '.join(words)}: no GPU can be used here (trainer.device={device}); leave {words[0]} out; --slots "
                "says how many runs there are at a time"
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


def work(runner: Runner) -> None:
    """Runs trials until none is left; what ends it before says how to go on."""
    again = shlex.join(["python", "-m", "trainer.sweep", "--study", str(runner.study.folder), *runner.means.words()])
    try:
        runner.work()
    except (KeyboardInterrupt, OSError):  # a disk that is full
        runner.view.event(f"to go on: {again}")
        raise
    except ClusterLostError as error:
        raise ClusterLostError(f"{error}. To go on, start a cluster: {again}") from None
