"""`python -m tests.unlogged_metrics FILE`: which metrics of METRICS.md no test has logged.

FILE is what `RECORD_METRICS=FILE python -m pytest ...` has gathered over the tests that were run. Exit status 1 if
there are any besides those that need a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from trainer.observe.metric_docs import DocumentedMetric, metrics

NEEDS_A_GPU = {f"{role}/perf/max_memory_{x}_gb" for role in ("actor", "train") for x in ("allocated", "reserved")}


def unlogged(documented: Iterable[DocumentedMetric], logged: set[str]) -> list[str]:
    """Documented names, one for each alternative, that none of the logged ones is."""
    alone = [replace(metric, name=name) for metric in documented for name in metric.names if name not in NEEDS_A_GPU]
    return sorted(metric.name for metric in alone if not any(metric.matches(each) for each in logged))


def main(argv: list[str]) -> int:
    """Prints them; returns the exit status."""
    logged = {name for file in argv for name in Path(file).read_text(encoding="utf-8").splitlines()}
    missing = unlogged(metrics(), logged)
    print("\n".join(missing) or "all are logged")
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
