"""`python -m tests.golden COMMIT [CASE ...]`: compares runs of this tree with those of another commit, digit by digit.

Each case is a run of `python -m trainer.main_ppo` (DPO: `main_sft`) and a second run that resumes from a checkpoint in
its middle. Both run in a checkout of the commit and in this tree. Compared are every metric of every step except times
and memory, the samples of training (which shows the groups that dynamic sampling trained on), the stored validation
answers, and within each tree the resumed steps with those of the uninterrupted run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
VOLATILE = ("timing", "perf/", "_per_second", "seconds", "_gb", "weight_sync", "idle_frac", "time/", "system/tps",
            "engine_busy_frac", "engine_sequences", "overlap")  # fmt: skip
"""Parts of the names of metrics that depend on time or memory."""
MISMATCH = ("rollout_corr/", "training/rollout_probs_diff", "actor/train_infer_")
"""Parts of the names of metrics that compare the log-probs of rollout and trainer. With agents and dynamic sampling,
their last bits depend on time, which decides the samples that the engine decodes together. Rarely they decide a token:
a difference of such a case is to be repeated, also with the same commit on both sides."""


STORED = {"rollouts": "trainer.rollout_data_dir", "validation": "trainer.validation_data_dir"}
"""Folders of stored samples, and the options that name them."""


class Case(NamedTuple):
    """A run.

    Args:
        options: Its options.
        steps: Its number of steps.
        half: The step after which the second run resumes.
        volatile: Parts of the names of metrics that are not compared.
        module: The command.
        stored: Names of the folders of samples that are compared.
    """

    options: tuple[str, ...]
    steps: int = 25
    half: int = 12
    volatile: tuple[str, ...] = VOLATILE
    module: str = "trainer.main_ppo"
    stored: tuple[str, ...] = tuple(STORED)


def _case(recipe: str, *options: str, steps: int = 25, half: int = 12, volatile: tuple[str, ...] = VOLATILE) -> Case:
    return Case((f"recipe={recipe}", *options), steps, half, volatile)


HF, TWO = "rollout.name=hf", "trainer.n_gpus_per_node=2"
PAIRS = "pairs.jsonl"
"""File of `write_pairs`, whose folder `run` adds."""
CASES = {
    "hf": _case("quickstart", HF, "trainer.n_gpus_per_node=1"),
    "hf-2-ranks": _case("quickstart", HF, TWO),
    "vllm": _case("quickstart", "rollout.name=vllm"),
    "vllm-tensor-parallel": _case(
        "quickstart", "rollout.name=vllm", TWO, "rollout.tensor_model_parallel_size=2", steps=6, half=3
    ),
    "dynamic-sampling": _case(
        "dapo", HF, "algorithm.filter_groups.metric=acc", steps=8, half=4, volatile=VOLATILE + MISMATCH
    ),
    "remax": _case("remax", HF, steps=8, half=4),
    "frozen-lake": _case("agentic_frozen_lake", HF, volatile=VOLATILE + MISMATCH),
    "frozen-lake-ahead": _case(
        "agentic_frozen_lake",
        HF,
        "agentic.async_generation_ratio=1",
        "algorithm.rollout_correction.bypass_mode=false",
        volatile=VOLATILE + MISMATCH,
    ),
    "program": _case("agent_program", HF, steps=8, half=4, volatile=VOLATILE + MISMATCH),
    "vision": _case("vision", HF, steps=8, half=4),
    "distillation": _case("distill", HF, steps=8, half=4),
    "dpo": Case(
        (
            "recipe=sft",
            "loss=dpo",
            f"data.train_files={PAIRS}",
            f"data.val_files={PAIRS}",
            "data.train_batch_size=16",
            "trainer.log_freq=1",
        ),
        steps=8,
        half=4,
        module="trainer.main_sft",
        stored=(),
    ),
}


def write_pairs(file: Path) -> None:
    """Writes 128 pairs of a right and a wrong answer to sorting tasks like those of the recipe `sft`."""
    rng = random.Random(1)
    lines = []
    for _ in range(128):
        digits = "".join(rng.choices("0123456789", k=5))
        right = "".join(sorted(digits))
        lines.append(json.dumps({"prompt": f"sort {digits}", "chosen": right, "rejected": right[::-1]}) + "\n")
    file.write_text("".join(lines))


def run(tree: Path, folder: Path, case: Case, *options: str) -> None:
    """Runs the case in `tree` and leaves its results in `folder`, unless they are there already."""
    if (folder / "done").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    # one path for both runs of a tree, because a resumed run refuses other data
    pairs = folder.parent / PAIRS
    write_pairs(pairs)
    command = [
        *(sys.executable, "-m", case.module),
        *(option.replace(PAIRS, str(pairs)) for option in case.options),
        f"trainer.total_training_steps={case.steps}",
        f"trainer.save_freq={case.half}",
        "trainer.test_freq=-1",
        "trainer.logger=[jsonl]",
        f"trainer.default_local_dir={folder}",
        *(f"{STORED[name]}={folder / name}" for name in case.stored),
        *options,
    ]
    with (folder / "output.txt").open("w") as output:
        environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=tree, env=environment, stdout=output, stderr=subprocess.STDOUT)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{(folder / 'output.txt').read_text()[-4000:]}")
    (folder / "done").touch()


def metrics(folder: Path, volatile: tuple[str, ...] = VOLATILE) -> dict[int, dict[str, float]]:
    """Returns the metrics by step, except those whose names contain an entry of `volatile`."""
    steps: dict[int, dict[str, float]] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        row = row.get("data", {}) | {"step": row["step"]}
        steps.setdefault(int(row.pop("step")), {}).update(
            {name: value for name, value in row.items() if not any(part in name for part in volatile)}
        )
    return steps


def samples(folder: Path, kind: str) -> dict[str, list[Any]]:
    """Returns the lines of the files of samples, by file name."""
    return {
        path.name: [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted((folder / kind).glob("*.jsonl"))
    }


def differences(old: Any, new: Any, name: str = "") -> Iterator[str]:
    """Yields where two structures of dictionaries, lists and values differ. NaN equals NaN."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new}, key=str):
            if key not in old or key not in new:
                yield f"{name}/{key}: only in the {'new' if key in new else 'old'} run"
            else:
                yield from differences(old[key], new[key], f"{name}/{key}")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for place, pair in enumerate(zip(old, new, strict=True)):
            yield from differences(*pair, f"{name}[{place}]")
    elif repr(old) != repr(new):
        yield f"{name}: {old!r} -> {new!r}"


