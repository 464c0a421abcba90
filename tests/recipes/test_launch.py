"""What stands in recipes/launch for batch systems and clusters: options that exist, and a Slurm job that is requeued.

`srun` and `scontrol` are stubs that do on this machine what Slurm's do: run the command; name the machines; note a
requeue, after which the test starts the job again, as Slurm would, with the same number.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.tiny_run import REWARD, ROOT, TinyTask
from trainer.observe.tracking import read_metrics
from verl_lite.config import PPOConfig, load_schema

FOLDER = ROOT / "recipes" / "launch"
FILES = sorted(path for path in FOLDER.iterdir() if path.name != "README.md")
SLOW_REWARD = f"import time\n{REWARD}".replace("    return", "    time.sleep(0.2)\n    return")
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""
SCONTROL = """#!/bin/bash
case $1 in
    show) tr ',' '\\n' <<< "$3" ;;
    requeue) echo "$2" >> "$REQUEUED" ;;
esac
"""


@pytest.mark.parametrize("file", FILES, ids=[path.name for path in FILES])
def test_every_option_that_a_file_names_is_known(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    words = dict(re.findall(r"\b((?:trainer|ray_kwargs|model|data)\.[a-z_.]+)=([\w/.-]*)", text))
    numbers = {"trainer.nnodes": "2", "trainer.n_gpus_per_node": "8", "ray_kwargs.ray_init.address": "10.0.0.1:6379"}
    argv = [f"{name}={numbers.get(name, value) or 'x'}" for name, value in words.items()]
    assert load_schema(argv, PPOConfig).config.trainer.resume_mode in ("auto", "disable")
    assert words or file.name == "Dockerfile.cpu"


@pytest.mark.parametrize("file", [path for path in FILES if path.suffix == ".yaml"], ids=lambda path: path.name)
def test_shell_in_yaml_is_shell(file: Path) -> None:
    document: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    script = document["run"] if "run" in document else document["spec"]["entrypoint"]
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


class Slurm:
    """A batch system of one machine. nodes: names that a job's machines have."""

    def __init__(self, folder: Path, nodes: str) -> None:
        self.requeued = folder / "requeued"
        self.requeued.touch()
        stubs = folder / "bin"
        stubs.mkdir()
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
            (stubs / name).write_text(text)
            (stubs / name).chmod(0o755)
        self.env = os.environ | {
            "PATH": f"{stubs}:{os.environ['PATH']}",
            "PYTHON": sys.executable,
            "PYTHONPATH": str(ROOT),
            "REQUEUED": str(self.requeued),
            "RUN": str(folder / "run"),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NUM_NODES": str(len(nodes.split(","))),
            "SLURM_JOB_NODELIST": nodes,
        }
        self.log = folder / "slurm-7.out"

    def start(self, options: list[str]) -> subprocess.Popen[bytes]:
        """The job begins, or begins again after it was requeued."""
        restarts = str(len(self.requeued.read_text().splitlines()))
        return subprocess.Popen(
            [FOLDER / "slurm.sh", *options],
            env=self.env | {"SLURM_RESTART_COUNT": restarts},
            stdout=self.log.open("a"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nodes", "more"),
    [
        pytest.param("a", ["trainer.backend=inline"], id="one machine"),
        pytest.param("a,b", ["trainer.n_gpus_per_node=1"], id="two machines", marks=pytest.mark.long),
    ],
)
def test_a_job_whose_time_is_up_is_requeued_and_goes_on(tmp_path: Path, nodes: str, more: list[str]) -> None:
    slurm, task, steps = Slurm(tmp_path, nodes), TinyTask(tmp_path / "task", SLOW_REWARD), 8
    own = "ray_kwargs.ray_init."
    options = [option for option in task.options if not (option.startswith(own) and nodes != "a")]
    options += [f"trainer.total_training_steps={steps}", "trainer.save_freq=-1", *more]
    job = slurm.start(options)
    metrics, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 300
    while not metrics.exists() or not metrics.read_text():
        assert job.poll() is None and time.monotonic() < deadline, slurm.log.read_text()[-4000:]
        time.sleep(0.1)
    job.send_signal(signal.SIGTERM)
    assert job.wait(120) == 0, slurm.log.read_text()[-4000:]
    assert slurm.requeued.read_text() == "7\n"
    assert 1 <= len(read_metrics(metrics)) < steps
    assert slurm.start(options).wait(300) == 0, slurm.log.read_text()[-4000:]
    assert slurm.requeued.read_text() == "7\n"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [row["step"] for row in rows if "timing_s/step" in row["data"]] == list(range(1, steps + 1))


@pytest.mark.slow
def test_a_job_that_fails_is_not_requeued(tmp_path: Path) -> None:
    slurm = Slurm(tmp_path, "a")
    assert slurm.start(["trainer.no_such_option=1"]).wait(120) == 2
    assert slurm.requeued.read_text() == ""
