"""Runs a study on Ray Tune: chooses runs, places them, prunes trials and repeats failed runs.

Each trial of Tune is one run, that is, one trial of the study with one seed: an actor that starts the run's process and
reports its metrics. Tune places and repeats runs, Optuna chooses parameters, and ASHA judges means over seeds. Every
decision is first written to the study's log, from which a continued sweep rebuilds sampler and pruner.
"""

import difflib
import json
import math
import os
import random
import shutil
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import optuna
import ray
from ray import tune
from ray.tune.experiment import Trial as TuneTrial
from ray.tune.schedulers import AsyncHyperBandScheduler, FIFOScheduler
from ray.tune.search import Searcher

from trainer.cli import stopping_on_signal
from trainer.sweeps.study import Study, Trial, TrialRun
from trainer.sweeps.study_spec import STOP, StudyOptions, Value
from trainer.sweeps.sweep_checks import planned, problem
from trainer.sweeps.trial_process import Order, clean, train
from verl_lite.config.run import RayInitConfig
from verl_lite.errors import UserError
from verl_lite.json_types import JsonObject
from verl_lite.machine.device import device_type
from verl_lite.machine.gpus import ResourceRequest, list_gpus, unavailable, visible_gpus
from verl_lite.single_controller.guard import guarded, set_environment
from verl_lite.single_controller.ray_cluster import current_umask, machines, ray_loss, ray_running

Tell = Callable[[str], None]
_CONNECT_TIMEOUT_S = 20.0
_QUIET = {
    # no csv, json and TensorBoard files of Tune's own
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    # `stopping_on_signal` handles it
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    # `Faults` reports them in one line
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    # Tune's own state is not kept
    "TUNE_GLOBAL_CHECKPOINT_S": "3600",
    "RAY_AIR_NEW_OUTPUT": "0",
}


@dataclass(frozen=True)
class Place:
    """Where runs execute.

    Attributes:
        gpus: GPUs of each run; None = CPU.
        environment: Variables that runs inherit; None = those of their machine.
    """

    gpus: int | None
    environment: dict[str, str] | None


@contextmanager
def places(options: StudyOptions, device: str, tell: Tell) -> Iterator[Place]:
    """Context manager that starts Ray on the free devices of this machine, or joins the given cluster.

    Raises UserError if no device is free, the address does not answer, or no machine is large enough for a run.
    """
    address = options.address
    free_tokens: list[str] = []
    slots: int | None = None
    environment = None
    on_cpu = device == "cpu"
    with ExitStack() as stack:
        environment_before = set_environment(dict(_QUIET))
        stack.callback(set_environment, environment_before)
        if address is None:
            # before CUDA_VISIBLE_DEVICES changes, which each run gets from Ray
            environment = clean(os.environ)
            on_cpu = on_cpu or device_type(device) == "cpu"
            if not on_cpu:
                free_tokens = free_devices(tell)
                devices_before = set_environment({"CUDA_VISIBLE_DEVICES": ",".join(free_tokens)})
                stack.callback(set_environment, devices_before)
            stack.enter_context(guarded())
            # one run on a CPU, and on GPUs as many as fit
            runs_that_fit = len(free_tokens) // options.per_trial
            slots = options.slots or max(1, runs_that_fit)
        # Ray accepts no store below 75 MiB; this one carries only reports, because runs have a Ray of their own
        ray_init = RayInitConfig(
            address=address, num_cpus=slots, wait_for_nodes_s=_CONNECT_TIMEOUT_S, object_store_memory_mb=80
        )
        name = f"sweep-{os.getpid()}"
        cluster = ray_running(ray_init, name, num_gpus=len(free_tokens), tell=tell)
        stack.enter_context(cluster)

        present = machines()
        # on a cluster, the devices of the machines decide
        has_gpus = any("GPU" in machine.resources for machine in present)
        if device == "auto" and not has_gpus:
            on_cpu = True
        gpus = None if on_cpu else options.per_trial
        needed = {"CPU": 1.0}
        if gpus is not None:
            needed["GPU"] = float(gpus)
        if not any(machine.has(needed) for machine in present):
            raise UserError(f"--per-trial: each run needs {needed} on one machine, and no machine has that")

        threading.Thread(target=_watch_ray, daemon=True).start()
        yield Place(gpus, environment)


