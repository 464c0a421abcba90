"""Seconds of each stage of a step, as `timing_s/<stage>` reports them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from codetiming import Timer

from verl_lite.errors import during


@contextmanager
def timed(timing: dict[str, float], name: str, step: int, within: str | None = None) -> Iterator[None]:
    """Adds the block's seconds to timing[name]; what is raised inside says that it was in this phase of this step.

    within: the phase around the block, which has not ended yet; these seconds are not its own.
    """
    with Timer(name=name, logger=None) as timer, during(name, step):
        yield
    timing[name] = timing.get(name, 0.0) + timer.last
    if within is not None:
        timing[within] = timing.get(within, 0.0) - timer.last
