"""`python -m recipes.pipeline FOLDER`: supervised fine-tuning, then distillation, then RL, each from the last stage's
model.

Starts from a random model of 1.1 million parameters. The first stage learns from the quickstart's demonstrations, the
second from the teacher of recipes/distill on the student's own samples, the third from the rewards. Each stage is a
command of its own with a run folder in FOLDER; the script prints the commands. If the script is interrupted or killed,
the same command continues the stage from its last checkpoint and repeats no finished stage.
"""

from pathlib import Path

from recipes.distill import recipe as distill
from recipes.embedded import ONE_GROUP
from recipes.quickstart.recipe import START
from recipes.stages import call, folder_argument, is_finished

SFT_STEPS, DISTILL_STEPS, RL_STEPS = 390, 40, 60


def supervised(folder: Path, start: Path) -> Path:
    """Trains the model at `start` on demonstrations. Returns the trained model's folder."""
    if not (folder / "hf").is_dir():
        call(
            "trainer.main_sft",
            f"model.path={start}",
            f"data.train_files={START.folder / 'demonstrations.parquet'}",
            "data.train_batch_size=64",
            "data.max_length=32",
            "optim.lr=2e-3",
            "optim.betas=[0.9,0.99]",
            "optim.lr_warmup_steps=10",
            "optim.lr_scheduler_type=cosine",
            f"fsdp_config.wrap_policy.min_num_params={ONE_GROUP}",
            f"trainer.total_training_steps={SFT_STEPS}",
            *stage(folder, every=50),
        )
    return folder / "hf"


def reinforced(folder: Path, start: Path, recipe: str, steps: int) -> Path:
    """Trains the model at `start` with the settings of a recipe. Returns the trained model's folder."""
    if not is_finished(folder, steps):
        options = [f"recipe={recipe}", f"model.path={start}", f"trainer.total_training_steps={steps}"]
        call("trainer.main_ppo", *options, *stage(folder, every=20))
    if not (folder / "hf").is_dir():
        call("trainer.export", str(folder), "--out", str(folder / "hf"))
    return folder / "hf"


def stage(folder: Path, every: int) -> list[str]:
    """Returns the options of a run in `folder` that continues from its last checkpoint; one is kept `every` steps."""
    return [f"trainer.default_local_dir={folder}", "trainer.resume_mode=auto", f"trainer.save_freq={every}"]


def main(folder: Path) -> None:
    """Runs the stages that are not finished."""
    for made in (START.made, distill.TEACHER.made):
        made.make()
    if not (folder / "random" / "model.safetensors").exists():
        START.write_random_model(folder / "random")
    model = supervised(folder / "1_supervised", folder / "random")
    model = reinforced(folder / "2_distillation", model, "distill", DISTILL_STEPS)
    model = reinforced(folder / "3_rl", model, "quickstart", RL_STEPS)
    print(f"\nThe model after all stages: {model}")


if __name__ == "__main__":
    main(folder_argument("recipes.pipeline"))