def _watch_ray() -> None:
    """Ends this process if Ray is lost. Ray Tune itself would wait forever or end without a message."""
    while ray.is_initialized():
        loss = ray_loss()
        if loss is not None:
            print(f"ClusterLostError: {loss}. The same command continues the sweep", file=sys.stderr, flush=True)
            # sys.exit would end this thread alone
            os._exit(1)
        time.sleep(1.0)


def free_devices(tell: Tell) -> list[str]:
    """Returns the devices that no other process uses, as CUDA_VISIBLE_DEVICES names them.

    Raises:
        UserError: If there is none. The message names the users of the devices.
    """
    free_tokens = []
    refusals = []
    for visible in visible_gpus(list_gpus() or []):
        reason = unavailable(visible.gpu, ResourceRequest(1))
        if reason is None:
            free_tokens.append(visible.token)
        else:
            refusals.append(f"{visible.gpu} {reason}")
    if not free_tokens:
        lines = ["no device is free; choose others with CUDA_VISIBLE_DEVICES:", *refusals]
        raise UserError("\n  ".join(lines))
    for refusal in refusals:
        tell(f"device not used: {refusal}")
    return free_tokens


class Sweep(Searcher):
    """Searcher that gives Tune the runs of a study and records their reports."""

    def __init__(self, study: Study, place: Place, tell: Tell) -> None:
        super().__init__()
        self._study = study
        self._place = place
        self._tell = tell
        self._mark = uuid.uuid4().hex
        self._running: dict[str, tuple[Trial, TrialRun]] = {}
        self._announced: set[str] = set()
        self.problem: UserError | None = None
        self._queue, self._draws = _remaining_trials(study)

        self._asha: AsyncHyperBandScheduler | None = None
        asha_parameters = study.search.asha
        if asha_parameters is not None:
            self._asha = _make_asha(asha_parameters, study.spec.mode)
        self._known_to_asha: set[int] = set()
        # a new pruner gets the means that the log contains; its decisions about them were made before
        for trial in study.trials:
            for step, mean in trial.means.items():
                self._is_stopped(trial, step, mean)

    def suggest(self, trial_id: str) -> dict[str, Order] | str:
        """Returns the next run for one of Tune's trials: a run of a started trial, else of a new trial."""
        if (self._study.folder / STOP).exists():
            return Searcher.FINISHED
        next_run = self._next_started() or self._next_new()
        if next_run is None:
            return Searcher.FINISHED
        trial, run = next_run
        self._running[trial_id] = next_run
        run.state = "running"
        return {"order": self._order(trial, run)}

    def _order(self, trial: Trial, run: TrialRun) -> Order:
        """Returns the order to start a run."""
        name = f"{self._study.folder.name}-{trial.number:04}-{run.folder.name}"
        words = [f"trainer.default_local_dir={run.folder}", "trainer.resume_mode=auto"]
        if self._place.gpus is not None:
            words.append(f"trainer.n_gpus_per_node={self._place.gpus}")
        words.append(f"trainer.experiment_name={name}")
        return Order(
            command=[sys.executable, *run.words, *words],
            folder=run.folder,
            cwd=os.getcwd(),
            metric=self._study.spec.metric,
            environment=self._place.environment,
            sweep=self._mark,
            gpus=self._place.gpus is not None,
            umask=current_umask(),
        )

    def _next_started(self) -> tuple[Trial, TrialRun] | None:
        """Returns a run of a started trial that is neither done nor running, or None."""
        running_folders = {run.folder for _, run in self._running.values()}
        for trial in self._study.trials:
            if trial.is_over:
                continue
            for run in trial.runs:
                if run.state != "done" and run.folder not in running_folders:
                    return trial, run
        return None

    def _next_new(self) -> tuple[Trial, TrialRun] | None:
        """Begins the next trial that the command accepts, and returns its first run; None if no trial is left."""
        while self._queue or self._draws:
            if self._queue:
                parameters = self._queue.pop(0)
            else:
                self._draws -= 1
                parameters = draw(self._study)
            trial = self._study.begin(parameters)
            first_run = trial.runs[0]
            refusal = problem(self._study.spec, parameters, self._place.gpus)
            if not refusal:
                return trial, first_run
            # in the log as failed, so that a continued sweep does not take the combination again
            self._study.end(trial, first_run, "failed", error=refusal)
            self._tell(f"trial {trial.number} is not run: {refusal}")
        return None

    def on_trial_result(self, trial_id: str, result: JsonObject) -> None:
        """Records the report of a run."""
        trial, run = self._running[trial_id]
        report = json.loads(result["report"])
        run.steps = report["step"]
        # json has only texts as keys
        run.values = {}
        for step, value in report["values"].items():
            run.values[int(step)] = value

        waits = report["waits"]
        ended = report["ended"]
        if waits and waits != run.waits:
            self._tell(f"{_name(trial, run)} waits: {waits}")
        run.waits = waits
        # announced with the first report, because Tune requests the next run before there is room for it
        has_started = not waits and ended is None
        if has_started and trial_id not in self._announced:
            self._announced.add(trial_id)
            parameters = [f"{name}={value}" for name, value in trial.parameters.items()]
            self._tell(f"{_name(trial, run)} starts: {', '.join(parameters)}")

        self._judge_means(trial)
        if ended is not None:
            self._end(trial_id, **ended, names=report["names"])

    def on_trial_complete(self, trial_id: str, result: JsonObject | None = None, error: bool = False) -> None:
        """Does nothing: the last result contains the end of the run."""

    def save(self, checkpoint_path: str) -> None:
        # Tune expects a file; the study's log is kept instead
        Path(checkpoint_path).touch()

    def on_machine_fault(self, trial_id: str, error: str, is_last: bool) -> None:
        """Records that a machine failed. Tune starts the run again unless is_last."""
        if is_last:
            self._end(trial_id, "failed", error=error)
            return
        trial, run = self._running[trial_id]
        self._tell(f"{_name(trial, run)}: {error}; restarting from its last checkpoint")

    def _judge_means(self, trial: Trial) -> None:
        """Judges the mean at each step that all started runs of the trial have reached."""
        values_of_runs = [run.values for run in trial.runs if run.values]
        if not values_of_runs:
            return
        common_steps = set(values_of_runs[0])
        for values in values_of_runs:
            common_steps &= values.keys()

        for step in sorted(common_steps - trial.means.keys()):
            # a trial that has just been pruned gets no further means
            if self._asha is None or trial.is_over:
                return
            values_at_step = [values[step] for values in values_of_runs]
            mean = sum(values_at_step) / len(values_at_step)
            is_stopped = self._is_stopped(trial, step, mean)
            self._study.judge(trial, step, mean, prune=is_stopped)
            if trial.is_pruned:
                self._tell(f"trial {trial.number} is pruned at step {step}")

    def _is_stopped(self, trial: Trial, step: int, mean: float) -> bool:
        """Returns True if ASHA stops a trial with this mean at this step."""
        if self._asha is None:
            return False
        # ASHA uses neither the tuner nor more of a trial than its name
        trial_of_asha = SimpleNamespace(trial_id=str(trial.number))
        if trial.number not in self._known_to_asha:
            self._known_to_asha.add(trial.number)
            # of several brackets, ASHA draws one for each trial
            with _numpy_seed(trial.number):
                self._asha.on_trial_add(None, trial_of_asha)
        result = {"step": step, "value": mean}
        decision = self._asha.on_trial_result(None, trial_of_asha, result)
        return bool(decision == FIFOScheduler.STOP)

    def _end(self, trial_id: str, state: str, names: Sequence[str] = (), **details: object) -> None:
        """Records the end of a run.

        Args:
            trial_id: Tune's id of the run.
            state: done | failed | stopped.
            names: metrics that it has logged, if the compared metric is none of them.
            details: see `Study.end`.
        """
        trial, run = self._running.pop(trial_id)
        if state == "done":
            # the last value of a run counts
            last_step = max(run.values, default=0)
            value = run.values.get(last_step, math.nan)
            if math.isnan(value):
                state = "failed"
                details["error"] = self._missing_value(trial, run, names)
            else:
                details["value"] = value
        self._study.end(trial, run, state, **details)
        summary = _summary(trial, run, state, self._study.spec.metric)
        self._tell(summary)
        self._study.write_csv()

    def _missing_value(self, trial: Trial, run: TrialRun, names: Sequence[str]) -> str:
        """Returns why a run has no value to compare. Stops the sweep if no run has logged the metric so far."""
        metric = self._study.spec.metric
        if run.values:
            return f"{metric} is nan"
        logged = "it logs no metrics"
        if names:
            similar_names = difflib.get_close_matches(metric, names, n=3, cutoff=0.5)
            examples = similar_names or sorted(names)[:5]
            logged = f"it logs {len(names)} metrics, such as {', '.join(examples)}"
        error = f"--metric {metric}: {_name(trial, run)} does not log it ({logged})"
        # a misspelled metric would let every run of the sweep fail at its end
        if not any(trial.values for trial in self._study.trials):
            self.problem = UserError(error)
            (self._study.folder / STOP).touch()
        return error


