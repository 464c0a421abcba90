"""State in files that may come from a stranger: tensors, numpy arrays, numbers, text and containers of these, no code.

A pickle runs whatever functions it names. These files are read with an allow list, and one that names anything beside
it is refused. A module whose own types belong into a state adds them: `torch.serialization.add_safe_globals`.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from verl_lite.errors import UserError

_NUMPY = [
    np._core.multiarray._reconstruct,  # type: ignore[attr-defined]
    np._core.multiarray.scalar,  # type: ignore[attr-defined]
    np.ndarray,
    np.dtype,
    *(getattr(np.dtypes, name) for name in np.dtypes.__all__),
]

_METADATA = {
    "pathlib": {"PosixPath"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
}
"""What the index of a torch.distributed checkpoint is made of, by module; and any torch.dtype."""


def write_state(path: Path, state: Any) -> None:
    """Writes a state.

    Raises:
        TypeError: it holds an object of a type that is not allowed, so that it could not be read again.
    """
    torch.save(state, path)
    with safe_globals(_NUMPY):
        unknown = get_unsafe_globals_in_checkpoint(path)
    if unknown:
        path.unlink()
        raise TypeError(
            f"{path.name}: the state has objects of {', '.join(sorted(unknown))}; expected tensors, arrays, numbers, "
            "text, lists and dictionaries. A sampler or environment of your own has to give such values"
        )


def read_state(path: Path) -> Any:
    """What `write_state` wrote.

    Raises:
        UserError: the file is damaged, or names something that could run.
    """
    try:
        with safe_globals(_NUMPY):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        why = str(error).split("Please file an issue")[0].splitlines()[-1].strip()
        raise UserError(f"{path} is not opened, because it may run code when it is read: {why}") from None
    except (RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        raise UserError(f"{path} cannot be read: {(str(error).splitlines() or [''])[0]}") from error


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if name not in _METADATA.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


def read_metadata(path: Path) -> Any:
    """The index of a torch.distributed checkpoint, its file .metadata, a `Metadata`.

    Raises:
        UserError: the file is damaged, or names something that could run, or files outside its folder.
    """
    try:
        metadata = _MetadataUnpickler(io.BytesIO(path.read_bytes())).load()
        outside = [str(place.relative_path) for place in (metadata.storage_data or {}).values()]
        if any(Path(name).name != name for name in outside):
            raise pickle.UnpicklingError("it points to files outside its folder")
    except pickle.UnpicklingError as error:
        raise UserError(f"{path} is not opened: it is damaged or may run code when it is read, {error}") from None
    except (EOFError, OSError, ValueError, KeyError, IndexError, AttributeError, TypeError, ImportError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    return metadata
