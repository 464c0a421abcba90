"""A command that stands in for a training: writes metrics.jsonl in its run folder, and fails, hangs or dies as asked.

    python fake_trial.py x=2 steps=3 pause=0.01 trainer.seed=1 trainer.default_local_dir=FOLDER

The metric of step s is x * s + 0.01 * seed. Each start adds a line to FOLDER/starts; `trainer.resume_mode=auto` goes on
from the step in FOLDER/checkpoint. hold=FILE: waits while that is there. fail=oom|lost|input|error: how
its first `times` starts end, at step `at`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

WORDS = {
    "oom": (1, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"),
    "lost": (1, "RuntimeError: CUDA error: uncorrectable ECC error encountered"),
    "input": (2, "UserError: data.train_files=['a.parquet']: there is no such file\ngive one that is there"),
    "error": (1, "Traceback (most recent call last):\n  File 'x.py', line 1\nValueError: the reward is wrong"),
}


def main() -> None:
    given = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
    folder = Path(given["trainer.default_local_dir"])
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "starts").open("a") as file:
        file.write(json.dumps({"pid": os.getpid(), "words": sys.argv[1:], "threads": os.environ["OMP_NUM_THREADS"]}))
        file.write("\n")
    starts = len((folder / "starts").read_text().splitlines())
    stops: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: stops.append(number))
    if "child" in given:  # a process of its own that would outlive it
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
    checkpoint = folder / "checkpoint"
    resumes = given.get("trainer.resume_mode") == "auto" and checkpoint.exists()
    first = int(checkpoint.read_text()) + 1 if resumes else 1
    x, seed = float(given.get("x", 1)), int(given.get("trainer.seed", 0))
    while Path(given.get("hold", "/nowhere")).exists():
        time.sleep(0.1)
    for step in range(first, int(given.get("steps", 3)) + 1):
        time.sleep(float(given.get("pause", 0)))
        if "fail" in given and starts <= int(given.get("times", 1000)) and step >= int(given.get("at", 1)):
            status, words = WORDS[given["fail"]]
            print(words, file=sys.stderr)
            sys.exit(status)
        name = given.get("metric", "val-core/task/acc/mean@1")
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "data": {name: x * step + 0.01 * seed}}) + "\n")
        checkpoint.write_text(str(step))
        if stops:
            sys.exit(130)


if __name__ == "__main__":
    main()
