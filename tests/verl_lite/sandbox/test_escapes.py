"""What hostile code tries, and that it does not succeed."""

from __future__ import annotations

import ctypes
import os
import resource
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from verl_lite.sandbox import Limits, Sandbox, SandboxError
from verl_lite.sandbox.client import Ending, Process
from verl_lite.sandbox.landlock import landlock_version
from verl_lite.sandbox.runs import run_script

NEEDS_LANDLOCK = pytest.mark.skipif(landlock_version(ctypes.CDLL(None)) == 0, reason="this kernel has no Landlock")
FORBIDDEN = "print('in')\n{}\nprint('out')"


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    found = Sandbox(Limits(memory_mb=256, output_kb=256, file_mb=1, folder_mb=2, threads=16))
    yield found
    found.close()


@pytest.fixture(scope="module")
def hasty() -> Iterator[Sandbox]:
    found = Sandbox(Limits(cpu_s=0.4, wall_s=0.8, memory_mb=256, output_kb=256, file_mb=1, folder_mb=2, threads=16))
    yield found
    found.close()


def run(sandbox: Sandbox, code: str, stdin: str = "") -> tuple[Process, Ending]:
    with sandbox.process("program", stdin=stdin) as process:
        process.post({"code": code})
        return process, sandbox.wait_end(process)


def test_every_protection_holds_on_this_machine(sandbox: Sandbox) -> None:
    assert sandbox.protection.is_safe
    assert sandbox.protection.reading or landlock_version(ctypes.CDLL(None)) == 0
    assert any("seccomp" in layer for layer in sandbox.protection.layers)


@pytest.mark.parametrize(
    "attempt",
    [
        # network
        "import socket; socket.socket()",
        "import socket; socket.socket(socket.AF_UNIX)",
        "import socket; socket.socketpair()",
        "import urllib.request; urllib.request.urlopen('http://127.0.0.1:1/', timeout=1)",
        # processes
        "import os; os.fork()",
        "import os; os.posix_spawn('/bin/sh', ['sh', '-c', 'sleep 100'], {})",
        "import os; os.execv('/bin/sh', ['sh'])",
        "import subprocess; subprocess.run(['sleep', '100'])",
        "import multiprocessing as m; p = m.get_context('fork').Process(target=print); p.start()",
        "import os; os.setsid()",
        # others
        "import os; os.kill(os.getppid(), 9)",
        "import os; os.kill(-1, 9)",
        "import os, signal; os.killpg(os.getpgid(os.getppid()), signal.SIGTERM)",
        "import os; os.pidfd_open(os.getppid())",
        "import os, fcntl; fcntl.fcntl(0, fcntl.F_SETOWN, os.getppid())",
        "import resource, os; resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (0, 0))",
        "import os; os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)",
        "import os; os.sched_setaffinity(os.getppid(), {0})",
        # files
        "open('/tmp/verl_lite-escaped', 'w')",
        "import os; open(os.path.join(os.path.expanduser('~'), 'verl_lite-escaped'), 'w')",
        "open('/dev/shm/verl_lite-escaped', 'w')",
        "open('../verl_lite-escaped', 'w')",
        "import os; os.symlink('/etc/passwd', 'link')",
        "import os; os.link('/etc/hostname', 'link')",
        "import os; os.mkfifo('pipe')",
        "import os; os.chmod('.', 0o777)",
        "import os; os.chmod('/tmp', 0o700)",
        "import os; os.utime('/tmp')",
        "import os; os.truncate('/etc/hostname', 0)",
        "import os; os.rename('/etc/hostname', 'mine')",
        "import os; os.setxattr('/tmp', 'user.x', b'1')",
        # rights
        "import os; os.setuid(0) if os.getuid() else os.chown('.', 1, 1)",
        "import os; os.chroot('.')",
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
        "import os; os.memfd_create('x')",
        "import os; os.nice(-5)",
    ],
)
def test_it_is_refused(sandbox: Sandbox, attempt: str) -> None:
    if "setuid" in attempt and os.getuid() != 0:
        attempt = "import os; os.setuid(0)"
    process, ending = run(sandbox, FORBIDDEN.format(attempt))
    assert process.stdout == b"in\n" and ending.exit_code == 1, process.stdout
    assert b"Error" in process.stderr  # PermissionError, OSError, AttributeError of a missing call: no silent success