def compare(name: str, case: Case, old: Path, new: Path) -> list[str]:
    """Returns all differences of a case between the results of two trees, and between a run and its resumed part."""
    found = []
    for part in ("whole", "resumed"):
        one, two = old / name / part, new / name / part
        before, after = (metrics(folder, case.volatile) for folder in (one, two))
        found += [f"{part} metrics of step {text[1:]}" for text in differences(before, after)]
        for kind in case.stored:
            stored, expected = samples(two, kind), samples(one, kind)
            if not stored and part == "whole":
                found.append(f"{part}: no {kind} were stored, so nothing was compared")
            found += [f"{part} {kind}{text}" for text in differences(expected, stored)]
    whole, resumed = (metrics(new / name / part, case.volatile) for part in ("whole", "resumed"))
    parts = ({step: row for step, row in rows.items() if step > case.half} for rows in (whole, resumed))
    return found + [f"resumed against uninterrupted, step {text[1:]}" for text in differences(*parts)]


def main(argv: list[str] | None = None) -> int:
    """Runs and compares the cases; returns 1 if any number differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__.split("\n")[0])
    parser.add_argument("commit", help="the commit to compare with, for example HEAD")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"by default all of {', '.join(CASES)}")
    parser.add_argument("--out", type=Path, help="folder that keeps the results of the commit for the next comparison")
    options = parser.parse_args(argv)
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"unknown cases: {', '.join(sorted(unknown))}; expected some of {', '.join(CASES)}")
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run([*git, "rev-parse", f"{options.commit}^{{commit}}"], capture_output=True, text=True)
    if commit.returncode:
        parser.error(f"there is no commit {options.commit!r} in this repository")
    with tempfile.TemporaryDirectory(prefix="golden-") as temporary:
        tree, new = Path(temporary) / "tree", Path(temporary) / "new"
        old = (options.out or Path(temporary)).absolute() / commit.stdout.strip()[:12]
        subprocess.run([*git, "worktree", "add", "--quiet", "--detach", str(tree), commit.stdout.strip()], check=True)
        try:
            failed = [name for name in options.cases or CASES if not _is_equal(name, tree, old, new)]
        finally:
            subprocess.run([*git, "worktree", "remove", "--force", str(tree)], check=True)
    print(f"{len(failed)} cases differ: {', '.join(failed)}" if failed else "all numbers are equal")
    return 1 if failed else 0


def _is_equal(name: str, tree: Path, old: Path, new: Path) -> bool:
    """Runs a case in both trees and prints the result of the comparison."""
    case = CASES[name]
    for root, folder in ((tree, old / name), (ROOT, new / name)):
        run(root, folder / "whole", case)
        checkpoint = folder / "whole" / f"global_step_{case.half}"
        resume = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoint}")
        run(root, folder / "resumed", case, *resume)
    found = compare(name, case, old, new)
    steps = len(metrics(new / name / "whole"))
    print(f"{name}: " + (f"{len(found)} differences" if found else f"equal in {steps} steps and after a resume"))
    print("".join(f"  {text}\n" for text in found[:12]), end="", flush=True)
    return not found


if __name__ == "__main__":
    sys.exit(main())
