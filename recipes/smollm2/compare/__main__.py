"""`python -m recipes.smollm2.compare FOLDER`: trains the addition task with this library and with TRL.

Both sides get the same questions in the same order, the same settings and the same seeds. `settings.EQUAL` lists
them, and the command prints the list. The runs alternate (verl_lite with seed 1, TRL with seed 1, verl_lite with seed
2, ...), so that a machine that becomes slower slows both. Each run is a folder SIDE-SEED of FOLDER. Its metrics.jsonl
gets a line when a step ends. The same command continues a stopped comparison: finished runs are not repeated, and an
unfinished run continues from its last checkpoint, which it writes every ten steps.

At the end the command prints a table, says whether the curves over steps agree, and draws FOLDER/comparison.png with
the reward over steps and over minutes. Minutes are those of training steps, without start, validation and saving. The
accuracy on the 512 held-out questions is measured with greedy answers after the last step.

    --steps N        training steps of each run (40)
    --seeds N        number of seeds, 1 to N (3)
    --model FOLDER   another model than SmolLM2-135M-Instruct
    --no-time        no times in the table and the picture, for a machine that did other work, too
    --check          instead: one step of both sides on the same answers, with the loss and the gradient norm of both
    key=value        further options of this library's side, such as trainer.n_gpus_per_node=1

Needs the extra `bench`: pip install -e ".[cpu,bench]"
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from recipes.curves import interval
from recipes.smollm2 import model, recipe
from recipes.smollm2.compare.results import OURS, TRL, agreement, draw, table
from recipes.smollm2.compare.runs import CHECK, Comparison, call_trl, claim, our_words, run_all, write_questions
from recipes.smollm2.compare.same_answers import OWN_REWARDS
from recipes.smollm2.compare.settings import ANSWERS, PROMPTS, settings_table
from recipes.stages import call
from trainer.cli import command, leave
from trainer.tracking import METRICS, read_metrics
from verl_lite.errors import UserError

INSTALL = 'pip install -e ".[cpu,bench]"'
COMPARED = {
    "actor/pg_loss": "loss",
    "actor/grad_norm": "norm of the gradient",
    "actor/entropy": "mean entropy of the tokens",
}
"""Metrics that `--check` compares, and their descriptions."""
TOLERANCE = 1e-3
"""Largest relative difference in `--check`. TRL adds 1e-4 to the standard deviation of a group, which changes
advantages by about 0.03%."""


def check(comparison: Comparison) -> bool:
    """Trains one step with TRL and one with this library on TRL's answers, and prints loss and gradient norm of both.

    The rewards of this step depend on the length of the text, so that the answers to a question differ in them whatever
    the model can do. Returns True if loss, gradient norm and entropy agree within `TOLERANCE`.
    """
    ours_folder = comparison.run_folder(OURS, 1)
    theirs_folder = comparison.run_folder(TRL, 1)
    # an earlier check must not be continued
    shutil.rmtree(ours_folder, ignore_errors=True)
    shutil.rmtree(theirs_folder, ignore_errors=True)
    theirs_folder.mkdir(parents=True)
    write_questions(comparison.questions(1), 1, seed=1)
    call_trl(comparison, theirs_folder, 1, "--keep-answers")

    words = our_words(comparison, ours_folder, 1)
    words += [
        "trainer.test_freq=0",
        "trainer.save_freq=0",
        # the file has no log-probs of the engine that sampled the answers
        "rollout.calculate_log_probs=false",
        "actor.calculate_entropy=true",
    ]
    answers = theirs_folder / "answers.json"
    call("recipes.smollm2.compare.same_answers", str(answers), *words)

    ours = read_metrics(ours_folder / METRICS)[1]
    own_rewards = json.loads((ours_folder / OWN_REWARDS).read_text())
    theirs = json.loads(answers.read_text())
    print(f"\nOne step on the same {PROMPTS * ANSWERS} answers, sampled by TRL:\n")
    print(compared_step(ours, theirs["metrics"]))
    comparison_of_rewards = own_answers(own_rewards, theirs["right"])
    print(f"\nFirst step, each side's own answers to the same {PROMPTS} questions: {comparison_of_rewards}")
    differences = [_relative(ours[name], theirs["metrics"][name]) for name in COMPARED]
    return all(difference <= TOLERANCE for difference in differences)


def compared_step(ours: Mapping[str, float], theirs: Mapping[str, float]) -> str:
    """Returns a table of the values in `COMPARED` of the same step on both sides."""
    lines = [f"| | {OURS} | {TRL} | relative difference | |", "|---|---|---|---|---|"]
    for name, description in COMPARED.items():
        difference = _relative(ours[name], theirs[name])
        verdict = "equal" if difference <= TOLERANCE else f"differs by more than {TOLERANCE:g}"
        lines.append(f"| {description} | {ours[name]:.6f} | {theirs[name]:.6f} | {difference:.1e} | {verdict} |")
    return "\n".join(lines)


def own_answers(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Compares the rewards of both sides for their own answers to the same questions, `ANSWERS` to each in order.

    The interval of the difference is Student's t over the questions, because answers to one question are alike.
    """
    differences_of_questions = []
    for start in range(0, len(ours), ANSWERS):
        answers = slice(start, start + ANSWERS)
        our_mean = statistics.fmean(ours[answers])
        their_mean = statistics.fmean(theirs[answers])
        differences_of_questions.append(our_mean - their_mean)
    mean, half = interval(differences_of_questions)
    means = f"{OURS} {statistics.fmean(ours):.3f}, {TRL} {statistics.fmean(theirs):.3f}"
    # one question has no interval
    if half is None:
        return means
    verdict = "they agree" if abs(mean) <= half else "they do not agree"
    return f"{means}, difference {mean:+.3f} ± {half:.3f} (95%): {verdict}"


