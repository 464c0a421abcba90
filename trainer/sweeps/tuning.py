"""The runs of a study on Ray Tune: which comes next, where it runs, when its trial is pruned, what is tried again.

A trial of Tune's is one run, a trial with one seed: an actor that starts the run's process and reports what it logs.
Tune places and retries runs, `OptunaSearch` chooses parameters, ASHA judges means over seeds. What is decided is in the
study's log first; from it searcher and pruner are made anew when a sweep goes on.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
from ray import tune
from ray.tune.schedulers import AsyncHyperBandScheduler, FIFOScheduler
from ray.tune.search import Searcher
from ray.tune.search.optuna import OptunaSearch

from trainer.cli import stopping_on_signal
from trainer.sweeps.child import Child, Order, clean
from trainer.sweeps.options import Resources
from trainer.sweeps.space import Value
from trainer.sweeps.study import STOP, Run, Study, Trial
from trainer.sweeps.target import OWN_KEYS, Target, missing_metric, planned
from verl_lite.device import device_type
from verl_lite.errors import UserError
from verl_lite.machine.gpus import is_busy, list_gpus, other_users, visible_gpus
from verl_lite.single_controller.guard import guarded, set_environment
from verl_lite.single_controller.ray_cluster import joined_cluster, machines, ray_running

Tell = Callable[[str], None]

_REPORT_S, _LOOK_S = 1.0, 0.1
_STATUS_EVERY_S = 60.0
_DEVICES_EVERY_S = 10.0
_FIRST_ANSWER_S = 20.0
_OBJECT_STORE_MB = 80
_NO_LIMIT = 10**9
_QUIET = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    "TUNE_GLOBAL_CHECKPOINT_S": "3600",
    "RAY_AIR_NEW_OUTPUT": "0",
}


# ------------------------------------------------------------------------------------------------------------- places


@contextmanager
def places(resources: Resources, device: str, tell: Tell) -> Iterator[int | None]:
    """Where runs can be; inside, a cluster that was asked for is joined. Gives the GPUs of each run; None = on a CPU.

    Raises:
        UserError: nobody answers at the address, no machine could ever hold a run, or a device is asked for that is
            not there.
    """
    if resources.address is None:
        on_cpu = device_type(device) == "cpu"
        if on_cpu and (resources.per_trial, resources.share) != (1, 1.0):
            raise UserError(f"--per-trial, --share: no GPU can be used here (trainer.device={device}); leave them out")
        if not on_cpu and list_gpus() is None:
            raise UserError("sweeps on GPUs look at who uses them: install nvidia-ml-py, or set trainer.device=cpu")
        yield None if on_cpu else resources.per_trial
        return
    with _ray(resources.address, None, None, tell):
        there = machines()
        has_gpus = device != "cpu" and (device == "cuda" or any("GPU" in machine.resources for machine in there))
        needed = {"CPU": float(resources.threads)} | ({"GPU": float(resources.per_trial)} if has_gpus else {})
        if not any(machine.has(needed) for machine in there):
            raise UserError(
                f"--ray-address {resources.address}: each run asks for {needed} on one machine, and none has that. Ask "
                "for less, or add machines with `ray start --address=...`"
            )
        threading.Thread(target=_watch_head, args=(resources.address,), daemon=True).start()
        yield resources.per_trial if has_gpus else None


@contextmanager
def _ray(address: str | None, cpus: int | None, gpus: int | None, tell: Tell) -> Iterator[None]:
    asked = {"address": address, "num_cpus": cpus, "wait_for_nodes_s": _FIRST_ANSWER_S}
    options = SimpleNamespace(**asked, object_store_memory_mb=_OBJECT_STORE_MB)
    with ray_running(options, f"sweep-{os.getpid()}", num_gpus=gpus, tell=tell):
        yield


def _watch_head(address: str) -> None:
    """Ends this process if the head of the cluster is gone, which Ray would do after a minute without a word."""
    while (cluster := joined_cluster()) is not None:
        if cluster.is_headless:
            print(
                f"ClusterLostError: the Ray cluster at {address} is gone. To go on: the same command", file=sys.stderr
            )
            os._exit(1)
        time.sleep(1.0)


def _free_devices(wait: bool, tell: Tell) -> list[str]:
    """Words of CUDA_VISIBLE_DEVICES for the devices that nobody else uses. Raises UserError if there is none."""
    while True:
        visible = visible_gpus(list_gpus() or [])
        busy = {
            one.token: f"{one.gpu} is in use: {'; '.join(other_users(one.gpu))}" for one in visible if is_busy(one.gpu)
        }
        free = [one.token for one in visible if one.token not in busy]
        for reason in busy.values():
            tell(f"{reason}; {'passed over' if free else 'waiting'}")
        if free:
            return free
        if not wait:
            raise UserError(
                "no device is free:\n  " + "\n  ".join(busy.values()) + "\nWait for them with --wait, or choose others "
                "with CUDA_VISIBLE_DEVICES"
            )
        time.sleep(_DEVICES_EVERY_S)


# --------------------------------------------------------------------------------------------------------- the sweep


class Sweep:
    """What Tune's searcher and scheduler hand out and hear, as the study has it.

    Args:
        skipped: combinations that are left out. again: failed trials are run once more.
        order: makes the configuration of a run's actor.
    """

    def __init__(
        self,
        study: Study,
        target: Target,
        order: Callable[[Trial, Run], dict[str, Any]],
        tell: Tell,
        *,
        skipped: Collection[Mapping[str, Value]] = (),
        skip_invalid: bool = False,
        again: bool = False,
    ) -> None:
        self._study, self._target, self._order, self._tell = study, target, order, tell
        self._skip_invalid = skip_invalid
        self._queue, self._draws = _to_run(study, skipped, again)
        self._drawn = {str(trial.number) for trial in study.trials if not trial.is_over}
        self._optuna = _optuna(study) if planned(study.question, study.search) is None else None
        self._judge = None if study.search.asha is None else Judge(study, study.search.asha)
        self._running: dict[str, tuple[Trial, Run]] = {}
        self._told: dict[str, str] = {}
        self._status = time.monotonic()
        self._has_metric = any(trial.means or trial.values for trial in study.trials)
        self.problem: UserError | None = None

    def next_run(self, trial_id: str) -> dict[str, Any] | None:
        """For Tune's trial of that name: a run of a trial that was begun, else of a new one; None if none is left."""
        if self.problem is not None or (self._study.folder / STOP).exists():
            return None
        found = self._begun() or self._new()
        if found is None:
            return None
        trial, run = self._running[trial_id] = found
        run.state = "running"
        self._tell(f"{_name(trial, run)} starts: {shown(trial.parameters)}")
        return self._order(trial, run)

    def _begun(self) -> tuple[Trial, Run] | None:
        handed_out = [id(run) for _, run in self._running.values()]
        runs = [(trial, run) for trial in self._study.trials if not trial.is_over for run in trial.runs]
        return next((one for one in runs if one[1].state != "done" and id(one[1]) not in handed_out), None)

    def _new(self) -> tuple[Trial, Run] | None:
        while self._queue or self._draws:
            number = str(len(self._study.trials))
            if self._queue:
                parameters = self._queue.pop(0)
            else:
                assert self._optuna is not None, "only it draws"
                self._draws -= 1
                self._drawn.add(number)
                parameters = dict(self._optuna.suggest(number) or {})
            problem = self._target.problem(parameters) or ""
            trial = self._study.begin(parameters, problem, bool(problem) and self._skip_invalid)
            if not problem:
                return trial, trial.runs[0]
            self._tell(f"trial {number} is not run: {problem}")
            self._end_trial(trial)
        return None

    def take(self, trial_id: str, said: dict[str, Any]) -> None:
        """What a run's actor reports."""
        trial, run = self._running[trial_id]
        run.values |= {int(step): value for step, value in said["values"]}
        run.steps = said["step"]
        if said["waits"] and self._told.get(trial_id) != said["waits"]:
            self._tell(f"{_name(trial, run)} waits: {said['waits']}")
        self._told[trial_id] = said["waits"]
        self._has_metric |= bool(run.values)
        if said["names"]:
            self._give_up_without_metric(missing_metric(self._study.question.metric, said["names"], _name(trial, run)))
        self._look_at_means(trial)
        if said["ended"] is not None:
            self._end(trial_id, **said["ended"], names=said["names"])
        self._tell_status()

    def hear_of_fault(self, trial_id: str, error: str, is_last: bool) -> None:
        """The machine was at fault; Tune starts the run again, unless it was the last time."""
        if is_last:
            self._end(trial_id, "failed", error=error)
        else:
            self._tell(f"{_name(*self._running[trial_id])}: {error}; again, from its last checkpoint")

    def _look_at_means(self, trial: Trial) -> None:
        """Shows the judge the mean of each step that all runs of the trial that have begun have reached."""
        begun = [run.values for run in trial.runs if run.values]
        if self._judge is None or trial.is_over or not begun:
            return
        for step in sorted(set.intersection(*map(set, begun)) - trial.means.keys()):
            mean = sum(values[step] for values in begun) / len(begun)
            self._study.judge(trial, step, mean, prune=self._judge.stops(trial.number, step, mean))
            if self._optuna is not None and str(trial.number) in self._drawn:
                self._optuna.on_trial_result(str(trial.number), {"value": mean, "training_iteration": step})
            if trial.is_pruned:
                self._tell(f"trial {trial.number} is pruned at step {step}")
                return

    def _end(self, trial_id: str, state: str, *, names: Collection[str] = (), **known: Any) -> None:
        trial, run = self._running.pop(trial_id)
        question, name = self._study.question, _name(trial, run)
        if state == "done":
            value = run.counted(question.take, question.mode)
            if value is None:
                self._give_up_without_metric(missing := missing_metric(question.metric, names, name))
                state, known["error"] = "failed", missing
            elif value != value:
                state, known["error"] = "failed", f"{question.metric} is {value}"
            else:
                known["value"] = value
        self._study.end(trial, run, state, **known)
        error = known.get("error", "").partition("\n")[0]
        value_text = f": {question.metric} {run.value:.4g} after {run.steps} steps" if run.value is not None else ""
        self._tell(f"{name} {state}{value_text}{': ' if error else ''}{error}")
        if trial.is_over and not any(other is trial for other, _ in self._running.values()):
            self._end_trial(trial)

    def _end_trial(self, trial: Trial) -> None:
        if self._optuna is not None and str(trial.number) in self._drawn:
            # pruned without a value is the worst that a trial can be to Optuna's samplers, which learn nothing of FAIL
            value = trial.value if trial.state == "complete" else None
            self._optuna.on_trial_complete(str(trial.number), {"value": value})
        self._study.write_csv()

    def _give_up_without_metric(self, problem: str) -> None:
        """Ends the sweep where no run has logged the metric yet: its name is wrong, and all runs would be in vain."""
        if not self._has_metric:
            self.problem = self.problem or UserError(problem)
            (self._study.folder / STOP).touch()

    def _tell_status(self) -> None:
        if time.monotonic() - self._status > _STATUS_EVERY_S:
            self._status = time.monotonic()
            over = sum(trial.is_over for trial in self._study.trials)
            running = [f"{_name(trial, run)} step {run.steps}" for trial, run in self._running.values()]
            self._tell(f"{over} trials are over; {', '.join(running)}")


