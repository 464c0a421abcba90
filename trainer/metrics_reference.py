"""`python -m trainer.metrics_reference [--write | --check]`: every metric of a run, as METRICS.md.

Prints the page; `--write` writes trainer/METRICS.md, `--check` fails where that is stale.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from trainer.metric_docs import metrics

PAGE = Path(__file__).with_name("METRICS.md")

_TOP = """# Metrics

What a run logs. Generated from the table in [metric_docs.py](metric_docs.py) by `python -m trainer.metrics_reference
--write`; a test fails on a metric that is logged and not here. `{a,b}` stands for each of the words, `{N}` for a
number, `{data_source}` and other words for a name of yours. *share* is 0 to 1. Means are over what the formula says, on
all devices; rows that fill up a batch, and samples whose reward failed, are in none unless it says so. A range is where
a number raises no question: a rule of thumb, not a law; `x first` means the multiple of the run's first value.
`python -m trainer.report RUN` judges a run, by the rules in [reports/health.py](reports/health.py).

| metric | formula | unit | healthy |
|---|---|---|---|
"""


def render() -> str:
    """The page as markdown."""
    lines, section = [], ""
    for metric in metrics():
        if metric.section != section:
            section = metric.section
            lines.append(f"| **{section}** | | | |")
        formula = metric.formula.replace("|", "\\|") + (f" *({metric.when})*" if metric.when else "")
        lines.append(f"| `{metric.name}` | {formula} | {metric.unit} | {metric.healthy} |")
    return _TOP + "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    """The command; returns the exit status, 1 for a stale page."""
    parser = argparse.ArgumentParser(prog="python -m trainer.metrics_reference", description="All metrics of a run.")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--write", action="store_true", help="write trainer/METRICS.md")
    which.add_argument("--check", action="store_true", help="fail where trainer/METRICS.md is stale")
    given = parser.parse_args(argv)
    page = render()
    if given.write:
        PAGE.write_text(page, encoding="utf-8")
    elif not given.check:
        print(page, end="")
    elif not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != page:
        print(f"{PAGE} is stale: python -m trainer.metrics_reference --write", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
