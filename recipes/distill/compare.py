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
T_95 = 4.303  # 97.5% quantile of Student's t with two degrees of freedom
WITH_REWARDS = "distillation.distillation_loss.use_task_rewards=true"
WAYS = {
    "RL": ["distillation.enabled=false", WITH_REWARDS],
    "supervised, teacher's answers": None,
    "distillation": [],
    "distillation and RL": [WITH_REWARDS],
}


def train(folder: Path, way: str, seed: int) -> Path:
    """Trains one student unless it is finished. Returns the run folder, whose metrics contain a validation."""
    run = folder / f"{re.sub('[^a-zA-Z]+', '_', way)}-{seed}"
    common = ["trainer.resume_mode=auto", f"trainer.seed={seed}", f"trainer.default_local_dir={run}"]
    options = WAYS[way]
    if options is None:
        answers = folder / f"answers-{seed}.parquet"
        sampling = ["do_sample=true", "temperature=1.0", f"n={ANSWERS}"]
        prompts = [f"data.val_files={START.folder}/data/train.parquet", f"data.val_max_samples={STEPS * PROMPTS}"]
        prompts += ["data.max_prompt_length=16", "data.max_response_length=10", f"trainer.seed={seed}"]
        words = [f"rollout.val_kwargs.{option}" for option in sampling]
        call("trainer.main_generate", str(TEACHER.folder / "model"), "--out", str(answers), *prompts, *words)
        call("trainer.main_sft", *supervised(answers), *common[:2], f"trainer.default_local_dir={run}-sft")
        common = [f"trainer.default_local_dir={run}", "trainer.val_only=true", f"trainer.seed={seed}"]
        options = [f"model.path={run}-sft/hf", "distillation.enabled=false", WITH_REWARDS]
    is_done = (run / "metrics.jsonl").exists() if WAYS[way] is None else is_finished(run, STEPS)
    if not is_done:
        call("trainer.main_ppo", "recipe=distill", *options, *common)
    return run


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
        "trainer.save_freq=-1",
    ]


def accuracy(run: Path, kind: str = "val-core/", suffix: str = "/reward/mean@1") -> list[tuple[int, float]]:
    """Returns steps and means over the three tasks of the validations of a run."""
    found = []
    for step, metrics in read_metrics(run / "metrics.jsonl").items():
        values = [value for name, value in metrics.items() if name.startswith(kind) and name.endswith(suffix)]
        if values:
            found.append((step, float(np.mean(values))))
    return found


def interval(values: list[float]) -> tuple[float, float]:
    """Returns the mean over seeds and half the width of its 95% interval."""
    return float(np.mean(values)), T_95 * float(np.std(values, ddof=1)) / math.sqrt(len(values))


def main(folder: Path) -> None:
    """Runs the comparison; prints the table and draws the picture."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    runs = {way: [train(folder, way, seed) for seed in SEEDS] for way in WAYS}
    figure, panel = plt.subplots(figsize=(7, 4.2), layout="constrained")
    print(f"\n| after {STEPS} steps of {PROMPTS * ANSWERS} answers | sampled | greedy |\n|---|---|---|")
    for way, folders in runs.items():
        last = {"sampled": [accuracy(run)[-1][1] for run in folders]}
        greedy = "/greedy/reward/mean@1"
        last["greedy"] = [accuracy(run, "val-aux/", greedy)[-1][1] for run in folders]
        cells = (f"{mean:.3f} ± {width:.3f}" for mean, width in map(interval, last.values()))
        print(f"| {way} | {' | '.join(cells)} |")
        curves = np.array([[value for _, value in accuracy(run)] for run in folders])  # (seeds, validations)
        steps = [step for step, _ in accuracy(folders[0])] if curves.shape[1] > 1 else [STEPS]
        means, widths = np.array([interval(list(column)) for column in curves.T]).T
        panel.errorbar(steps, means, widths, marker="o", capsize=3, label=way)
    panel.set(xlabel="step", ylabel="accuracy on 512 held-out questions, sampled", ylim=(0.25, 1))
    panel.legend()
    panel.set_title("Student of 1.1M parameters, teacher of 3.2M; mean and 95% interval of three seeds", fontsize=10)
    figure.savefig(folder / "comparison.png", dpi=110)
    print(f"\n{folder / 'comparison.png'}")


if __name__ == "__main__":
    main(folder_argument("recipes.distill.compare"))
