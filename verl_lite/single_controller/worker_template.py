"""Forks the worker processes of a private Ray cluster from a process that has already imported their libraries.

The driver starts the template as `python worker_template.py SOCKET` before it imports its own modules, and names on the
template's standard input what to import. Ray runs `python worker_template.py SOCKET SCRIPT ARGUMENT...` as the
interpreter of a worker: this process hands arguments, environment, folder and open streams to the template, which forks
the worker, and waits for its end. The workers end with the template, and the template with the driver. Linux only; uses
only the standard library.
"""

import contextlib
import gc
import json
import os
import pkgutil
import runpy
import select
import signal
import socket
import sys
from typing import NamedTuple

# the template's first folder of packages is its own
if __name__ == "__main__":
    _own_folder = os.path.dirname(os.path.abspath(__file__))
    _project_root = os.path.dirname(os.path.dirname(_own_folder))
    sys.path.insert(1, _project_root)

from verl_lite.machine import process_tree

STREAMS = (0, 1, 2)


class WorkerStart(NamedTuple):
    """The arguments, environment and folder with which Ray starts the interpreter of a worker."""

    argv: list[str]
    environment: dict[str, str]
    folder: str


def request_worker(path: str, argv: list[str]) -> None:
    """Lets the template fork a worker that runs the script argv[0]. Becomes the worker if no template answers."""
    with socket.socket(socket.AF_UNIX) as template:
        try:
            template.connect(path)
        except OSError:
            os.execv(sys.executable, [sys.executable, *argv])
        # descriptors travel only together with at least one byte
        socket.send_fds(template, [b"w"], STREAMS)
        start = WorkerStart(argv, dict(os.environ), os.getcwd())
        template.sendall(json.dumps(start).encode())
        # the template reads up to the end
        template.shutdown(socket.SHUT_WR)
        # waits for the end of the worker: Ray takes an earlier end of this process for a failed start
        template.recv(1)


def serve(path: str) -> WorkerStart | None:
    """Imports modules and forks workers until standard input closes; then returns None.

    It also returns in each forked worker, with the start that Ray requested. An input line is a module, or a function
    to call as `module:function`.
    """
    # the kernel removes ended workers
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    # the workers inherit this mask, like workers that Ray's own daemons start
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2))
    template = os.getpid()
    # Ray keeps the settings of the environment at its import, so each worker imports it with its own environment
    sys.modules["ray"] = None  # type: ignore[assignment]
    with socket.socket(socket.AF_UNIX) as listener:
        # an earlier template of the same run can have left its socket
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        listener.bind(path)
        listener.listen()
        while True:
            ready, _, _ = select.select([0, listener.fileno()], [], [])
            if 0 in ready:
                names = os.read(0, 1 << 16).decode().split()
                if not names:  # the driver has closed the input
                    return None
                for name in names:
                    _preload(name)
                continue
            start = _fork_worker(listener, template)
            if start is not None:
                return start


def _fork_worker(listener: socket.socket, template: int) -> WorkerStart | None:
    """Accepts a request and forks its worker. Returns the start in the worker, and None in the template.

    Args:
        listener: socket at which `request_worker` connects.
        template: process id of the template.
    """
    connection, _ = listener.accept()
    with connection:
        _, streams, _, _ = socket.recv_fds(connection, 1, len(STREAMS))
        with connection.makefile("r") as request:
            start = WorkerStart(*json.load(request))
        # collections in the workers then leave the shared memory alone
        gc.freeze()
        # not a `ForkedProcess`: a worker returns to `main` and ends like any Python program, with the exit
        # handlers that Ray has registered; its parent does not wait for it (SIGCHLD is ignored)
        if os.fork() == 0:
            # Ray kills the process group of a worker that has died
            os.setsid()
            # Ray's workers end with their parent
            process_tree.die_with_parent(template)
            for stream, fd in zip(STREAMS, streams, strict=True):
                os.dup2(fd, stream)
                os.close(fd)
            # stays open until this process ends, which is what `request_worker` waits for
            os.dup(connection.fileno())
            return start
        for fd in streams:
            os.close(fd)
    return None


def _preload(name: str) -> None:
    """Imports a module, or calls a function (`module:function`)."""
    # the worker repeats the import and raises the error
    with contextlib.suppress(Exception):
        target = pkgutil.resolve_name(name)
        if callable(target):
            target()


def main(path: str, argv: list[str]) -> None:
    """Runs the template, or with `argv` the interpreter of a worker."""
    if argv:
        request_worker(path, argv)
        return
    # the folder of this file: its modules would hide others with the same names
    del sys.path[0]
    gc.disable()  # while there are only imports
    worker = serve(path)
    if worker is None:
        return
    gc.enable()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    del sys.modules["ray"]
    sys.argv = worker.argv

    os.environ.clear()
    os.environ.update(worker.environment)
    os.chdir(worker.folder)
    # the worker's folders first, as if its interpreter had started with them; the template's others stay
    python_path = worker.environment.get("PYTHONPATH", "").split(os.pathsep)
    folders = [*filter(None, python_path), *sys.path]
    sys.path[:] = dict.fromkeys(folders)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
