"""One supervised pool of processes, for rewards, environments and whatever else runs code of others.

Read `process_pool.py` first: what happens if a process hangs, dies, or returns nonsense. `child_main.py` is the
process. Imports only `verl_lite`.
"""
