"""From requests to the rows of a batch: samples, groups and their runners, on the side of the engine.

Read `specs.py` first: what driver and engine exchange. `runner.py` drives one engine on all its ranks, `answers.py`
samples single answers, `group_run.py` and `group_queue.py` finish groups in order, and `rows.py` builds the columns.

Imports `workers/engines/base.py`. Episodes and programs are in `workers/agents/`.
"""
