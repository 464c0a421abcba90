"""Tools that trade time for memory where gradients run through denoising steps and a video decoder: recomputing,
keeping what the backward pass needs on the host, and having frozen parts on the device only while they work.

They change no number: gradients with and without them are equal. `trainer.diffusion_plan` predicts what they save.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

Result = TypeVar("Result")


def checkpointed_step(step: Callable[..., Result], enabled: bool) -> Callable[..., Result]:
    """`step`, which keeps only its arguments for the backward pass and is run once more there.

    FSDP's modules gather their shards again. Blocks inside may have checkpoints of their own: they then hold their
    inputs for one step at a time instead of for all. Without gradients it is a plain call.
    """
    return cast("Callable[..., Result]", partial(checkpoint, step, use_reentrant=False)) if enabled else step


def checkpointed_decode(
    decode: Callable[[torch.Tensor], torch.Tensor], enabled: bool, vae: nn.Module | None = None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """`decode` from latents to frames, recomputed in the backward pass.

    Args:
        vae: the module that `decode` runs. If its decoder works in chunks of time (and tiles) with a feature cache, as
            that of `AutoencoderKLWan` does, each chunk is a checkpoint: between forward and backward only the cache's
            tensors are kept, and the activations of a single chunk exist at one time.
    """
    decoder = getattr(vae, "decoder", None)
    if not enabled or not isinstance(decoder, nn.Module):
        return checkpointed_step(decode, enabled)
    if "feat_cache" not in inspect.signature(decoder.forward).parameters:
        return checkpointed_step(decode, True)

    def decode_in_checkpoints(latents: torch.Tensor) -> torch.Tensor:
        with _chunks_recomputed(decoder):
            return decode(latents)

    return decode_in_checkpoints


@contextmanager
def _chunks_recomputed(decoder: nn.Module) -> Iterator[None]:
    """Inside, each call of `decoder` is a checkpoint whose arguments are the chunk and the feature cache's tensors."""
    plain = decoder.forward

    def run_chunk(chunk: torch.Tensor, first_chunk: bool, *cache: Any) -> tuple[Any, ...]:
        entries = list(cache)
        frames = plain(chunk, feat_cache=entries, feat_idx=[0], first_chunk=first_chunk)
        return frames, *entries

    def forward(
        chunk: torch.Tensor, feat_cache: list[Any], feat_idx: list[int], first_chunk: bool = False
    ) -> torch.Tensor:
        frames, *feat_cache[:] = checkpoint(run_chunk, chunk, first_chunk, *feat_cache, use_reentrant=False)
        feat_idx[0] = len(feat_cache)
        return cast("torch.Tensor", frames)

    decoder.forward = forward
    try:
        yield
    finally:
        del decoder.forward  # the class's own is found again


def activation_offload(enabled: bool) -> AbstractContextManager[Any]:
    """Inside, what autograd saves is kept in host memory and comes back when the backward pass asks for it.

    Put around the forward pass. Weights stay on the device (`torch.autograd.graph.save_on_cpu` copies each frozen
    weight once for each use), and so does what a checkpoint inside recomputes. On a CPU nothing moves.
    """
    return saved_tensors_hooks(_to_host, _from_host) if enabled else nullcontext()


def _to_host(tensor: torch.Tensor) -> tuple[torch.device, torch.Tensor]:
    if tensor.device.type == "cpu" or _is_weight(tensor):
        return tensor.device, tensor.detach()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
    return tensor.device, host.copy_(tensor.detach(), non_blocking=True)


def _from_host(saved: tuple[torch.device, torch.Tensor]) -> torch.Tensor:
    device, tensor = saved
    return tensor.to(device, non_blocking=True)


def _is_weight(tensor: torch.Tensor) -> bool:
    """A parameter, or a view of one, as a linear layer saves its transposed weight."""
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)


class Placement:
    """Frozen modules that are on the device only while they work (text encoder, high-noise expert).

    A module's weights never change, so its copy on the host (pinned, for a CUDA device) stays: bringing it costs one
    copy, and sending it back none.

    Args:
        device: where they work.
        offload: False = all stay there.
    """

    def __init__(self, device: torch.device, offload: bool) -> None:
        self.device, self.offload = device, offload
        self._homes: dict[nn.Module, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def add(self, module: nn.Module) -> None:
        """Takes charge of `module`, which goes to the device, or to the host until it works.

        Raises ValueError if parts of it learn or are sharded.
        """
        for name, parameter in module.named_parameters():
            if parameter.requires_grad or isinstance(parameter, DTensor):
                reason = "learns" if parameter.requires_grad else "is sharded"
                raise ValueError(f"{type(module).__name__}: {name} {reason}; only frozen, whole modules can be placed")
        module.to("cpu" if self.offload else self.device)
        if not self.offload:
            return
        self._homes[module] = []
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.data = tensor.data.pin_memory() if self.device.type == "cuda" else tensor.data
            self._homes[module].append((tensor, tensor.data))

    @contextmanager
    def at_work(self, module: nn.Module) -> Iterator[None]:
        """Inside, `module` is on the device and runs without gradients: they would need its weights later.

        Raises KeyError for a module that was not added where `offload` is set.
        """
        homes = self._homes[module] if self.offload else []
        for tensor, home in homes:
            tensor.data = _copied(home, self.device)
        try:
            with torch.no_grad():
                yield
        finally:
            for tensor, home in homes:
                tensor.data = home


def _copied(home: torch.Tensor, device: torch.device) -> torch.Tensor:
    return home.to(device, non_blocking=True)
