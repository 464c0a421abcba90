"""Shows the findings on the health of a run in a terminal, and selects those for the end of a run."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trainer.observe.final_report import shortened
from trainer.observe.health import findings_of
from trainer.observe.health_checks import BAD, LOOK, OK, Finding
from trainer.observe.run_data import METRICS, read_run

_STYLES = {BAD: "bold red", LOOK: "yellow", OK: "green"}
_MOST_CHARACTERS = 4000


def closing_findings(run_dir: Path) -> list[Finding]:
    """Returns the findings of an ended run, or an empty list if all checks passed or the run has no metrics file."""
    if not (run_dir / METRICS).is_file():
        return []
    findings = findings_of(read_run(run_dir))
    if all(finding.grade == OK for finding in findings):
        return []
    return findings


def findings_table(findings: Sequence[Finding], most: int | None = None) -> RenderableType:
    """Returns a table of the findings that need attention, in the given order, and the number of passed checks.

    Args:
        findings: All findings of a run.
        most: Maximum number of findings in the table; None for all.
    """
    problems = [finding for finding in findings if finding.grade != OK]
    listed = problems[:most]
    table = Table.grid(padding=(0, 1))
    for problem in listed:
        details = ""
        if problem.cause:
            details += f"\nlikely: {problem.cause}"
        details += f"\nto do:  {problem.advice}"
        text = shortened(problem.text, _MOST_CHARACTERS)
        grade = Text(problem.grade, _STYLES[problem.grade])
        description = Text.assemble(text, (details, "dim"))
        table.add_row(grade, description)

    passed = len(findings) - len(problems)
    summary = f"{passed} checks are fine"
    left_out = len(problems) - len(listed)
    if left_out:
        summary = f"{left_out} more findings, and {summary}"
    table.add_row(Text(OK, _STYLES[OK]), summary)
    return Group(Text("Findings", style="bold"), table)