@contextmanager
def _numpy_seed(seed: int) -> Iterator[None]:
    """Seeds numpy's global generator inside. A continued sweep then repeats the draws of its earlier part."""
    state = np.random.get_state()
    np.random.seed(seed)
    try:
        yield
    finally:
        np.random.set_state(state)


def _remaining_trials(study: Study) -> tuple[list[dict[str, Value]], int]:
    """Returns the planned combinations that no trial has taken yet, and the number of trials that are to be drawn."""
    search = study.search
    plan = planned(study.spec, search)
    if plan is None:
        trials = search.trials or 0
        return [], max(0, trials - len(study.trials))

    # always the same order, so that a continued sweep takes the combinations that are left
    if search.kind == "random":
        random.Random(0).shuffle(plan)
        plan = plan[: search.trials]
    taken = [trial.parameters for trial in study.trials]
    remaining = [values for values in plan if values not in taken]
    return remaining, 0


def _make_asha(parameters: Mapping[str, float], mode: str) -> AsyncHyperBandScheduler:
    """Creates Tune's pruner from the parameters of --pruner."""
    arguments: dict[str, float] = {}
    for name, value in parameters.items():
        # only the factor need not be a whole number
        arguments[name] = value if name == "reduction_factor" else int(value)
    return AsyncHyperBandScheduler(
        time_attr="step",
        metric="value",
        mode=mode,
        # no run is so long that ASHA ends it for its length, which trainer.total_training_steps decides
        max_t=10**9,
        stop_last_trials=False,
        **arguments,
    )


