"""Callbacks: when they are called, what they read, what they can request, and how they fail."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_model import tiny_qwen2
from tests.tiny_run import write_rows
from tests.trainer.test_fit import QUIET, Parts, make
from tests.trainer.tiny_run import options_of, write_files
from trainer import callbacks, main_sft
from trainer.callbacks import (
    Callback,
    Callbacks,
    EarlyStopping,
    RunControl,
    RunState,
    load_callbacks,
    require_callbacks,
)
from trainer.checkpoint.files import saved_steps
from trainer.launch.ppo_job import run_ppo
from trainer.observe.final_report import read_early_end
from trainer.observe.tracking import read_metrics
from trainer.ray_trainer import RayPPOTrainer
from verl_lite.config import RunConfig
from verl_lite.errors import FinishedRunError, UserError

SCORE = "critic/score/mean"


class LoggingParts(Parts):
    """Fake parts that also remember the metrics of a step and the notes, as `Tracking` does."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []

    def logged_at(self, step: int) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for logged_step, values in self.logged:
            if logged_step == step:
                metrics |= values
        return metrics

    def note(self, text: str) -> None:
        self.notes.append(text)


class Recorder(Callback):
    """Notes its calls as (hook, step)."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.states: list[RunState] = []

    def _note(self, hook: str, state: RunState) -> None:
        self.calls.append((hook, state.global_step))
        self.states.append(state)

    def on_run_begin(self, state: RunState, control: RunControl) -> None:
        self._note("run begin", state)

    def on_step_end(self, state: RunState, control: RunControl) -> None:
        self._note("step", state)

    def on_validation_end(self, state: RunState, control: RunControl) -> None:
        self._note("validation", state)

    def on_checkpoint(self, state: RunState, control: RunControl) -> None:
        self._note("checkpoint", state)

    def on_run_end(self, state: RunState, control: RunControl) -> None:
        self._note("run end", state)

    def of(self, hook: str) -> list[int]:
        """Returns the steps at which a hook was called."""
        return [step for name, step in self.calls if name == hook]

    def states_of(self, hook: str) -> list[RunState]:
        """Returns the states that a hook received."""
        return [state for (name, _), state in zip(self.calls, self.states, strict=True) if name == hook]


class Requests(Recorder):
    """Sets one request at the end of one step."""

    def __init__(self, attribute: str, step: int) -> None:
        super().__init__()
        self.attribute = attribute
        self.step = step

    def on_step_end(self, state: RunState, control: RunControl) -> None:
        super().on_step_end(state, control)
        if state.global_step == self.step:
            setattr(control, self.attribute, True)


def fit(tmp_path: Path, callback: Callback, **settings: Any) -> tuple[RayPPOTrainer, LoggingParts]:
    """Runs three steps with fake parts and a callback."""
    parts = LoggingParts()
    trainer = make(tmp_path, parts, **settings)
    trainer.callbacks = Callbacks([callback])
    trainer.fit()
    return trainer, parts


def test_hooks_are_called_in_the_order_of_the_run(tmp_path: Path) -> None:
    recorder = Recorder()
    fit(tmp_path, recorder, trainer__test_freq=2, trainer__save_freq=-1)
    assert recorder.calls[:6] == [
        ("run begin", 0),
        ("validation", 0),
        ("step", 1),
        ("validation", 2),
        ("step", 2),
        ("validation", 3),  # the last step is always validated
    ]
    assert recorder.calls[6:] == [("step", 3), ("checkpoint", 3), ("run end", 3)]


def test_each_checkpoint_is_reported_once_and_complete(tmp_path: Path) -> None:
    recorder = Recorder()
    fit(tmp_path, recorder, trainer__save_freq=1, **QUIET)
    reported = [state.checkpoint for state in recorder.states if state.checkpoint is not None]
    by_hook = [state.checkpoint for state in recorder.states_of("checkpoint")]
    assert by_hook == [tmp_path / f"global_step_{step}" for step in (1, 2, 3)]
    assert all(folder is not None and (folder / "data.pt").exists() for folder in by_hook)
    assert reported[-1] == tmp_path / "global_step_3", "the state at the end names the newest one"


def test_the_state_has_the_logged_metrics_and_cannot_be_changed(tmp_path: Path) -> None:
    recorder = Recorder()
    _, parts = fit(tmp_path, recorder, trainer__test_freq=1)
    at_step = {state.global_step: state for state in recorder.states_of("step")}
    for step, state in at_step.items():
        assert dict(state.metrics) == parts.logged_at(step)
        assert {SCORE, "val-core/task/acc/mean@1"} <= set(state.metrics)
        assert (state.max_steps, state.run_dir, state.validates) == (3, tmp_path, True)
    with pytest.raises(TypeError):
        at_step[1].metrics["x"] = 1.0  # type: ignore[index]
    with pytest.raises(AttributeError):
        at_step[1].global_step = 5  # type: ignore[misc]


def test_a_stop_ends_the_run_as_if_the_step_were_the_last(tmp_path: Path) -> None:
    callback = Requests("should_training_stop", step=2)
    trainer, parts = fit(tmp_path, callback, trainer__save_freq=-1, trainer__test_freq=-1)
    assert callback.of("step") == [1, 2]
    assert callback.of("validation") == [0, 2], "validated as after a last step"
    assert sorted(saved_steps(tmp_path)) == [2]
    assert callback.of("run end") == [2]
    assert not trainer.result.stopped, "a run that ends early is complete"
    assert trainer.result.after and trainer.result.checkpoint == tmp_path / "global_step_2"


def test_a_stop_in_a_validated_step_does_not_validate_twice(tmp_path: Path) -> None:
    callback = Requests("should_training_stop", step=2)
    fit(tmp_path, callback, trainer__test_freq=2)
    assert callback.of("validation") == [0, 2]


def test_a_stop_before_the_first_step_trains_nothing(tmp_path: Path) -> None:
    class StopsAtOnce(Recorder):
        def on_validation_end(self, state: RunState, control: RunControl) -> None:
            control.should_training_stop = True

    callback = StopsAtOnce()
    _, parts = fit(tmp_path, callback)
    assert callback.of("step") == [] and "update" not in parts.calls


@pytest.mark.parametrize("save_freq", [0, -1])
def test_a_checkpoint_can_be_requested(tmp_path: Path, save_freq: int) -> None:
    fit(tmp_path, Requests("should_save", step=2), trainer__save_freq=save_freq, **QUIET)
    assert sorted(saved_steps(tmp_path)) == ([2, 3] if save_freq else [2])


def test_a_validation_can_be_requested(tmp_path: Path) -> None:
    callback = Requests("should_evaluate", step=1)
    _, parts = fit(tmp_path, callback, trainer__val_before_train=False, trainer__test_freq=0)
    assert callback.of("validation") == [1]
    assert "val-core/task/acc/mean@1" in parts.logged_at(1)
    assert "timing_s/testing" in parts.logged_at(1)


def test_a_validation_without_data_is_refused(tmp_path: Path) -> None:
    parts = LoggingParts()
    trainer = make(tmp_path, parts, **QUIET)
    trainer.val_data = None
    trainer.callbacks = Callbacks([Requests("should_evaluate", step=1)])
    with pytest.raises(UserError, match=r"Requests\.on_step_end requests a validation.*data\.val_files"):
        trainer.fit()


def test_an_exception_names_the_callback_and_loses_no_step(tmp_path: Path) -> None:
    class Breaks(Callback):
        def on_step_end(self, state: RunState, control: RunControl) -> None:
            if state.global_step == 2:
                raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom") as raised:
        fit(tmp_path, Breaks(), trainer__save_freq=-1, **QUIET)
    assert any("raised by the callback" in note and "Breaks.on_step_end" in note for note in raised.value.__notes__)
    assert sorted(saved_steps(tmp_path)) == [2], "the finished step is saved although no checkpoint was due"


class Counter(Callback):
    """Counts steps over interruptions."""

    def __init__(self) -> None:
        self.num_steps = 0

    def on_step_end(self, state: RunState, control: RunControl) -> None:
        self.num_steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_steps = state["num_steps"]


def test_the_state_of_a_callback_is_part_of_a_checkpoint(tmp_path: Path) -> None:
    fit(tmp_path, Counter(), trainer__save_freq=1, steps=2, **QUIET)
    resumed = Counter()
    fit(tmp_path, resumed, trainer__save_freq=1, trainer__resume_mode="auto", steps=3, **QUIET)
    assert resumed.num_steps == 3
    other = Recorder()
    fit(tmp_path, other, trainer__save_freq=1, trainer__resume_mode="auto", steps=4, **QUIET)
    assert other.of("run begin") == [3], "a callback that the checkpoint does not know begins anew"


def test_two_callbacks_of_a_class_keep_their_own_states() -> None:
    first, second = Counter(), Counter()
    first.num_steps, second.num_steps = 1, 2
    states = Callbacks([first, second]).state_dict()
    restored = [Counter(), Counter()]
    Callbacks(restored).load_state_dict(states)
    assert [counter.num_steps for counter in restored] == [1, 2]


@pytest.mark.parametrize("value", [lambda: 0, Path("nowhere"), object()])
def test_a_state_that_no_checkpoint_can_hold_is_refused_before_the_first_step(tmp_path: Path, value: Any) -> None:
    class Bad(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"value": value}

    parts = LoggingParts()
    trainer = make(tmp_path, parts, **QUIET)
    trainer.callbacks = Callbacks([Bad()])
    with pytest.raises(TypeError, match="the state") as raised:
        trainer.fit()
    assert "Bad.state_dict" in "".join(raised.value.__notes__) and "update" not in parts.calls


def stop_after(values: list[float | None], **options: Any) -> int | None:
    """Returns the number of values after which early stopping ends the run; None if it never does."""
    stopping = EarlyStopping("reward", **options)
    for step, value in enumerate(values, start=1):
        control = RunControl()
        metrics = {"other": 0.0} if value is None else {"reward": value}
        stopping.on_step_end(state_of(step, metrics), control)
        if control.should_training_stop:
            return step
    return None


def state_of(step: int, metrics: dict[str, float], validates: bool = True) -> RunState:
    return RunState(step, 100, Path("run"), metrics, None, validates, [].append, list)


@pytest.mark.parametrize(
    ("values", "options", "expected"),
    [
        ([0.1, 0.2, 0.2, 0.2], {"patience": 2}, 4),  # best at 2; the third and fourth are not better
        ([0.1, 0.2, 0.15, 0.3, 0.2, 0.3], {"patience": 2}, 6),  # 0.3 begins the count anew; equal is not better
        ([0.1, 0.2, 0.3, 0.4], {"patience": 1}, None),
        ([3.0, 2.0, 1.0, 1.5, 1.2], {"patience": 2, "greater_is_better": False}, 5),
        ([1.0, 1.05, 1.2, 1.25, 1.29], {"patience": 2, "threshold": 0.1}, 5),  # 1.05 is no improvement, 1.2 is
        ([1.0, float("nan"), float("inf"), 2.0], {"patience": 2}, 3),  # values that are not finite are no improvements
        ([1.0, None, None, None, 0.5], {"patience": 1}, 5),  # steps that do not log the metric do not count
    ],
)
def test_early_stopping_counts_values_without_improvement(
    values: list[float | None], options: dict[str, Any], expected: int | None
) -> None:
    assert stop_after(values, **options) == expected


def test_early_stopping_sees_a_validated_step_once() -> None:
    stopping = EarlyStopping("val/loss", patience=2, greater_is_better=False)
    control = RunControl()
    for step in (1, 2):
        stopping.on_validation_end(state_of(step, {"val/loss": 1.0}), control)
        stopping.on_step_end(state_of(step, {"val/loss": 1.0, "train/loss": 2.0}), control)
    assert stopping.num_without_improvement == 1 and not control.should_training_stop


def test_early_stopping_reports_a_metric_that_does_not_exist() -> None:
    stopping = EarlyStopping("val-core/task/ac/mean@1")
    with pytest.raises(UserError, match=r"no such metric; did you mean val-core/task/acc/mean@1"):
        stopping.on_validation_end(state_of(0, {"val-core/task/acc/mean@1": 0.5}), RunControl())
    with pytest.raises(UserError, match=r"has no validation data: set data\.val_files"):
        stopping.on_run_begin(state_of(0, {}, validates=False), RunControl())
    with pytest.raises(UserError, match=r"step 1 logged no such metric; did you mean critic/score/mean"):
        EarlyStopping("critic/score/men").on_step_end(state_of(1, {SCORE: 0.5}), RunControl())


def test_a_run_that_ended_early_has_nothing_left_to_do() -> None:
    stopping = EarlyStopping("reward", patience=1)
    stopping.load_state_dict({"best_value": 0.5, "best_step": 3, "num_without_improvement": 1, "last_step": 4})
    with pytest.raises(FinishedRunError, match="best at step 3 .*patience=1"):
        stopping.on_run_begin(state_of(4, {}), RunControl())


NOTES = """
import json
from pathlib import Path

