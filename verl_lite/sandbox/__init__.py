"""Runs untrusted Python: each program in a confined process with limits, no network, no other processes, no files.

`client.Sandbox` is the parent's side, `confine` what a process gives up, `programs` what it may be for. What is held
and what is not: the section "Code" of verl_lite/rewards/README.md.
"""

from verl_lite.sandbox.client import Outcome, Sandbox, SandboxError
from verl_lite.sandbox.confine import Limits

__all__ = ["Limits", "Outcome", "Sandbox", "SandboxError"]
