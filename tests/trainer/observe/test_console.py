"""What is printed during a run and at its end, on a terminal and in a file."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from rich.console import RenderableType
from rich.panel import Panel
from rich.text import Text

from tests.trainer.run_folder import make_run
from trainer import cli, inspect
from trainer.observe.console import Console, Terminal, following, format_seconds
from trainer.observe.final_report import final_report, shortened, validation_line, validation_table
from trainer.observe.picture import draw_curve
from trainer.validation.sample import Sample
from trainer.validation.sample_files import SampleFiles
from verl_lite.config import ConfigError, SFTConfig, Verbosity, load_config, load_schema
from verl_lite.errors import UserError, printable

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
    before_step: int = 0


SAMPLE = Sample(
    step=1, uid="u", data_source="verl_lite/sort", input="Sort 21", output="x\x1b[31m[b]", gts="12", score=None,
    response_length=3, finish_reason="stop", policy_version=1, extra={},
)  # fmt: skip


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def printed(file: io.StringIO, steps: range, verbosity: Verbosity = "normal", total: int = 10) -> str:
    console = Console(file, verbosity)
    console.start(total)
    console.print("the [plan] " + "x" * 200)
    console.note("a [note] with brackets")
    for step in steps:
        console.advance(step)
        console.log(METRICS | AFTER, step)
        console.progress("a sample")
    console.stop()
    return file.getvalue()


def test_output_that_cannot_be_written_is_dropped_and_the_run_goes_on(capfd: pytest.CaptureFixture[str]) -> None:
    """The disk of a log is full, or nobody reads the pipe any more."""
    with open("/dev/full", "w") as full:
        console = Console(full)
        for step in (1, 2):
            console.log(METRICS, step)
        # what could not be written does not fail again when the file is closed
    told = capfd.readouterr().err
    assert told.count("note: the output of the run cannot be written (No space left on device)") == 1

    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        console = Console(pipe)
        console.log(METRICS, 1)
        console.note("more")
    assert "(Broken pipe) and is dropped; the run goes on" in capfd.readouterr().err


def test_a_log_is_continued_once_its_disk_has_room(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        target = os.dup(log.fileno())
        console = Console(log)
        with open("/dev/full", "w") as full:
            os.dup2(full.fileno(), log.fileno())
        console.print("lost")
        os.dup2(target, log.fileno())
        os.close(target)
        console.print("kept")
    assert (tmp_path / "log").read_text() == "kept\n"


def test_a_step_is_one_readable_line_and_failed_rewards_are_told() -> None:
    file = io.StringIO()
    console = Console(file)
    console.start(100)
    console.log({**METRICS, "reward/error_rate": 0.05}, 7)
    line = "step 7/100 reward 0.563 length 12.3 kl 1.2e-03 entropy 0.810 5,231 tok/s 1.43 s 5.0% of rewards failed"
    assert file.getvalue().split() == line.split()


def test_a_file_gets_plain_lines_with_the_time_left_and_a_terminal_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([60.0, 61.0, 500.0, 502.0])  # the start, and what came before a resumption, do not count
    monkeypatch.setattr("trainer.observe.console.time.monotonic", lambda: next(now))
    file = io.StringIO()
    console = Console(file)
    console.start(100)
    for step in (0, 1, 50, 51):
        console.advance(step)
    console.log(METRICS, 51)
    assert file.getvalue().rstrip().endswith("1:38 left")
    monkeypatch.undo()
    text = printed(io.StringIO(), range(3))
    assert all(letter.isprintable() or letter == "\n" for letter in text)
    assert "note: a [note] with brackets" in text and "the [plan] " + "x" * 200 + "\n" in text
    monkeypatch.setenv("TERM", "xterm-256color")
    text = printed(Screen(), range(2))
    assert "1/10" in text and "\x1b[" in text


def test_quiet_leaves_beginning_warnings_and_end() -> None:
    assert len(printed(io.StringIO(), range(2), "quiet").splitlines()) == 2
    assert len(printed(io.StringIO(), range(2)).splitlines()) == 2 + 2 * 3
    given = ["model.path=x", "data.train_files=[y]"]
    assert load_config(["--quiet", *given]).verbosity == "quiet"
    assert load_schema([*given, "--verbose"], SFTConfig).verbosity == "verbose"
    with pytest.raises(ConfigError, match="--silent is not known.*--quiet and --verbose"):
        load_config(["--silent", *given])


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (7.4, "0:07"), (725, "12:05"), (10935, "3:02:15")])
def test_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def shown(content: RenderableType, width: int = 140) -> str:
    file = io.StringIO()
    Terminal(file=file, width=width).print(content, crop=False)
    return file.getvalue()


def test_the_report_of_training_without_a_rollout_compares_each_metric_of_the_validation(tmp_path: Path) -> None:
    result = Result({"val/loss": 0.7, "val/margin": 0.0}, {"val/loss": 0.5, "val/margin": 0.2})
    text = shown(final_report(result, tmp_path, {}, {}))
    rows = [line.split() for line in text.splitlines()]
    assert ["loss", "0.700", "0.500"] in rows and ["margin", "0.000", "0.200"] in rows
    assert ["metric", "before", "after"] in rows and "mean of sources" not in text


def test_the_report_has_before_and_after_samples_places_and_commands(tmp_path: Path) -> None:
    assert validation_line(BEFORE) == "verl_lite/sort 0.300 (greedy 0.500), verl_lite/add 0.200"
    (checkpoint := tmp_path / "global_step_3").mkdir()
    result, command = Result(BEFORE, AFTER, [SAMPLE], checkpoint), "python -m trainer.main_eval " + "x" * 160
    text = shown(final_report(result, tmp_path, {"picture": None}, {"evaluate": command}))
    rows = [line.split() for line in text.splitlines()]
    for row in ("verl_lite/add 0.200 0.300", "mean of sources 0.250 0.350", "verl_lite/sort (greedy) 0.500 0.600"):
        assert row.split() in rows
    for part in ("Sort 21", "failed", "x\\x1b[31m[b]", f"  checkpoint   {checkpoint}", f"  evaluate     {command}"):
        assert part in text
    assert "\x1b" not in text and "curve.png" not in text
    text = shown(final_report(Result(BEFORE, BEFORE), tmp_path, {}, {}))
    assert "before  " not in text and "0.300" in text and "evaluate" not in text
    assert shortened("a" * 1000) == "a" * 300 + " ... (1000 characters)"
    many = dataclasses.replace(SAMPLE, output="\n\n".join("line" for _ in range(30)))
    reports = [final_report(Result(BEFORE, AFTER, [sample]), tmp_path, {}, {}) for sample in (SAMPLE, many)]
    few, lines = (len(shown(report).splitlines()) for report in reports)
    assert lines <= few + 3, "newlines of an answer are no lines of the table"


EVIL = "\x1b]0;t\x07\x1b[2J\x9b31m\u202e\u2066\r[red]:smile:$\\a^$"
SHOWN = r"\x1b]0;t\x07\x1b[2J\x9b31m\u202e\u2066\r[red]:smile:$\a^$"


def test_text_of_others_does_not_control_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In every way that text can take: plain, styled, in titles, headers and cells of tables, in errors."""
    evil = {f"val-core/{EVIL}/acc/mean@1": 0.5, f"val-core/a/{EVIL}/mean@1": 0.5}
    sample = dataclasses.replace(SAMPLE, data_source=EVIL, input=EVIL, output=EVIL, gts=EVIL)
    file = io.StringIO()
    console = Console(file)
    for content in (EVIL, Text(EVIL, style="bold"), validation_table({EVIL: evil}), Panel(EVIL, title=Text(EVIL))):
        console.print(content)
    console.note(EVIL)
    console.log(evil, 1)
    console.print(final_report(Result(evil, evil, [sample]), tmp_path / EVIL.replace("/", ""), {}, {}))
    folder = make_run(tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps({"step": 5, "data": {**evil, "critic/score/mean": 1.0}}) + "\n")
    SampleFiles(folder, 1 << 26, print).write_validation([dataclasses.replace(sample, uid=EVIL, score=2.0)], 5)
    assert draw_curve(folder) is not None
    assert inspect.main([str(folder)]) == inspect.main([str(folder), "--best"]) == 0

    def fail(error: Exception) -> int:
        raise error

    assert cli.run_command(lambda: fail(UserError(EVIL))) == 2
    cli.print_failure(ValueError, ValueError(EVIL), None)
    captured = capsys.readouterr()
    for text in (file.getvalue(), captured.out, captured.err):
        assert all(letter.isprintable() or letter == "\n" for letter in text) and SHOWN in text
    assert printable("\u3000\t é\n") == "\u3000\t é\n", "spaces are harmless"


