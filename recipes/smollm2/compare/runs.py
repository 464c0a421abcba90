"""The runs of the comparison: files, command lines, and which of them are finished."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from recipes.smollm2 import recipe
from recipes.smollm2.compare.results import ACCURACY, OURS, TRL, Curve, read_curve
from recipes.smollm2.compare.settings import PROMPTS, our_settings
from recipes.smollm2.compare.trl_side import checkpoint_of, is_complete
from recipes.stages import call
from trainer.tracking import METRICS
from verl_lite.errors import UserError
from verl_lite.machine.host import cpu_count

CHECK = "check"
"""Folder of the runs of --check, within that of the comparison."""


@dataclass(frozen=True)
class Comparison:
    """The settings of a comparison that all its runs share.

    Args:
        folder: Folder of the runs.
        model: Model folder.
        steps: Training steps of a run.
        options: Further options of this library's side.
    """

    folder: Path
    model: Path
    steps: int
    options: tuple[str, ...] = ()

    def run_folder(self, side: str, seed: int) -> Path:
        """Returns the folder of a run."""
        return self.folder / f"{side}-{seed}"

    def questions(self, seed: int) -> Path:
        """Returns the file of the training questions of a seed, in the order in which both sides ask them."""
        return self.folder / f"questions-{seed}.parquet"


def write_questions(file: Path, steps: int, seed: int) -> None:
    """Writes the questions of a run: `steps` times `PROMPTS` rows of the training questions in random order.

    If they are more than the training questions, the file continues with another random order of all of them.
    """
    import pyarrow.parquet as pq

    table = pq.read_table(recipe.made_tasks().folder / "addition" / "train.parquet")
    rng = random.Random(seed)
    needed = steps * PROMPTS
    row_numbers: list[int] = []
    while len(row_numbers) < needed:
        order = list(range(table.num_rows))
        rng.shuffle(order)
        row_numbers += order
    questions = table.take(row_numbers[:needed])

    # a stopped command leaves no part of a file
    incomplete = file.with_suffix(".incomplete")
    pq.write_table(questions, incomplete)
    incomplete.replace(file)


def train_ours(comparison: Comparison, seed: int) -> None:
    """Trains with this library, validates the last step, and deletes the checkpoints."""
    run = comparison.run_folder(OURS, seed)
    call("trainer.main_ppo", *our_words(comparison, run, seed))
    for checkpoint in run.glob("global_step_*"):
        shutil.rmtree(checkpoint)


def our_words(comparison: Comparison, run: Path, seed: int) -> list[str]:
    """Returns the command line of this library's run."""
    settings = our_settings() | {
        "model.path": str(comparison.model),
        "data.train_files": [str(comparison.questions(seed))],
        # the recipe validates with samples, too; for the comparison, greedy answers after the last step are enough
        "rollout.val_kwargs.do_sample": False,
        "rollout.val_kwargs.temperature": 0.0,
        "rollout.val_kwargs.greedy_too": False,
        "trainer.seed": seed,
        "trainer.total_training_steps": comparison.steps,
        "trainer.val_before_train": False,
        "trainer.test_freq": comparison.steps,
        "trainer.default_local_dir": str(run),
    }
    words = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    return ["recipe=smollm2", *words, *comparison.options]


def train_trl(comparison: Comparison, seed: int) -> None:
    """Trains with TRL, validates the model with this library's `main_eval`, and deletes the checkpoints."""
    run = comparison.run_folder(TRL, seed)
    run.mkdir(exist_ok=True)
    trained = checkpoint_of(run, comparison.steps)
    # a run that was stopped during its validation is not trained again
    if not is_complete(trained):
        call_trl(comparison, run, seed)

    evaluation = run / "eval"
    call("trainer.main_eval", str(trained), *evaluation_words(evaluation))
    results = json.loads((evaluation / "results.json").read_text())
    accuracy = results["metrics"][ACCURACY]
    line = json.dumps({"step": comparison.steps, "data": {ACCURACY: accuracy}})
    with (run / METRICS).open("a") as file:
        file.write(f"{line}\n")
    # last, because a run without its checkpoint would be trained again
    shutil.rmtree(trained.parent)


