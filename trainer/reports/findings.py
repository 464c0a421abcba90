"""One finding on the health of a run, and its words: what `health` and `health_trends` give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

OK, LOOK, BAD = "ok", "look", "bad"
GRADES = (BAD, LOOK, OK)

Points = Sequence[tuple[int, float]]
Series = Mapping[str, Points]


@dataclass(frozen=True)
class Finding:
    """One thing about a run. grade: `ok`, `look` (worth a look) or `bad`. metric: the name it is about. text: what is
    seen, with numbers. steps: where. cause, change: why it is likely so, and what to do; empty where all is well. keys:
    the options to change. healthy: the range."""

    grade: str
    metric: str
    text: str
    steps: tuple[int, ...] = ()
    cause: str = ""
    change: str = ""
    keys: tuple[str, ...] = ()
    healthy: str = ""

    @property
    def advice(self) -> str:
        """What to change, with the keys: `lower the learning rate (actor.optim.lr)`."""
        return f"{self.change} ({', '.join(self.keys)})" if self.keys else self.change


def number(value: float) -> str:
    """A number for a sentence: `0.013`, `1,250`."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
