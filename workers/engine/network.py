"""The interface of a network that the training engine can shard, run and save without knowing what it computes.

The engine (`workers.engine.fsdp`) handles sharding, gradients, optimizer state and the placement of memory. The network
implements everything that depends on its kind: how to build it, which blocks to shard separately, how to turn rows into
inputs of its forward, and which files a checkpoint needs in addition to the weights. The networks of language models
are in `workers.policy`, those of diffusion models in `workers.diffusion`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from verl_lite.protocol import DataProto
from workers.engine.sequence_parallel import SequenceGroup

if TYPE_CHECKING:
    from peft import LoraConfig


@dataclass(frozen=True)
class BuildArguments:
    """Arguments of the engine for building a network on the CPU.

    Attributes:
        compute_dtype: dtype of forward and backward, and of the frozen parameters of a model with an adapter.
        dtype: dtype of the parameters if all of them are trained.
        trains: False if the network is never trained.
        with_weights: False leaves the parameters uninitialised (the engine copies them from rank 0) but sets the
            buffers.
        device: the device on which the network will compute. On the meta device, which needs no memory and reads no
            weights, the network is built only to find errors in its specification and its files.
    """

    compute_dtype: torch.dtype
    dtype: torch.dtype
    trains: bool
    with_weights: bool
    device: torch.device


class EngineNetwork(nn.Module):
    """A network for the engine, which shards, moves and trains the network's parameters.

    `forward` takes the inputs of `prepare_inputs` and options, and returns outputs (b, ...) by name. Every trained
    parameter must contribute to at least one output.

    Attributes:
        adapter: peft's config if only an adapter is trained and the other parameters are frozen.
        prefix: prefix of the parameters' names that checkpoints leave out.
        sequence_group: the ranks that share the tokens of each micro-batch; None if each rank has its own
            micro-batches.
        is_cast: True casts all parameters to the compute dtype for computing; False computes with each parameter's
            dtype.
        functions: functions of the forward that `model.compile` compiles besides the blocks, by name.
    """

    adapter: LoraConfig | None = None
    prefix: str = ""
    sequence_group: SequenceGroup | None = None
    is_cast: bool = True
    functions: Mapping[str, Callable[..., torch.Tensor]] = MappingProxyType({})

    @abstractmethod
    def blocks(self) -> list[nn.Module]:
        """Returns the repeated modules, such as decoder layers, each of which the engine may shard separately."""

    @abstractmethod
    def prepare_inputs(self, micro_batch: DataProto, device: torch.device) -> tuple[Any, bool]:
        """Returns the inputs of the forward on `device`, and True if any of its outputs will count.

        If no output counts, the inputs are a small placeholder, because every rank must take part in the collectives.
        """

    @abstractmethod
    def save_assets(self, path: str) -> None:
        """Writes the files that a checkpoint in the folder `path` needs in addition to the weights, on one rank."""


NetworkBuilder = Callable[[BuildArguments], EngineNetwork]


def block_classes(model: nn.Module) -> set[str]:
    """Returns the class names of the blocks that a Hugging Face or diffusers model declares, possibly none."""
    return set(getattr(model, "_no_split_modules", None) or ())


def blocks_named(network: nn.Module, class_names: set[str]) -> list[nn.Module]:
    """Returns the modules of these classes, in order of definition, that can be sharded separately.

    Excludes modules inside another module of these classes, and modules that share a parameter with another one.
    """
    outermost: list[nn.Module] = []
    inside: set[nn.Module] = set()
    # `modules` yields a module before its children
    for module in network.modules():
        if module in inside:
            continue
        if type(module).__name__ in class_names:
            outermost.append(module)
            inside.update(module.modules())

    num_users: Counter[nn.Parameter] = Counter()
    for block in outermost:
        num_users.update(block.parameters())

    # FSDP shards each parameter in one group; a parameter of two blocks stays with the root
    separate = []
    for block in outermost:
        has_shared = any(num_users[parameter] > 1 for parameter in block.parameters())
        if not has_shared:
            separate.append(block)
    return separate