from trainer.callbacks import Callback


class Notes(Callback):
    def on_step_end(self, state, control):
        answers = [[sample.output, sample.score] for sample in state.samples]
        line = json.dumps({"step": state.global_step, "score": state.metrics["critic/score/mean"], "samples": answers})
        with (state.run_dir / "notes.jsonl").open("a") as file:
            file.write(line + "\\n")


class NeedsArgument(Callback):
    def __init__(self, name):
        self.name = name


def no_class():
    pass
"""


def test_a_file_adds_callbacks_and_early_stopping_to_a_run(tmp_path: Path) -> None:
    write_files(tmp_path, ["one", "two", "three", "four"])
    (tmp_path / "notes.py").write_text(NOTES)
    options = [
        *options_of(tmp_path),
        f"trainer.callbacks=[{tmp_path}/notes.py:Notes]",
        "trainer.early_stopping.metric=perf/total_num_tokens",  # at most 4 * 2 * 54, so it stops growing
        "trainer.early_stopping.patience=1",
        "trainer.early_stopping.threshold=100000",
        "trainer.total_training_steps=9",
        "trainer.save_freq=-1",
    ]
    assert run_ppo(options) == 0
    run_dir = tmp_path / "run"
    lines = [json.loads(line) for line in (run_dir / "notes.jsonl").read_text().splitlines()]
    metrics = read_metrics(run_dir / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2], "the second value is not better by 100000"
    for line in lines:
        assert len(line["samples"]) == 8
        mean = sum(score for _, score in line["samples"]) / 8
        assert line["score"] == pytest.approx(mean) == pytest.approx(metrics[line["step"]][SCORE])
    assert sorted(saved_steps(run_dir)) == [2]
    with pytest.raises(FinishedRunError, match="nothing is left to do"):
        run_ppo([*options, "trainer.resume_mode=auto"])


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("notes.py", "'.*notes.py' has no class; expected FILE.py:CLASS"),
        ("notes.py:", "has no class"),
        ("missing.py:Notes", "no such file"),
        ("notes.py:Notse", "defines nothing of that name"),
        ("notes.py:no_class", "expected a subclass of Callback"),
        ("notes.py:NeedsArgument", "cannot be created without arguments .*'name'"),
    ],
)
def test_wrong_entries(tmp_path: Path, entry: str, message: str) -> None:
    (tmp_path / "notes.py").write_text(NOTES)
    with pytest.raises(UserError, match=f"(?s)trainer.callbacks.*{message}"):
        load_callbacks(RunConfig(callbacks=[f"{tmp_path}/{entry}"]))


def test_a_module_names_a_callback() -> None:
    [callback] = load_callbacks(RunConfig(callbacks=["tests.trainer.test_callbacks:Counter"]))
    assert type(callback).__name__ == "Counter"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["trainer.early_stopping.patience=5"], "no metric: set trainer.early_stopping.metric"),
        (["trainer.early_stopping.metric=val/loss"], "only before and after the training: set trainer.test_freq"),
        (["trainer.callbacks=[x.py:A]"], "trainer.callbacks='x.py'"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(tmp_path: Path, options: list[str], message: str) -> None:
    write_files(tmp_path, ["one"])
    with pytest.raises(UserError, match=message):
        run_ppo([*options_of(tmp_path), *options])
    assert not (tmp_path / "run").exists()


def test_early_stopping_of_supervised_training_logs_the_last_steps_and_exports_the_model(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}] * 8
    write_rows(tmp_path / "rows.jsonl", rows)
    options = [
        f"model.path={tiny_qwen2(tmp_path / 'model')}",
        f"data.train_files={tmp_path}/rows.jsonl",
        f"data.val_files={tmp_path}/rows.jsonl",
        "data.train_batch_size=4",
        "trainer.total_training_steps=20",
        "trainer.log_freq=4",
        "trainer.test_freq=1",
        "optim.lr=1e-9",  # the loss stays as it is
        "trainer.early_stopping.metric=val/loss",
        "trainer.early_stopping.greater_is_better=false",
        "trainer.early_stopping.patience=2",
        "trainer.early_stopping.threshold=1",
        "trainer.backend=inline",
        "trainer.n_gpus_per_node=1",
        "trainer.device=cpu",
        "trainer.logger=[jsonl]",
        f"trainer.default_local_dir={tmp_path}/run",
    ]
    assert main_sft.main(options) == 0
    metrics = read_metrics(tmp_path / "run" / "metrics.jsonl")
    # the values of steps 0, 1 and 2 are equal within 1: the second without an improvement is that of step 2
    assert max(metrics) == 2
    assert "train/loss" in metrics[2], "the steps since the last line of trainer.log_freq are logged"
    assert sorted(saved_steps(tmp_path / "run")) == [2]
    assert (tmp_path / "run" / "hf" / "model.safetensors").exists()


STOPS = """
from trainer.callbacks import Callback


