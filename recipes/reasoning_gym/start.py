"""Where the recipe begins: a random model, the questions, and the warm start on a careless teacher's demonstrations."""

from __future__ import annotations

import shutil
from pathlib import Path

NAME = "reasoning_gym"
MODEL_SEED = DATA_SEED = 1
WARM_START_STEPS, WARM_START_ROWS = 450, 64
LONGEST_CONVERSATION = 96


def build(folder: Path) -> None:
    """Writes model/ (after the warm start) and data/ into `folder`."""
    from recipes.embedded import byte_tokenizer, warm_start, write_qwen2
    from recipes.reasoning_gym.data import write_data
    from recipes.reasoning_gym.tasks import TOKENS

    write_qwen2(folder / "random", byte_tokenizer(TOKENS), MODEL_SEED, layers=4, hidden=64, intermediate=256)
    write_data(folder / "data", DATA_SEED)
    shutil.move(folder / "data" / "demonstrations.parquet", folder)
    sizes = {"steps": WARM_START_STEPS, "rows": WARM_START_ROWS, "max_length": LONGEST_CONVERSATION}
    warm_start(folder, NAME, **sizes, lr=3e-3)


def made_from() -> list[Path]:
    """The files that decide what `build` writes."""
    return [Path(__file__).with_name(name) for name in ("start.py", "data.py", "tasks.py")]
