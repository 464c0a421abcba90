"""This machine and this process: devices, memory, process trees, random generators, and files of states.

Read `device.py` first, the only module that knows whether a run uses CPU or CUDA. `host.py` measures cores and memory,
`gpus.py` finds and reserves free GPUs, `process_tree.py` starts, watches and ends processes with all their children,
`launcher.py` refuses torchrun and its kind, `event_loop.py` runs coroutines, `proxies.py` keeps requests to this
machine away from proxies, and `safe_state.py` reads states that may come from somebody else.

Imports only `verl_lite.errors`.
"""
