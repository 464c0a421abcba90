"""The options that have no effect in some configurations: one table with keys, condition, reason and remedy.

`idle_options` compares the table with the options that the user gave on the command line, in a file or to `train`.
Values of recipes and defaults are not reported, nor are values that equal the default. An idle option is a note; it is
an error where it shows that the run is not the one that the user wants (`is_error`) and the user typed it for this run.

Read `table.py` first, which defines a row, then `report.py`. The rows are in `shared_rows.py` and `ppo_rows.py`.
"""

from verl_lite.config.idle_options.report import IdleReport, idle_options, table_of
from verl_lite.config.idle_options.table import IdleOption, Situation

__all__ = ["IdleOption", "IdleReport", "Situation", "idle_options", "table_of"]
