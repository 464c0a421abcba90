"""A Ray cluster of several machines on this one: a Ray node each, with an address of its own in 127.0.0.0/8.

`RayMachines` is the handle in a test. The cluster lives in a process of its own, `python -m tests.ray_machines`, which
takes commands on its standard input: Ray remembers too much of one cluster to have another in the same process.
The head has no slots; it is where drivers run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from verl_lite.machine.process_table import marked_processes
from verl_lite.machine.process_tree import end_processes

ROOT = Path(__file__).resolve().parents[1]
MARK = "VERL_LITE_TEST_MACHINES"
HEAD = "127.0.0.9"  # not 127.0.0.1, which Ray takes for this machine's outer address
AUTH = {"RAY_AUTH_MODE": "disabled"}
SOON = {"RAY_gcs_rpc_server_reconnect_timeout_s": "30"}  # of a machine whose head is lost, else 60; runs look for 16
_STORE_BYTES = 80 << 20
_STARTS = 4  # on a busy machine a node may give up by itself
_NODE_PATIENCE_S = 90.0


class RayMachines:
    """The cluster. env: for all its processes, the workers of runs included."""

    def __init__(self, addresses: list[str], slots: int, env: dict[str, str]) -> None:
        self.temp = Path(tempfile.mkdtemp(prefix="rm-", dir="/tmp"))
        self.mark = self.temp.name
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.ray_machines", str(self.temp), str(slots)],
            cwd=ROOT,
            # Ray notes the last cluster under RAY_TMPDIR, which it expects to be there
            env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": str(self.temp), MARK: self.mark}
            | {**AUTH, **SOON, **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(self.temp / "errors").open("w"),
            text=True,
            start_new_session=True,
        )
        self.address = self._answer()
        for address in addresses:
            self.add(address)

    def add(self, address: str) -> None:
        """A machine joins."""
        self._ask(f"add {address}")

    def kill(self, address: str) -> None:
        """A machine is gone: its Ray node and all that ran on it, as by kill -9."""
        self._ask(f"kill {address}")

    def kill_head(self) -> None:
        """The head is gone."""
        self._ask("kill_head")

    def processes(self) -> list[int]:
        """All of the cluster, the workers of runs included."""
        return marked_processes(MARK, self.mark)

    def close(self) -> None:
        """End all of it."""
        while found := self.processes():
            end_processes(found)
            self.process.wait()
        shutil.rmtree(self.temp, ignore_errors=True)

    def _ask(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        answer = self._answer()
        assert answer == command, answer

    def _answer(self) -> str:
        assert self.process.stdout is not None
        answer = self.process.stdout.readline().strip()
        assert answer, (self.temp / "errors").read_text()[-4000:]
        return answer


class _Nodes:
    """In the cluster's own process."""

    def __init__(self, temp: str, slots: int) -> None:
        from ray._private import services
        from ray.cluster_utils import Cluster

        services.get_node = patient(services.get_node)
        self._cluster = Cluster(initialize_head=False)
        self._slots, self._nodes = slots, {}
        self._start(HEAD, num_cpus=0, include_dashboard=False, no_monitor=True, temp_dir=f"{temp}/ray")

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add(self, address: str) -> None:
        self._nodes[address] = self._start(address, num_cpus=self._slots)

    def kill(self, address: str) -> None:
        self._cluster.remove_node(self._nodes.pop(address), allow_graceful=False)

    def kill_head(self) -> None:
        self._cluster.remove_node(self._cluster.head_node, allow_graceful=False)

    def _start(self, address: str, **options: Any) -> Any:
        options |= {"node_ip_address": address, "object_store_memory": _STORE_BYTES, "include_log_monitor": False}
        for start in range(_STARTS):
            before = set(psutil.Process().children(recursive=True))
            try:
                return self._cluster.add_node(**options)
            except Exception as error:  # Ray raises it bare
                if "timed out during startup" not in str(error) or start == _STARTS - 1:
                    raise
                end_processes([child.pid for child in set(psutil.Process().children(recursive=True)) - before])
        raise AssertionError("the last start returns or raises")


def patient(ask: Callable[..., Any]) -> Callable[..., Any]:
    """Asks again while Ray says that a node is not there: it would give up after 30 s, too few on a busy machine."""

    def ask_patiently(*arguments: Any) -> Any:
        deadline = time.monotonic() + _NODE_PATIENCE_S
        while True:
            try:
                return ask(*arguments)
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    return ask_patiently


def main() -> None:
    """Answers each command with itself, once done."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what Ray prints
    nodes = _Nodes(sys.argv[1], int(sys.argv[2]))
    print(nodes.address, file=answers)
    for line in sys.stdin:
        name, *arguments = line.split()
        getattr(nodes, name)(*arguments)
        print(line.strip(), file=answers)


if __name__ == "__main__":
    main()
