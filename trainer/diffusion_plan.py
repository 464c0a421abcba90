"""Removed: `python -m trainer.plan --command main_reward_flow` predicts the memory of a step."""

from trainer.cli import removed_command

main = removed_command("trainer.diffusion_plan", "python -m trainer.plan --command main_reward_flow key=value ...")

if __name__ == "__main__":
    raise SystemExit(main())