def _summary(trial: Trial, run: TrialRun, state: str, metric: str) -> str:
    """Returns a line about the end of a run."""
    line = f"{_name(trial, run)} {state}"
    if run.value is not None:
        line += f": {metric} {run.value:.4g} after {run.steps} steps"
    if run.error:
        # the study's log has the complete error
        first_line, _, _ = run.error.partition("\n")
        line += f": {first_line}"
    return line


def draw(study: Study) -> dict[str, Value]:
    """Draws the parameters of a new trial with Optuna from the study's results.

    Running trials count as bad ones, so that trials at the same time differ; failed trials count as the worst.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    # `multivariate` and `constant_liar` are experimental in Optuna
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    # the draws depend on the log alone, not on the process that continues the sweep
    seed = len(study.trials)
    sampler: optuna.samplers.BaseSampler = optuna.samplers.RandomSampler(seed)
    if study.search.kind == "optuna":
        sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True)
    direction = "minimize"
    if study.spec.mode == "max":
        direction = "maximize"
    results = optuna.create_study(sampler=sampler, direction=direction)

    space: dict[str, optuna.distributions.BaseDistribution] = {}
    for parameter in study.spec.space:
        space[parameter.name] = parameter.distribution
    for trial in study.trials:
        results.add_trial(_frozen_trial(trial, space))
    new_trial = results.ask(space)
    return dict(new_trial.params)


def _frozen_trial(trial: Trial, space: Mapping[str, optuna.distributions.BaseDistribution]) -> optuna.trial.FrozenTrial:
    """Returns a trial as Optuna's samplers read it."""
    value = None
    if not trial.is_over:
        state = optuna.trial.TrialState.RUNNING
    elif trial.state == "complete":
        state = optuna.trial.TrialState.COMPLETE
        value = trial.value
    else:
        # also for a failed trial, because Optuna's samplers leave out trials of the state FAIL
        state = optuna.trial.TrialState.PRUNED
    return optuna.trial.create_trial(
        state=state,
        value=value,
        params=dict(trial.parameters),
        distributions=dict(space),
        intermediate_values=trial.means,
    )


