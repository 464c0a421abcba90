"""Everything through which a person sees a run: terminal, metrics file, trackers, curve, findings and report page.

Read `tracking.py` first, through which all metrics pass. `console.py` and `final_report.py` write to the terminal,
`trackers.py` has the adapters of wandb and others, `run_data.py` reads a run folder and
`recorded_answers.py` its samples, `health.py` (with the functions of `health_checks.py`) judges the run, `findings.py`
shows the result, `page_data.py` (with `page_charts.py`) is the content of the HTML page, and `picture.py` draws
`curve.png`.

Imports `validation/` for samples. Nothing here changes a run.
"""
