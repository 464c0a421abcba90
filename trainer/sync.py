"""Removed: trainer/REPORTS.md has the lines of Python that send a recorded run to a tracker."""

from trainer.cli import removed_command

main = removed_command("trainer.sync", "the lines of Python in trainer/REPORTS.md#trackers")

if __name__ == "__main__":
    raise SystemExit(main())