def _name(trial: Trial, run: TrialRun) -> str:
    if run.seed is None:
        return f"trial {trial.number}"
    return f"trial {trial.number} seed {run.seed}"


class Faults(FIFOScheduler):
    """Scheduler that reports machine failures to the sweep, because Tune does not report them to a searcher. It never
    stops a run."""

    def __init__(self, sweep: Sweep) -> None:
        super().__init__()
        self._sweep = sweep

    def on_trial_error(self, tune_controller: object, trial: TuneTrial) -> None:
        traceback_text = ""
        if trial.error_file:
            traceback_text = Path(trial.error_file).read_text()
        error = "the machine or its Ray node was lost"
        # without this name in the traceback, the process had no chance to say what happened
        _, is_named, message = traceback_text.rpartition("MachineFault: ")
        if is_named:
            error, _, _ = message.partition("\n")
        is_last = not trial.should_recover()
        self._sweep.on_machine_fault(trial.trial_id, error, is_last)


def run_study(study: Study, place: Place, options: StudyOptions, tell: Tell) -> None:
    """Runs the remaining trials of a study. No process of a run is left when the function returns or raises.

    Raises UserError if no run logs the metric, and KeyboardInterrupt if the sweep was asked to stop.
    """
    stop = study.folder / STOP
    resources = {"cpu": 1, "gpu": place.gpus or 0}
    sweep = Sweep(study, place, tell)
    # requests to end, left by the sweep that this one continues
    stop.unlink(missing_ok=True)
    for trial in study.trials:
        if not trial.is_over:
            (trial.folder / STOP).unlink(missing_ok=True)
    try:
        with stopping_on_signal(stop.touch, lambda _: tell("stopping: runs save what they have")):
            tune.Tuner(
                tune.with_resources(train, resources),
                tune_config=tune.TuneConfig(
                    search_alg=sweep,
                    scheduler=Faults(sweep),
                    # until `Sweep.suggest` returns FINISHED
                    num_samples=-1,
                    max_concurrent_trials=options.slots,
                    reuse_actors=True,
                    # Tune's own name of a folder would contain the order
                    trial_dirname_creator=lambda trial: trial.trial_id,
                ),
                run_config=tune.RunConfig(
                    name="tune",
                    storage_path=str(study.folder / ".tune"),
                    failure_config=tune.FailureConfig(max_failures=options.retries),
                    verbose=0,
                ),
            ).fit()
    finally:
        # a continued sweep reads the study's log instead
        shutil.rmtree(study.folder / ".tune", ignore_errors=True)
    if sweep.problem is not None:
        raise sweep.problem
    if stop.exists():
        raise KeyboardInterrupt
