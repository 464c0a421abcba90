"""The environment of `bench agentic`: each step takes a set time, as a sandbox or a web page does, and says nothing."""

from __future__ import annotations

import time
from typing import Any

TURNS = 4


class Slow:
    """seconds: that a step takes."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.turns = seconds, 0

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        self.turns = 0
        return f"task {seed}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        time.sleep(self.seconds)
        self.turns += 1
        return f"seen {len(action)}", 0.0, self.turns >= TURNS, False, {}
