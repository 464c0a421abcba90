"""Removed: a dry run of `trainer.main_reward_flow` lists the clips and all problems."""

from trainer.cli import removed_command

main = removed_command("trainer.video_data", "python -m trainer.main_reward_flow key=value ... trainer.dry_run=true")

if __name__ == "__main__":
    raise SystemExit(main())
