"""What the training engine is given: a network that it can shard, run and save without knowing what it computes.

The engine (`workers.engine.fsdp`) owns sharding, gradients, optimizer state and where memory lies. What depends on the
kind of network is a part that the network brings along: how it is built, which of its blocks are sharded one by one,
how rows become the inputs of its forward, and what has to lie in a checkpoint beside the weights. Language models have
theirs in `workers.policy`, diffusion models in `workers.diffusion`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from verl_lite.protocol import DataProto

if TYPE_CHECKING:
    from peft import LoraConfig


@dataclass(frozen=True)
class BuildArguments:
    """How the engine wants its network: on the CPU.

    compute_dtype: of forward and backward, and of what is frozen beside an adapter. dtype: of the parameters where all
    of them learn. trains: False for an engine that never does. with_weights=False leaves the parameters uninitialised
    (the engine fills them from rank 0); buffers are right. device: where the network will compute.
    """

    compute_dtype: torch.dtype
    dtype: torch.dtype
    trains: bool
    with_weights: bool
    device: torch.device


class EngineNetwork(nn.Module):
    """A network for the engine. Its parameters are all that the engine shards, moves and trains.

    forward takes what `prepare_inputs` made and options of its own, and gives outputs (b, ...) by name; what learns has
    to take part in one of them. adapter: peft's config where only an adapter learns (the other parameters are frozen).
    prefix: in front of parameters' names, left out in checkpoints. is_cast: compute with all parameters cast to the
    compute dtype; False = each in the dtype that it has.
    """

    adapter: LoraConfig | None = None
    prefix: str = ""
    is_cast: bool = True

    @abstractmethod
    def blocks(self) -> list[nn.Module]:
        """The repeated parts, each of which the engine may shard on its own."""

    @abstractmethod
    def prepare_inputs(self, micro_batch: DataProto, device: torch.device) -> tuple[Any, bool]:
        """The forward's inputs on `device`, and whether any of its outputs will count.

        Where none does, they are a stand-in: ranks must take part in collectives alike.
        """

    @abstractmethod
    def save_assets(self, path: str) -> None:
        """What a checkpoint in the folder `path` needs beside the weights. Called on one rank."""


NetworkBuilder = Callable[[BuildArguments], EngineNetwork]


def blocks_named(network: nn.Module, class_names: set[str]) -> list[nn.Module]:
    """Modules of these classes, in their order: of nested ones the outermost, and none that shares a parameter with
    another, which could not be sharded apart from it."""
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in network.modules():  # a module comes before those that it holds
        if type(module).__name__ in class_names and module not in inside:
            found.append(module)
            inside.update(module.modules())
    users = Counter(parameter for block in found for parameter in block.parameters())
    return [block for block in found if all(users[parameter] == 1 for parameter in block.parameters())]
