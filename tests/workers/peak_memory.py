"""Memory of the tensors that a function makes, on a CPU."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """Context manager that counts the bytes of the tensors made inside: `bytes` now, and `peak` at most."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in _storages([args, kwargs])}
        for storage in _storages(result):
            key = storage._cdata
            # views, and results of operations in place
            if key in given or key in self._sizes:
                continue
            self._sizes[key] = storage.nbytes()
            self.bytes += storage.nbytes()
            self.peak = max(self.peak, self.bytes)
            weakref.finalize(storage, self._release, key)
        return result

    def _release(self, key: int) -> None:
        self.bytes -= self._sizes.pop(key)


def _storages(values: Any) -> list[torch.UntypedStorage]:
    return [value.untyped_storage() for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