def _to_run(study: Study, skipped: Collection[Mapping[str, Value]], again: bool) -> tuple[list[dict[str, Value]], int]:
    """Combinations that are to be run, in order, and how many the sampler draws after them."""
    known = [trial.parameters for trial in study.trials]
    failed = [trial.parameters for trial in study.trials if trial.state == "failed"]
    alive = [trial.parameters for trial in study.trials if trial.state != "failed"]
    queue = [values for number, values in enumerate(failed) if again and values not in [*alive, *failed[:number]]]
    plan, search = planned(study.question, study.search), study.search
    if plan is None:
        return queue, max(0, (search.trials or 0) - len(known))
    if search.kind == "random":
        random.Random(search.seed).shuffle(plan)
        plan = plan[: search.trials]
    return queue + [values for values in plan if values not in known and values not in skipped], 0


def _optuna(study: Study) -> OptunaSearch:
    """The searcher, with what is known. TPE takes trials that run for bad ones, so that several at a time differ."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    samplers, seed = optuna.samplers, study.search.seed + len(study.trials)  # what was drawn is not drawn again
    is_tpe = study.search.kind == "optuna"
    sampler = samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True) if is_tpe else None
    begun = [trial for trial in study.trials if not trial.is_over]
    found = OptunaSearch(
        {parameter.name: parameter.distribution for parameter in study.question.space},
        metric="value",
        mode=study.question.mode,
        points_to_evaluate=[trial.parameters for trial in begun],
        sampler=sampler or samplers.RandomSampler(seed),
    )
    for trial in begun:
        found.suggest(str(trial.number))
    for trial in (trial for trial in study.trials if trial.is_over):
        is_complete, means = trial.state == "complete", list(trial.means.values())
        value: Any = trial.value if is_complete else None
        found.add_evaluated_point(trial.parameters, value, pruned=not is_complete, intermediate_values=means)
    return found


class Judge:
    """ASHA over the means of trials, with those of the study's log."""

    def __init__(self, study: Study, arguments: Mapping[str, float]) -> None:
        whole: Any = {name: value if name == "reduction_factor" else int(value) for name, value in arguments.items()}
        self._asha = AsyncHyperBandScheduler(
            time_attr="step", metric="value", mode=study.question.mode, max_t=_NO_LIMIT, stop_last_trials=False, **whole
        )
        self._known: set[int] = set()
        for trial in study.trials:
            for step, mean in trial.means.items():
                self.stops(trial.number, step, mean)

    def stops(self, number: int, step: int, mean: float) -> bool:
        """Whether a trial with this mean at this step is not worth going on with."""
        tuner: Any = None  # ASHA does not ask it, and of a trial only its name
        trial: Any = SimpleNamespace(trial_id=str(number))
        if number not in self._known:
            self._known.add(number)
            self._asha.on_trial_add(tuner, trial)
        decision = self._asha.on_trial_result(tuner, trial, {"step": step, "value": mean})
        return bool(decision == FIFOScheduler.STOP)


