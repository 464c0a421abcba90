"""Seeds, saves and restores the global random generators of a process: Python's, numpy's and torch's.

User code may draw from these generators. This project draws from generators that are seeded from trainer.seed instead.
"""

import random
from typing import Any

import numpy as np
import torch


def seed_random_state(seed: int) -> None:
    """Seeds all generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def get_random_state() -> dict[str, Any]:
    """Returns the current states; torch's for the CPU and, if CUDA is in use, for all devices of this process."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state(), "cuda": cuda}


def set_random_state(state: dict[str, Any]) -> None:
    """Restores states from `get_random_state`. States of CUDA devices that do not exist here are ignored."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    for device, value in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(value, device)
