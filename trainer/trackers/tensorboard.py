"""Event files in RUN/tensorboard, for `tensorboard --logdir`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainer.evaluate.sample import Sample
from trainer.trackers.base import TrackedRun

_COLUMNS = "| source | prompt | answer | expected | score |\n|---|---|---|---|---|\n"


class Adapter:
    """A resumed run hides the events of the steps that it repeats."""

    forgets = True

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._make = SummaryWriter
        self._folder = run.run_dir / "tensorboard"
        self._writer: Any = None

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        # a resumed run may validate first: that adds to its step, whose training was not repeated
        writer = self._open(step if "training/global_step" in metrics else step + 1)
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        rows = []
        for sample in samples:
            cells = (sample.data_source, sample.input, sample.output, sample.gts, sample.score)
            rows.append("| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
        self._open(step + 1).add_text("samples", _COLUMNS + "\n".join(rows), step)

    def finish(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _open(self, first_repeated: int) -> Any:
        """The writer; the first one of a resumed run hides events from `first_repeated` on."""
        if self._writer is None:
            resumed = self._folder.exists()
            self._writer = self._make(str(self._folder), purge_step=first_repeated if resumed else None)
        return self._writer
