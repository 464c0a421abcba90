"""Fuzz processes that are kept and reused: a case goes in, its result comes out; a hang or crash costs the process."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.cases import Case

ROOT = Path(__file__).resolve().parents[2]
CASES_OF_A_PROCESS = 150
START_S = 600.0


@dataclass(frozen=True)
class Result:
    """outcome: ran | planned | refused | failed. kind: equal for equal causes. message: what the user sees of it."""

    outcome: str
    kind: str = ""
    message: str = ""
    seconds: float = 0.0


class FuzzProcess:
    """One process, started when a case needs it. time_limit_s: of a case; past it, it hangs."""

    def __init__(self, time_limit_s: float) -> None:
        self.time_limit_s = time_limit_s
        self.process: subprocess.Popen[bytes] | None = None
        self.done = 0

    def run(self, case: Case, folder: Path) -> Result:
        """Runs a case in its folder, which is made."""
        argv = case.write(folder)
        if self.process is None or self.done >= CASES_OF_A_PROCESS:
            self.close()
            self._start()
        began = time.monotonic()
        assert self.process is not None and self.process.stdin is not None
        self.process.stdin.write(json.dumps({"folder": str(folder), "argv": argv}).encode() + b"\n")
        self.process.stdin.flush()
        answer = self._answer(self.time_limit_s)
        self.done += 1
        seconds = time.monotonic() - began
        if answer is None:
            hung = self.process.poll() is None
            kind = "hang" if hung else f"the process ended with {self.process.wait()}"
            self.close()
            return Result("failed", kind, f"{kind} after {seconds:.0f} s", seconds)
        return Result(**answer, seconds=seconds)

    def close(self) -> None:
        """Ends the process and what a case left."""
        if self.process is None:
            return
        process, self.process = self.process, None
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
        os.close(self._answers)

    def _start(self) -> None:
        self._answers, write = os.pipe()
        self._buffer = b""
        self.done = 0
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.worker", str(write)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            pass_fds=(write,),
            start_new_session=True,
        )
        os.close(write)
        if self._answer(START_S) is None:
            raise RuntimeError("the fuzz's process does not start")

    def _answer(self, patience_s: float) -> dict[str, str] | None:
        """The next answer; None if the process is silent for too long, or gone."""
        deadline = time.monotonic() + patience_s
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
            read = os.read(self._answers, 65536) if ready else b""
            if not read:
                return None
            self._buffer += read
        line, self._buffer = self._buffer.split(b"\n", 1)
        answer: dict[str, str] = json.loads(line)
        return answer
