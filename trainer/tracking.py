"""The metrics of a run, for readers of a run folder and for trackers of your own (trainer/REPORTS.md).

`trainer/observe/tracking.py` writes them.
"""

from trainer.observe.trackers import TRACKERS, TrackedRun, register_tracker
from trainer.observe.tracking import METRICS, TRAINED, read_metrics

__all__ = ["METRICS", "TRACKERS", "TRAINED", "TrackedRun", "read_metrics", "register_tracker"]
