"""The inside of a fuzz process: runs cases one after the other, each as the command would, and tells what became of it.

A case is a line of json on standard input ({"folder", "argv"}), its result one on the descriptor that the first
argument names. What a case prints goes to `output.txt` in its folder. A run ends after its first step; one that would
start Ray or vLLM ends where everything before them is done.
"""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import shutil
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

MEMORY_BYTES = 16 << 30
ROOT = str(Path(__file__).resolve().parents[2])
WORKER = str(Path(__file__))


class Planned(BaseException):
    """Everything before the start of Ray or vLLM went well."""


def main() -> None:
    """Answers cases until standard input ends."""
    answers = os.fdopen(int(sys.argv[1]), "w", buffering=1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    faulthandler.enable()
    prepare()
    answers.write(json.dumps({"outcome": "ready"}) + "\n")
    home = os.getcwd()
    for line in sys.stdin:
        case = json.loads(line)
        before = dict(os.environ)
        os.chdir(case["folder"])
        with Printed(Path("output.txt")):
            result = run(case["argv"])
        os.chdir(home)
        os.environ.clear()
        os.environ.update(before)
        shutil.rmtree(Path(case["folder"], "run"), ignore_errors=True)
        answers.write(json.dumps(result) + "\n")


def prepare() -> None:
    """Imports what a run needs, and puts Ray and vLLM out of reach."""
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


def run(argv: list[str]) -> dict[str, str]:
    """What became of the command: ran, planned, refused (kind, message), or failed (kind, message)."""
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
        return {"outcome": "planned"}
    except BaseException as error:  # whatever leaves the command is what the fuzz looks for
        traceback.print_exc()
        return {"outcome": "failed", "kind": kind_of(error), "message": f"{type(error).__name__}: {error}"[:500]}
    if refusals and status == WRONG_INPUT:
        return {"outcome": "refused", "kind": place_of(refusals[0].__traceback__), "message": str(refusals[0])}
    if status in (0, INTERRUPTED):
        return {"outcome": "ran"}
    return {"outcome": "failed", "kind": f"exit status {status}", "message": f"exit status {status}"}


def kind_of(error: BaseException) -> str:
    """A name by which equal failures are known: the error's type, and the place in the project where it came up."""
    return f"{type(error).__name__} in {place_of(error.__traceback__)}"


def place_of(trace: TracebackType | None) -> str:
    """The innermost function of the project in a traceback."""
    frames = [frame for frame in traceback.extract_tb(trace) if frame.filename.startswith(ROOT + os.sep)]
    own = [frame for frame in frames if "/.venv/" not in frame.filename and frame.filename != WORKER]
    if not own:
        return "nowhere of the project"
    return f"{Path(own[-1].filename).relative_to(ROOT)}:{own[-1].name}"


class Printed:
    """Inside, what this process and its children print goes to a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self.kept = [os.dup(1), os.dup(2)]
        file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.close(file)

    def __exit__(self, *error: object) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        for stream, kept in zip((1, 2), self.kept, strict=True):
            os.dup2(kept, stream)
            os.close(kept)


def stop() -> NoReturn:
    """Ends without waiting for threads that a case may have left."""
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
    stop()
