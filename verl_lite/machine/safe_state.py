"""Reads and writes states in files that may come from somebody else: tensors, numpy arrays, numbers, text, containers.

Loading a pickle can run any function that the pickle names. These files are therefore loaded with an allow list, and a
file that names anything else is rejected. A module that stores types of its own in a state allows them with
`torch.serialization.add_safe_globals`.
"""

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
# types in the index of a torch.distributed checkpoint, by module; any torch.dtype is allowed too
_METADATA = {
    "pathlib": "PosixPath",
    "torch": "Size",
    "torch.serialization": "_get_layout",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.distributed.checkpoint.metadata": "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex "
    "StorageMeta TensorProperties TensorStorageMetadata _MEM_FORMAT_ENCODING",
}
_DAMAGE = (RuntimeError, EOFError, OSError, ValueError, LookupError, AttributeError, TypeError, ImportError)


def write_state(path: Path, state: Any) -> None:
    """Writes a state. Raises TypeError if it contains an object that `read_state` would reject."""
    torch.save(state, path)
    if unknown := _unknown_types(path):
        path.unlink()
        raise TypeError(
            f"{path.name}: {_not_allowed(unknown)}. Make your sampler or environment return only such values"
        )


def require_safe(state: Any) -> None:
    """Raises TypeError if a state contains an object that `read_state` would reject."""
    buffer = io.BytesIO()
    try:
        torch.save(state, buffer)
    except (pickle.PicklingError, AttributeError) as error:
        # what pickle raises for functions and local classes
        raise TypeError(f"the state cannot be saved: {error}") from None
    buffer.seek(0)
    if unknown := _unknown_types(buffer):
        raise TypeError(_not_allowed(unknown))


def _unknown_types(file: Path | io.BytesIO) -> list[str]:
    """Returns the names of the types in a saved state that `read_state` would reject."""
    with safe_globals(_NUMPY):
        return sorted(get_unsafe_globals_in_checkpoint(file))


def _not_allowed(types: list[str]) -> str:
    return (
        f"the state has objects of {', '.join(types)}; expected tensors, arrays, numbers, text, lists and dictionaries"
    )


def read_state(path: Path) -> Any:
    """Reads a state that `write_state` wrote. Raises UserError if the file is damaged or names code that could run."""
    try:
        with safe_globals(_NUMPY):
            return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, *_DAMAGE) as error:
        raise _refusal(path, error) from None


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in _METADATA.get(module, "").split():
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


def read_metadata(path: Path) -> Any:
    """Reads `.metadata`, the index of a torch.distributed checkpoint, as a `Metadata`.

    Raises:
        UserError: if the file is damaged, names code that could run, or names files outside its folder.
    """
    try:
        metadata = _MetadataUnpickler(io.BytesIO(path.read_bytes())).load()
        if any(Path(place.relative_path).name != place.relative_path for place in metadata.storage_data.values()):
            raise pickle.UnpicklingError("it points to files outside its folder")
        return metadata
    except (pickle.UnpicklingError, *_DAMAGE) as error:
        raise _refusal(path, error) from None


def _refusal(path: Path, error: Exception) -> UserError:
    why = str(error).split("Please file an issue")[0].strip().splitlines()[-1:] or [repr(error)]
    return UserError(f"{path} was not loaded, because it is damaged or may run code: {why[0].strip()}")
