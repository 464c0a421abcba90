"""`python -m tests.bench NAME [options]`: runs one benchmark. Each prints ratios against a peer or a limit in one
run.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

HIDDEN = ("__init__", "__main__")


def main() -> int:
    """Finds the benchmark by name and runs its `main`."""
    folder = Path(__file__).parent
    names = sorted(p.stem for p in folder.glob("*.py") if p.stem not in HIDDEN and "def main(" in p.read_text())
    if len(sys.argv) < 2 or sys.argv[1] not in names:
        print(f"usage: python -m tests.bench NAME; NAME is one of {', '.join(names)}", file=sys.stderr)
        return 2
    return importlib.import_module(f"tests.bench.{sys.argv[1]}").main(sys.argv[2:]) or 0


if __name__ == "__main__":
    sys.exit(main())
