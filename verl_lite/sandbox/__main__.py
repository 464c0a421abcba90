"""`python -m verl_lite.sandbox`: checks the confinement of untrusted code on this machine.

Prints the forbidden actions that a program could perform. The exit status is 1 if one of them is more than reading.
"""

import sys

from verl_lite.errors import UserError
from verl_lite.sandbox.client import READ, Sandbox

if __name__ == "__main__":
    try:
        could = Sandbox(allow_unsafe=True).could
    except UserError as error:
        sys.exit(str(error))
    print("Code could: " + (", ".join(could) or "perform none of the attempted actions"))
    sys.exit(int(bool(set(could) - {READ})))
