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
        """What to change, with the keys and what they are: `lower the learning rate (now actor.optim.lr=1e-05)`."""
        if not self.keys:
            return self.change
        have_values = all("=" in key for key in self.keys)
        return f"{self.change} ({'now ' if have_values else ''}{', '.join(self.keys)})"


def number(value: float) -> str:
    """A number for a sentence: `0.013`, `1,250`."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
