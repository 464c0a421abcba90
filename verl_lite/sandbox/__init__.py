"""Runs untrusted Python in confined processes, with resource limits and without network, other processes or files.

`client.Sandbox` is the interface of the parent process, `confine` drops a process's rights, and `programs` contains the
programs that a confined process runs. Section "Code" of verl_lite/rewards/README.md lists the limits of confinement.
"""

from verl_lite.sandbox.client import Outcome, Sandbox, SandboxError
from verl_lite.sandbox.confine import Limits

__all__ = ["Limits", "Outcome", "Sandbox", "SandboxError"]
