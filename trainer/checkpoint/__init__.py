"""The folders of a run's checkpoints, the checks before a run resumes, and crash dumps.

Read `files.py` first: the layout on disk, and how a checkpoint is either complete or absent. `resume.py` checks that
data, model and algorithm are those of the checkpoint. `crash_dump.py` writes and reads a failed step for
`trainer.replay`.

Imports only `trainer.cli`; `trainer/loop/saving.py` decides when a checkpoint is written.
"""
