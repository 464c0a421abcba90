"""Runs of a sweep on the machines of a Ray cluster that is there already: `--ray HOST:PORT`.

`RayPool` is pool and launcher in one. Ray gives a place to each run; an actor in it starts the run there as a process,
passes signals on, and gives its exit status. (Ray's own jobs would need its dashboard, which minimal installations do
not have.) A run does not join the cluster: it has a private Ray on its machine, the same command as anywhere, and
cannot disturb the runs of others. Run folders, data and models are on a file system that all machines share.

The actor ends with the sweep's connection to the cluster, and the run with the actor, kill -9 of any of them included.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.sweeps.slots import Slot
from trainer.sweeps.trial import LocalProcess, Process, usual_environment
from verl_lite.errors import WorkerDiedError

if TYPE_CHECKING:
    from verl_lite.single_controller.ray_places import Place, RayPlaces, Remote

_FIRST_ANSWER_S = 20.0
_KILL_S = 20.0
_LOST = 1


class RayPool:
    """Places on the machines of a cluster, and the start of runs there; this process has joined it until `close`.

    gpus: of each run, where the cluster has any; needed: it must. cores: that a run takes of Ray's count. most: runs at
    a time. cwd: where runs are started, on each machine. Raises NoRoomError if nobody answers at the address, UserError
    if no machine of the cluster could ever hold a run.
    """

    def __init__(
        self,
        address: str,
        *,
        gpus: int,
        needed: bool,
        cores: int,
        cwd: Path,
        most: int | None = None,
        tell: Callable[[str], None] = print,
    ) -> None:
        from verl_lite.single_controller.ray_places import RayPlaces

        self._places = RayPlaces(
            address, "--ray ", gpus=gpus, needed=needed, cores=cores, wait_s=_FIRST_ANSWER_S, tell=tell
        )
        self.gpus, self._cores, self._cwd, self._most = self._places.gpus, cores, cwd, most
        self._taken: dict[str, Place] = {}
        self._started: list[_RemoteProcess] = []

    @property
    def size(self) -> int:
        """Runs that the machines there are now can hold; at least 1, since machines may come back."""
        room = self._places.room()
        return max(1, min(room, self._most or room))

    def take(self, avoid: Collection[str] = ()) -> Slot | None:
        place = self._places.take(avoid)
        if place is None:
            return None
        name = f"{place.machine} #{len(self._started) + 1}"
        self._taken[name] = place
        settings = (f"trainer.n_gpus_per_node={self.gpus}",) if self.gpus else ()
        return Slot(name, (place.machine,), {"OMP_NUM_THREADS": str(self._cores)}, settings)

    def give_back(self, slot: Slot, lost: bool = False) -> None:
        self._places.give_back(self._taken.pop(slot.name))

    def why_not(self) -> list[str]:
        return self._places.why_not()

    def start(self, command: Sequence[str], log: Path, slot: Slot) -> Process:
        """command: whole, python first. log: what the run prints is added to it, on its machine."""
        host = self._places.start(self._taken[slot.name], Host, list(command), log, self._cwd, dict(slot.environment))
        self._started.append(_RemoteProcess(host, log, self._places))
        return self._started[-1]

    def close(self) -> None:
        """Leaves the cluster; runs that are left end: Ray sees to it, unless it has lost its head."""
        if self._places.is_headless:
            left = [run for run in self._started if run.status is None]
            for run in left:
                run.host.ask("kill")
            deadline = time.monotonic() + _KILL_S
            for run in left:
                run.look(max(0.0, deadline - time.monotonic()))
        self._places.close()


class Host:
    """In the cluster, on a run's machine: its process. Reached only through `_RemoteProcess`."""

    def __init__(self, command: list[str], log: Path, cwd: Path, environment: Mapping[str, str]) -> None:
        usual = {name: value for name, value in usual_environment().items() if not name.startswith("RAY_")}
        self._ray = os.getppid()
        self._process = LocalProcess(command, log, cwd, {**usual, **environment})

    def wait(self) -> int:
        """Its exit status once it has ended and nothing of it is left. It is killed if this machine's part of Ray ends,
        which would let this actor live on while it waits."""
        while (status := self._process.poll()) is None:
            if os.getppid() != self._ray:
                self._process.kill()
                os._exit(1)  # so that the sweep takes the machine for lost, and not the run for killed
            time.sleep(0.1)
        self._process.clean()
        return status

    def interrupt(self) -> None:
        if self._process.poll() is None:
            self._process.interrupt()

    def kill(self) -> None:
        self._process.kill()


@dataclass
class _RemoteProcess:
    """A run on another machine. pid: 0, since it is of that machine."""

    host: Remote
    log: Path
    places: RayPlaces
    pid: int = 0
    status: int | None = None

    def __post_init__(self) -> None:
        self._ended = self.host.ask("wait")

    def poll(self) -> int | None:
        """Its exit status; 1, with a line in the log that says so, if its machine is lost. Raises ClusterLostError
        if the cluster is."""
        if self.status is None:
            self.places.require_head()
            self.look(0.0)
        return self.status

    def interrupt(self) -> None:
        self.host.ask("interrupt")

    def kill(self) -> None:
        if self.status is None:
            self.host.ask("kill")
            self.look(_KILL_S)
            self.status = -signal.SIGKILL if self.status is None else self.status
        self.clean()

    def clean(self) -> None:
        self.places.wait_for_head()
        self.host.end()

    def look(self, wait_s: float) -> None:
        """Waits so long for its end."""
        try:
            self.status = self.host.answer(self._ended, wait_s)
        except WorkerDiedError as error:
            self.status = _LOST
            with self.log.open("a", encoding="utf-8") as file:
                file.write(f"WorkerDiedError: {error}\n")
