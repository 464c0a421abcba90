"""The conflicts between options: values that are valid alone, but cannot work together, or would give other results
than requested. One table has a row for each conflict: keys, condition, reason and remedy.

Read `table.py` first: it defines a row, and builds the error message from it. `ppo_rows.py` has the rows of
`trainer.main_ppo`, `shared_rows.py` those of sections that several commands have, and of the other commands.
`verl_lite/config/idle_options` is the corresponding table of options that have no effect.

A new conflict is a new row here, unless it needs more than the configuration. These checks are elsewhere:

- one option alone: its range or valid words in the declaration of the option (`verl_lite/config/fields.py`), and the
  form of its text, its entries or the file that it names in the `check` method of its section;
- code that an option names: `verl_lite/config/user_calls.py`, which imports it;
- the number of devices: `machine_problems` in `verl_lite/config/checks.py`, and `verl_lite/config/pools.py`;
- environments, reward functions and models' folders: `verl_lite/config/checks.py`, which opens or imports them;
- the files of a pipeline: `verl_lite/config/diffusion_checks.py`. The options of clips stay in `VideoDataConfig.check`,
  because a `VideoDataset` has no other options;
- what an engine can do with the model and with images: `trainer/launch/engine_checks.py`, in rows of the same form;
  `workers/engines/base.py` and, for versions of vLLM, `workers/engines/vllm_engine.py`;
- rows of the data, and values that a reward returns: `trainer/launch/build.py` and `trainer/supervised`;
- an existing run or checkpoint: `trainer/launch/run.py` and `trainer/checkpoint/resume.py`;
- the command line of a sweep, which has several values for an option: `trainer/sweeps/sweep_checks.py`.
"""

from verl_lite.config.conflicts.commands import conflict_problems, table_of
from verl_lite.config.conflicts.table import Conflict

__all__ = ["Conflict", "conflict_problems", "table_of"]
