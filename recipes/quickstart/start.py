"""Where the quickstart begins: a random model, the data, and the warm start on a careless teacher's demonstrations."""

from __future__ import annotations

import shutil
from pathlib import Path

NAME = "quickstart"
MODEL_SEED = DATA_SEED = 1
WARM_START_STEPS, WARM_START_ROWS = 390, 64
LONGEST_CONVERSATION = 32


def build(folder: Path) -> None:
    """Writes model/ (after the warm start) and data/ into `folder`."""
    from recipes.embedded import warm_start
    from recipes.quickstart.data import write_data
    from recipes.quickstart.model import write_model

    write_model(folder / "random", MODEL_SEED)
    write_data(folder / "data", DATA_SEED)
    shutil.move(folder / "data" / "demonstrations.parquet", folder)
    sizes = {"steps": WARM_START_STEPS, "rows": WARM_START_ROWS, "max_length": LONGEST_CONVERSATION}
    warm_start(folder, NAME, **sizes, lr=2e-3)


def made_from() -> list[Path]:
    """The files that decide what `build` writes."""
    return [Path(__file__).with_name(name) for name in ("start.py", "data.py", "model.py")]