def _name(trial: Trial, run: Run) -> str:
    return f"trial {trial.number}" + ("" if run.seed is None else f" seed {run.seed}")


def shown(values: Mapping[str, Value]) -> str:
    """Parameters in a line, numbers short, keys by their last part where that is enough to tell them apart."""
    lasts = [name.rpartition(".")[2] for name in values]
    names = [name if lasts.count(last) > 1 else last for name, last in zip(values, lasts, strict=True)]
    texts = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in values.values()]
    return ", ".join(f"{name}={text}" for name, text in zip(names, texts, strict=True)) or "no parameters"


# ---------------------------------------------------------------------------------------------------------- on Tune


class RunActor(tune.Trainable):
    """On the machine of a run: its process. What it reports is JSON, since Tune takes nested results apart."""

    def setup(self, config: dict[str, Any]) -> None:
        self._child = Child(Order(**config))
        self._reported: dict[int, float] = {}

    def step(self) -> dict[str, Any]:
        child, deadline = self._child, time.monotonic() + _REPORT_S
        ended, waits, new = None, "", dict[int, float]()
        while ended is None and not new and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
            if child.has_begun:
                ended = child.look()
            elif child.is_unwanted():
                ended = {"state": "stopped"}
            else:
                waits = child.why_not()
            new = dict(child.metrics.values.items() - self._reported.items())
        self._reported |= new
        metrics = child.metrics
        is_missing = not metrics.values and (ended or any(name.startswith("val-core/") for name in metrics.names))
        names = sorted(metrics.names) if is_missing else []
        said = {"values": sorted(new.items()), "step": metrics.step, "waits": waits, "names": names, "ended": ended}
        return {"said": json.dumps(said), "done": ended is not None}

    def cleanup(self) -> None:
        self._child.kill()

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self.cleanup()
        self.setup(new_config)
        return True


