"""`python -m verl_lite.sandbox`: prints what untrusted code can and cannot do on this machine."""

from __future__ import annotations

import sys

from verl_lite.sandbox.client import Sandbox

if __name__ == "__main__":
    protection = Sandbox(allow_unsafe=True).protection
    print("In force: " + "; ".join(protection.layers))
    print("Code could: " + (", ".join(protection.could) or "do nothing that was tried"))
    sys.exit(int(not protection.is_safe))
