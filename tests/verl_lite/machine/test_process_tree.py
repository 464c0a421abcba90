"""Process trees that try to survive, and the end of all their processes."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.verl_lite.machine import process_children
from verl_lite.machine import process_table, process_tree
from verl_lite.machine.process_table import Status, marked_processes
from verl_lite.machine.process_tree import MARK, ForkedProcess, ProcessTree

FILE = str(Path(str(process_children.__file__)).absolute())


def start(name: str, folder: Path) -> ProcessTree:
    return ProcessTree([sys.executable, FILE, name, str(folder)], os.environ)


def waited(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def alive(folder: Path) -> list[int]:
    """Returns the processes of the test that have not ended: each of them created a file with its id as name."""
    pids = [int(path.name) for path in folder.iterdir()]
    statuses = [process_table.status_of(pid) for pid in pids]
    return [status.pid for status in statuses if status is not None and not status.has_ended]


def in_own_process(test: Callable[[Path], None], folder: Path) -> None:
    """Runs a test in a process of its own, which becomes a subreaper: `end_adopted` ends all its other children."""
    process = multiprocessing.get_context("spawn").Process(target=as_subreaper, args=(test, folder))
    process.start()
    process.join(60.0)
    assert process.exitcode == 0


def as_subreaper(test: Callable[[Path], None], folder: Path) -> None:
    process_tree.become_subreaper()
    test(folder)


def test_a_tree_that_still_forks_leaves_no_process(tmp_path: Path) -> None:
    tree = start("forks", tmp_path)
    waited(lambda: len(list(tmp_path.iterdir())) > 20)
    tree.end()
    assert alive(tmp_path) == [] and tree.process.returncode == -9
    number = len(list(tmp_path.iterdir()))
    time.sleep(0.2)
    assert len(list(tmp_path.iterdir())) == number


def test_a_daemon_without_environment_is_adopted_and_ended(tmp_path: Path) -> None:
    in_own_process(adopts_a_daemon, tmp_path)


def adopts_a_daemon(folder: Path) -> None:
    tree = start("daemon", folder)
    assert tree.wait(10.0) == 0
    waited(lambda: len(alive(folder)) == 1)
    before = marked_processes(MARK, tree.mark)
    tree.end()
    assert before == [] and len(alive(folder)) == 1, "nothing but its parent shows whose process it was"
    process_tree.end_adopted()
    [pid] = [int(path.name) for path in folder.iterdir()]
    assert alive(folder) == [] and process_table.status_of(pid) is None, "it was reaped"


def test_the_processes_of_a_root_that_was_killed_are_ended_by_their_mark(tmp_path: Path) -> None:
    tree = start("forks", tmp_path)
    waited(lambda: len(list(tmp_path.iterdir())) > 20)
    tree.process.kill()
    assert tree.wait(10.0) == -9
    tree.end()
    assert alive(tmp_path) == []


def test_a_process_that_continues_in_children_in_other_sessions_is_ended(tmp_path: Path) -> None:
    in_own_process(ends_a_chain, tmp_path)


def ends_a_chain(folder: Path) -> None:
    """Ends three chains. One may outrun the reading of /proc on a busy machine, which only a cgroup would prevent."""
    survivors = []
    for number in range(3):
        tree = start("chain", folder / str(number))
        time.sleep(0.3)
        tree.end()
        survivors.append(marked_processes(MARK, tree.mark))
    assert survivors.count([]) >= 2, survivors


def test_processes_outside_the_tree_are_not_touched(tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(20)"])
    tree = start("forks", tmp_path)
    waited(lambda: len(list(tmp_path.iterdir())) > 5)
    tree.end()
    status = process_table.status_of(other.pid)
    assert other.poll() is None and status is not None and not status.is_stopped
    other.kill()
    other.wait()


def test_a_job_goes_on_that_shares_its_process_group_with_an_ended_process() -> None:
    """A script that started a driver: the guard, in its own session, ends the forks of a driver that was killed."""
    script = subprocess.Popen(
        ["sh", "-c", "sleep 20 & sleep 20 & echo $!; wait"], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert script.stdout is not None
    fork = int(script.stdout.readline())
    process_tree.end_processes([fork])
    group = [status for status in process_table.list_processes().values() if status.group == script.pid]
    assert [status.pid for status in group if status.has_ended] in ([], [fork])
    remaining = [status for status in group if not status.has_ended]
    assert len(remaining) == 2 and not any(status.is_stopped for status in remaining)
    os.killpg(script.pid, 9)
    script.wait()


def test_a_signal_does_not_reach_another_process_with_the_same_id() -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(20)"])
    earlier = Status(other.pid, os.getpid(), other.pid, "S", started="1")
    process_tree._send(earlier, 9)
    time.sleep(0.1)
    assert other.poll() is None
    other.kill()
    other.wait()


def test_the_mark_of_a_tree_begins_with_that_of_the_tree_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MARK, "/outer")
    tree = ProcessTree([sys.executable, "-c", "import time; time.sleep(20)"], os.environ)
    waited(lambda: tree.process.pid in marked_processes(MARK, "/outer"))
    tree.end()
    assert marked_processes(MARK, "/outer") == []


def test_processes_are_listed_and_ended_without_proc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(process_table, "_PROC", str(tmp_path / "proc"))
    folder = tmp_path / "marks"
    folder.mkdir()
    tree = start("forks", folder)
    waited(lambda: len(list(folder.iterdir())) > 20)
    tree.end()
    monkeypatch.undo()
    assert alive(folder) == []


def test_a_process_that_adopts_nobody_keeps_its_other_children() -> None:
    """Programs can run in the driver's process, whose children are Ray, the guard and the workers."""
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(20)"])
    process_tree.end_adopted()
    time.sleep(0.1)
    assert other.poll() is None
    other.kill()
    other.wait()