@NEEDS_LANDLOCK
@pytest.mark.parametrize(
    "attempt",
    [
        "open('/etc/passwd').read()",
        "open('/proc/self/environ').read()",
        "import os; open(f'/proc/{os.getppid()}/environ').read()",
        "import os; open(f'/proc/{os.getppid()}/mem', 'rb').read(1)",
        "import os; os.listdir('/proc')",
        "import os; os.listdir('/')",
        "import os; os.listdir(os.path.expanduser('~'))",
    ],
)
def test_nothing_of_others_is_read(sandbox: Sandbox, attempt: str) -> None:
    process, ending = run(sandbox, FORBIDDEN.format(attempt))
    assert process.stdout == b"in\n" and ending.exit_code == 1 and b"Error" in process.stderr


@pytest.mark.parametrize(
    "number, what",
    [
        (101, "ptrace"),
        (310, "process_vm_readv"),
        (425, "io_uring_setup"),
        (165, "mount"),
        (272, "unshare"),
        (321, "bpf"),
        (157, "prctl: the death signal"),
        (29, "shmget"),
        (250, "keyctl"),
        (438, "pidfd_getfd"),
        (0x40000000 + 57, "fork by its x32 number"),
        (57, "fork"),
        (58, "vfork"),
        (56, "clone of a process"),
        (435, "clone3"),
        (59, "execve"),
        (322, "execveat"),
        (41, "socket"),
        (62, "kill process 1"),
        (200, "tkill"),
        (129, "rt_sigqueueinfo"),
        (303, "name_to_handle_at"),
        (323, "userfaultfd"),
        (90, "chmod"),
        (437, "openat2"),
    ],
)
def test_system_calls_by_number_are_refused(sandbox: Sandbox, number: int, what: str) -> None:
    if os.uname().machine != "x86_64":
        pytest.skip("the numbers are those of x86-64")
    code = f"import ctypes; print(ctypes.CDLL(None).syscall({number}, 1, 0, 0, 0, 0))"
    assert run(sandbox, code)[0].stdout == b"-1\n", what


def test_32_bit_system_calls_end_it(sandbox: Sandbox) -> None:
    if os.uname().machine != "x86_64":
        pytest.skip("int 0x80 is an instruction of x86-64")
    machine_code = b"\xb8\x14\x00\x00\x00\xcd\x80\xc3"  # mov eax, 20 (getpid); int 0x80; ret
    code = f"""
import ctypes, mmap
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write({machine_code!r})
print(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))())
"""
    process, ending = run(sandbox, code)
    assert process.stdout == b"" and ending.exit_code < 0


DEAF = """
import signal
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True: pass
"""
MANY_THREADS = """
import threading, time
threading.stack_size(1 << 16)
for _ in range(100): threading.Thread(target=time.sleep, args=(9,)).start()
"""
BUSY_THREADS = """
import threading
def f():
    while True: pass
for _ in range(4): threading.Thread(target=f).start()
"""


@pytest.mark.parametrize(
    "code, reason",
    [
        ("while True: pass", "time"),
        ("import time; time.sleep(100)", "time"),
        ("x = 10 ** 10 ** 10", "time"),
        (DEAF, "time"),
        (BUSY_THREADS, "time"),
        (MANY_THREADS, "threads"),
        ("while True: print('x' * 1000)", "output"),
        ("import sys\nwhile True: sys.stderr.write('x' * 1000)", "output"),
        pytest.param(
            "import time\nfor i in range(600): open(str(i), 'w').write('x')\ntime.sleep(9)",
            "files",
            marks=NEEDS_LANDLOCK,
        ),
    ],
)
def test_limits_end_it(hasty: Sandbox, code: str, reason: str) -> None:
    _, ending = run(hasty, code)
    assert ending.reason == reason and ending.exit_code == -9
    assert ending.cpu_s < 1.5


def test_memory_is_limited(sandbox: Sandbox) -> None:
    for code in ("x = bytearray(1 << 30)", "x = []\nwhile True: x.append(bytearray(1 << 20))"):
        process, ending = run(sandbox, code)
        assert b"MemoryError" in process.stderr and ending.exit_code == 1
        assert ending.peak_mb < 300


@NEEDS_LANDLOCK
def test_a_file_has_a_largest_size(sandbox: Sandbox) -> None:
    process, _ = run(sandbox, "with open('big', 'wb') as f:\n for _ in range(100): f.write(bytes(1 << 20)); f.flush()")
    assert b"File too large" in process.stderr


