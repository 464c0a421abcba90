"""Memory of activations between forward and backward: which layers are recomputed, and offload to host memory.

Gradient checkpointing keeps only the input of a layer and repeats its forward in the backward pass. Offload copies what
the decoder saves (inputs of recomputed layers, activations of the others) to host memory and back. Neither changes a
gradient. On CUDA the copies run on a side stream, at the same time as the layers; on a CPU they save no memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import TypeVar
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from verl_lite.config import NetworkConfig
from verl_lite.errors import UserError

AHEAD = 4  # saved tensors that stay on the device after they are saved, and that return before they are read
MIN_BYTES = 1 << 16  # smaller tensors stay on the device

T = TypeVar("T")


def limit_activations(network: PreTrainedModel, model: NetworkConfig) -> None:
    """Applies the options of gradient checkpointing and activation offload to a network that will be trained.

    Raises:
        UserError: more layers are to be recomputed than the network has.
    """
    decoder = network.get_decoder()
    if model.enable_gradient_checkpointing:
        network.gradient_checkpointing_enable({"use_reentrant": False})
        # else a frozen vision tower keeps activations and runs a backward pass
        network.disable_input_require_grads()
        number = model.gradient_checkpointing_layers
        layers = [layer for layer in decoder.modules() if isinstance(layer, GradientCheckpointingLayer)]
        if number is not None and number > len(layers):
            raise UserError(
                f"model.gradient_checkpointing_layers={number}: model.path={model.path!r} has {len(layers)} layers "
                "that can be recomputed; set at most that number, or null for all"
            )
        if number is not None:
            for layer in layers[number:]:
                layer.gradient_checkpointing = False
    # the decoder and not its layers, so that tensors return ahead of time across layers
    if model.enable_activation_offload:
        vars(decoder)["forward"] = partial(_offloaded_forward, decoder.forward)


def _offloaded_forward(forward: Callable[..., T], *args: object, **kwargs: object) -> T:
    with ActivationOffload():
        return forward(*args, **kwargs)


class ActivationOffload(saved_tensors_hooks):
    """Context manager around one forward pass: tensors that autograd saves inside move to host memory until the
    backward pass reads them. Parameters, tensors without gradient (such as indices and rotary positions) and tensors
    below MIN_BYTES stay where they are."""

    def __init__(self) -> None:
        super().__init__(self._pack, self._unpack)
        # of copies, which are numbered in the order of the forward pass
        self._count = 0
        self._unread: WeakValueDictionary[int, HostCopy] = WeakValueDictionary()

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | HostCopy:
        # a linear layer saves its transposed weight, which is a view of the parameter
        source = tensor if tensor._base is None else tensor._base
        is_parameter = isinstance(source, nn.Parameter)
        # with its graph an output would never be freed
        values = tensor.detach()
        is_small = values.nbytes < MIN_BYTES
        if not tensor.requires_grad or is_parameter or is_small:
            return values

        # only copies to and from pinned memory run beside the layers
        host = torch.empty_like(values, device="cpu", pin_memory=values.is_cuda)
        copied = _copy(host, values, values.device)
        copy = HostCopy(host, self._count, values.device, values, copied)
        self._unread[copy.index] = copy
        self._count += 1
        # its copy began several tensors ago and has usually ended, so that the forward pass hardly waits
        oldest = self._unread.get(copy.index - AHEAD)
        if oldest is not None:
            oldest.wait()
            oldest.on_device = None
        return copy

    def _unpack(self, saved: torch.Tensor | HostCopy) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        # a second backward pass, with retain_graph, reads it again
        self._unread.pop(saved.index, None)
        self._return_to_device(saved)
        # the backward pass reads the tensors in reverse order
        for ahead in range(1, AHEAD):
            next_copy = self._unread.get(saved.index - ahead)
            if next_copy is not None:
                self._return_to_device(next_copy)

        saved.wait()
        tensor = saved.on_device
        assert tensor is not None
        saved.on_device = None
        return tensor

    @staticmethod
    def _return_to_device(copy: HostCopy) -> None:
        """Starts to copy a tensor back, unless its device has it."""
        if copy.on_device is not None:
            return
        # allocated here, because the memory of a tensor belongs to the stream that allocates it
        copy.on_device = torch.empty_like(copy.host, device=copy.device)
        copy.copied = _copy(copy.on_device, copy.host, copy.device)


@dataclass(eq=False)
class HostCopy:
    """A saved tensor in host memory.

    Attributes:
        host: the tensor in host memory, pinned on CUDA.
        index: its number in the order of the forward pass.
        device: the device that it came from.
        on_device: the tensor while its device has it; must not be freed before `wait`.
        copied: the end of the last copy.
    """

    host: torch.Tensor
    index: int
    device: torch.device
    on_device: torch.Tensor | None
    copied: torch.cuda.Event | None

    def wait(self) -> None:
        """Lets the current stream wait for the last copy."""
        if self.copied is not None:
            torch.cuda.current_stream(self.device).wait_event(self.copied)

    def __del__(self) -> None:
        # also if no backward pass reads it: the side stream may still read or write the memory
        self.wait()


def _copy(to: torch.Tensor, source: torch.Tensor, device: torch.device) -> torch.cuda.Event | None:
    """Copies on the side stream of `device`. Returns the end of the copy; None on a CPU, where it has ended."""
    if device.type != "cuda":
        to.copy_(source)
        return None
    side = _side_stream(device)
    # the kernel that computes `source` may still be running
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        to.copy_(source, non_blocking=True)
    return side.record_event()


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
