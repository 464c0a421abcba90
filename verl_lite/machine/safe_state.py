"""Reads and writes states in files that may come from somebody else: tensors, numpy arrays, numbers, text, containers.

Loading a pickle can run any function that the pickle names. These files are therefore loaded with an allow list, and a
file that names anything else is rejected. A module that stores types of its own in a state allows them with
`torch.serialization.add_safe_globals`.
"""

import io
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from verl_lite.errors import UserError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

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


def write_state(path: Path, state: object) -> None:
    """Writes a state. Raises TypeError if it contains an object that `read_state` would reject."""
    # checked after it is written: the names of the types are known only from the pickle
    torch.save(state, path)
    unknown = _unknown_types(path)
    if unknown:
        path.unlink()
        raise TypeError(
            f"{path.name}: {_not_allowed(unknown)}. Make your sampler or environment return only such values"
        )


def require_safe(state: object) -> None:
    """Raises TypeError if a state contains an object that `read_state` would reject."""
    buffer = io.BytesIO()
    try:
        torch.save(state, buffer)
    except (pickle.PicklingError, AttributeError) as error:
        # what pickle raises for functions and local classes
        raise TypeError(f"the state cannot be saved: {error}") from None
    buffer.seek(0)
    unknown = _unknown_types(buffer)
    if unknown:
        raise TypeError(_not_allowed(unknown))


def _unknown_types(file: Path | io.BytesIO) -> list[str]:
    """Returns the names of the types in a saved state that `read_state` would reject."""
    with safe_globals(_NUMPY):
        return sorted(get_unsafe_globals_in_checkpoint(file))


def _not_allowed(types: list[str]) -> str:
    """Returns the reason for refusing a state with objects of these types."""
    return (
        f"the state has objects of {', '.join(types)}; expected tensors, arrays, numbers, text, lists and dictionaries"
    )


# Any: only the code that wrote a state knows its keys
def read_state(path: Path) -> Any:
    """Reads a state that `write_state` wrote. Raises UserError if the file is damaged or names code that could run."""
    try:
        with safe_globals(_NUMPY):
            return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, *_DAMAGE) as error:
        raise _refusal(path, error) from None


class _MetadataUnpickler(pickle.Unpickler):
    """Loads only the types of `_METADATA`."""

    # torch.distributed writes this file with plain pickle, which `torch.load` and its allow list do not read
    def find_class(self, module: str, name: str) -> object:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        allowed_names = _METADATA.get(module, "").split()
        if name not in allowed_names and not is_dtype:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


def read_metadata(path: Path) -> "Metadata":
    """Reads `.metadata`, the index of a torch.distributed checkpoint.

    Raises:
        UserError: if the file is damaged, names code that could run, or names files outside its folder.
    """
    try:
        metadata: Metadata = _MetadataUnpickler(io.BytesIO(path.read_bytes())).load()
        for storage in metadata.storage_data.values():
            if Path(storage.relative_path).name != storage.relative_path:
                raise pickle.UnpicklingError("it points to files outside its folder")
        return metadata
    except (pickle.UnpicklingError, *_DAMAGE) as error:
        raise _refusal(path, error) from None


def _refusal(path: Path, error: Exception) -> UserError:
    """Returns the error of a file that was not loaded, with the last line of the reason."""
    # torch's own message ends with advice that does not apply here
    reason, _, _ = str(error).partition("Please file an issue")
    lines = reason.strip().splitlines()
    last_line = repr(error)
    if lines:
        last_line = lines[-1].strip()
    return UserError(f"{path} was not loaded, because it is damaged or may run code: {last_line}")
