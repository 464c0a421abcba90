"""`python -m recipes.pipeline FOLDER`: supervised fine-tuning, then distillation, then RL, each from the model of the
stage before.

Starts from a random model of 1.1 million parameters. The first stage learns from demonstrations (recipes/sft), the
second from a teacher on the student's own samples (recipes/distill), the third from the rewards (recipes/quickstart).
Each stage is a command of its own with a run folder in FOLDER; the script prints the commands. If the script is
interrupted or killed, the same command continues the stage from its last checkpoint and repeats no finished stage.
"""

from pathlib import Path

from recipes.stages import folder_argument, rl_stage, supervised_stage

DISTILLATION_STEPS, RL_STEPS = 40, 60


def main(folder: Path) -> None:
    """Runs the stages that are not finished."""
    model = supervised_stage(folder / "1_supervised", "sft")
    model = rl_stage(folder / "2_distillation", model, "distill", DISTILLATION_STEPS)
    model = rl_stage(folder / "3_rl", model, "quickstart", RL_STEPS)
    print(f"\nThe model after all stages: {model}")


if __name__ == "__main__":
    main(folder_argument("recipes.pipeline"))
