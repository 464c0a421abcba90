"""How many files of the product one has to read to follow four things: `python -m tests.architecture.flows`.

Counted are files of which a frame is entered, in an inline run of the plain GRPO loop on a tiny model:

- prompt: from the first prompt of a step to the end of its gradient (start, weights to the engine, logging, validation
  and saving excluded)
- key: `actor.optim.lr` from the command line to the optimizer: the files entered while the command line is parsed, and
  those that read the option
- reward: a custom reward from its file to the score: the files entered in the process that calls it
- program: as prompt, in a run whose samples are the episodes of a program
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TOPS = tuple(f"{ROOT}/{top}/" for top in ("verl_lite", "workers", "trainer", "recipes"))

REWARD = """
import json, os, sys, threading
ROOT = {root!r}
seen = set()
def note(frame, event, arg):
    if event == "call":
        seen.add(frame.f_code.co_filename)
def note_callers():
    frame = sys._getframe()
    while frame is not None:
        seen.add(frame.f_code.co_filename)
        frame = frame.f_back
note_callers()
sys.setprofile(note)
threading.setprofile(note)
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    note_callers()
    with open({folder!r} + f"/{{os.getpid()}}.json", "w") as file:
        json.dump(sorted(name for name in seen if name.startswith(ROOT)), file)
    return float(len(solution_str) % 3)
"""


PROGRAM = "--program"
"""Follows a program instead of the three others, which takes a run of its own."""


def program(base_url: str, api_key: str, row: dict[str, Any]) -> dict[str, float]:
    """A program of one request."""
    body = {"messages": row["prompt"], "temperature": 1.0}
    headers = {"Authorization": f"Bearer {api_key}"}
    request = urllib.request.Request(f"{base_url}/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as response:
        reply = json.load(response)
    answer = reply["choices"][0]["message"]["content"] or ""
    return {"score": float(len(answer) % 3)}


class Frames:
    """The product's files of which a frame was entered while `on`."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.on = False

    def note(self, frame: FrameType, event: str, argument: object) -> None:
        if self.on and event == "call" and frame.f_code.co_filename.startswith(TOPS):
            if frame.f_code.co_name != "<module>":
                self.files.add(frame.f_code.co_filename.removeprefix(f"{ROOT}/"))

    @contextmanager
    def counting(self, on: bool = True) -> Iterator[None]:
        before, self.on = self.on, on
        try:
            yield
        finally:
            self.on = before


def wrap(owner: Any, name: str, around: Callable[[], Any]) -> None:
    """Calls of a method run inside a context."""
    method = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with around():
            return method(*args, **kwargs)

    setattr(owner, name, wrapped)


def measure(folder: Path, *more_options: str) -> dict[str, list[str]]:
    """Runs a step in this process; gives the files of each flow."""
    import trainer.launch.ppo_job  # noqa: F401  imports all that reads the command line
    import verl_lite.config
    from tests.tiny_run import TinyTask
    from trainer.main_ppo import main
    from trainer.ray_trainer import RayPPOTrainer

    task = TinyTask(folder)
    reward = folder / "counted_reward.py"
    reward.write_text(REWARD.format(root=f"{ROOT}/", folder=str(folder)))
    prompt, key = Frames(), Frames()

    def note(frame: FrameType, event: str, argument: object) -> None:
        prompt.note(frame, event, argument)
        key.note(frame, event, argument)

    fit = RayPPOTrainer.fit

    def counted_fit(trainer: RayPPOTrainer) -> Any:
        for name in ("resume", "model_update", "validate", "log_step", "save"):
            wrap(trainer, name, lambda: prompt.counting(False))
        wrap(trainer.weight_sync, "start", lambda: prompt.counting(False))
        update = trainer.actor.update

        def last(*args: Any, **kwargs: Any) -> Any:
            result = update(*args, **kwargs)
            prompt.on = False
            return result

        trainer.actor.update = last  # type: ignore[method-assign]
        prompt.on = True
        return fit(trainer)

    RayPPOTrainer.fit = counted_fit  # type: ignore[method-assign]
    load = verl_lite.config.load_schema

    def counted_load(*args: Any, **kwargs: Any) -> Any:
        with key.counting():
            loaded = load(*args, **kwargs)
        readers(type(loaded.config.actor.optim), key.files)
        return loaded

    for module in list(sys.modules.values()):
        if vars(module).get("load_schema") is load:
            module.load_schema = counted_load  # type: ignore[attr-defined]
    sys.setprofile(note)
    threading.setprofile(note)
    options = [
        "trainer.backend=inline",
        "trainer.total_training_steps=1",
        f"trainer.default_local_dir={folder / 'run'}",
        f"reward.custom_reward_function.path={reward}",
        "actor.optim.lr=0.003",
        *more_options,
    ]
    try:
        status = main([*task.options, *options])
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    assert status == 0, f"the run ended with {status}"
    rewards = {name for file in folder.glob("*.json") for name in json.loads(file.read_text()) if name.startswith(TOPS)}
    called = sorted(name.removeprefix(f"{ROOT}/") for name in rewards)
    return {"prompt": sorted(prompt.files), "key": sorted(key.files), "reward": called}


def readers(options: type, files: set[str]) -> None:
    """Notes the files that read the learning rate from now on."""
    plain = object.__getattribute__

    def read(instance: object, name: str) -> Any:
        if name == "lr":
            frame = sys._getframe(1)
            if frame.f_code.co_filename.startswith(TOPS):
                files.add(frame.f_code.co_filename.removeprefix(f"{ROOT}/"))
        return plain(instance, name)

    options.__getattribute__ = read  # type: ignore[assignment,method-assign]


def in_own_process() -> dict[str, list[str]]:
    """All flows, each run in a process that nothing else has touched."""
    return _of_process() | {"program": _of_process(PROGRAM)["prompt"]}


def _of_process(*words: str) -> dict[str, list[str]]:
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.architecture.flows", "--json", *words]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> int:
    if "--json" in sys.argv:
        options = []
        if PROGRAM in sys.argv:
            options = [
                "agentic.program=tests.architecture.flows:program",
                "algorithm.adv_estimator=grpo",
                "data.max_response_length=24",
            ]
        with tempfile.TemporaryDirectory() as folder:
            flows = measure(Path(folder), *options)
        print("\n" + json.dumps(flows))
        return 0
    for name, files in in_own_process().items():
        print(f"{name}: {len(files)}\n  " + "\n  ".join(files))
    return 0


if __name__ == "__main__":
    sys.exit(main())
