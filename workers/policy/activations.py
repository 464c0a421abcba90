"""Memory of activations between forward and backward: which layers are recomputed, and offload to host memory.

Gradient checkpointing keeps only the input of a layer and repeats its forward in the backward pass. Offload copies what
the decoder saves (inputs of recomputed layers, activations of the others) to host memory and back. Neither changes a
gradient. On CUDA the copies run on a side stream, at the same time as the layers; on a CPU they save no memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from verl_lite.config import NetworkConfig
from verl_lite.errors import UserError

AHEAD = 4  # saved tensors that stay on the device after they are saved, and that return before they are read
MIN_BYTES = 1 << 16  # smaller tensors stay on the device


def limit_activations(network: PreTrainedModel, model: NetworkConfig) -> None:
    """Applies the options of gradient checkpointing and activation offload to a network that will be trained. Raises
    UserError if more layers are to be recomputed than the network has."""
    decoder = network.get_decoder()
    if model.enable_gradient_checkpointing:
        network.gradient_checkpointing_enable({"use_reentrant": False})
        number = model.gradient_checkpointing_layers
        layers = [layer for layer in decoder.modules() if isinstance(layer, GradientCheckpointingLayer)]
        if number is not None and number > len(layers):
            raise UserError(
                f"model.gradient_checkpointing_layers={number}: model.path={model.path!r} has {len(layers)} layers "
                "that can be recomputed; set at most that number, or null for all"
            )
        for layer in layers[len(layers) if number is None else number :]:
            layer.gradient_checkpointing = False
    if model.enable_activation_offload:
        vars(decoder)["forward"] = partial(_offloaded_forward, decoder.forward)


def _offloaded_forward(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with ActivationOffload():
        return forward(*args, **kwargs)


class ActivationOffload(saved_tensors_hooks):
    """Context manager around one forward pass: tensors that autograd saves inside move to host memory until the
    backward pass reads them. Parameters, tensors without gradient (such as indices and rotary positions) and tensors
    below MIN_BYTES stay where they are. A tensor that several operations save is copied once."""

    def __init__(self) -> None:
        super().__init__(self._pack, self._unpack)
        self._saved: list[weakref.ref[HostCopy]] = []  # in the order of the forward pass

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | HostCopy:
        source = tensor if tensor._base is None else tensor._base
        if not tensor.requires_grad or isinstance(source, nn.Parameter) or tensor.nbytes < MIN_BYTES:
            return tensor.detach()  # an output that is saved with its graph would never be freed
        for recent in filter(None, (reference() for reference in self._saved[-AHEAD:])):
            if recent.is_copy_of(tensor):
                recent.reads += 1
                return recent
        copy = HostCopy(tensor, len(self._saved))
        self._saved.append(weakref.ref(copy))
        if copy.index >= AHEAD and (oldest := self._saved[copy.index - AHEAD]()) is not None:
            oldest.leave_device()
        return copy

    def _unpack(self, saved: torch.Tensor | HostCopy) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        for index in range(saved.index, max(-1, saved.index - AHEAD), -1):
            if (copy := self._saved[index]()) is not None and (copy.reads > 0 or copy is saved):
                copy.start_return()
        return saved.read()


class HostCopy:
    """A saved tensor in host memory, pinned on CUDA. index: its place in the order of the forward pass."""

    _copied: torch.cuda.Event | None = None

    def __init__(self, tensor: torch.Tensor, index: int) -> None:
        self.index, self.reads = index, 1  # reads: expected in the backward pass
        self.device, self._version = tensor.device, tensor._version
        self.on_device: torch.Tensor | None = tensor.detach()
        self.host = torch.empty_like(self.on_device, device="cpu", pin_memory=tensor.is_cuda)
        self._copied = self._copy(self.host, self.on_device)

    def is_copy_of(self, tensor: torch.Tensor) -> bool:
        """True if the tensor is the one that was copied, and was not modified since."""
        mine = self.on_device
        if mine is None or mine.data_ptr() != tensor.data_ptr() or self._version != tensor._version:
            return False
        return (mine.dtype, mine.shape, mine.stride()) == (tensor.dtype, tensor.shape, tensor.stride())

    def leave_device(self) -> None:
        """Frees the memory on the device as soon as the copy is complete."""
        self._wait()
        self.on_device = None

    def start_return(self) -> None:
        """Starts the copy back to the device, if the tensor is not there or was modified there."""
        if self.on_device is None or self.on_device._version != self._version:
            self.on_device = torch.empty_like(self.host, device=self.device)  # memory of the stream that will read it
            self._copied = self._copy(self.on_device, self.host)
            self._version = self.on_device._version

    def read(self) -> torch.Tensor:
        """The tensor on the device. The last expected read frees its memory there."""
        assert self.on_device is not None
        self._wait()
        tensor, self.reads = self.on_device, self.reads - 1
        if self.reads <= 0:
            self.on_device = None
        return tensor

    def _copy(self, to: torch.Tensor, source: torch.Tensor) -> torch.cuda.Event | None:
        if self.device.type != "cuda":
            to.copy_(source)
            return None
        side = _side_stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            to.copy_(source, non_blocking=True)
        return side.record_event()

    def _wait(self) -> None:
        if self._copied is not None:
            torch.cuda.current_stream(self.device).wait_event(self._copied)

    def __del__(self) -> None:
        self._wait()  # the memory of a tensor that nothing read must not be reused while the copy writes it


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
