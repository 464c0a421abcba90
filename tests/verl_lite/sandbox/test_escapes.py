"""What hostile code tries, and that it does not succeed."""

from __future__ import annotations

import ctypes
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from verl_lite.sandbox import Limits, Sandbox, SandboxError
from verl_lite.sandbox.client import Ended
from verl_lite.sandbox.confine import landlock_version

NEEDS_LANDLOCK = pytest.mark.skipif(landlock_version(ctypes.CDLL(None)) == 0, reason="this kernel has no Landlock")
X86_ONLY = pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers and instructions of x86-64")
SMALL = {"memory_mb": 256, "output_kb": 256, "file_mb": 1, "folder_mb": 2, "threads": 16}


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    found = Sandbox(Limits(**SMALL))
    yield found
    found.close()


@pytest.fixture(scope="module")
def hasty() -> Iterator[Sandbox]:
    found = Sandbox(Limits(cpu_s=0.4, wall_s=0.8, **SMALL))
    yield found
    found.close()


def run(sandbox: Sandbox, code: str) -> Ended:
    [ended] = sandbox.run([("run_script", [{"code": code}])])
    return ended


REFUSED = [
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
    "import os; os.mkdir('folder')",
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
]
READING = [
    "open('/etc/passwd').read()",
    "open('/proc/self/environ').read()",
    "import os; open(f'/proc/{os.getppid()}/environ').read()",
    "import os; open(f'/proc/{os.getppid()}/mem', 'rb').read(1)",
    "import os; os.listdir('/proc')",
    "import os; os.listdir('/')",
    "import os; os.listdir(os.path.expanduser('~'))",
]


@pytest.mark.parametrize("attempts", [REFUSED, pytest.param(READING, marks=NEEDS_LANDLOCK)])
def test_it_is_refused(sandbox: Sandbox, attempts: list[str]) -> None:
    assert sandbox.could == () or landlock_version(ctypes.CDLL(None)) == 0
    for attempt in attempts:
        ended = run(sandbox, f"print('in')\n{attempt}\nprint('out')")
        assert ended.stdout == "in\n" and ended.exit_code == 1, attempt
        assert "Error" in ended.stderr, attempt  # of permission, or of a missing call: no silent success


SYSTEM_CALLS = [
    (101, "ptrace"), (310, "process_vm_readv"), (425, "io_uring_setup"), (165, "mount"), (272, "unshare"),
    (321, "bpf"), (157, "prctl: the death signal"), (29, "shmget"), (250, "keyctl"), (438, "pidfd_getfd"),
    (0x40000000 + 57, "fork by its x32 number"), (57, "fork"), (58, "vfork"), (56, "clone of a process"),
    (435, "clone3"), (59, "execve"), (322, "execveat"), (41, "socket"), (62, "kill process 1"), (200, "tkill"),
    (129, "rt_sigqueueinfo"), (303, "name_to_handle_at"), (323, "userfaultfd"), (90, "chmod"), (437, "openat2"),
]  # fmt: skip


@X86_ONLY
def test_system_calls_by_number_are_refused(sandbox: Sandbox) -> None:
    for number, what in SYSTEM_CALLS:
        code = f"import ctypes; print(ctypes.CDLL(None).syscall({number}, 1, 0, 0, 0, 0))"
        assert run(sandbox, code).stdout == "-1\n", what


@X86_ONLY
def test_32_bit_system_calls_end_it(sandbox: Sandbox) -> None:
    machine_code = b"\xb8\x14\x00\x00\x00\xcd\x80\xc3"  # mov eax, 20 (getpid); int 0x80; ret
    ended = run(
        sandbox,
        "import ctypes, mmap\n"
        "page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)\n"
        f"page.write({machine_code!r})\n"
        "print(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))())",
    )
    assert ended.stdout == "" and ended.exit_code < 0


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


TOO_MANY_FILES = "import time\nfor i in range(600): open(str(i), 'w').write('x')\ntime.sleep(9)"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("while True: pass", "time"),
        ("import time; time.sleep(100)", "time"),
        ("x = 10 ** 10 ** 10", "time"),
        (DEAF, "time"),
        (BUSY_THREADS, "time"),
        (MANY_THREADS, "threads"),
        ("while True: print('x' * 1000)", "output"),
        ("import sys\nwhile True: sys.stderr.write('x' * 1000)", "output"),
        pytest.param(TOO_MANY_FILES, "files", marks=NEEDS_LANDLOCK),
    ],
)
def test_limits_end_it(hasty: Sandbox, code: str, reason: str) -> None:
    started = time.monotonic()
    ended = run(hasty, code)
    assert ended.met == reason and (ended.exit_code == -9 or reason == "output")
    assert time.monotonic() - started < 2.5


