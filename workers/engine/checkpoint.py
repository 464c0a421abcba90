"""Checkpoints of the trained parameters and the optimizer of a sharded model, and the export to a Hugging Face folder.

A checkpoint is a folder in the format of torch.distributed.checkpoint (each rank writes its shards; any number of
ranks can read it). Its subfolder `huggingface/` has the config, tokenizer and generation config. The checkpoint of an
adapter also has the peft config and does not copy the base model. Reading a checkpoint never executes code from it
(`verl_lite.machine.safe_state`).
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import _FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from verl_lite.errors import UserError
from verl_lite.machine.random_state import get_random_state, set_random_state
from verl_lite.machine.safe_state import read_metadata, read_state, write_state
from workers.engine.lora import load_adapter_config
from workers.engine.optimizer import ShardedAdamW


def save(
    path: str,
    parameters: Mapping[str, torch.Tensor],
    optimizer: ShardedAdamW | None,
    scheduler_step: int,
    background: dist.ProcessGroup | None = None,
) -> Future[object] | None:
    """Writes the shards of all ranks under `path`. Collective: all ranks must call it.

    Args:
        path: the folder of the checkpoint.
        parameters: the tensors of the model by name.
        optimizer: its moments are written, too; None if there is none.
        scheduler_step: number of training steps so far.
        background: process group of a save in the background. If given, the state is copied to the host, a thread
            writes the files, and the thread's collectives use this group.

    Returns:
        The future of the thread of a save in the background, otherwise None.
    """
    state = _state(parameters, optimizer, scheduler_step)
    if background is None:
        with naming_the_cause():
            dcp.save(state, storage_writer=_Writer(path))
        return None
    saving = dcp.async_save(state, storage_writer=_Writer(path), process_group=background)
    assert isinstance(saving, Future)
    return saving


@contextmanager
def naming_the_cause() -> Iterator[None]:
    """Replaces a CheckpointException, whose first line only names ranks, with the first error of these ranks."""
    try:
        yield
    except CheckpointException as error:  # derives from BaseException, not from Exception
        cause, _ = next(iter(error.failures.values()))
        raise RuntimeError(f"the checkpoint cannot be written: {cause}") from error


def load(path: str, parameters: Mapping[str, torch.Tensor], optimizer: ShardedAdamW | None) -> int:
    """Loads parameters and optimizer state in place and returns the scheduler step. Collective.

    Any number of ranks may have written the checkpoint.

    Raises:
        UserError: the checkpoint is incomplete or damaged, or belongs to other parameters (for example to an adapter
            with another LoRA rank) or to another optimizer.
    """
    # rank 0 writes it last, after the files of all ranks
    index = Path(path) / ".metadata"
    if not index.is_file():
        raise _damaged(path, "it has no .metadata")
    saved_sizes = _sizes(read_metadata(index))
    _require_same_parameters(path, parameters, saved_sizes)
    # AdamW and Muon have moments of different names
    if optimizer is not None:
        moments = optimizer.moments()
        missing = moments.keys() - saved_sizes.keys()
        if missing:
            raise UserError(
                f"checkpoint {path} was written by another optimizer: it has no {min(missing)}, which optim.optimizer="
                f"{optimizer.config.optimizer} needs. Set the optim.optimizer of the checkpoint's run"
            )

    # in place: the tensors of this state are those of the model and of the optimizer
    state = _state(parameters, optimizer, 0)
    _read(state, path)
    if optimizer is not None:
        optimizer.steps_taken = int(state["steps_taken"])
    return int(state["scheduler_step"])


def _require_same_parameters(
    path: str, parameters: Mapping[str, torch.Tensor], saved_sizes: Mapping[str, torch.Size]
) -> None:
    """Raises UserError if a checkpoint lacks a parameter, or has it in another size."""
    for name, parameter in parameters.items():
        saved_size = saved_sizes.get(f"model.{name}")
        if saved_size == parameter.shape:
            continue
        # most often another rank of the adapter, or an adapter instead of all parameters (rank 0)
        adapter = load_adapter_config(Path(path))
        rank = 0 if adapter is None else adapter.r
        raise UserError(
            f"checkpoint {path} has other parameters: {name} has the shape {saved_size} in it. "
            f"Set the options model.* of the checkpoint's run (model.lora_rank={rank}), "
            "or start from another checkpoint"
        )


def _sizes(metadata: Metadata) -> dict[str, torch.Size]:
    """Returns the sizes of all tensors of a checkpoint by name."""
    # other entries are numbers, such as scheduler_step
    sizes = {}
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            sizes[name] = entry.size
    return sizes


def _read(
    state: dict[str, torch.Tensor | int] | dict[str, torch.Tensor], path: str | Path, *, no_dist: bool = False
) -> None:
    """Loads the checkpoint into the tensors of `state` in place, and replaces the other values of `state`."""
    try:
        dcp.load(state, storage_reader=_Reader(path), planner=_Planner(), no_dist=no_dist)
    except UserError:
        raise
    # what torch raises for files that are missing, cut or overwritten
    except (CheckpointException, OSError, RuntimeError, EOFError, ValueError, KeyError) as error:
        cause = repr(error)
        lines = str(error).strip().splitlines()
        # the first lines of a CheckpointException only name the ranks
        if lines:
            cause = lines[-1].strip()
        raise _damaged(path, cause) from error


def _damaged(path: str | Path, cause: str) -> UserError:
    """Returns the error for a checkpoint that cannot be read, with the way to resume from another one."""
    return UserError(
        f"checkpoint {path}: its files are damaged or incomplete ({cause}); resume from an older one with "
        "trainer.resume_mode=resume_path trainer.resume_from_path=RUN/global_step_N"
    )


class _Writer(_FileSystemWriter):
    """Writer that raises the operating system's error ("File too large") instead of torch's "unexpected pos"."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            # torch.save fails again while it closes the file that it could not write
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise error from None


