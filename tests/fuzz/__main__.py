"""`python -m tests.fuzz --configs 500 --datasets 200 --seed 0`: random configurations and malformed datasets.

Each has to run (one step of a tiny model, in this machine's processes) or to stop with our error, which has to name
something that was typed. A traceback from inside, a crash, a hang, or an error about something else is a failure: it is
shown with the command that repeats it. Exit status: 0 without failures, else 1.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import multiprocessing
import os
import re
import resource
import shlex
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.forked_runs import PRELOADED
from tests.fuzz.cases import OVERLAY, Case, make_good_files
from tests.fuzz.configs import draw_config
from tests.fuzz.datasets import draw_dataset

ROOT = str(Path(__file__).resolve().parents[2])
MEMORY_BYTES = 16 << 30
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload([*PRELOADED, "trainer.launch.ppo_job"])
TIME_LIMIT_S = 120.0  # of a case, past which it hangs


@dataclass(frozen=True)
class Result:
    """outcome: ran | planned (all before Ray or vLLM) | refused | failed. kind: equal for equal causes. message: what
    the user sees of it."""

    outcome: str
    kind: str = ""
    message: str = ""


class Planned(BaseException):
    """Everything before the start of Ray or vLLM went well."""


def main(argv: list[str]) -> int:
    """Runs the fuzz; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.split("\n\n")[1])
    parser.add_argument("--configs", type=int, default=500, help="random configurations")
    parser.add_argument("--datasets", type=int, default=200, help="malformed datasets")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--keep", help="folder for the files of cases that failed; default: a new one")
    options = parser.parse_args(argv)
    root = Path(options.keep or tempfile.mkdtemp(prefix="fuzz-", dir="/tmp")).resolve()
    make_good_files(root)
    cases = [draw_config(options.seed, index, root) for index in range(options.configs)]
    cases += [draw_dataset(options.seed, index, root) for index in range(options.datasets)]
    with ThreadPoolExecutor(options.jobs) as pool:
        results = list(pool.map(lambda case: attempt(case, root / "cases" / case.name), cases))
    for (outcome, kind), count in Counter((one.outcome, one.kind) for one in results).most_common():
        print(f"{count:6d} {outcome:8} {kind}")
    failed = [pair for pair in zip(cases, results, strict=True) if pair[1].outcome == "failed"]
    for case, result in failed:
        folder = root / "cases" / case.name
        command = shlex.join(["python", "-m", "trainer.main_ppo", *case.write(folder)])
        print(f"\n{case.name}: {result.kind}\n  {result.message[:600]}\n  cd {folder} && {command}")
    if not failed and not options.keep:
        shutil.rmtree(root)
    return int(bool(failed))


def attempt(case: Case, folder: Path) -> Result:
    """Runs the case as a process that is forked from one which has imported the libraries."""
    here, there = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=in_child, args=(str(folder), case.write(folder), there))
    process.start()
    there.close()
    try:
        result = here.recv() if here.poll(TIME_LIMIT_S) else Result("failed", "hang")
    except EOFError:
        result = Result("failed", "the process ended")
    with suppress(ProcessLookupError):
        os.killpg(process.pid or 0, signal.SIGKILL)  # and what a case left
    process.join()
    if result.outcome == "refused" and not names_what_was_typed(result.message, case):
        result = Result("failed", f"an error that does not name what was typed, in {result.kind}", result.message)
    if result.outcome != "failed":
        shutil.rmtree(folder, ignore_errors=True)
    return result


def names_what_was_typed(message: str, case: Case) -> bool:
    """An error has a word of the case: the last part of a key, an argument, a file."""
    typed = [*case.arguments, *case.overlay]
    words = {word for text in typed for word in re.split(r"[\s=+~.:,\[\]{}\"']+", text) if len(word) > 1}
    told = set(re.split(r"[\s=+~.:,;()\[\]{}\"'/]+", message))
    is_short = all(len(text) < 4 for text in typed)
    is_file = OVERLAY in message and bool(case.overlay)
    return is_short or is_file or bool(words & told) or any(text in message for text in typed)


# ---------------------------------------------------------------------------------------------- inside a process


def in_child(folder: str, argv: list[str], connection: Connection) -> None:
    """Sends what became of the command; what it prints goes to `output.txt`."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    faulthandler.enable()
    os.chdir(folder)
    file = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    from trainer.cli import prepare_driver

    prepare_driver()
    import trainer.launch.ppo_job
    from workers.engines.base import resolve_engine_name

    build = trainer.launch.ppo_job.build_trainer

    def build_or_stop(config: Any, *rest: Any) -> Any:
        if config.trainer.backend == "ray" or resolve_engine_name(config.rollout.name) == "vllm":
            raise Planned
        return build(config, *rest)

    trainer.launch.ppo_job.build_trainer = build_or_stop
    connection.send(run(argv))
    os._exit(0)


def run(argv: list[str]) -> Result:
    """What became of the command. A run ends after its first step."""
    from trainer.cli import INTERRUPTED, WRONG_INPUT, run_command
    from trainer.launch.ppo_job import run_ppo
    from trainer.ray_trainer import RayPPOTrainer
    from verl_lite.errors import UserError

    class OneStep(RayPPOTrainer):
        def collect_batch(self) -> Any:
            self.steps.stop()
            return super().collect_batch()

    refusals: list[UserError] = []

    def command() -> int:
        try:
            return run_ppo(argv, OneStep)
        except UserError as error:
            refusals.append(error)
            raise

    try:
        status = run_command(command)
    except Planned:
        return Result("planned")
    except BaseException as error:  # whatever leaves the command is what the fuzz looks for
        traceback.print_exc()
        kind = f"{type(error).__name__} in {place_of(error.__traceback__)}"
        return Result("failed", kind, f"{type(error).__name__}: {error}"[:500])
    if refusals and status == WRONG_INPUT:
        return Result("refused", place_of(refusals[0].__traceback__), str(refusals[0]))
    return Result("ran") if status in (0, INTERRUPTED) else Result("failed", f"exit status {status}", json.dumps(argv))


def place_of(trace: TracebackType | None) -> str:
    """The innermost function of the project in a traceback, by which equal failures are known."""
    frames = [frame for frame in traceback.extract_tb(trace) if frame.filename.startswith(ROOT + os.sep)]
    own = [frame for frame in frames if "/.venv/" not in frame.filename and frame.filename != __file__]
    return f"{Path(own[-1].filename).relative_to(ROOT)}:{own[-1].name}" if own else "nowhere of the project"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