class RunSearcher(Searcher):
    """Hands Tune the runs of a sweep."""

    def __init__(self, sweep: Sweep) -> None:
        super().__init__()
        self._sweep = sweep

    def suggest(self, trial_id: str) -> Any:
        return self._sweep.next_run(trial_id) or Searcher.FINISHED

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        pass

    def save(self, checkpoint_path: str) -> None:
        Path(checkpoint_path).touch()  # the study's log is what is kept


class RunScheduler(FIFOScheduler):
    """Tells a sweep what Tune hears of its runs. A run ends by itself, also when it is asked to."""

    def __init__(self, sweep: Sweep, retries: int) -> None:
        super().__init__()
        self._sweep, self._retries = sweep, retries

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        self._sweep.take(trial.trial_id, json.loads(result["said"]))
        return str(FIFOScheduler.CONTINUE)

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        self._sweep.take(trial.trial_id, json.loads(result["said"]))

    def on_trial_error(self, tune_controller: Any, trial: Any) -> None:
        text = Path(trial.error_file).read_text() if trial.error_file else ""
        lost = "the machine, or its part of Ray, was lost"
        error = text.rpartition("MachineFault: ")[2].partition("\n")[0] if "MachineFault: " in text else lost
        self._sweep.hear_of_fault(trial.trial_id, error, is_last=not trial.should_recover())


