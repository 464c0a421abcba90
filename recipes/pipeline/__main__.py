"""`python -m recipes.pipeline FOLDER`: supervised fine-tuning, then distillation, then RL, each from the model of the
stage before.

Starts from a random model of 1.1 million parameters. The first stage learns from demonstrations (recipes/sft), the
second from a teacher on the student's own samples (recipes/distill), the third from the rewards (recipes/quickstart).
Each stage is a command of its own with a run folder in FOLDER; the script prints the commands. If the script is
interrupted or killed, the same command continues the stage from its last checkpoint and repeats no finished stage.
"""

from pathlib import Path

from recipes.stages import call, folder_argument, is_finished

DISTILLATION_STEPS, RL_STEPS = 40, 60


def supervised(folder: Path) -> Path:
    """Trains a random model on demonstrations. Returns the folder of the trained model."""
    if not (folder / "hf").is_dir():
        call("trainer.main_sft", "recipe=sft", *continued(folder, save_freq=100))
    return folder / "hf"


def on_policy(folder: Path, start: Path, recipe: str, steps: int) -> Path:
    """Trains the model at `start` with the settings of a recipe. Returns the folder of the trained model."""
    if not is_finished(folder, steps):
        options = [f"recipe={recipe}", f"model.path={start}", f"trainer.total_training_steps={steps}"]
        call("trainer.main_ppo", *options, *continued(folder, save_freq=20))
    if not (folder / "hf").is_dir():
        call("trainer.export", str(folder), "--out", str(folder / "hf"))
    return folder / "hf"


def continued(folder: Path, save_freq: int) -> list[str]:
    """Returns the options of a run in `folder` that continues from its last checkpoint."""
    return [f"trainer.default_local_dir={folder}", "trainer.resume_mode=auto", f"trainer.save_freq={save_freq}"]


def main(folder: Path) -> None:
    """Runs the stages that are not finished."""
    model = supervised(folder / "1_supervised")
    model = on_policy(folder / "2_distillation", model, "distill", DISTILLATION_STEPS)
    model = on_policy(folder / "3_rl", model, "quickstart", RL_STEPS)
    print(f"\nThe model after all stages: {model}")


if __name__ == "__main__":
    main(folder_argument("recipes.pipeline"))
