"""Video clips: a dataset of them, safe reading, and writing.

`reading.py` treats every file as hostile; read it first. `dataset.py` builds the rows of a step, and `writing.py`
writes clips and contact sheets. Imports `trainer/loop/steps.py` and `verl_lite`.
"""
