"""Seeds, saves and restores the global random generators of a process: Python's, numpy's and torch's.

User code may draw from these generators. This project draws from generators that are seeded from trainer.seed instead.
"""

import random
from typing import TypedDict

import numpy as np
import torch


class RandomState(TypedDict):
    """The states of all global generators of a process. Its keys are those of checkpoint files."""

    python: tuple[object, ...]
    numpy: dict[str, object] | tuple[str, np.ndarray, int, int, float]
    torch: torch.Tensor
    cuda: list[torch.Tensor]


def seed_random_state(seed: int) -> None:
    """Seeds all generators."""
    random.seed(seed)
    # numpy takes 32 bits; trainer.seed can have 63
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def get_random_state() -> RandomState:
    """Returns the current states; torch's for the CPU and, if CUDA is in use, for all devices of this process."""
    cuda_states: list[torch.Tensor] = []
    # otherwise reading the states would initialize CUDA
    if torch.cuda.is_initialized():
        cuda_states = torch.cuda.get_rng_state_all()
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": cuda_states,
    }


def set_random_state(state: RandomState) -> None:
    """Restores states from `get_random_state`. States of CUDA devices that do not exist here are ignored."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    cuda_states = state["cuda"][: torch.cuda.device_count()]
    for device, cuda_state in enumerate(cuda_states):
        torch.cuda.set_rng_state(cuda_state, device)