class Stops(Callback):
    def on_step_end(self, state, control):
        control.should_training_stop = state.global_step == 2
"""


@pytest.mark.parametrize(
    "options", [[], ["async_training.partial_rollout=true"]], ids=["whole batches", "partial rollouts"]
)
def test_a_run_that_samples_ahead_ends_early_and_goes_on_with_more_patience(tmp_path: Path, options: list[str]) -> None:
    write_files(tmp_path, ["one", "two", "three", "four"])
    (tmp_path / "stops.py").write_text(STOPS)
    arguments = [*options_of(tmp_path), "async_training.max_off_policy_threshold=1", *options]
    arguments += ["trainer.total_training_steps=4", "trainer.save_freq=-1"]
    assert run_ppo([*arguments, f"trainer.callbacks=[{tmp_path}/stops.py:Stops]"]) == 0
    assert sorted(saved_steps(tmp_path / "run")) == [2]
    assert run_ppo([*arguments, "trainer.resume_mode=auto"]) == 0
    assert sorted(saved_steps(tmp_path / "run")) == [2, 4]


def test_the_example_of_the_guide_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    guide = Path(callbacks.__file__).with_name("CALLBACKS.md").read_text(encoding="utf-8")
    code = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    write_files(tmp_path, ["one", "two", "three", "four"])
    (tmp_path / "watch.py").write_text(code[0])
    options = [f"trainer.callbacks=[{tmp_path}/watch.py:Watch]", "trainer.total_training_steps=2"]
    validation = [f"data.val_files={tmp_path}/prompts.jsonl", "trainer.test_freq=0", "trainer.val_before_train=false"]
    # an untrained model rarely ends an answer, so the example requests a validation
    assert run_ppo([*options_of(tmp_path), *options, *validation, "trainer.save_freq=-1"]) == 0
    assert f"complete: {tmp_path}/run/global_step_2" in capsys.readouterr().out
    metrics = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert metrics[1]["response_length/clip_ratio"] > 0.5
    assert any(name.startswith("val-core/") for name in metrics[1])


def test_the_state_of_all_callbacks_is_in_the_checkpoint_of_a_run_that_a_callback_ends(tmp_path: Path) -> None:
    class Breaks(Callback):
        has_raised = False

        def on_step_end(self, state: RunState, control: RunControl) -> None:
            self.has_raised = True
            raise RuntimeError("boom")

        def state_dict(self) -> dict[str, Any]:
            if self.has_raised:
                raise ValueError("no state")
            return {}

    parts = LoggingParts()
    trainer = make(tmp_path, parts, trainer__save_freq=-1, **QUIET)
    trainer.callbacks = Callbacks([Counter(), Breaks()])
    with pytest.raises(RuntimeError, match="boom"):
        trainer.fit()
    resumed = Counter()
    fit(tmp_path, resumed, trainer__save_freq=-1, trainer__resume_mode="auto", **QUIET)
    assert resumed.num_steps == 3, "one step before the error, two after it"


def test_a_state_that_breaks_later_loses_no_step(tmp_path: Path) -> None:
    class BreaksLater(Counter):
        def state_dict(self) -> dict[str, Any]:
            return {"value": object() if self.num_steps == 2 else 0}

    with pytest.raises(TypeError, match="the state"):
        fit(tmp_path, BreaksLater(), trainer__save_freq=1, **QUIET)
    assert sorted(saved_steps(tmp_path)) == [1, 2]


def test_a_saved_state_does_not_change_with_the_callback() -> None:
    class Growing(Callback):
        def __init__(self) -> None:
            self.values: list[int] = []

        def state_dict(self) -> dict[str, Any]:
            return {"values": self.values}

    callback = Growing()
    saved = Callbacks([callback]).state_dict()
    callback.values.append(1)
    assert list(saved.values()) == [{"values": []}]


def test_a_state_must_be_a_dictionary() -> None:
    class Forgets(Callback):
        def state_dict(self) -> dict[str, Any]:
            return None  # type: ignore[return-value]

    with pytest.raises(TypeError, match=r"Forgets.state_dict\(\) returned None; expected a dictionary"):
        Callbacks([Forgets()]).state_dict()


def test_an_unknown_request_is_an_error() -> None:
    with pytest.raises(AttributeError, match="should_stop"):
        RunControl().should_stop = True  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        ("on_evaluate", "on_evaluate is no hook, so no run would call it; here it is on_validation_end"),
        ("on_save", "here it is on_checkpoint"),
        ("on_step_ends", "did you mean on_step_end"),
    ],
)
def test_a_hook_that_no_run_calls_is_refused(hook: str, message: str) -> None:
    kind = type("Own", (Callback,), {hook: lambda self, state, control: None})
    with pytest.raises(UserError, match=message):
        require_callbacks([kind()], "callbacks")


def test_a_hook_with_the_arguments_of_transformers_is_refused() -> None:
    class Foreign(Callback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # type: ignore[override]
            pass

    with pytest.raises(UserError, match=r"Foreign.on_step_end.*cannot be called.*on_step_end\(self, state, control\)"):
        require_callbacks([Foreign()], "callbacks")


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        ([Recorder], "Recorder is a class; expected an object of it"),
        ([print], "is not a callback"),
        ([(counter := Counter()), counter], "the same Counter object is in the list twice"),
    ],
)
def test_wrong_objects(callbacks: list[Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        require_callbacks(callbacks, "callbacks")


def test_early_stopping_begins_anew_in_another_run() -> None:
    stopping = EarlyStopping("reward", patience=1)
    exhausted = {"best_value": 0.5, "best_step": 3, "num_without_improvement": 1, "last_step": 4}
    for step in (0, 2):  # a new run, and one that is resumed before the newest value
        stopping.load_state_dict(exhausted)
        stopping.on_run_begin(state_of(step, {}), RunControl())
        assert not stopping.is_exhausted and stopping.best_value is None


def test_a_run_that_ended_early_can_be_validated() -> None:
    stopping = EarlyStopping("reward", patience=1)
    stopping.load_state_dict({"best_value": 0.5, "best_step": 3, "num_without_improvement": 1, "last_step": 4})
    stopping.on_run_begin(dataclasses.replace(state_of(4, {}), val_only=True), RunControl())


def test_the_run_folder_and_the_console_tell_of_an_early_end(tmp_path: Path) -> None:
    _, parts = fit(tmp_path, Requests("should_training_stop", step=2), **QUIET)
    assert "The run ends after step 2 of 3, as Requests.on_step_end requests" in parts.notes
    assert read_early_end(tmp_path) == 2
    fit(tmp_path / "whole", Recorder(), **QUIET)
    assert read_early_end(tmp_path / "whole") is None


def test_a_checkpoint_that_the_last_validation_requests_is_saved(tmp_path: Path) -> None:
    class SavesAfterValidation(Requests):
        def on_validation_end(self, state: RunState, control: RunControl) -> None:
            control.should_save = state.global_step > 0

    callback = SavesAfterValidation("should_training_stop", step=2)
    fit(tmp_path, callback, trainer__save_freq=0, trainer__val_before_train=False, trainer__test_freq=-1)
    assert sorted(saved_steps(tmp_path)) == [2]
