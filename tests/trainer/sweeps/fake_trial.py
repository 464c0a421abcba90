"""A command that stands in for a training: writes metrics.jsonl in its run folder, and fails or dies as asked.

    python fake_trial.py x=2 steps=3 pause=0.01 trainer.seed=1 trainer.default_local_dir=FOLDER

The metric of step s is x * s + 0.01 * seed. Each start adds a line to FOLDER/starts, with its environment, and each
step one to FOLDER/steps; it goes on from the step in FOLDER/checkpoint. fail=lost|input|error: how its first `times`
starts end, at step `at`. Two at a time in one folder leave FOLDER/twice.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import time
from pathlib import Path

METRIC = "val-core/task/acc/mean@1"
WORDS = {
    "lost": (1, "RuntimeError: CUDA error: uncorrectable ECC error encountered"),
    "input": (2, "UserError: data.train_files=['a.parquet']: there is no such file\ngive one that is there"),
    "finished": (2, "UserError: run/global_step_3 is at step 3 of 3: nothing is left to do. For more steps"),
    "error": (1, "Traceback (most recent call last):\n  File 'x.py', line 1\nValueError: the reward is wrong"),
}


def main() -> None:
    given = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
    folder = Path(given["trainer.default_local_dir"])
    folder.mkdir(parents=True, exist_ok=True)
    alive = (folder / "alive").open("a")
    try:
        fcntl.flock(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        (folder / "twice").touch()
    with (folder / "starts").open("a") as file:
        file.write(json.dumps({"pid": os.getpid(), "words": sys.argv[1:], "environment": dict(os.environ)}) + "\n")
    starts = len((folder / "starts").read_text().splitlines())
    stops: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: stops.append(number))
    checkpoint = folder / "checkpoint"
    first = int(checkpoint.read_text() or 0) + 1 if checkpoint.exists() else 1
    x, seed = float(given.get("x", 1)), int(given.get("trainer.seed", 0))
    for step in range(first, int(given.get("steps", 3)) + 1):
        time.sleep(float(given.get("pause", 0)))
        if "fail" in given and starts <= int(given.get("times", 1000)) and step >= int(given.get("at", 1)):
            status, words = WORDS[given["fail"]]
            print(words, file=sys.stderr)
            sys.exit(status)
        with (folder / "steps").open("a") as file:
            file.write(f"{step}\n")
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "data": {given.get("metric", METRIC): x * step + 0.01 * seed}}) + "\n")
        draft = folder / "draft"
        draft.write_text(str(step))
        draft.rename(checkpoint)
        if stops:
            sys.exit(130)


if __name__ == "__main__":
    main()
