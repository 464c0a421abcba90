"""The states of a process's random number generators: Python's, numpy's, torch's; taken, kept and put back. Users'
code may draw from them; our own draws have seeds of their own, derived from trainer.seed."""

import random
from typing import Any

import numpy as np
import torch


def seed_random_state(seed: int) -> None:
    """Starts all generators from one seed."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def get_random_state() -> dict[str, Any]:
    """The states of now; torch's of the CPU and, where CUDA is in use, of all devices of this process."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state(), "cuda": cuda}


def set_random_state(state: dict[str, Any]) -> None:
    """Puts back what `get_random_state` gave. States of CUDA devices that are not there now are left out."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    for device, value in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(value, device)
