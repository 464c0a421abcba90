"""How commands end: exit status, signals, and what is printed last."""

from __future__ import annotations

import importlib
import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from trainer import main_ppo
from trainer.cli import failure_text, run_command, stopping_on_signal
from trainer.evaluate import evaluation
from trainer.launch import run, start
from trainer.observe.console import Console
from verl_lite.errors import UserError, add_circumstances, during

ROOT = Path(__file__).resolve().parents[2]
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@pytest.fixture(autouse=True)
def hook_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)


def test_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    def wrong() -> int:
        raise UserError("data.train_files: no such file")

    def broken() -> int:
        raise LookupError("x")

    assert run_command(lambda: 0) == 0
    assert run_command(wrong) == 2
    assert capsys.readouterr().err == "\nUserError: data.train_files: no such file\n"
    with pytest.raises(LookupError):  # for debuggers; `sys.excepthook` prints it
        run_command(broken)
    assert sys.excepthook.__name__ == "print_failure"


def test_help_and_a_wrong_key_wait_for_no_library() -> None:
    code = "import sys; from trainer.main_ppo import main; assert [main(['--help']), main(['actor.lrr=1'])] == [0, 2]; "
    code += "assert not sys.modules.keys() & {'torch', 'transformers', 'ray'}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "actor.optim.lr" in done.stderr, done.stderr


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """The signals, where the tests themselves run under nohup or in the background, which ignore some."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_unwinds_the_run(number: signal.Signals, capfd: pytest.CaptureFixture[str]) -> None:
    before = [signal.getsignal(each) for each in SIGNALS]
    cleaned: list[str] = []

    def command() -> int:
        try:
            os.kill(os.getpid(), number)
            return 0
        finally:
            cleaned.append("up")

    assert run_command(command) == 128 + number and cleaned == ["up"]
    assert f"Stopped by {number.name}" in capfd.readouterr().err
    assert [signal.getsignal(each) for each in SIGNALS] == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_the_warning_of_a_batch_system_stops_a_command_with_a_checkpoint(number: signal.Signals) -> None:
    asked: list[str] = []

    def command() -> int:
        with stopping_on_signal(lambda: asked.append("stop"), asked.append):
            os.kill(os.getpid(), number)
        return 0

    assert run_command(command) == 0 and asked[1:] == ["stop"] and f"{number.name}: stopping" in asked[0]


def test_a_program_that_calls_train_keeps_its_own_use_of_sigusr() -> None:
    received: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: received.append(number))
    try:
        with stopping_on_signal(lambda: pytest.fail("stopped"), print):
            os.kill(os.getpid(), signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert received == [signal.SIGUSR1]


def test_characters_that_the_terminal_lacks_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="latin-1"))

    def command() -> int:
        Console().print("3 \u2264 4")
        print("\u4e2d", flush=True)
        return 0

    assert run_command(command) == 0 and written.getvalue() == b"3 \\u2264 4\n\\u4e2d\n"


def test_the_second_signal_ends_at_once() -> None:
    program = (
        "import os, signal, time\nfrom trainer.cli import run_command\n"
        "def command():\n"
        "    print('before', end='')\n"
        "    try:\n        os.kill(os.getpid(), signal.SIGTERM)\n"
        "    finally:\n        os.kill(os.getpid(), signal.SIGINT)\n        time.sleep(60)\n"
        "run_command(command)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=50, capture_output=True, text=True)
    assert done.returncode == 128 + signal.SIGINT and done.stdout == "before"
    assert done.stderr == "\nStopped at once by SIGINT; the run's guard ends its remaining processes.\n"


LOST = """
import os, signal, sys, time
from trainer.cli import run_command
from verl_lite.errors import ClusterLostError
def command():
    print(os.getpid(), *sys.argv[2:], flush=True)
    if "again=1" in sys.argv:
        time.sleep(60)
    error = ClusterLostError("gone")
    error.again = ["again=1"]
    try:
        raise error
    finally:
        if "early" in sys.argv:
            os.kill(os.getpid(), signal.SIGTERM)
