"""`python -m verl_lite.sandbox`: prints what untrusted code can and cannot do on this machine."""

from __future__ import annotations

import sys

from verl_lite.sandbox.client import Sandbox


def main() -> int:
    """Prints; 1 if this machine does not hold code."""
    sandbox = Sandbox(allow_unsafe=True)
    protection = sandbox.protection
    sandbox.close()
    print("In force: " + "; ".join(protection.layers))
    print("Code could: " + (", ".join(protection.missing()) or "do nothing that was tried"))
    return int(not protection.is_safe)


if __name__ == "__main__":
    sys.exit(main())
