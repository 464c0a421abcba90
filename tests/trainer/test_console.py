"""What is printed during a run and at its end, on a terminal and in a file."""

from __future__ import annotations

import io
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import rich.console

from trainer.console import Console, following, format_seconds
from trainer.evaluate.sample import Sample
from trainer.final_report import final_report, printable, steps_table, validation_line, validation_means
from verl_lite.config import ConfigError, SFTConfig, Verbosity, load_config, load_schema

METRICS = {
    "training/global_step": 7.0,
    "critic/score/mean": 0.5634,
    "response_length/mean": 12.34,
    "actor/kl_loss": 0.00123,
    "actor/entropy": 0.81,
    "perf/throughput": 5231.4,
    "timing_s/step": 1.43,
}
BEFORE = {
    "val-core/verl_lite/sort/reward/mean@4": 0.3,
    "val-core/verl_lite/add/acc/mean@4": 0.2,
    "val-core/verl_lite/add/reward/mean@4": 9.0,
    "val-aux/verl_lite/sort/reward/std@4": 0.1,
    "val-aux/verl_lite/add/reward/mean@4": 0.9,
    "val-aux/verl_lite/sort/greedy/reward/mean@1": 0.5,
}
AFTER = {name: value + 0.1 for name, value in BEFORE.items()}


@dataclass
class Result:
    before: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    checkpoint: Path | None = None


def sample(**changes: Any) -> Sample:
    values = {"step": 1, "uid": "u", "data_source": "verl_lite/sort", "input": "Sort 21", "output": "12", "gts": "12"}
    values |= {"score": 1.0, "response_length": 3, "finish_reason": "stop", "policy_version": 1, "extra": {}}
    return Sample(**{**values, **changes})


def test_a_step_is_one_readable_line() -> None:
    file = io.StringIO()
    console = Console(file)
    console.start(100)
    console.advance(7)
    console.log(METRICS, 7)
    (line,) = file.getvalue().splitlines()
    assert line.split() == ("step 7/100 reward 0.563 length 12.3 kl 1.2e-03 entropy 0.810 5,231 tok/s 1.43 s".split())


def test_failed_rewards_are_told() -> None:
    file = io.StringIO()
    Console(file).log({**METRICS, "reward/error_rate": 0.05}, 7)
    assert "5.0% of rewards failed" in file.getvalue()


def test_a_file_gets_no_control_characters_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("trainer.console.time.monotonic", lambda: now[0])
    file = io.StringIO()
    console = Console(file)
    console.start(10)
    for step in range(4):
        console.advance(step)
        console.log(METRICS, step)
        now[0] += 2.0
    console.note("a [note] with brackets")
    console.print("text [as it is] " + "x" * 200)
    console.stop()
    printed = file.getvalue()
    assert all(letter.isprintable() or letter == "\n" for letter in printed)
    assert "step  3/10" in printed and printed.splitlines()[3].endswith("0:14 left")  # 7 steps of 2 s
    assert "note: a [note] with brackets" in printed and "[as it is] " + "x" * 200 + "\n" in printed


def test_the_time_left_does_not_count_the_start_nor_what_came_before_a_resumption(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr("trainer.console.time.monotonic", lambda: now[0])
    console = Console(io.StringIO())
    console.start(100)
    for step, at in ((0, 60.0), (1, 61.0), (50, 500.0), (51, 502.0)):
        now[0] = at
        console.advance(step)
    assert console.seconds_left() == 2.0 * 49


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm-256color")
    file = Terminal()
    console = Console(file)
    console.start(10)
    console.advance(0)
    console.advance(1)
    console.log(METRICS, 1)
    console.stop()
    assert "1/10" in file.getvalue() and "\x1b[" in file.getvalue()


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (7.4, "0:07"), (725, "12:05"), (10935, "3:02:15")])
def test_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_validation_means_are_the_core_measure_and_greedy_apart() -> None:
    found = {(mean.source, mean.greedy): (mean.name, mean.value) for mean in validation_means(BEFORE)}
    assert found == {
        ("verl_lite/sort", False): ("reward mean@4", 0.3),
        ("verl_lite/add", False): ("acc mean@4", 0.2),
        ("verl_lite/sort", True): ("reward mean@1", 0.5),
    }
    assert validation_line(BEFORE) == "verl_lite/sort 0.300 (greedy 0.500), verl_lite/add 0.200"
    assert validation_line(METRICS) == ""


def shown(result: Result, run_dir: Path, picture: Path | None = None) -> str:
    console = rich.console.Console(file=io.StringIO(), width=140)
    console.print(final_report(result, run_dir, {"picture": picture}, {"look": f"cat {run_dir}"}))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_report_has_before_and_after_samples_places_and_commands(tmp_path: Path) -> None:
    checkpoint = tmp_path / "global_step_3"
    checkpoint.mkdir()
    (tmp_path / "metrics.jsonl").touch()
    samples = [sample(), sample(output="x\x1b[31m[b]", score=None)]
    text = shown(Result(BEFORE, AFTER, samples, checkpoint), tmp_path)
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.strip().startswith("verl_lite")}
    assert "0.200 0.300 - -".split() == rows["verl_lite/add"]
    assert ["0.300", "0.400", "0.500", "0.600"] in [line.split()[1:] for line in text.splitlines()]
    assert ["mean", "of", "sources", "0.250", "0.350", "0.500", "0.600"] in [x.split() for x in text.splitlines()]
    for part in ("Sort 21", "failed", "x\ufffd[31m[b]", str(tmp_path), "metrics.jsonl", "global_step_3"):
        assert part in text
    assert f"look         cat {tmp_path}" in text
    assert "\x1b" not in text and "curve.png" not in text


