"""Optuna as the engine: its storage, samplers and pruners, and the queue of trials that several sweeps share.

A study's trials are put into Optuna's queue when they are planned: the combinations of a grid, or as many empty places
as there shall be trials, which the sampler fills when a sweep takes them. So the number of trials is the same however
many sweeps work on them, and a grid has no combination twice.
"""

from __future__ import annotations

import fcntl
import hashlib
import inspect
import logging
import os
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from trainer.sweeps.options import Plan
from trainer.sweeps.owners import NO_LOCKS
from trainer.sweeps.space import Choices, Value
from trainer.sweeps.study import Study
from verl_lite.errors import UserError

if TYPE_CHECKING:
    import optuna
    from optuna.trial import FrozenTrial, Trial

_NETWORK = (
    "nfs",
    "lustre",
    "gpfs",
    "beegfs",
    "cifs",
    "smb",
    "ceph",
    "glusterfs",
    "afs",
    "9p",
    "wekafs",
    "panfs",
    "fuse.",
)
_NAME = "sweep"
_SQLITE_PATIENCE_S = 60.0


class Engine:
    """Optuna's side of one study, opened for this process."""

    def __init__(self, study: Study) -> None:
        optuna = _optuna()
        self.study = study
        with locked(study.folder):
            self.storage = _storage(study)
            self.optuna = optuna.create_study(
                study_name=_NAME,
                storage=self.storage,
                direction="maximize" if study.question.mode == "max" else "minimize",
                load_if_exists=True,
                sampler=optuna.samplers.RandomSampler(study.plan.seed),
                pruner=make_pruner(study.plan),
            )
        self._id = self.storage.get_study_id_from_name(_NAME)

    def trials(self, *states: str) -> list[FrozenTrial]:
        """Those in these states (Optuna's names); without any, all."""
        from optuna.trial import TrialState

        wanted = tuple(TrialState[state] for state in states) or None
        return self.optuna.get_trials(deepcopy=False, states=wanted)

    # ----------------------------------------------------------------------------------------------------- planning

    def plan(self, add: int = 0, again: bool = False, refused: Any = None) -> int:
        """Fills the queue up to what the plan says; gives the number of new places.

        add: places beyond those that there are. again: failed trials once more. refused: from a combination of a
        grid to whether it is left out.
        """
        with locked(self.study.folder):
            known = self.trials()
            places: list[dict[str, Value]] = []
            if again:
                running = [_given(trial) for trial in known if trial.state.name in ("WAITING", "RUNNING", "COMPLETE")]
                failed = [dict(trial.params) for trial in known if trial.state.name == "FAIL"]
                places += [
                    values
                    for number, values in enumerate(failed)
                    if values not in running and values not in failed[:number]
                ]
            wanted = self.study.plan.trials
            if self.study.question.space.is_listed(self.study.plan.kind):
                left = [values for values in self._combinations() if not (refused and refused(values))]
                taken = [_given(trial) for trial in known]
                left = [values for values in left if values not in taken]
                count = len(left) if wanted is None else max(0, wanted - len(known)) + add
                if add > len(left):
                    raise UserError(
                        f"--add {add}: the grid has {len(left)} combinations left; for trials between its points give "
                        "ranges in a study of its own"
                    )
                places += left[:count]
            else:
                places += [{}] * (max(0, (wanted or 0) - len(known)) + add)
            for values in places:
                self.optuna.enqueue_trial(values)
        return len(places)

    def _combinations(self) -> list[dict[str, Value]]:
        """Of the grid, in order; shuffled by the plan's seed where they are drawn at random."""
        combinations = list(self.study.question.space.grid())
        if self.study.plan.kind == "random":
            random.Random(self.study.plan.seed).shuffle(combinations)
        return combinations

    # ------------------------------------------------------------------------------------------------------- trials

    def begin(self, number: int) -> tuple[Trial, dict[str, Value]]:
        """The trial of that number, which this sweep has claimed, running, and its parameters.

        A place of the queue is filled now. The sampler's seed comes from the plan's seed and the number, so that no two
        trials are chosen alike, whichever sweep does it.
        """
        from optuna.trial import Trial, TrialState

        trial_id = self.storage.get_trial_id_from_study_id_trial_number(self._id, number)
        if self.storage.get_trial(trial_id).state == TrialState.WAITING:
            self.storage.set_trial_state_values(trial_id, TrialState.RUNNING)
        text = f"{self.study.plan.seed} {number}".encode()
        self.optuna.sampler = make_sampler(self.study.plan, int.from_bytes(hashlib.sha256(text).digest()[:4], "big"))
        trial = Trial(self.optuna, trial_id)
        values: dict[str, Value] = {}
        for parameter in self.study.question.space.parameters:
            if isinstance(parameter, Choices):
                labels = [option.label for option in parameter.options]
                values[parameter.name] = trial.suggest_categorical(parameter.name, labels)
            elif parameter.whole:
                values[parameter.name] = trial.suggest_int(
                    parameter.name,
                    int(parameter.low),
                    int(parameter.high),
                    step=int(parameter.step or 1),
                    log=parameter.log,
                )
            else:
                values[parameter.name] = trial.suggest_float(
                    parameter.name, parameter.low, parameter.high, step=parameter.step, log=parameter.log
                )
        return trial, values

    def is_open(self, number: int) -> bool:
        """Whether a trial is not finished, looked at anew."""
        return not self.storage.get_trial(
            self.storage.get_trial_id_from_study_id_trial_number(self._id, number)
        ).state.is_finished()

    def end(self, trial: Trial, state: str, value: float | None = None, error: str = "") -> None:
        """COMPLETE with a value, PRUNED or FAIL."""
        from optuna.trial import TrialState

        if error:
            trial.set_user_attr("error", error)
        self.optuna.tell(trial, value, TrialState[state])


