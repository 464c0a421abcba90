"""Which faults in the core files the tests of their own room notice.

    python -m tests.mutation [--count 120] [--seed 1] [--out FILE] [--room NAME] [--list]

First the faults of `named.json`, each with the test that must fail (left out with --room). Then a seeded draw of
faults (signs, masks, denominators, borders, lost rows, swallowed exceptions, order of arguments, forgotten state and
resets), each with all tests of its room. Puts each fault into a copy of the project and runs its tests there. Prints a
line for each and a table; exit status 1 where one survives that is not in `equivalent.txt` with its reason.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

from tests.mutation.mutants import Mutant, draw, named

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("verl_lite", "workers", "trainer", "recipes", "tests")
NAMED = Path(__file__).parent / "named.json"
KNOWN = Path(__file__).parent / "equivalent.txt"
TIMEOUT_S = 900  # a fault may also hang

Room = tuple[tuple[str, ...], tuple[str, ...]]
ROOMS: dict[str, Room] = json.loads((Path(__file__).parent / "rooms.json").read_text())
"""Of each room: globs of its core files, and the tests that hold it."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=120, help="faults to draw; 0 = the named ones alone")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--room", choices=ROOMS, help="of this room alone")
    parser.add_argument("--list", action="store_true", help="show them, run nothing")
    parser.add_argument("--out", type=Path, help="write a JSON line for each")
    args = parser.parse_args()
    room_of = {path: room for room, (globs, _) in ROOMS.items() for glob in globs for path in sorted(ROOT.glob(glob))}
    paths = [path for path, room in room_of.items() if args.room in (None, room)]
    drawn = draw(paths, ROOT, args.count, args.seed)
    mutants = [replace(mutant, tests=tuple(ROOMS[room_of[ROOT / mutant.path]][1])) for mutant in drawn]
    to_pass = {mutant.tests for mutant in mutants}
    if not args.room:
        mutants = (written := named(NAMED, ROOT)) + mutants
        to_pass.add(tuple(test for mutant in written for test in mutant.tests))
    if args.list:
        print("\n".join(mutant.name for mutant in mutants))
        return 0
    outcomes: Counter[tuple[str, str]] = Counter()
    survivors: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in FOLDERS:
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md", "setup.py"):
            shutil.copy(ROOT / name, copy / name)
        for tests in to_pass:
            if (said := run_tests(copy, tests)) is not None:
                print(f"these tests fail without any fault: {' '.join(tests)}\n{said}")
                return 2
        for mutant in mutants:
            began = time.monotonic()
            outcome = run(mutant, copy)
            took = time.monotonic() - began
            outcomes[mutant.kind, outcome] += 1
            if outcome == "survived":
                survivors.append(mutant.name)
            print(f"{outcome:9} {took:5.1f} s  {mutant.name}", flush=True)
            if args.out:
                line = {"mutant": mutant.name, "outcome": outcome, "seconds": round(took, 1)}
                with args.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
    print(f"\n{'kind':12} killed  survived")
    for kind in sorted({kind for kind, _ in outcomes}):
        print(f"{kind:12} {outcomes[kind, 'killed']:6}  {outcomes[kind, 'survived']:8}")
    known = KNOWN.read_text(encoding="utf-8") if KNOWN.exists() else ""
    unknown = [name for name in survivors if name.split(" ", 1)[1] not in known]
    killed = len(mutants) - len(survivors)
    print(f"{killed} of {len(mutants)} killed, {len(survivors) - len(unknown)} of the others known")
    return 1 if unknown else 0


def run(mutant: Mutant, copy: Path) -> str:
    """`killed` or `survived`: its tests on the copy with this one fault."""
    file = copy / mutant.path
    source = file.read_text(encoding="utf-8")
    file.write_text(mutant.apply(source), encoding="utf-8")
    try:
        return "survived" if run_tests(copy, mutant.tests) is None else "killed"
    finally:
        file.write_text(source, encoding="utf-8")


def run_tests(copy: Path, tests: tuple[str, ...]) -> str | None:
    """None if they pass, else the end of what they printed. tests: globs of files, or one test as FILE::NAME."""
    files = sorted({str(path) for test in tests for path in copy.glob(test)} | {test for test in tests if "::" in test})
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider"]
    command += ["-o", "markers=slow\nlong\ngpu", "-m", "not slow and not gpu and not long", *files]
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, cwd=copy, env=environment, start_new_session=True, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            if process.wait(timeout=TIMEOUT_S) == 0:
                return None
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return output.read()[-2000:]


if __name__ == "__main__":
    sys.exit(main())