def test_intervals_stand_beside_the_means() -> None:
    metrics = {
        "val-core/a/acc/mean@1": 0.5, "val-aux/a/acc/mean@1/ci95": 0.03, "val-aux/a/greedy/acc/mean@1": 0.25,
        "val-core/b/acc/mean@1": 0.7, "val-aux/b/acc/mean@1/ci95": 0.04, "val-aux/b/greedy/acc/mean@1": 0.35,
        "val-aux/a/greedy/acc/mean@1/ci95": 0.01,
    }  # fmt: skip
    text = shown(validation_table({"step 1": metrics, "step 2": {"val-core/a/acc/mean@1": 0.25}}))
    rows = [line.split() for line in text.splitlines()]
    assert "a 0.500 ±0.030 0.250".split() in rows and "b (greedy) 0.350 -".split() in rows
    assert "mean of sources 0.600 ±0.025 0.250".split() in rows, "hypot(0.03, 0.04) / 2"
    assert "mean of sources (greedy) 0.300 -".split() in rows


def test_verbose_shows_what_workers_print_and_from_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.observe.console._POLL_S", 0.01)
    logs = tmp_path / "logs"
    (logs / "environments-0").mkdir(parents=True)
    (logs / "actor-0.log").write_text("of an earlier process\n")
    file, quiet = io.StringIO(), io.StringIO()
    with following(logs, Console(file, "verbose")), following(logs, Console(quiet)):
        with (logs / "actor-0.log").open("a") as log:
            log.write("loading\x1b[31m weights\x1b[0m\rdone\nnot\x9b yet ended")
        (logs / "environments-0" / "env-1.log").write_text("[a] step\n")
        deadline = time.monotonic() + 20
        while "env-1" not in file.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert "yet ended" not in file.getvalue()
    lines = [f"actor-0 | {text}" for text in ("done", "loading weights", r"not\x9b yet ended")]
    assert sorted(file.getvalue().splitlines()) == [*lines, "environments-0/env-1 | [a] step"]
    assert not quiet.getvalue()


def test_a_resumed_run_names_the_step_of_its_first_validation(tmp_path: Path) -> None:
    result = Result(BEFORE, AFTER)
    assert "before" in shown(final_report(result, tmp_path, {}, {}))
    result.before_step = 40
    text = shown(final_report(result, tmp_path, {}, {}))
    assert "step 40" in text and "before" not in text
