"""A few processes that run functions together in a gloo group: `Ranks(2).run(function, *args)` -> one result a rank.

The processes stay for many calls, because starting one (importing torch and transformers) takes seconds; they start
when they are first needed, and form groups of different sizes one after the other. Functions must be importable (module
level), and what they return must pickle; tensors travel as numpy arrays.
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
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

OnRanks = Callable[..., list[Any]]
"""Runs a function, given with its arguments, on ranks."""


class Ranks:
    """Up to `size` spawned processes with one compute thread each; use as a context manager."""

    def __init__(self, size: int, timeout_s: float = 120.0) -> None:
        self.size, self.timeout_s = size, timeout_s
        self.folder = tempfile.TemporaryDirectory()
        self.connections: list[Connection] = []
        self.processes: list[Any] = []
        self._group: tuple[int, str] | None = None  # size, file through which the members meet
        self._groups = 0

    def run(self, function: Callable[..., Any], *args: Any, size: int | None = None) -> list[Any]:
        """function(*args) on every rank of a group of `size` (null = all) at once. Raises RuntimeError with a rank's
        traceback, or if one does not answer."""
        size = self.size if size is None else size
        self._start(size)
        if self._group is None or self._group[0] != size:
            self._groups += 1
            self._group = (size, f"{self.folder.name}/store{self._groups}")
        for connection in self.connections[:size]:
            connection.send((self._group, function, args))
        results = []
        for rank, connection in enumerate(self.connections[:size]):
            answered = connection.poll(self.timeout_s)
            result, error = connection.recv() if answered else (None, f"no answer within {self.timeout_s} s")
            if error:
                self._end()  # the others may wait for it: the next call starts new ones
                raise RuntimeError(f"rank {rank}:\n{error}")
            results.append(result)
        return results

    def _start(self, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        for rank in range(len(self.processes), size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, there), daemon=True)
            process.start()
            self.connections.append(here)
            self.processes.append(process)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exception: object) -> None:
        self._end()
        self.folder.cleanup()

    def _end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.processes, self.connections, self._group = [], [], None


def _serve(rank: int, connection: Connection) -> None:
    torch.set_num_threads(1)
    joined = None
    while True:
        group, function, args = connection.recv()
        try:
            if group != joined:
                _join(rank, *group)
                joined = group
            connection.send((function(*args), None))
        except Exception:  # the door through which any error of a test function reaches the test
            connection.send((None, traceback.format_exc()))


def _join(rank: int, size: int, store: str) -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        _clear_sharding_prop_cache()  # it holds meshes, and these the names of groups that are gone
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
