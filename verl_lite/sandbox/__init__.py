"""Runs untrusted Python in confined processes, with resource limits and without network, other processes or files.

Read `client.py` first, the interface of the parent process. `confine.py` drops a process's rights, and `programs.py`
contains the programs that a confined process runs. Section "Code" of verl_lite/rewards/README.md lists the limits of
confinement. Imports `verl_lite.machine` and nothing heavy.
"""

from verl_lite.sandbox.client import Outcome, Sandbox, SandboxError
from verl_lite.sandbox.confine import Limits

__all__ = ["Limits", "Outcome", "Sandbox", "SandboxError"]
