"""`python -m recipes.smollm2.sft_then_rl FOLDER`: SmolLM2 learns to reverse texts from demonstrations, then by RL.

Each stage has a run folder in FOLDER. If the script is interrupted or killed, the same command continues the stage from
its last checkpoint and repeats no finished stage.
"""

from __future__ import annotations

from pathlib import Path

from recipes.stages import folder_argument, rl_stage, supervised_stage

RL_STEPS = 40


def main(folder: Path) -> None:
    """Runs the stages that are not finished."""
    start = supervised_stage(folder / "1_supervised", "recipes.smollm2.reversed_sft")
    model = rl_stage(folder / "2_rl", start, "recipes.smollm2.reversed_text", RL_STEPS)
    print(f"\nThe model after both stages: {model}")


if __name__ == "__main__":
    main(folder_argument("recipes.smollm2.sft_then_rl"))
