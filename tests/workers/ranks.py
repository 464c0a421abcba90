"""A few processes that form a gloo group and run functions together: `Ranks(2).run(function, *args)` -> one result a
rank.

The processes stay for many calls, because starting one (importing torch and transformers) takes seconds. Functions
must be importable (module level), and what they return must pickle; tensors travel as numpy arrays.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch


class Ranks:
    """`size` spawned processes with one compute thread each; use as a context manager."""

    def __init__(self, size: int, timeout_s: float = 120.0) -> None:
        self.timeout_s = timeout_s
        self.folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("spawn")
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        self.connections, self.processes = [], []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, self.folder.name, there), daemon=True)
            process.start()
            self.connections.append(here)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """function(*args) on every rank at once. Raises RuntimeError with a rank's traceback, or if one does not
        answer."""
        for connection in self.connections:
            connection.send((function, args))
        results = []
        for rank, connection in enumerate(self.connections):
            if not connection.poll(self.timeout_s):
                raise RuntimeError(f"rank {rank} did not answer within {self.timeout_s} s")
            result, error = connection.recv()
            if error:
                raise RuntimeError(f"rank {rank}:\n{error}")
            results.append(result)
        return results

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()


def _serve(rank: int, size: int, folder: str, connection: Connection) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    while True:
        function, args = connection.recv()
        try:
            connection.send((function(*args), None))
        except Exception:  # the door through which any error of a test function reaches the test
            connection.send((None, traceback.format_exc()))
