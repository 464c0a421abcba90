"""Compiles the decoder layers and the output layer of a policy with `torch.compile` (`model.compile`).

Each function must be one graph: a graph break would cost more than it saves and is easily overlooked. If a function has
a graph break, or the machine cannot compile (no C++ compiler, no Triton), the process prints a note and calls the
function eagerly for the rest of the run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch
import torch.distributed as dist

from workers.engine.network import EngineNetwork

T = TypeVar("T")


def compile_policy(policy: EngineNetwork, backend: str | Callable[..., object] = "inductor") -> None:
    """Compiles the forward of each block of `policy` and its `functions`, at their first calls.

    Hooks run outside the compiled code, so blocks can be sharded and checkpointed afterwards. Blocks of one class share
    their compiled code.
    """
    # shared, so that all blocks of a class run eagerly once one of them cannot be compiled
    eager: set[str] = set()
    for block in policy.blocks():
        name = type(block).__name__
        block.forward = CompiledFunction(name, block.forward, eager, backend)
    functions = {}
    for name, function in policy.functions.items():
        functions[name] = CompiledFunction(name, function, eager, backend)
    policy.functions = functions


class CompiledFunction(Generic[T]):
    """A function compiled as one graph, with dynamic shapes.

    Args:
        name: name in the note and in `eager`.
        function: the function to compile.
        eager: the names of functions whose compilation failed, shared by all functions of a policy.
        backend: backend of `torch.compile`.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., T],
        eager: set[str],
        backend: str | Callable[..., object],
    ) -> None:
        self.name = name
        self.function = function
        self.eager = eager
        # dynamic, because each micro-batch has another number of tokens
        self.compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=backend)

    def __call__(self, *args: object, **kwargs: object) -> T:
        from torch._dynamo import config
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

        if self.name in self.eager:
            return self.function(*args, **kwargs)
        try:
            # vLLM on a CPU disables the compiler for its own functions
            with config.patch(disable=False):
                return self.compiled(*args, **kwargs)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            self.eager.add(self.name)
            if not dist.is_initialized() or dist.get_rank() == 0:
                # the first paragraph on one line; torch's hints and the user's code follow it
                first_paragraph = str(error).split("\n\n")[0]
                reason = " ".join(first_paragraph.split())
                print(f"model.compile=true: {self.name} is not compiled and runs eagerly: {reason}", flush=True)
        return self.function(*args, **kwargs)