def test_commands_are_whole_on_a_narrow_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.console._WIDTH_OF_FILES", 40)
    checkpoint = tmp_path / "global_step_3"
    checkpoint.mkdir()
    command, file = "python -m trainer.main_eval " + "x" * 60 + " rollout.val_kwargs.n=8", io.StringIO()
    Console(file).print(final_report(Result(checkpoint=checkpoint), tmp_path, {}, {"evaluate": command}))
    lines = [line.rstrip() for line in file.getvalue().splitlines()]
    assert f"  evaluate     {command}" in lines and f"  checkpoint   {checkpoint}" in lines


def test_a_validation_alone_has_one_column(tmp_path: Path) -> None:
    text = shown(Result(BEFORE, BEFORE), tmp_path)
    assert "before" not in text and "0.300" in text


def test_a_run_without_validation_or_checkpoint_still_says_where_things_are(tmp_path: Path) -> None:
    text = shown(Result(), tmp_path)
    assert str(tmp_path) in text and "Validation" not in text and "main_eval" not in text


def test_long_text_is_cut_and_says_so() -> None:
    assert printable("a" * 1000).plain == "a" * 300 + " ... (1000 characters)"


def test_intervals_stand_beside_the_means_and_the_mean_of_sources_is_no_source(tmp_path: Path) -> None:
    metrics = {
        "val-core/a/acc/mean@1": 0.5, "val-aux/a/acc/mean@1/ci95": 0.03, "val-aux/a/greedy/acc/mean@1": 0.25,
        "val-core/b/acc/mean@1": 0.7, "val-aux/b/acc/mean@1/ci95": 0.04, "val-aux/b/greedy/acc/mean@1": 0.35,
        "val-aux/a/greedy/acc/mean@1/ci95": 0.01, "val-aux/mean_of_sources/greedy/acc/mean@1": 0.3,
    }  # fmt: skip
    rows = [line.split() for line in shown(Result(metrics, metrics), tmp_path).splitlines()]
    assert "a 0.500 ±0.030 0.250 ±0.010".split() in rows and "b 0.700 ±0.040 0.350".split() in rows
    assert "mean of sources 0.600 ±0.025 0.300".split() in rows, "hypot(0.03, 0.04) / 2; one greedy interval is missing"
    assert not any("mean_of_sources" in row for row in rows)


def test_a_table_over_steps_has_a_line_for_each_and_marks_what_is_missing() -> None:
    console = rich.console.Console(file=io.StringIO(), width=140)
    later = {"val-core/add/acc/mean@4": 0.875, "val-aux/add/acc/mean@4/ci95": 0.0625}
    earlier = {"val-core/sort/acc/mean@4": 0.25, "val-core/add/acc/mean@4": 0.5}
    console.print(steps_table([("global_step_9", earlier), ("global_step_10", later)]))
    rows = [line.split() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert ["checkpoint", "add", "sort"] in rows
    assert ["global_step_9", "0.500", "0.250"] in rows and ["global_step_10", "0.875", "±0.062", "-"] in rows


def printed_by(verbosity: Verbosity) -> str:
    file = io.StringIO()
    console = Console(file, verbosity)
    console.start(10)
    console.print("the plan")
    console.note("a warning")
    for step in (1, 2):
        console.advance(step)
        console.log(METRICS, step)
        console.log(AFTER, step)
        console.progress("a sample")
    console.stop()
    console.print("the end")
    return file.getvalue()


def test_quiet_leaves_beginning_warnings_and_end() -> None:
    assert printed_by("quiet").splitlines() == ["the plan", "note: a warning", "the end"]
    assert len(printed_by("normal").splitlines()) == len(printed_by("verbose").splitlines()) == 9


def test_the_switches_are_known_to_every_command() -> None:
    given = ["model.path=x", "data.train_files=[y]"]
    assert load_config(given).verbosity == "normal"
    assert load_config(["--quiet", *given]).verbosity == "quiet"
    assert load_schema([*given, "--verbose"], SFTConfig).verbosity == "verbose"
    with pytest.raises(ConfigError, match="--silent is not known.*--quiet and --verbose"):
        load_config(["--silent", *given])


def test_verbose_shows_what_workers_print_and_from_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.console._LOOK_EVERY_S", 0.01)
    logs = tmp_path / "logs"
    (logs / "environments-0").mkdir(parents=True)
    (logs / "actor-0.log").write_text("of an earlier process\n")
    file = io.StringIO()
    with following(logs, Console(file, "verbose")):
        with (logs / "actor-0.log").open("a") as log:
            log.write("loading\x1b[31m weights\x1b[0m\rdone\nnot yet ended")
        (logs / "environments-0" / "env-1.log").write_text("[a] step\n")
        deadline = time.monotonic() + 20
        while "env-1" not in file.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert "not yet ended" not in file.getvalue()
    assert sorted(file.getvalue().splitlines()) == [
        "actor-0 | done",
        "actor-0 | loading weights",
        "actor-0 | not yet ended",
        "environments-0/env-1 | [a] step",
    ]


def test_without_verbose_nothing_of_it_is_shown(tmp_path: Path) -> None:
    file = io.StringIO()
    with following(tmp_path, Console(file)):
        (tmp_path / "actor-0.log").write_text("noise\n")
    assert file.getvalue() == ""