def _given(trial: FrozenTrial) -> dict[str, Any]:
    return dict(trial.params) or dict(trial.system_attrs.get("fixed_params", {}))


# -------------------------------------------------------------------------------------------------- parts of Optuna


def _optuna() -> Any:
    """The module, quiet. Raises UserError if it is not installed."""
    try:
        import optuna
    except ImportError:
        raise UserError("sweeps need Optuna: pip install 'optuna>=4'") from None
    optuna.logging.set_verbosity(logging.WARNING)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    return optuna


def make_sampler(plan: Plan, seed: int) -> optuna.samplers.BaseSampler:
    """For the next trial. TPE takes trials that run for bad ones, so that several at a time differ."""
    samplers = _optuna().samplers
    if plan.kind == "optuna":
        return samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True)
    return samplers.RandomSampler(seed)


def make_pruner(plan: Plan) -> optuna.pruners.BasePruner:
    """Raises UserError for parameters that Optuna's pruner does not have."""
    pruners = _optuna().pruners
    known = {
        "none": pruners.NopPruner,
        "asha": pruners.SuccessiveHalvingPruner,
        "hyperband": pruners.HyperbandPruner,
        "median": pruners.MedianPruner,
    }[plan.pruner]
    names = [name for name in inspect.signature(known).parameters if name not in ("args", "kwargs")]
    for name in plan.pruner_arguments:
        if name not in names:
            raise UserError(f"--pruner {plan.pruner}: {name} is none of its parameters, {', '.join(names) or 'none'}")
    try:
        return known(**plan.pruner_arguments)
    except (ValueError, TypeError) as error:
        raise UserError(f"--pruner {plan.pruner}: {error}") from None


def _storage(study: Study) -> optuna.storages.BaseStorage:
    storages = _optuna().storages
    if study.storage == "sqlite":
        arguments = {"connect_args": {"timeout": _SQLITE_PATIENCE_S}}
        return storages.RDBStorage(f"sqlite:///{study.folder / 'study.db'}", engine_kwargs=arguments)
    # a symbolic link as the lock works on every NFS, and is broken when a process that had it is gone
    return storages.JournalStorage(storages.journal.JournalFileBackend(str(study.folder / "journal.log")))


def storage_for(folder: Path, asked: str) -> str:
    """sqlite, or journal where the folder is on a network file system, on which SQLite's locks do not hold."""
    if asked != "auto":
        return asked
    return "journal" if is_network_file_system(folder) else "sqlite"


def is_network_file_system(folder: Path) -> bool:
    """By the kind of the mount that it lies in."""
    path = folder.absolute()
    places = {partition.mountpoint: partition.fstype for partition in psutil.disk_partitions(all=True)}
    kind = next((places[str(parent)] for parent in (path, *path.parents) if str(parent) in places), "")
    return kind.startswith(_NETWORK)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Inside, no other sweep plans or makes this study."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:  # without locks sweeps should not be started at the very same moment
            if error.errno not in NO_LOCKS:
                raise
        yield
    finally:
        os.close(descriptor)
