"""`python -m tests.gpu.accept --out DIR`: what a machine with a GPU has to show before the project is believed on it.

The steps of `tests.gpu.accept_steps`, most information first, each in a process group of its own with a time limit:
about ten minutes on one GPU. DIR gets a line of JSON for each step (results.jsonl), its output (STEP.log), and
summary.md. Without a GPU it says so and runs the static part. `--rehearse` runs every step on a CPU with a tiny model:
that tries the steps themselves, and proves nothing about CUDA. `--only STEP ...` chooses. `--wheels FOLDER` first
installs the project into DIR/venv, beside the packages of this Python (its torch above all), from that folder alone and
without network. Exit status 1: a step failed.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch

ROOT = Path(__file__).resolve().parents[2]
LIMITS_S = {
    "machine": 60,
    "states": 120,
    "static": 240,
    "inline": 240,
    "experts": 240,
    "tests": 300,
    "ray": 400,
    "update": 240,
    "rollout": 240,
    "sleep": 180,
}
"""The steps in their order, and how long each may take."""


def run_step(name: str, folder: Path, rehearse: bool) -> dict[str, Any]:
    """Runs one step; returns its line: step, ok, seconds, and its figures or what went wrong."""
    figures = folder / f"{name}.json"
    figures.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tests.gpu.accept_steps", name, str(folder), *(["--rehearse"] if rehearse else [])]
    started = time.monotonic()
    with (folder / f"{name}.log").open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status = process.wait(LIMITS_S[name])
            reason = f"exit status {status}"
        except subprocess.TimeoutExpired:
            status, reason = 1, f"not done after {LIMITS_S[name]} s"
        finally:
            end_group(process)
    line: dict[str, Any] = {"step": name, "ok": status == 0, "seconds": round(time.monotonic() - started, 1)}
    if figures.exists():
        line |= json.loads(figures.read_text())
    return line if line["ok"] else line | {"reason": reason, "log": f"{name}.log"}


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Nothing of a step outlives it."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def summary(lines: list[dict[str, Any]], title: str) -> str:
    """The results as a page of Markdown."""
    rows = [f"# {title}", "", "| step | result | seconds | figures |", "|---|---|---|---|"]
    for line in lines:
        figures = {name: value for name, value in line.items() if name not in ("step", "ok", "seconds")}
        shown = ", ".join(f"{name} {value}" for name, value in figures.items())
        rows.append(f"| {line['step']} | {'ok' if line['ok'] else '**failed**'} | {line['seconds']} | {shown} |")
    return "\n".join([*rows, ""])


def install(wheels: Path, folder: Path) -> str:
    """Makes FOLDER/venv with this Python's packages and what is missing, from `wheels`; returns its Python."""
    with mock.patch("setuptools.setup") as setup:
        runpy.run_path(str(ROOT / "setup.py"))
    python, extras = str(folder / "venv" / "bin" / "python"), setup.call_args.kwargs["extras_require"]
    tests = [one for one in extras["dev"] if one.startswith(("pytest", "hypothesis"))]
    requirements = [*setup.call_args.kwargs["install_requires"], *extras["gpu"], *tests]
    subprocess.run([sys.executable, "-m", "venv", "--system-site-packages", str(folder / "venv")], check=True)
    for site in (folder / "venv" / "lib").glob("python*/site-packages"):  # where this Python is itself in a venv
        (site / "host.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [python, "-m", "pip", "install", "-q", "--no-index", "--find-links", str(wheels)]
    subprocess.run([*pip, *requirements], check=True)
    return python


def main(argv: list[str] | None = None) -> int:
    """The command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.accept")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--only", nargs="+", choices=LIMITS_S, default=list(LIMITS_S))
    parser.add_argument("--rehearse", action="store_true", help="every step on a CPU, tiny")
    parser.add_argument("--wheels", type=Path, help="install from this folder, without network")
    options = parser.parse_args(argv)
    folder: Path = options.out.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if options.wheels is not None:
        rest = ["--out", str(folder), "--only", *options.only, *["--rehearse"] * options.rehearse]
        python = install(options.wheels.absolute(), folder)
        return subprocess.run([python, "-m", "tests.gpu.accept", *rest], cwd=ROOT).returncode
    steps, title = options.only, "Acceptance"
    if options.rehearse:
        title = "Rehearsal on a CPU: nothing here is about CUDA"
    elif not torch.cuda.is_available():
        print("No CUDA device is visible: the static part alone.")
        steps, title = ["static"], "Static part, without a GPU"
    lines = []
    for name in steps:
        lines.append(run_step(name, folder, options.rehearse))
        print(json.dumps(lines[-1]), flush=True)
        (folder / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (folder / "summary.md").write_text(summary(lines, title))
    print(f"\n{folder / 'summary.md'}")
    return 0 if all(line["ok"] for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