def evaluation_words(folder: Path) -> list[str]:
    """Returns the options of `trainer.main_eval` that repeat the validation of this library's runs, into `folder`."""
    return [
        "recipe=smollm2",
        # as in the runs of this library, see `EQUAL`
        "rollout.dtype=fp32",
        "rollout.val_kwargs.do_sample=false",
        "rollout.val_kwargs.temperature=0",
        "rollout.val_kwargs.greedy_too=false",
        "trainer.device=cpu",
        f"trainer.default_local_dir={folder}",
    ]


def call_trl(comparison: Comparison, run: Path, seed: int, *words: str) -> None:
    """Runs `trl_side` with one compute thread per core. Ends this program if it fails or is interrupted."""
    arguments = [
        str(run),
        str(comparison.model),
        str(comparison.questions(seed)),
        str(comparison.steps),
        str(seed),
        *words,
    ]
    # threads that spin while they wait for each other make a step several times longer if others use the cores, too
    threads = {"OMP_NUM_THREADS": str(cpu_count()), "GOMP_SPINCOUNT": "1000"}
    call("recipes.smollm2.compare.trl_side", *arguments, environment=threads)


SIDES: dict[str, Callable[[Comparison, int], None]] = {OURS: train_ours, TRL: train_trl}
"""Trains a run of a side, by the name of the side."""


def run_all(comparison: Comparison, seeds: int) -> dict[str, list[Curve]]:
    """Trains the runs that are not finished, both sides in turn, and returns the curves of all runs."""
    curves: dict[str, list[Curve]] = {side: [] for side in SIDES}
    for seed in range(1, seeds + 1):
        if not comparison.questions(seed).exists():
            write_questions(comparison.questions(seed), comparison.steps, seed)
        # in turn, so that a machine that becomes slower slows both sides
        for side, train in SIDES.items():
            run = comparison.run_folder(side, seed)
            curve = read_curve(run, comparison.steps)
            if curve is None:
                train(comparison, seed)
                curve = read_curve(run, comparison.steps)
            if curve is None:
                raise UserError(f"{run}: the run ended without step {comparison.steps} or without {ACCURACY}")
            curves[side].append(curve)
    return curves


def claim(comparison: Comparison) -> None:
    """Creates the folder of the comparison, or checks that the runs in it have the same settings.

    Raises:
        UserError: The folder has a comparison with other settings, or other files.
    """
    file = comparison.folder / "settings.json"
    settings = {
        "weights": hash_of_weights(comparison.model),
        "steps": comparison.steps,
        "options": list(comparison.options),
    }
    if file.is_file():
        earlier = json.loads(file.read_text())
        differences = []
        for name, value in settings.items():
            if earlier.get(name) != value:
                differences.append(f"{name} {earlier.get(name)!r} (now {value!r})")
        if differences:
            raise UserError(
                f"{comparison.folder} has a comparison with {', '.join(differences)}: repeat its command, or give "
                "another folder"
            )
        return

    # the runs of `--check` may come first
    others = [path for path in comparison.folder.glob("*") if path.name != CHECK]
    if others:
        raise UserError(f"{comparison.folder} has other files and no comparison: give a new folder")
    comparison.folder.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(settings, indent=1))


def hash_of_weights(model: Path) -> str:
    """Returns the SHA-256 of a model's weights.

    It identifies the model, because the folder of a converted model changes with the version of this library.
    """
    digest = hashlib.sha256()
    for file in sorted(model.glob("*.safetensors")):
        with file.open("rb") as weights:
            file_digest = hashlib.file_digest(weights, "sha256")
        digest.update(file_digest.digest())
    return digest.hexdigest()
