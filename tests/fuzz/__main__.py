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
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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
CONTEXT.set_forkserver_preload([*PRELOADED, "trainer.build"])
DRAWS = {"config": draw_config, "dataset": draw_dataset}


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
    parser.add_argument("--only", nargs="*", help="these cases alone, such as config:17")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--time-limit", type=float, default=120.0, help="seconds of a case, past which it hangs")
    parser.add_argument("--keep", help="folder for the files; it stays. Without it, it stays where something failed")
    options = parser.parse_args(argv)
    root = Path(options.keep or tempfile.mkdtemp(prefix="fuzz-", dir="/tmp")).resolve()
    make_good_files(root)
    counts = {"config": options.configs, "dataset": options.datasets}
    names = options.only or [f"{kind}:{index}" for kind, count in counts.items() for index in range(count)]
    shares = [names[first :: options.jobs] for first in range(options.jobs)]
    with ThreadPoolExecutor(options.jobs) as pool:
        found = pool.map(lambda share: list(fuzz(share, options.seed, root, options.time_limit)), shares)
        results = [one for share in found for one in share]
    for (outcome, kind), count in Counter((one.outcome, one.kind) for _, one in results).most_common():
        print(f"{count:6d} {outcome:8} {kind}")
    failed = [(case, result) for case, result in results if result.outcome == "failed"]
    for case, result in failed:
        print(f"\n{case.name}: {result.kind}\n  {result.message[:600]}\n  {case.command(folder_of(case, root))}")
    if not failed and not options.keep:
        shutil.rmtree(root)
    return int(bool(failed))


def folder_of(case: Case, root: Path) -> Path:
    return root / "cases" / case.name.replace(":", "-")


def fuzz(names: list[str], seed: int, root: Path, time_limit_s: float) -> Iterator[tuple[Case, Result]]:
    """Runs cases one after the other, each in a process of its own."""
    for name in names:
        kind, index = name.split(":")
        case = DRAWS[kind](seed, int(index), root)
        folder = folder_of(case, root)
        result = attempt(str(folder), case.write(folder), time_limit_s)
        if result.outcome == "refused" and not names_what_was_typed(result.message, case):
            result = Result("failed", f"an error that does not name what was typed, in {result.kind}", result.message)
        if result.outcome != "failed":
            shutil.rmtree(folder, ignore_errors=True)
        yield case, result


def attempt(folder: str, argv: list[str], time_limit_s: float) -> Result:
    """Runs the command as a process that is forked from one which has imported the libraries."""
    here, there = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=in_child, args=(folder, argv, there))
    process.start()
    there.close()
    try:
        result = here.recv() if here.poll(time_limit_s) else Result("failed", "hang")
    except EOFError:
        result = Result("failed", "the process ended")
    try:
        os.killpg(process.pid or 0, signal.SIGKILL)  # and what a case left
    except ProcessLookupError:
        pass
    process.join()
    return result


def names_what_was_typed(message: str, case: Case) -> bool:
    """An error has a word of the case: the last part of a key, an argument, a file."""
    words = {word for part in case.parts for word in re.split(r"[\s=+~.:,\[\]{}\"']+", part.text) if len(word) > 1}
    told = set(re.split(r"[\s=+~.:,;()\[\]{}\"'/]+", message))
    is_short = all(len(part.text) < 4 for part in case.parts)
    is_files = OVERLAY in message and any(part.in_file for part in case.parts)
    return is_short or is_files or bool(words & told) or any(part.text in message for part in case.parts)


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
    import trainer.build
    from workers.rollout.base import resolve_engine_name

    build = trainer.build.build_trainer

    def build_or_stop(config: Any, *rest: Any) -> Any:
        if config.trainer.backend == "ray" or resolve_engine_name(config.rollout.name) == "vllm":
            raise Planned
        return build(config, *rest)

    trainer.build.build_trainer = build_or_stop
    connection.send(run(argv))
    os._exit(0)


def run(argv: list[str]) -> Result:
    """What became of the command. A run ends after its first step."""
    from trainer.build import run_ppo
    from trainer.cli import INTERRUPTED, WRONG_INPUT, run_command
    from trainer.ray_trainer import RayPPOTrainer
    from verl_lite.errors import UserError

    class OneStep(RayPPOTrainer):
        def collect(self, prompts: Any) -> Any:
            self.steps.stop()
            return super().collect(prompts)

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