class _Reader(dcp.FileSystemReader):
    """Reader that unpickles the checkpoint's index with an allow list."""

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        metadata: Metadata = read_metadata(Path(self.path) / ".metadata")
        # as torch's reader does
        if metadata.storage_meta is not None:
            metadata.storage_meta.load_id = self.load_id
        return metadata


class _Planner(DefaultLoadPlanner):
    """Load planner that reads non-tensor entries with `weights_only=True`; torch's planner would run any pickle."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        # refuses a pickle with code before torch's planner unpickles it
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)


def _state(
    parameters: Mapping[str, torch.Tensor], optimizer: ShardedAdamW | None, scheduler_step: int
) -> dict[str, torch.Tensor | int]:
    """Returns the state with flat keys: model.NAME, the optimizer's moments, steps_taken and scheduler_step."""
    state: dict[str, torch.Tensor | int] = {}
    for name, parameter in parameters.items():
        state[f"model.{name}"] = parameter.detach()
    state["scheduler_step"] = scheduler_step
    if optimizer is not None:
        state |= optimizer.moments()
        state["steps_taken"] = optimizer.steps_taken
    return state


def save_random_state(path: str, rank: int) -> None:
    """Writes the states of this rank's random generators to `path`/random_RANK.pt."""
    write_state(Path(path) / f"random_{rank}.pt", get_random_state())


def load_random_state(path: str, rank: int) -> None:
    """Restores the random states of this rank. A rank without a saved state keeps its current one."""
    file = Path(path) / f"random_{rank}.pt"
    if file.exists():
        set_random_state(read_state(file))


def read_weights(source: Path) -> dict[str, torch.Tensor]:
    """Returns the model tensors of a checkpoint by name, unsharded."""
    metadata = read_metadata(source / ".metadata")
    # fp32, the dtype of the checkpoint; the moments are left out, which need twice the memory of the weights
    sizes = _sizes(metadata)
    state: dict[str, torch.Tensor] = {}
    for name, size in sizes.items():
        if name.startswith("model."):
            state[name] = torch.empty(size)
    with warnings.catch_warnings():
        # reading in a single process is intended
        warnings.filterwarnings("ignore", "torch.distributed is")
        _read(state, source, no_dist=True)
    return {name.removeprefix("model."): tensor for name, tensor in state.items()}
