"""Optuna as the engine: its storage, samplers and pruners, and the queue of trials that several sweeps share.

A study's trials are put into Optuna's queue when they are planned: the combinations of a grid, or as many empty places
as there shall be trials, which the sampler fills when a sweep takes them. So the number of trials is the same however
many sweeps work on them, and a grid has no combination twice.
"""

from __future__ import annotations

import fcntl
import hashlib
import inspect
import json
import logging
import os
import random
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from trainer.sweeps.options import Plan
from trainer.sweeps.owners import NO_LOCKS
from trainer.sweeps.space import Value
from trainer.sweeps.study import Study, damaged
from verl_lite.errors import UserError

if TYPE_CHECKING:
    import optuna
    from optuna.trial import FrozenTrial, Trial

_NETWORK = (
    *("nfs", "lustre", "gpfs", "beegfs", "cifs", "smb", "ceph"),
    *("glusterfs", "afs", "9p", "wekafs", "panfs", "fuse."),
)
_FILES = {"sqlite": "study.db", "journal": "journal.log"}
_NAME = "sweep"
_SQLITE_PATIENCE_S = 60.0


class Engine:
    """Optuna's side of one study, opened for this process."""

    def __init__(self, study: Study) -> None:
        from sqlalchemy.exc import DatabaseError

        optuna = _optuna()
        self.study = study
        try:
            with locked(study.folder):
                self.storage = _storage(study)
                self.optuna = optuna.create_study(
                    study_name=_NAME,
                    storage=self.storage,
                    direction="maximize" if study.question.mode == "max" else "minimize",
                    load_if_exists=True,
                    pruner=make_pruner(study.plan),
                )
        except (DatabaseError, json.JSONDecodeError) as error:
            raise UserError(damaged(study.folder / _FILES[study.storage], error)) from None
        self._id = self.storage.get_study_id_from_name(_NAME)

    def trials(self, *states: str) -> list[FrozenTrial]:
        """Those in these states (Optuna's names); without any, all."""
        from optuna.trial import TrialState

        wanted = tuple(TrialState[state] for state in states) or None
        return self.optuna.get_trials(deepcopy=False, states=wanted)

    # ----------------------------------------------------------------------------------------------------- planning

    def plan(self, add: int = 0, again: bool = False, refused: Collection[Mapping[str, Value]] = ()) -> int:
        """Fills the queue up to what the plan says; gives the number of new places.

        add: places beyond those that there are. again: failed trials once more. refused: combinations of a grid that
        are left out.
        """
        with locked(self.study.folder):
            known = self.trials()
            taken = [_given(trial) for trial in known]
            places: list[dict[str, Value]] = []
            if again:
                others = [_given(trial) for trial in known if trial.state.name in ("WAITING", "RUNNING", "COMPLETE")]
                for trial in known:
                    if trial.state.name == "FAIL" and trial.params not in others + places:
                        places.append(dict(trial.params))
            wanted = self.study.plan.trials
            missing = add if wanted is None else max(0, wanted - len(known)) + add
            if self.study.question.space.is_listed(self.study.plan.kind):
                left = [values for values in self._combinations() if values not in refused and values not in taken]
                if add > len(left):
                    raise UserError(
                        f"--add {add}: the grid has {len(left)} combinations left; for trials between its points give "
                        "ranges in a study of its own"
                    )
                places += left if wanted is None else left[:missing]
            else:
                places += [{}] * missing
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

        trial_id = self._trial_id(number)
        if self.storage.get_trial(trial_id).state == TrialState.WAITING:
            self.storage.set_trial_state_values(trial_id, TrialState.RUNNING)
        text = f"{self.study.plan.seed} {number}".encode()
        self.optuna.sampler = make_sampler(self.study.plan, int.from_bytes(hashlib.sha256(text).digest()[:4], "big"))
        trial = Trial(self.optuna, trial_id)
        parameters = self.study.question.space.distributions()  # as `Study.ask` fills in what it is given
        return trial, {name: trial._suggest(name, distribution) for name, distribution in parameters.items()}

    def is_open(self, number: int) -> bool:
        """Whether a trial is not finished, looked at anew."""
        return not self.storage.get_trial(self._trial_id(number)).state.is_finished()

    def _trial_id(self, number: int) -> int:
        return self.storage.get_trial_id_from_study_id_trial_number(self._id, number)

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
    storages, path = _optuna().storages, study.folder / _FILES[study.storage]
    if study.storage == "sqlite":
        arguments = {"connect_args": {"timeout": _SQLITE_PATIENCE_S}}
        return storages.RDBStorage(f"sqlite:///{path}", engine_kwargs=arguments)
    # a symbolic link as the lock works on every NFS, and is broken when a process that had it is gone
    return storages.JournalStorage(storages.journal.JournalFileBackend(str(path)))


def storage_for(folder: Path, asked: str) -> str:
    """sqlite, or journal where the folder is on a network file system, on which SQLite's locks do not hold."""
    if asked != "auto":
        return asked
    path = folder.absolute()
    places = {partition.mountpoint: partition.fstype for partition in psutil.disk_partitions(all=True)}
    kind = next((places[str(parent)] for parent in (path, *path.parents) if str(parent) in places), "")
    return "journal" if kind.startswith(_NETWORK) else "sqlite"


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