def _relative(ours: float, theirs: float) -> float:
    """Returns the difference of two values relative to the second, which may be 0."""
    denominator = max(abs(theirs), 1e-12)
    return abs(ours - theirs) / denominator


def require_trl() -> None:
    """Raises UserError if TRL is not installed."""
    if find_spec("trl") is None:
        raise UserError(f"recipes.smollm2.compare: the package trl, the other side, is not installed: {INSTALL}")


def _read_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parses the command line. Exits for a word that is no key=value."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.smollm2.compare", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("options", nargs="*", metavar="key=value")
    parser.add_argument("--steps", type=_positive, default=40)
    parser.add_argument("--seeds", type=_positive, default=3)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--no-time", action="store_true")
    parser.add_argument("--check", action="store_true")
    # options may stand before and after the key=value words
    arguments = parser.parse_intermixed_args(argv)
    for word in arguments.options:
        if "=" not in word:
            parser.error(f"{word}: an option of this library's side is key=value, such as trainer.n_gpus_per_node=1")
    return arguments


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: a whole number of at least 1 is expected")
    return number


@command
def main(argv: list[str]) -> int:
    """Runs the comparison, or the check, and returns the exit status: 1 if the check finds a difference."""
    arguments = _read_arguments(argv)
    require_trl()
    # `write_questions` reads them
    recipe.made_tasks().make()
    folder = arguments.folder.expanduser().absolute()
    if arguments.model is None:
        model_folder = model.make()
    else:
        model_folder = arguments.model.expanduser().absolute()
    if not (model_folder / "config.json").is_file():
        raise UserError(f"--model {model_folder}: a model folder with a config.json is expected")

    options = tuple(arguments.options)
    if arguments.check:
        agrees = check(Comparison(folder / CHECK, model_folder, 1, options))
        return 0 if agrees else 1

    comparison = Comparison(folder, model_folder, arguments.steps, options)
    claim(comparison)
    curves = run_all(comparison, arguments.seeds)
    picture = folder / "comparison.png"
    with_time = not arguments.no_time
    draw(curves, picture, with_time)
    print(f"\n{settings_table()}\n\n{table(curves, with_time)}\n\n{agreement(curves)}\n\n{picture}")
    return 0


if __name__ == "__main__":
    leave(main())
