"""Where a run stands among its steps: which runs now, which is the last, what is due, whether its user wants it to end.

The base of every command's sequence of steps; what a step works on is the subclass's part.
"""

from __future__ import annotations


class StepCounter:
    """`global_step` is the step that runs now (1 is the first; 0 before it), `epoch` counts from 0; `total` is the last
    one."""

    total: int
    global_step: int = 0
    epoch: int = 0
    stop_asked = False
    stopping = False
    """Whether the step that runs now is the last one although there were more."""

    def stop(self) -> None:
        """Asks the run to end after the step that runs now; the others are for a resumed run. At any instant, even
        from a signal's handler: see `must_stop`."""
        self.stop_asked = True

    def must_stop(self) -> bool:
        """Whether the run was asked to end after this step. Decided here, once a step, before its checkpoint: asked to
        between that and the end of the step, the run goes on to the next one, so that it never ends without one."""
        self.stopping = self.stop_asked
        return self.stopping

    @property
    def is_last(self) -> bool:
        return self.global_step >= self.total

    def due(self, frequency: int) -> bool:
        """Whether something that happens every `frequency` steps happens in this one.

        The last step counts always, unless frequency is 0 (never); -1 means only then.
        """
        return frequency != 0 and (self.is_last or (frequency > 0 and self.global_step % frequency == 0))