@pytest.mark.parametrize(
    "deep", ["f = lambda n: f(n + 1)\nf(0)", "import re; re.compile('(' * 10**6)", "eval('-' * 10**6)"]
)
def test_deep_recursion_ends_only_itself(hasty: Sandbox, deep: str) -> None:
    assert run(hasty, f"import sys; sys.setrecursionlimit(10**9)\n{deep}")[1].exit_code != 0
    assert hasty._server is not None and hasty._server.poll() is None


def test_it_waits_for_no_input(sandbox: Sandbox) -> None:
    started = time.monotonic()
    assert "EOFError" in run_script(sandbox, "input()", "").error
    assert time.monotonic() - started < 2


def test_bytes_that_are_no_text(sandbox: Sandbox) -> None:
    code = "import sys; sys.stdout.buffer.write(bytes(range(256))); sys.stdout.write('\\ud800 é \\0')"
    assert run_script(sandbox, code, "").value == bytes(range(256)).decode("utf-8", "replace") + "? é \0"
    assert run_script(sandbox, "print(input())", "é\0\ud800").value is not None


def test_the_environment_is_empty_and_the_folder_is_its_own(sandbox: Sandbox) -> None:
    os.environ["MY_TOKEN"] = "secret"
    try:
        fresh = Sandbox()
        value = run_script(fresh, "import os; print(dict(os.environ), os.listdir('.'), os.getcwd())", "").value
        fresh.close()
    finally:
        del os.environ["MY_TOKEN"]
    assert "secret" not in value and "HOME" not in value and "[]" in value
    folder = value.split()[-1]
    assert folder.startswith(tempfile.gettempdir()) and not Path(folder).exists()


@NEEDS_LANDLOCK
def test_its_folder_can_be_used_and_goes_away(sandbox: Sandbox) -> None:
    code = """
import os, tempfile
os.makedirs('a/b'); open('a/b/c', 'w').write('text'); os.rename('a/b/c', 'd'); print(open('d').read())
os.mkdir('closed', 0)
print(os.getcwd())
"""
    text, folder = run_script(sandbox, code, "").value.split()
    assert text == "text" and not Path(folder).exists()


def test_nothing_of_the_server_or_of_others_is_open(sandbox: Sandbox) -> None:
    code = """
import os
for fd in range(3, 64):
    try: os.fstat(fd); print(fd)
    except OSError: pass
"""
    with sandbox.process("functions"):  # another one is there
        assert run_script(sandbox, code, "").value == ""


def test_randomness_and_hashes_are_the_same_in_every_run(sandbox: Sandbox) -> None:
    code = "import random; print(random.random(), hash('a'), list({'x', 'y', 'z'}))"
    assert run_script(sandbox, code, "").value == run_script(sandbox, code, "").value


def test_threads_may_run_and_are_waited_for(sandbox: Sandbox) -> None:
    code = """
import sys, threading
sys.setrecursionlimit(100000); threading.stack_size(1 << 26)
def main(): print(f(50000))
def f(n): return n and 1 + f(n - 1)
threading.Thread(target=main).start()
"""
    assert run_script(sandbox, code, "").value == "50000\n"


def test_output_at_exit_counts(sandbox: Sandbox) -> None:
    code = "import atexit, sys; atexit.register(lambda: print('last')); print('first'); sys.exit(0)"
    assert run_script(sandbox, code, "").value == "first\nlast\n"
    assert run_script(sandbox, "print(1); raise SystemExit('no')", "").value is None


def test_no_process_is_left_when_the_sandbox_ends() -> None:
    own = Sandbox(Limits(wall_s=50, cpu_s=50))
    with pytest.raises(SandboxError):
        with own.process("program") as process:
            process.post({"code": "while True: pass"})
            own.wait(process, lambda: bool(process.messages) and process.pid is not None)
            assert process.pid is not None and psutil.pid_exists(process.pid)
            assert own._server is not None
            own._server.kill()  # as a killed reward process takes it along
            own.wait_end(process)
    deadline = time.monotonic() + 5
    while psutil.pid_exists(process.pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not psutil.pid_exists(process.pid)
    assert run_script(own, "print(1)", "").value == "1\n"  # it starts anew
    own.close()


def test_the_parents_own_descriptors_do_not_pile_up(sandbox: Sandbox) -> None:
    run_script(sandbox, "print(1)", "")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        run_script(sandbox, "print(1)", "")
    assert len(os.listdir("/proc/self/fd")) == before
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 64 and socket.socketpair()