def test_a_mark_that_only_begins_with_another_belongs_to_another_tree() -> None:
    own, inner, other = (
        subprocess.Popen(["sleep", "20"], env={"SOME_MARK": value, "PATH": os.environ["PATH"]})
        for value in ("/ab", "/ab/cd", "/abc")
    )
    waited(lambda: marked_processes("SOME_MARK", "/abc") == [other.pid])
    assert marked_processes("SOME_MARK", "/ab") == sorted([own.pid, inner.pid])
    for process in (own, inner, other):
        process.kill()
        process.wait()


def test_what_remains_of_the_group_of_an_ended_program_is_killed_before_its_exit_code_is_read(tmp_path: Path) -> None:
    program = "import subprocess, sys; print(subprocess.Popen(['sleep', '20']).pid, flush=True); sys.exit(3)"
    tree = ProcessTree([sys.executable, "-c", program], os.environ, stdout=subprocess.PIPE)
    assert tree.process.stdout is not None
    child = int(tree.process.stdout.readline())
    assert tree.wait(10.0) == 3
    status = process_table.status_of(child)
    assert status is None or status.has_ended
    tree.end()


def test_a_program_starts_with_its_folder_its_files_and_the_call_before_it(tmp_path: Path) -> None:
    def set_umask() -> None:
        os.umask(0o027)

    reader, writer = os.pipe()
    program = f"import os; os.write({writer}, f'{{os.getcwd()}} {{os.umask(0):o}}'.encode())"
    tree = ProcessTree(
        [sys.executable, "-S", "-c", program],
        {},
        cwd=tmp_path,
        pass_fds=[writer],
        before_exec=set_umask,
    )
    os.close(writer)
    assert tree.wait(10.0) == 0
    assert os.read(reader, 1000).decode().split() == [str(tmp_path), "27"]
    os.close(reader)
    tree.end()


def test_a_fork_exits_with_the_status_that_its_function_returns_or_with_1_after_an_exception() -> None:
    def fails() -> int:
        raise KeyboardInterrupt

    assert ForkedProcess(lambda: 7).wait() == 7
    assert ForkedProcess(fails).wait() == 1


def test_a_fork_is_killed_with_the_group_that_it_leads() -> None:
    reader, writer = os.pipe()

    def leads_a_group() -> int:
        os.setsid()
        os.write(writer, f"{os.fork()}\n".encode())
        time.sleep(20)
        return 0

    process = ForkedProcess(leads_a_group)
    pids: list[str] = []
    while len(pids) < 2:  # one line of the fork, and one of its own fork
        pids += os.read(reader, 100).decode().split()
    assert not process.has_exited()
    process.kill()
    waited(process.has_exited)
    assert process_table.status_of(process.pid) is not None, "its id stays reserved"
    assert process.wait() == -9
    [child] = [int(pid) for pid in pids if pid != "0"]
    waited(lambda: (status := process_table.status_of(child)) is None or status.has_ended)
