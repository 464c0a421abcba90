"""An hf engine that frees its memory on a CPU too, as engines do on CUDA with rollout.free_cache_engine=true."""

from types import SimpleNamespace
from typing import Any

from workers.engines.hf_engine import HFEngine


class SleepingEngine(HFEngine):
    def sleep(self) -> None:
        device: Any = self._device
        self._device = SimpleNamespace(type="cuda")  # type: ignore[assignment]
        try:
            super().sleep()
        finally:
            self._device = device
