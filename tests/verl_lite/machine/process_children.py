"""Processes that try to survive the end of their tree. Each of them ends after half a minute by itself."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

LIFE_S = 30.0


def daemon(folder: Path) -> None:
    """Becomes a daemon without an environment: new session, two forks, ignored signals."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            code = f"import os, time; open('{folder}/' + str(os.getpid()), 'w').close(); time.sleep({LIFE_S})"
            os.execve(sys.executable, [sys.executable, "-I", "-S", "-c", code], {})
        os._exit(0)
    os.wait()


def forks(folder: Path, most: int = 300) -> None:
    """Forks as fast as it can, at most 300 times, into groups of their own."""
    for _ in range(most):
        if os.fork() == 0:
            os.setpgid(0, 0)
            _stay(folder)
    _stay(folder)


def chain(folder: Path) -> None:
    """Runs on in a new child, in a new session, again and again; every parent exits at once."""
    end = time.monotonic() + LIFE_S
    number = 0
    while time.monotonic() < end and number < 3000:
        number += 1
        if os.fork() != 0:
            if number == 1:
                time.sleep(LIFE_S)
            os._exit(0)
        os.setsid()
        time.sleep(0.001)


def _stay(folder: Path) -> None:
    (folder / str(os.getpid())).touch()
    time.sleep(LIFE_S)
    os._exit(0)


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]))
