"""Whether options fit each other, the machine and the files."""

from verl_lite.config.checks.config import ranges, validate
from verl_lite.config.checks.run import TRACKERS

__all__ = ["TRACKERS", "ranges", "validate"]
