"""Sweeps of options: many runs of `trainer.main_ppo` on free devices, and their comparison.

Read `study_spec.py` first: what a sweep varies. `sweep_checks.py` checks every trial before the first starts,
`tuning.py` runs them with Ray Tune, each in a process of its own (`trial_process.py`), `study.py` reads the results,
and `study_page.py` is their page. The guide is trainer/SWEEPS.md.

Imports `launch/` and `observe/`.
"""