def test_memory_and_files_are_limited(sandbox: Sandbox) -> None:
    for code in ("x = bytearray(1 << 30)", "x = []\nwhile True: x.append(bytearray(1 << 20))"):
        ended = run(sandbox, code)
        assert "MemoryError" in ended.stderr and ended.exit_code == 1
    big = "with open('big', 'wb') as f:\n for _ in range(100): f.write(bytes(1 << 20)); f.flush()"
    assert "File too large" in run(sandbox, big).stderr or sandbox.could


def test_deep_recursion_ends_only_itself(hasty: Sandbox) -> None:
    for deep in ("f = lambda n: f(n + 1)\nf(0)", "import re; re.compile('(' * 10**6)", "eval('-' * 10**6)"):
        assert run(hasty, f"import sys; sys.setrecursionlimit(10**9)\n{deep}").exit_code != 0
        assert hasty.run_script("print(1)").value == "1\n"


def test_input_and_output_are_text_or_bytes(sandbox: Sandbox) -> None:
    assert "EOFError" in sandbox.run_script("input()").error  # it waits for no input
    code = "import sys; sys.stdout.buffer.write(bytes(range(256))); sys.stdout.write('\\ud800 é \\0')"
    assert sandbox.run_script(code).value == bytes(range(256)).decode("utf-8", "replace") + "? é \0"
    assert sandbox.run_script("print(input())", "é\0\ud800").value is not None


@NEEDS_LANDLOCK
def test_the_environment_is_empty_and_the_folder_is_its_own(sandbox: Sandbox) -> None:
    assert "HOME" in os.environ, "the environment of tests should have something to leak"
    value = sandbox.run_script(
        "import os\nprint(dict(os.environ), os.listdir('.'))\nopen('a', 'w').write('text')\n"
        "os.rename('a', 'd'); print(open('d').read()); print(os.getcwd())"
    ).value
    seen, text, folder = value.splitlines()
    assert "HOME" not in seen and seen.endswith("[]") and text == "text"
    assert Path(folder).name.startswith("verl_lite-sandbox-") and not Path(folder).exists()


def test_nothing_of_the_server_or_of_others_is_open(sandbox: Sandbox) -> None:
    code = """
import os
for fd in range(3, 64):
    try: os.fstat(fd); print(fd)
    except OSError: pass
"""
    assert sandbox.run_script(code).value == ""
    listing = "import os\ndef f(): return [fd for fd in range(3, 64) if is_open(fd)]\n"
    is_open = "def is_open(fd):\n    try: return bool(os.fstat(fd))\n    except OSError: return False"
    held = sandbox.call(listing + is_open, "f", [[]])
    assert held[0].value == [3, 4]  # its task and its reply


SMALL_TALK = """
import sys, threading
sys.setrecursionlimit(100000); threading.stack_size(1 << 26)
def main(): print(f(50000))
def f(n): return n and 1 + f(n - 1)
threading.Thread(target=main).start()
"""


def test_a_script_ends_as_it_would_by_itself(sandbox: Sandbox) -> None:
    last = "import atexit, sys; atexit.register(lambda: print('last')); print('first'); sys.exit(0)"
    assert sandbox.run_script(last).value == "first\nlast\n"
    assert sandbox.run_script(SMALL_TALK).value == "50000\n", "a thread is waited for"
    assert sandbox.run_script("print(1); raise SystemExit('no')").value is None
    same = "import random; print(random.random(), hash('a'), list({'x', 'y', 'z'}))"
    assert sandbox.run_script(same).value == sandbox.run_script(same).value


@pytest.mark.parametrize("ends", ["server", "parent"])
def test_no_process_is_left_when(ends: str) -> None:
    """As when a reward process is killed: the copy ends with the server, and the server with its parent."""
    own = Sandbox(Limits(wall_s=50, cpu_s=50))
    assert own.run_script("print(0)").value == "0\n"
    assert own._server is not None and own._control is not None
    server, control = psutil.Process(own._server.process.pid), own._control
    below = [server]

    def end() -> None:
        while not server.children():
            time.sleep(0.01)
        below.extend(server.children())
        server.kill() if ends == "server" else control.shutdown(socket.SHUT_RDWR)

    threading.Thread(target=end).start()
    with pytest.raises(SandboxError):
        own.run([("run_script", [{"code": "while True: pass"}])])
    assert len(below) == 2 and not psutil.wait_procs(below, timeout=5)[1]
    assert own.run_script("print(1)").value == "1\n"  # it starts anew
    own.close()
