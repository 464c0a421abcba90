"""`python -m trainer.metrics_reference [--write | --check]`: every metric of a run, as METRICS.md.

Reads the `METRIC_DOCS` of all modules of this project, see `verl_lite.metric_docs`; nothing is imported for it, so it
takes a fraction of a second. Prints the page; `--write` writes trainer/METRICS.md, `--check` fails where that is stale.
`Reference.read().find(name)` is for others that explain or judge numbers.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from verl_lite.metric_docs import Health, MetricDoc

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "trainer" / "METRICS.md"
PACKAGES = ("trainer", "workers", "verl_lite", "recipes")
DECLARATION = "METRIC_DOCS"
_CONSTRUCTORS = {"MetricDoc": MetricDoc, "Health": Health}
_SECTIONS = (
    ("Scores, rewards, advantages", ("critic/", "frac_", "reward/")),
    ("The policy's update", ("actor/", "pf_ppo/")),
    ("Rollout engine against trainer", ("training/rollout", "rollout_corr/")),
    ("Lengths", ("response", "prompt_length/", "tokens/", "global_seqlen/")),
    ("Groups and dynamic sampling", ("groups/", "training/filter_groups/", "sampler/")),
    ("Rollout and episodes", ("rollout/", "env/", "scheduler/", "system/")),
    ("Time and throughput", ("timing", "perf/", "weight_sync/", "time/")),
    ("Validation", ("val",)),
    ("Supervised training and reward models", ("train/", "seconds")),
)
_OTHER = "Other"


@dataclass(frozen=True)
class Entry:
    """A declaration and the file that has it, relative to the project."""

    doc: MetricDoc
    file: str


@dataclass(frozen=True)
class Reference:
    """All declarations, in the order of files and lines."""

    entries: list[Entry]

    @classmethod
    def read(cls, root: Path = ROOT) -> Reference:
        """Those of the project's source. Raises ValueError, naming the file, for one that is no plain constant."""
        files = [file for package in PACKAGES for file in sorted((root / package).rglob("*.py"))]
        return cls([Entry(doc, str(file.relative_to(root))) for file in files for doc in declared_in(file)])

    def find(self, name: str) -> Entry | None:
        """The declaration of a logged name; one without placeholders before a pattern, the longer pattern first."""
        found = [entry for entry in self.entries if entry.doc.matches(name)]
        return min(found, key=lambda entry: (entry.doc.is_pattern, -len(entry.doc.name)), default=None)

    def undocumented(self, names: Iterable[str]) -> list[str]:
        """Those of these names that have no declaration, sorted."""
        return sorted(name for name in set(names) if self.find(name) is None)

    def keys(self) -> set[str]:
        """The options that health findings tell to change."""
        return {key for entry in self.entries for health in entry.doc.ranges for key in health.keys}


def declared_in(file: Path) -> list[MetricDoc]:
    """The `METRIC_DOCS` of a source file; empty if it has none."""
    source = file.read_text(encoding="utf-8")
    if DECLARATION not in source:
        return []
    docs: list[MetricDoc] = []
    for statement in ast.parse(source).body:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if any(isinstance(target, ast.Name) and target.id == DECLARATION for target in targets):
            assert isinstance(statement, ast.Assign)
            value = compile(ast.Expression(statement.value), str(file), "eval")
            try:
                docs += eval(value, {"__builtins__": {}, **_CONSTRUCTORS})
            except NameError as error:
                raise ValueError(
                    f"{file}: {DECLARATION} is read without importing the file: {error}. Expected a tuple of "
                    f"{' and '.join(_CONSTRUCTORS)} with plain constants"
                ) from error
    return docs


# ---------------------------------------------------------------------------------------------------------- the page

_TOP = """# Metrics

What a run logs: name, formula, unit, healthy range, and the file that computes it. Generated from the `METRIC_DOCS` in
these files by `python -m trainer.metrics_reference --write`; a test fails on a metric that is logged and not here.

`{a,b}` stands for each of the words, `{N}` for a number, `{data_source}` and other words for a name of yours. *share*
is 0 to 1. Means are over what the formula says, on all devices; rows that fill up a batch, and samples whose reward
failed, are in none unless it says so. A metric over nothing is left out, since it has no value.

A range is where a number raises no question; it is a rule of thumb with its reason, not a law. `x first` means the
multiple of the run's first value. `python -m trainer.report RUN` judges a run by the same ranges.
"""


def render(reference: Reference) -> str:
    """The page as markdown."""
    parts = [_TOP]
    for title, entries in sections(reference).items():
        parts.append(f"## {title}\n")
        parts.append("| metric | formula | unit | healthy | computed in |\n|---|---|---|---|---|")
        parts += [_row(entry) for entry in entries]
        parts.append("")
    parts.append("## What to do outside the range\n")
    parts.append("| metric | healthy | what it means | what to change | why this range |\n|---|---|---|---|---|")
    parts += [_advice(entry.doc, health) for entry in reference.entries for health in entry.doc.ranges]
    return "\n".join(parts) + "\n"


def sections(reference: Reference) -> dict[str, list[Entry]]:
    """Entries by the headings of the page, each sorted by name."""
    found: dict[str, list[Entry]] = {title: [] for title in (*(title for title, _ in _SECTIONS), _OTHER)}
    for entry in reference.entries:
        fitting = [
            (len(start), title) for title, starts in _SECTIONS for start in starts if entry.doc.name.startswith(start)
        ]
        found[max(fitting)[1] if fitting else _OTHER].append(entry)
    return {title: sorted(own, key=lambda entry: entry.doc.name) for title, own in found.items() if own}


def _row(entry: Entry) -> str:
    doc = entry.doc
    formula = f"{doc.formula} *({doc.when})*" if doc.when else doc.formula
    healthy = "; ".join(health.shown for health in doc.ranges)
    where = f"[{entry.file}]({_link(entry.file)})"
    return f"| `{_cell(doc.name)}` | {_cell(formula)} | {doc.unit} | {healthy} | {where} |"


def _advice(doc: MetricDoc, health: Health) -> str:
    keys = ", ".join(f"`{key}`" for key in health.keys)
    change = f"{health.change} ({keys})" if keys else health.change
    return f"| `{_cell(doc.name)}` | {health.shown} | {_cell(health.cause)} | {_cell(change)} | {_cell(health.why)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _link(file: str) -> str:
    """The way from the page to a file of the project."""
    return file.removeprefix("trainer/") if file.startswith("trainer/") else f"../{file}"


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns the exit status: 1 for a stale page, 2 for wrong arguments."""
    argv = sys.argv[1:] if argv is None else argv
    if len(argv) > 1 or not set(argv) <= {"--write", "--check"}:
        print("usage: python -m trainer.metrics_reference [--write | --check]", file=sys.stderr)
        return 2
    page = render(Reference.read())
    if argv == ["--write"]:
        PAGE.write_text(page, encoding="utf-8")
    elif argv == ["--check"]:
        if not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != page:
            print(f"{PAGE} is stale: python -m trainer.metrics_reference --write", file=sys.stderr)
            return 1
    else:
        print(page, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
