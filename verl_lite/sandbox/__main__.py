"""`python -m verl_lite.sandbox`: prints what untrusted code can and cannot do on this machine."""

import sys

from verl_lite.errors import UserError
from verl_lite.sandbox.client import READ, Sandbox

if __name__ == "__main__":
    try:
        could = Sandbox(allow_unsafe=True).could
    except UserError as error:
        sys.exit(str(error))
    print("Code could: " + (", ".join(could) or "do nothing that was tried"))
    sys.exit(int(bool(set(could) - {READ})))
