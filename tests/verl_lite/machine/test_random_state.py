"""A generator's sequence goes on where its state was taken."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch

from verl_lite.machine.random_state import get_random_state, seed_random_state, set_random_state


def draw() -> list[float]:
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), float(torch.randn(()))]


def test_the_sequences_continue(tmp_path: Path) -> None:
    seed_random_state(5)
    first = draw()
    seed_random_state(5)
    assert draw() == first
    torch.save(get_random_state(), tmp_path / "state.pt")
    expected = [draw() for _ in range(3)]
    draw()
    set_random_state(torch.load(tmp_path / "state.pt", weights_only=False))
    assert [draw() for _ in range(3)] == expected
