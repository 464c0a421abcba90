"""Callbacks: code of the user that a training calls at the end of steps, validations and checkpoints.

    class Upload(Callback):
        def on_checkpoint(self, state, control):
            copy_somewhere(state.checkpoint)

`trainer.callbacks=[file.py:Upload]` or `train(..., callbacks=[Upload()])` adds it to a run. A callback reads the state
of the run and may request three actions: end the run after this step, save a checkpoint, validate. It cannot change a
batch or a metric; a recipe's `trainer_class` does that. It runs in the driver process, and the training waits for it;
code that only sends metrics somewhere belongs in a tracker, which has a thread of its own. Names that also occur in
`transformers.TrainerCallback` have the same meaning here.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

from trainer.cli import NOTHING_LEFT
from trainer.validation.sample import Sample
from verl_lite.config import RunConfig
from verl_lite.errors import FinishedRunError, UserError
from verl_lite.machine.safe_state import require_safe
from verl_lite.registry import MODULE_PREFIX, did_you_mean, load_object, require_call

KEY = "trainer.callbacks"
CallbackState: TypeAlias = dict[str, Any]
"""What a callback saves in a checkpoint: tensors, arrays, numbers, texts, lists and dictionaries."""
HOOKS = ("on_run_begin", "on_step_end", "on_validation_end", "on_checkpoint", "on_run_end")
_OTHER_NAMES = {
    "on_init_end": "on_run_begin",
    "on_train_begin": "on_run_begin",
    "on_train_start": "on_run_begin",
    "on_train_end": "on_run_end",
    "on_evaluate": "on_validation_end",
    "on_save": "on_checkpoint",
    "on_save_checkpoint": "on_checkpoint",
    "on_log": "on_step_end, whose state has the logged metrics",
    "on_train_batch_end": "on_step_end",
    "on_epoch_end": "on_step_end",
}
"""Hooks of transformers and Lightning, and the hooks here."""


@dataclass(frozen=True)
class RunState:
    """What a callback can read. Nothing in it can be changed.

    Args:
        global_step: the current step, from 1; 0 before the first step.
        max_steps: the last step of the run.
        run_dir: the run folder.
        metrics: the metrics that were logged for the current step, with those of its validation; in
            `on_validation_end`, only those of the validation. Empty if none were logged, for example in steps between
            those of `trainer.log_freq`.
        checkpoint: the newest complete checkpoint that this process wrote; None before the first.
        validates: whether the run has validation data.
        val_only: whether the run only validates (trainer.val_only) and has no step.
        note: shows a sentence to the user.
        read_samples: returns the value of `samples`.
    """

    global_step: int
    max_steps: int
    run_dir: Path
    metrics: Mapping[str, float]
    checkpoint: Path | None
    validates: bool
    note: Callable[[str], None]
    read_samples: Callable[[], Sequence[Sample]] = field(repr=False)
    val_only: bool = False

    def __post_init__(self) -> None:
        read_only = MappingProxyType(dict(self.metrics))
        # the dataclass is frozen, and forbids a plain assignment
        object.__setattr__(self, "metrics", read_only)

    @cached_property
    def samples(self) -> Sequence[Sample]:
        """The answers that the step trained on, with their scores; in `on_validation_end`, the first
        `trainer.log_val_generations` answers of the validation. Empty in runs that generate no text."""
        return tuple(self.read_samples())


# so that a misspelt request is an error
@dataclass(slots=True)
class RunControl:
    """What a callback can request. Each attribute is False when a hook is called; the callback sets it to True.

    Args:
        should_training_stop: ends the run after the current step, as if it were the last one: with a validation and a
            checkpoint if `trainer.test_freq` and `trainer.save_freq` are not 0. The exit status is 0.
        should_save: saves a checkpoint of the current step.
        should_evaluate: validates after the current step.
    """

    should_training_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False


class Callback:
    """Base class of callbacks. Every method may be left out. An exception ends the run with the name of the callback.

    All hooks have the same arguments: the state of the run, to read, and the requests, to set.
    """

    def on_run_begin(self, state: RunState, control: RunControl) -> None:
        """Called once, after the checkpoint of a resumed run is restored and before the first step."""

    def on_step_end(self, state: RunState, control: RunControl) -> None:
        """Called after each step, when its metrics are logged and before its checkpoint is written."""

    def on_validation_end(self, state: RunState, control: RunControl) -> None:
        """Called after each validation, also the one before the first step."""

    def on_checkpoint(self, state: RunState, control: RunControl) -> None:
        """Called when the checkpoint `state.checkpoint` is complete. Checkpoints are completed while training
        continues, so this can be at the end of a later step."""

    def on_run_end(self, state: RunState, control: RunControl) -> None:
        """Called once after the last checkpoint, also if the user stopped the run; not if the run failed."""

    def state_dict(self) -> CallbackState:
        """Returns what a resumed run needs. It becomes part of each checkpoint."""
        return {}

    def load_state_dict(self, state: CallbackState) -> None:
        """Restores the result of `state_dict`."""


class EarlyStopping(Callback):
    """Ends a run when a metric has stopped improving: `trainer.early_stopping.metric=...` adds it to any run.

    Args:
        metric: the logged name, such as "val-core/gsm8k/acc/mean@1" or "val/loss".
        patience: number of values in a row without an improvement after which the run ends.
        greater_is_better: whether larger values are better.
        threshold: a value is an improvement if it is better than the best value so far by more than this.

    A value that is not finite is no improvement. Values of the validation before the first step count.
    """

    def __init__(self, metric: str, patience: int = 3, greater_is_better: bool = True, threshold: float = 0.0) -> None:
        self.metric = metric
        self.patience = patience
        self.greater_is_better = greater_is_better
        self.threshold = threshold
        self.best_value: float | None
        self._warned = False
        self._begin_anew()

    @property
    def is_exhausted(self) -> bool:
        """True if the run must end."""
        return self.num_without_improvement >= self.patience

    def on_run_begin(self, state: RunState, control: RunControl) -> None:
        # a run that only validates has no step that could end it
        if state.val_only:
            return
        # the object has followed another run, or later steps than those that are restored
        if state.global_step == 0 or self.last_step > state.global_step:
            self._begin_anew()
        if self.is_exhausted:
            raise FinishedRunError(
                f"{state.run_dir} ended early at step {state.global_step} of {state.max_steps}: {NOTHING_LEFT}. "
                f"{self.metric} was best at step {self.best_step} ({self.best_value:g}). To continue, raise "
                f"trainer.early_stopping.patience={self.patience}, or set trainer.early_stopping.metric=null"
            )
        if self._is_of_validation and not state.validates:
            raise UserError(
                f"trainer.early_stopping.metric={self.metric} is a metric of validations, and the run has no "
                "validation data: set data.val_files, or choose a metric of the training"
            )

    def on_validation_end(self, state: RunState, control: RunControl) -> None:
        self._observe(state, control, is_expected=self._is_of_validation)

    def on_step_end(self, state: RunState, control: RunControl) -> None:
        is_logged = bool(state.metrics)
        self._observe(state, control, is_expected=is_logged and not self._is_of_validation)

    def state_dict(self) -> CallbackState:
        return {
            "best_value": self.best_value,
            "best_step": self.best_step,
            "num_without_improvement": self.num_without_improvement,
            "last_step": self.last_step,
        }

    def load_state_dict(self, state: CallbackState) -> None:
        self.best_value = state["best_value"]
        self.best_step = state["best_step"]
        self.num_without_improvement = state["num_without_improvement"]
        self.last_step = state["last_step"]

    def _begin_anew(self) -> None:
        """Forgets all values."""
        self.best_value = None
        self.best_step = 0
        self.num_without_improvement = 0
        self.last_step = -1  # the step of the newest value; a step can be seen twice: validated and logged

    @property
    def _is_of_validation(self) -> bool:
        return self.metric.startswith(("val/", "val-"))

    def _observe(self, state: RunState, control: RunControl, is_expected: bool) -> None:
        """Counts the metric's value of the current step.

        Args:
            state: the state of the run.
            control: receives the request to end the run.
            is_expected: True if the metric should be in the state.
        """
        value = state.metrics.get(self.metric)
        if value is None:
            if is_expected and self.best_value is None:
                self._report_missing(state)
            return
        # a value of a validation is in the state of its step, too, and counts once
        if state.global_step <= self.last_step:
            return
        self.last_step = state.global_step

        if self._is_improvement(value):
            self.best_value = value
            self.best_step = state.global_step
            self.num_without_improvement = 0
            return
        self.num_without_improvement += 1
        if self.is_exhausted:
            best = "never finite"
            if self.best_value is not None:
                best = f"best at step {self.best_step} ({self.best_value:g})"
            state.note(
                f"{self.metric} was {best}, and {self.num_without_improvement} later values are not better "
                "(trainer.early_stopping)"
            )
            control.should_training_stop = True

    def _is_improvement(self, value: float) -> bool:
        """Returns True if a value is better than the best one so far by more than the threshold."""
        if not math.isfinite(value):
            return False
        if self.best_value is None:
            return True
        gain = value - self.best_value
        if not self.greater_is_better:
            gain = -gain
        return gain > self.threshold

    def _report_missing(self, state: RunState) -> None:
        """Refuses a metric that does not exist. After the first steps, which would be lost, it is only reported."""
        problem = (
            f"trainer.early_stopping.metric={self.metric}: step {state.global_step} logged no such metric"
            f"{did_you_mean(self.metric, state.metrics)}. trainer/METRICS.md lists the metrics"
        )
        if state.global_step <= 1:
            raise UserError(problem)
        if not self._warned:
            state.note(f"{problem}. The run does not end early")
            self._warned = True


class Callbacks:
    """The callbacks of a run, which are called in their order.

    Args:
        callbacks: the callbacks.

    Attributes:
        control: the requests since the last `take_requests`.
        stopped_by: the hook that requested the end of the run, such as "Watch.on_step_end"; empty before.
    """

    def __init__(self, callbacks: Sequence[Callback] = ()) -> None:
        self.by_name: dict[str, Callback] = {}
        for callback in callbacks:
            class_name = type(callback).__qualname__
            name = class_name
            number = 1
            # equal in each run with these callbacks, because a checkpoint has their states by name
            while name in self.by_name:
                number += 1
                name = f"{class_name}#{number}"
            self.by_name[name] = callback
        self.control = RunControl()
        self.stopped_by = ""

    def __bool__(self) -> bool:
        return bool(self.by_name)

    def call(self, event: str, state: RunState) -> None:
        """Calls one hook, such as "on_step_end", of all callbacks, and collects their requests."""
        for name, callback in self.by_name.items():
            # each callback gets requests of its own, so that the one that made a request can be named
            requests = RunControl()
            hook = getattr(callback, event)
            with _named(f"{name}.{event}"):
                hook(state, requests)
            if requests.should_evaluate and not state.validates:
                raise UserError(
                    f"callback {name}.{event} requests a validation, and the run has no validation data: set "
                    "data.val_files, or read state.validates first"
                )
            if requests.should_training_stop and not self.stopped_by:
                self.stopped_by = f"{name}.{event}"
            self.control.should_training_stop |= bool(requests.should_training_stop)
            self.control.should_save |= bool(requests.should_save)
            self.control.should_evaluate |= bool(requests.should_evaluate)

    def take_requests(self) -> RunControl:
        """Returns the requests since the last call."""
        requests = self.control
        self.control = RunControl()
        return requests

    def state_dict(self) -> dict[str, CallbackState]:
        """Returns the states of the callbacks by name. Raises TypeError if a checkpoint cannot hold one of them."""
        return {name: self._state_of(name) for name in self.by_name}

    def readable_states(self) -> dict[str, CallbackState]:
        """Returns the states of those callbacks whose `state_dict` works. For the checkpoint of a run that ends with
        an error of a callback: the others lose nothing."""
        states = {}
        for name in self.by_name:
            # the first error ends the run and is shown
            with suppress(Exception):
                states[name] = self._state_of(name)
        return states

    def _state_of(self, name: str) -> CallbackState:
        with _named(f"{name}.state_dict"):
            state = self.by_name[name].state_dict()
            if not isinstance(state, Mapping):
                raise TypeError(f"{name}.state_dict() returned {state!r:.200}; expected a dictionary")
            # a checkpoint contains only types that can be read without running code
            require_safe(state)
            # the checkpoint may be written while the callback continues to change its own lists
            return copy.deepcopy(dict(state))

    def load_state_dict(self, states: Mapping[str, CallbackState]) -> None:
        """Restores the states of those callbacks that the checkpoint has; others begin anew."""
        for name, callback in self.by_name.items():
            if name in states:
                with _named(f"{name}.load_state_dict"):
                    callback.load_state_dict(states[name])


def load_callbacks(config: RunConfig) -> list[Callback]:
    """Creates the callbacks that the options name.

    Raises:
        UserError: if an entry of trainer.callbacks does not name a class of callbacks, or one that needs arguments.
    """
    callbacks = [_callback_at(entry) for entry in config.callbacks]
    options = config.early_stopping
    if options.metric is not None:
        callbacks.append(EarlyStopping(options.metric, options.patience, options.greater_is_better, options.threshold))
    return callbacks


def require_callbacks(callbacks: Sequence[object], key: str) -> list[Callback]:
    """Returns the objects of a user. Raises UserError, which names `key`, if one of them is not a callback."""
    seen: list[Callback] = []
    for callback in callbacks:
        if inspect.isclass(callback) and issubclass(callback, Callback):
            name = callback.__name__
            raise UserError(f"{key}: {name} is a class; expected an object of it: {name}(...)")
        if not isinstance(callback, Callback):
            raise UserError(
                f"{key}: {callback!r:.200} is not a callback; expected an object of a subclass of Callback "
                "(trainer/callbacks.py)"
            )
        # compared by identity, because two objects of one class are allowed
        if any(callback is other for other in seen):
            raise UserError(f"{key}: the same {type(callback).__name__} object is in the list twice; remove one")
        _require_hooks(type(callback), key)
        seen.append(callback)
    return seen


def _require_hooks(kind: type[Callback], key: str) -> None:
    """Raises UserError if a class defines a hook that no run calls, or one with other arguments."""
    for name in dir(kind):
        if not name.startswith("on_"):
            continue
        attribute = getattr(kind, name)
        if not callable(attribute):
            continue
        if name not in HOOKS:
            suggestion = did_you_mean(name, HOOKS)
            if name in _OTHER_NAMES:
                suggestion = f"; here it is {_OTHER_NAMES[name]}"
            raise UserError(
                f"{key}: {kind.__qualname__}.{name} is no hook, so no run would call it{suggestion}. "
                f"The hooks are {', '.join(HOOKS)}; name other methods without on_"
            )
        function = inspect.getattr_static(kind, name)
        # of these two, the attribute of the class takes no self
        num_arguments = 2 if isinstance(function, classmethod | staticmethod) else 3
        require_call(attribute, f"{name}(self, state, control)", *range(num_arguments))


def _callback_at(entry: str) -> Callback:
    """Creates the callback of an entry FILE.py:CLASS or package.module:CLASS."""
    path, separator, name = entry.rpartition(":")
    if not separator or not name or not path:
        raise UserError(f"{KEY}: {entry!r} has no class; expected FILE.py:CLASS or package.module:CLASS")
    module = path
    if not path.endswith(".py") and not path.startswith(MODULE_PREFIX):
        module = f"{MODULE_PREFIX}{path}"
    kind = load_object(module, name, KEY, KEY)
    if not (inspect.isclass(kind) and issubclass(kind, Callback)):
        raise UserError(f"{KEY}: {entry} is {kind!r:.200}; expected a subclass of Callback (trainer/callbacks.py)")
    _require_hooks(kind, KEY)
    # before the call, so that a TypeError of the constructor's own code is not taken for one of its arguments
    try:
        inspect.signature(kind).bind()
    except TypeError as error:
        raise UserError(
            f"{KEY}: {entry} cannot be created without arguments ({error}): give them defaults, or create the object "
            "yourself: train(..., callbacks=[...])"
        ) from None
    with _named(f"{name}()"):
        return kind()


@contextmanager
def _named(code: str) -> Iterator[None]:
    """Adds the name of the called code to an exception, which passes through."""
    try:
        yield
    # its message says what to do
    except UserError:
        raise
    except Exception as error:
        error.add_note(f"raised by the callback {code}")
        raise
