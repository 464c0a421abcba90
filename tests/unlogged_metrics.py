"""`python -m tests.unlogged_metrics FILE`: which metrics of METRICS.md no test has logged.

FILE is what `RECORD_METRICS=FILE python -m pytest ...` has gathered over the tests that were run. Exit status 1 if
there are any besides those that need a GPU.
"""

from __future__ import annotations

import sys
from pathlib import Path

from trainer.metrics_reference import Reference
from verl_lite.metric_docs import MetricDoc

NEEDS_A_GPU = {"actor/perf/max_memory_allocated_gb", "actor/perf/max_memory_reserved_gb"}


def unlogged(reference: Reference, logged: set[str]) -> list[str]:
    """Declared names, one for each alternative, that none of the logged ones is."""
    declared = {(name, entry.file) for entry in reference.entries for name in entry.doc.names}
    return sorted(
        f"{name} ({file})"
        for name, file in declared
        if name not in NEEDS_A_GPU and not any(MetricDoc(name, "").matches(each) for each in logged)
    )


def main(argv: list[str]) -> int:
    """Prints them; returns the exit status."""
    logged = {name for file in argv for name in Path(file).read_text(encoding="utf-8").splitlines()}
    missing = unlogged(Reference.read(), logged)
    print("\n".join(missing) or "all are logged")
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
