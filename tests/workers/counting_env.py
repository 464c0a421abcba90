"""An environment that counts digits, in a module of its own: environments' processes import it without torch."""

from __future__ import annotations

import os
import time
from typing import Any


class Counting:
    """`turns` steps; each is worth how many digits the action has, after `latency_s`. `bad` names seeds whose step
    raises, by their remainder to three."""

    def __init__(self, latency_s: float = 0.0, bad: int = -1, turns: int = 3) -> None:
        self.latency_s, self.bad, self.turns, self.steps, self.seed = latency_s, bad, turns, 0, 0

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        self.steps, self.seed = 0, seed
        return f"{seed % 100}", {"env_instruction": "say digits"}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if self.seed % 3 == self.bad:
            raise RuntimeError(f"seed {self.seed} is bad")
        time.sleep(self.latency_s)
        self.steps += 1
        count = sum(letter.isdigit() for letter in action)
        info = {"metrics": {"digits": count, "pid": os.getpid()}}
        return f"{count}", float(count), self.steps == self.turns, False, info