sys.exit(run_command(command))
"""


@pytest.mark.parametrize("when", ["early", "late"])
def test_a_command_that_lost_its_cluster_starts_again_in_its_process_and_hears_signals(when: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", LOST, when], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == f"{process.pid}\n"
    if when == "late":
        assert process.stdout.readline().startswith("Starting again from the last checkpoint")
        assert process.stdout.readline() == f"{process.pid} again=1\n"
        process.terminate()
    printed, told = process.communicate(timeout=50)
    assert process.returncode == 128 + signal.SIGTERM and "Stopped by SIGTERM" in told and printed == ""


def test_the_first_cause_is_printed_last() -> None:
    error = ValueError("no such loss\nin two lines")
    error.add_note("the machine is known for this")
    error.add_note("remote traceback:\nray::x\n  File loss.py\nValueError: no such loss")
    add_circumstances(
        error, role="actor", rank=1, method="update", traceback="ray::x\n  File loss.py\nValueError: no such loss"
    )
    add_circumstances(error, log="/run/logs/actor-1.log")
    with pytest.raises(ValueError) as caught, during("step", 3), during("update_actor", 3):
        raise error
    assert failure_text(caught.value).strip().split("\n\n") == [
        "The first cause, actor, rank 1, in update (phase update_actor of step 3):\n"
        "ray::x\n  File loss.py\nValueError: no such loss",
        "the machine is known for this",
        "The run failed: actor, rank 1, in update (phase update_actor of step 3): ValueError: no such loss\n"
        "  its log: /run/logs/actor-1.log",
    ]


def test_the_drivers_traceback_begins_in_the_training_loop() -> None:
    error = LookupError("x")
    with pytest.raises(LookupError) as caught:
        run_command(lambda: exec(compile("raise error", f"{ROOT}/trainer/ray_trainer.py", "exec"), {"error": error}))
    shown = failure_text(caught.value.with_traceback(caught.tb.tb_next))  # from the frame of run_command on
    assert shown.count("File ") == 2 and "/cli.py" not in shown and "ray_trainer.py" in shown


@pytest.mark.parametrize("launcher", [start.__file__, run.__file__, main_ppo.__file__, evaluation.__file__])
def test_the_files_that_lead_to_the_training_loop_are_not_shown(launcher: str) -> None:
    error = LookupError("x")
    loop = {"error": error, "step": compile("raise error", f"{ROOT}/trainer/loop/training_loop.py", "exec")}
    with pytest.raises(LookupError) as caught:
        exec(compile("exec(step)", launcher, "exec"), loop)
    assert caught.tb.tb_next is not None
    shown = failure_text(caught.value.with_traceback(caught.tb.tb_next))
    assert shown.count("File ") == 1 and "training_loop.py" in shown


@pytest.mark.parametrize("installed", [True, False])
def test_a_package_that_cannot_be_imported_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_stays: None, installed: bool
) -> None:
    """As torchvision for another build of torch, whose error transformers hides. A user's file is no such package."""
    (tmp_path / "compiled_part").mkdir()
    lines = "def register():\n    raise RuntimeError('operator compiled_part::nms does not exist')\n\nregister()\n"
    (tmp_path / "compiled_part" / "__init__.py").write_text(lines)
    if installed:
        information = tmp_path / "compiled_part-0.28.0.dist-info"
        information.mkdir()
        (information / "METADATA").write_text("Metadata-Version: 2.1\nName: compiled-part\nVersion: 0.28.0\n")
        (information / "RECORD").write_text("compiled_part/__init__.py,,\n")
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(ModuleNotFoundError) as caught:
        try:
            importlib.import_module("compiled_part")
        except RuntimeError as error:
            raise ModuleNotFoundError("Could not import module 'AutoImageProcessor'") from error

    _, *advice, summary = failure_text(caught.value).strip().split("\n\n")
    assert summary.startswith("The run failed: ModuleNotFoundError: Could not import module 'AutoImageProcessor'")
    advised = [text for text in advice if "cannot be imported" in text]
    assert len(advised) == installed
    if installed:
        assert "The installed package compiled-part 0.28.0" in advised[0]
        assert "RuntimeError: operator compiled_part::nms does not exist" in advised[0]
        assert f"than {version('torch')}" in advised[0] and "pip uninstall compiled-part" in advised[0]


def test_the_causes_of_an_error_may_form_a_circle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search for a broken package must end there, and at code that is executed without the name of a module."""
    (tmp_path / "nameless.py").write_text("exec(compile('1 / 0', 'generated', 'exec'), {})")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ZeroDivisionError) as caught:
        importlib.import_module("nameless")
    first = caught.value
    summary = "The run failed: ZeroDivisionError: division by zero"
    assert failure_text(first).endswith(summary)
    second = ValueError("another")
    first.__cause__ = second
    second.__cause__ = first
    assert failure_text(first).endswith(summary)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_asks_second_interrupts(number: signal.Signals) -> None:
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    asked: list[str] = []
    with pytest.raises(KeyboardInterrupt), stopping_on_signal(lambda: asked.append("stop"), asked.append):
        os.kill(os.getpid(), number)
        assert asked[1:] == ["stop"] and number.name in asked[0]
        os.kill(os.getpid(), signal.SIGTERM)
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before


def test_in_another_thread_nothing_is_touched() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen: list[object] = []

    def enter() -> None:
        with stopping_on_signal(lambda: None, print):
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [before]


@pytest.mark.parametrize(
    ("name", "replacement"),
    [
        ("diffusion_plan", "python -m trainer.plan --command main_reward_flow"),
        ("sync", "trainer/REPORTS.md#trackers"),
        ("video_data", "python -m trainer.main_reward_flow key=value ... trainer.dry_run=true"),
    ],
)
def test_a_removed_command_names_its_replacement(
    name: str, replacement: str, capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module(f"trainer.{name}")
    assert module.main(["RUN", "--to", "wandb"]) == 2
    message = capsys.readouterr().err
    assert f"python -m trainer.{name} was removed" in message
    assert replacement in message


@pytest.mark.parametrize("redirection", [">&-", "2>&-", "| true"])
def test_a_command_whose_output_nobody_reads_ends_with_its_own_status(redirection: str, tmp_path: Path) -> None:
    """Closed by the caller, or by a reader that has ended before the last line is written."""
    script = tmp_path / "ends.py"
    script.write_text(
        "import sys, time\nfrom trainer.cli import leave\n"
        "if sys.stdout is not None:\n    sys.stdout.write('unread')\n"
        # `true` has ended by then
        "time.sleep(0.3)\nleave(5)\n"
    )
    command = f"{sys.executable} {script} {redirection}; exit ${{PIPESTATUS[0]}}"
    # buffered, so that the text is still to be written
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONUNBUFFERED": ""}
    done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (5, "")
