"""`python -m recipes.distill.compare FOLDER`: compares four ways to train the student, with three seeds each.

RL with the rewards; supervised training on answers that the teacher sampled; distillation; and distillation with the
rewards. Each trains 40 steps of 256 answers. Prints a table and writes FOLDER/comparison.png. An interrupted comparison
continues; a finished run is not repeated. FOLDER has one run folder per way and seed.
"""

import math
import re
from pathlib import Path

import numpy as np

from recipes.distill.recipe import ANSWERS, PROMPTS, STEPS, TEACHER
from recipes.quickstart.recipe import START
from recipes.stages import call, folder_argument, is_finished
from trainer.tracking import read_metrics

SEEDS = (1, 2, 3)
# 97.5% quantile of Student's t with two degrees of freedom, for three seeds
T_95 = 4.303
WITH_REWARDS = "distillation.distillation_loss.use_task_rewards=true"
SUPERVISED = "supervised, teacher's answers"
WAYS = {
    "RL": ["distillation.enabled=false", WITH_REWARDS],
    SUPERVISED: [],
    "distillation": [],
    "distillation and RL": [WITH_REWARDS],
}
"""The ways by name, with their options of `trainer.main_ppo`; SUPERVISED trains with `trainer.main_sft`."""

SAMPLED = ("val-core/", "/reward/mean@1")
GREEDY = ("val-aux/", "/greedy/reward/mean@1")
"""Prefix and suffix of the metrics of a validation."""


def train(folder: Path, way: str, seed: int) -> Path:
    """Trains one student unless it is finished. Returns the run folder, whose metrics contain a validation."""
    name = re.sub("[^a-zA-Z]+", "_", way)
    run = folder / f"{name}-{seed}"
    common = [f"trainer.seed={seed}", f"trainer.default_local_dir={run}"]
    if way == SUPERVISED:
        model = train_supervised(folder, run, seed)
        # a validation alone writes no checkpoint, so that its metrics tell whether it is finished
        if not (run / "metrics.jsonl").exists():
            options = [
                f"model.path={model}",
                "distillation.enabled=false",
                WITH_REWARDS,
                "trainer.val_only=true",
            ]
            call("trainer.main_ppo", "recipe=distill", *options, *common)
    elif not is_finished(run, STEPS):
        call("trainer.main_ppo", "recipe=distill", *WAYS[way], "trainer.resume_mode=auto", *common)
    return run


def train_supervised(folder: Path, run: Path, seed: int) -> Path:
    """Samples answers of the teacher and trains a student on them. Returns the model folder of the student.

    Both commands continue or skip what is finished.
    """
    answers = folder / f"answers-{seed}.parquet"
    sampling = [
        f"data.val_files={START.folder}/data/train.parquet",
        # as many questions as the other ways see in their steps
        f"data.val_max_samples={STEPS * PROMPTS}",
        "data.max_prompt_length=16",
        "data.max_response_length=10",
        f"trainer.seed={seed}",
        "rollout.val_kwargs.do_sample=true",
        "rollout.val_kwargs.temperature=1.0",
        f"rollout.val_kwargs.n={ANSWERS}",
    ]
    call("trainer.main_generate", str(TEACHER.folder / "model"), "--out", str(answers), *sampling)

    trained = Path(f"{run}-sft")
    common = ["trainer.resume_mode=auto", f"trainer.seed={seed}", f"trainer.default_local_dir={trained}"]
    call("trainer.main_sft", *supervised(answers), *common)
    return trained / "hf"


def supervised(answers: Path) -> list[str]:
    """Returns the options of supervised training with the steps and the optimizer of the other ways."""
    return [
        f"model.path={START.folder}/model",
        f"data.train_files={answers}",
        "data.response_key=output",
        f"data.train_batch_size={PROMPTS * ANSWERS}",
        "data.max_length=32",
        "optim.lr=3e-4",
        "optim.lr_warmup_steps=10",
        "optim.betas=[0.9,0.95]",
        f"trainer.total_training_steps={STEPS}",
        "trainer.total_epochs=100",
        # only the last step, whose model is exported
        "trainer.save_freq=-1",
    ]


def accuracy(run: Path, metric: tuple[str, str] = SAMPLED) -> list[tuple[int, float]]:
    """Returns the step of each validation of a run and the mean over the three tasks.

    Args:
        run: The run folder.
        metric: SAMPLED or GREEDY.
    """
    prefix, suffix = metric
    means = []
    for step, metrics in read_metrics(run / "metrics.jsonl").items():
        accuracies_of_tasks = []
        for name, value in metrics.items():
            if name.startswith(prefix) and name.endswith(suffix):
                accuracies_of_tasks.append(value)
        # most steps have no validation
        if accuracies_of_tasks:
            mean = float(np.mean(accuracies_of_tasks))
            means.append((step, mean))
    return means


def last_accuracies(runs: list[Path], metric: tuple[str, str]) -> list[float]:
    """Returns the result of the last validation of each run."""
    results = []
    for run in runs:
        _, result = accuracy(run, metric)[-1]
        results.append(result)
    return results


def interval(values: list[float]) -> tuple[float, float]:
    """Returns the mean over seeds and half the width of its 95% interval."""
    mean = float(np.mean(values))
    deviation = float(np.std(values, ddof=1))
    half = T_95 * deviation / math.sqrt(len(values))
    return mean, half


def main(folder: Path) -> None:
    """Runs the comparison; prints the table and draws the picture."""
    runs = {}
    for way in WAYS:
        runs[way] = [train(folder, way, seed) for seed in SEEDS]
    print_table(runs)
    picture = folder / "comparison.png"
    draw(runs, picture)
    print(f"\n{picture}")


def print_table(runs: dict[str, list[Path]]) -> None:
    """Prints the last accuracies of each way, sampled and greedy."""
    print(f"\n| after {STEPS} steps of {PROMPTS * ANSWERS} answers | sampled | greedy |\n|---|---|---|")
    for way, folders in runs.items():
        cells = []
        for metric in (SAMPLED, GREEDY):
            mean, half = interval(last_accuracies(folders, metric))
            cells.append(f"{mean:.3f} ± {half:.3f}")
        print(f"| {way} | {' | '.join(cells)} |")


def draw(runs: dict[str, list[Path]], file: Path) -> None:
    """Draws the sampled accuracy of each way over the steps, with its interval."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panel = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for way, folders in runs.items():
        steps = []
        means = []
        halves = []
        accuracies = [accuracy(run) for run in folders]
        for validations in zip(*accuracies, strict=True):
            mean, half = interval([result for _, result in validations])
            steps.append(validations[0][0])
            means.append(mean)
            halves.append(half)
        # its only validation is logged at step 0, and comes after as many steps as the others have
        if way == SUPERVISED:
            steps = [STEPS]
        panel.errorbar(steps, means, halves, marker="o", capsize=3, label=way)

    panel.set(xlabel="step", ylabel="accuracy on 512 held-out questions, sampled", ylim=(0.25, 1))
    panel.legend()
    panel.set_title("Student of 1.1M parameters, teacher of 3.2M; mean and 95% interval of three seeds", fontsize=10)
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    main(folder_argument("recipes.distill.compare"))