def run_study(
    study: Study,
    target: Target,
    resources: Resources,
    tell: Tell,
    *,
    skipped: Collection[Mapping[str, Value]] = (),
    skip_invalid: bool = False,
    again: bool = False,
) -> None:
    """Runs what is left of a study. Nothing of it runs any more when this returns or raises.

    Raises:
        UserError: no run logs the metric. KeyboardInterrupt: it was asked to stop, and has.
    """
    environment = clean(os.environ, study.question.settings) if resources.address is None else None
    mark, on_gpu, stop = uuid.uuid4().hex, target.gpus is not None, study.folder / STOP
    additions = {"OMP_NUM_THREADS": str(resources.threads)}

    def order(trial: Trial, run: Run) -> dict[str, Any]:
        words = [*run.words, *_own_words(study, target, resources, trial, run)]
        return {
            "command": [sys.executable, *words], "folder": run.folder, "cwd": Path(study.cwd), "sweep": mark,
            "metric": study.question.metric, "environment": environment, "additions": additions, "gpus": on_gpu,
            "grace_s": resources.grace_s,
        }  # fmt: skip

    sweep = Sweep(study, target, order, tell, skipped=skipped, skip_invalid=skip_invalid, again=again)
    for path in (stop, *(trial.folder / STOP for trial in study.trials if not trial.is_over)):
        path.unlink(missing_ok=True)
    before = set_environment(dict(_QUIET))
    try:
        with ExitStack() as stack:
            if resources.address is None:
                stack.enter_context(guarded())
                tokens = _free_devices(resources.wait, tell) if on_gpu else []
                before |= set_environment({"CUDA_VISIBLE_DEVICES": ",".join(tokens)} if on_gpu else {})
                slots = resources.slots or max(1, int(len(tokens) / (resources.per_trial * resources.share) + 1e-9))
                stack.enter_context(_ray(None, slots, len(tokens), tell))
            stack.enter_context(stopping_on_signal(stop.touch, lambda _: tell("stopping: runs save what they have")))
            _tune(study, sweep, target, resources)
    finally:
        set_environment(before)
        shutil.rmtree(study.folder / ".tune", ignore_errors=True)
    if sweep.problem is not None:
        raise sweep.problem
    if stop.exists():
        raise KeyboardInterrupt


def _own_words(study: Study, target: Target, resources: Resources, trial: Trial, run: Run) -> list[str]:
    """What a sweep gives to each run itself."""
    folder, name, resume, _ = OWN_KEYS
    words = {folder: run.folder, name: f"{study.folder.name}-{trial.number:04}-{run.folder.name}", resume: "auto"}
    if target.gpus is not None:
        words["trainer.n_gpus_per_node"] = target.gpus
        loaded = target.load(trial.parameters) if resources.share < 1 else None
        if loaded is not None and target.has("rollout.gpu_memory_utilization"):
            words["rollout.gpu_memory_utilization"] = loaded.config.rollout.gpu_memory_utilization * resources.share
            words["trainer.share_devices"] = "true"
    return [f"{key}={value}" for key, value in words.items() if target.has(key)]


def _tune(study: Study, sweep: Sweep, target: Target, resources: Resources) -> None:
    gpus = 0.0 if target.gpus is None else target.gpus * resources.share
    cpus = 1 if resources.address is None else resources.threads
    tune.Tuner(
        tune.with_resources(RunActor, {"cpu": cpus, "gpu": gpus}),
        tune_config=tune.TuneConfig(
            search_alg=RunSearcher(sweep),
            scheduler=RunScheduler(sweep, resources.retries),
            num_samples=-1,
            max_concurrent_trials=resources.slots or (1 if resources.address is None and not gpus else None),
            reuse_actors=True,
            trial_dirname_creator=lambda trial: trial.trial_id,
        ),
        run_config=tune.RunConfig(
            name="tune",
            storage_path=str(study.folder / ".tune"),
            failure_config=tune.FailureConfig(max_failures=resources.retries),
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),  # runs have their own
            verbose=0,
        ),
    ).fit()
