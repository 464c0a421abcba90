"""Counts what a micro-batch costs on a GPU without one: fake tensors run through the code that CUDA runs.

The micro-batch has 21 rows of 768 tokens that share prompts in groups of eight: 16,128 tokens, 11,499 after sharing.
Eager operators are counted one by one: kernels, arithmetic, and for operators other than products and attention the
bytes that they read and write. Compiled graphs are counted by the kernels that remain after inductor's fusions and the
bytes that its scheduler computes for them. An operator that waits for the device (`nonzero`, `item`) is an error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo
from torch._inductor import compile_fx
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import NopKernelSchedulerNode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from transformers import AutoModelForCausalLM, Qwen2Config

from tests.workers.engine_cases import token_columns
from verl_lite.config import ActorConfig, NetworkConfig
from workers.engine import packed_attention
from workers.engine.packed_attention import PACKED_ATTENTION
from workers.engine.packed_sequences import PackedSequences
from workers.engine.packing import ModelInputs, pack
from workers.policy import causal_lm, output_layer
from workers.policy.activations import limit_activations
from workers.policy.causal_lm import CausalLMPolicy
from workers.policy.compiled import compile_policy

ROWS, GROUP, PROMPT, RESPONSE = 21, 8, 256, 512
SIZES = {  # hidden size, layers, heads, key/value heads, intermediate size, vocabulary, tied embeddings
    "0.5b": (896, 24, 14, 2, 4864, 151_936, True),
    "1.5b": (1536, 28, 12, 2, 8960, 151_936, True),
    "7b": (3584, 28, 28, 4, 18_944, 152_064, False),
}
PRODUCTS, ATTENTION, BYTES = 620e12, 330e12, 2.75e12  # assumed rates per second of an H200
ATTENTION_FACTOR = {"_varlen_attn": 1.0, "_varlen_attn_backward": 2.5}
NO_KERNEL = set(
    "view _unsafe_view t transpose expand slice select unsqueeze squeeze alias detach permute split split_with_sizes "
    "unflatten as_strided _reshape_alias unbind empty empty_like empty_strided new_empty new_empty_strided lift_fresh "
    "device sym_size promote_types".split()
)


class Cost(TorchDispatchMode):
    """Counts `kernels`, `TFLOP`, the part of these in attention, and `GB`.

    attention_flop: arithmetic of one layer's attention, forward.
    """

    def __init__(self, attention_flop: float) -> None:
        super().__init__()
        self.attention_flop = attention_flop
        self.total: Counter[str] = Counter()
        self.in_graph = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Allows compilation inside the mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket._qualified_op_name.split("::")[-1]
        if name in NO_KERNEL:
            return result
        attention = ATTENTION_FACTOR.get(name, 0.0) * self.attention_flop
        flop = attention
        if func.overloadpacket in flop_registry and not attention:
            flop = flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=result)
        self.total["TFLOP"] += flop / 1e12
        self.total["TFLOP of attention"] += attention / 1e12
        if not self.in_graph:
            self.total["kernels"] += 1
            self.total["GB"] += 0 if flop else moved_bytes(func, name, args, kwargs or {}, result) / 1e9
        return result

    @property
    def milliseconds(self) -> float:
        """Time at the assumed rates, without overlap."""
        attention = self.total["TFLOP of attention"] * 1e12
        products = self.total["TFLOP"] * 1e12 - attention
        return 1e3 * (products / PRODUCTS + attention / ATTENTION + self.total["GB"] * 1e9 / BYTES)

    def compile(self, gm: Any, example_inputs: Any) -> Callable[..., Any]:
        """A backend for `torch.compile` that counts the kernels of inductor and runs the graph with fake tensors."""
        return compile_fx.compile_fx(gm, example_inputs, inner_compile=self._graph)  # type: ignore[no-any-return]

    def _graph(self, gm: Any, example_inputs: Any, **options: Any) -> Callable[..., Any]:
        found: list[int] = []

        def count(graph: Any) -> None:
            graph.init_wrapper_code()
            graph._update_scheduler()
            found.extend(map(kernel_bytes, graph.scheduler.nodes))
            raise _CountedError

        with (
            patch.object(GraphLowering, "compile_to_module", count),
            torch._inductor.config.patch(force_disable_caches=True),
        ):
            try:
                compile_fx.compile_fx_inner(gm, example_inputs, **options)
            except Exception as error:
                if not isinstance(error.__cause__ or error.__context__, _CountedError) and not found:
                    raise
        kernels, size = sum(each >= 0 for each in found), sum(max(each, 0) for each in found)

        def run(*args: Any) -> Any:
            self.total["kernels"] += kernels
            self.total["GB"] += size / 1e9
            self.in_graph = True
            try:
                return gm(*args)
            finally:
                self.in_graph = False

        return run


class _CountedError(Exception):
    """Ends the compilation of a graph before code is generated."""


def kernel_bytes(node: Any) -> int:
    """Bytes that a kernel of inductor moves; 0 for products and attention, -1 if the node launches no kernel."""
    names = [str(getattr(each.node, "op_overload", None)) for each in node.get_nodes()]
    kinds = {type(each.node).__name__ for each in node.get_nodes()}
    if isinstance(node, NopKernelSchedulerNode) or "MultiOutput" in kinds:
        return -1
    is_product = any(part in name for name in names for part in ("aten.mm", "aten.addmm", "aten.bmm", "_varlen_attn"))
    return 0 if is_product else int(node.get_read_write_buffers_sizes())


def moved_bytes(func: Any, name: str, args: Any, kwargs: Any, result: Any) -> int:
    """Bytes that an eager operator reads and writes. Of a table that it indexes, only the selected entries."""
    if name in ("gather", "index_select", "embedding"):
        return 2 * result.nbytes + sum(each.nbytes for each in args[1:] if isinstance(each, torch.Tensor))
    if name in ("scatter_add_", "scatter_add"):
        return args[2].nbytes + 3 * args[3].nbytes
    read = {id(each): each.nbytes for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)}
    written = {id(each): each.nbytes for each in tree_leaves(result) if isinstance(each, torch.Tensor)}
    return sum(read.values()) + sum(written.values())


def inputs() -> ModelInputs:
    """The packed micro-batch."""
    ids = torch.randint(0, 1000, (ROWS, PROMPT + RESPONSE))
    for row in range(ROWS):
        ids[row, :PROMPT] = ids[row // GROUP * GROUP, :PROMPT]
    return pack(token_columns(ids, torch.ones_like(ids), PROMPT))


def not_there(value: Any, mode: FakeTensorMode) -> Any:
    """Returns a copy of a dataclass of tensors with fake tensors."""
    made = {
        name: mode.from_tensor(each) if isinstance(each, torch.Tensor) else not_there(each, mode)
        for name, each in vars(value).items()
        if isinstance(each, torch.Tensor | PackedSequences)
    }
    return replace(value, **made)


@contextmanager
def code_of_cuda(compiled: bool) -> Iterator[None]:
    """Selects the code that CUDA runs."""
    patches: list[tuple[Any, str, Any]] = [
        (packed_attention, "_sdpa_runs", packed_attention._varlen_attention),
        (packed_attention, "_flash_attn_varlen", lambda: None),
        (output_layer, "has_wide_products", lambda device: True),
        (causal_lm, "logit_transform", lambda model: output_layer.PLAIN_LOGITS),  # determined with real numbers
        (output_layer, "TILE_BYTES", {"cpu": output_layer.TILE_BYTES["cuda, compiled" if compiled else "cuda"]}),
    ]
    with ExitStack() as stack:
        for place, name, value in patches:
            stack.enter_context(patch.object(place, name, value))
        yield


def micro_batch(size: str, *, recomputed: float, compiled: bool) -> Cost:
    """Counts forward and backward of a micro-batch of Qwen2.5, bf16, with entropy.

    recomputed: share of the layers with gradient checkpointing.
    """
    packed = inputs()
    assert packed.sequences is not None and packed.input_ids.shape[1] == 11_499
    hidden, layers, heads, kv_heads, inner, vocab, tied = SIZES[size]
    config = Qwen2Config(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=inner,
        vocab_size=vocab,
        tie_word_embeddings=tied,
        max_position_embeddings=32_768,
    )
    pairs = sum(number * length * length / 2 for number, length in packed.sequences.runs)
    cost = Cost(4 * hidden * pairs)
    torch._dynamo.reset()
    with code_of_cuda(compiled), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=PACKED_ATTENTION)
        policy = CausalLMPolicy(model, ActorConfig().log_prob_chunk_tokens)
        limit_activations(model, NetworkConfig(gradient_checkpointing_layers=round(recomputed * layers)))
        if compiled:
            compile_policy(policy, cost.compile)
        policy.train()
        with cost:
            outputs = policy(not_there(packed, mode), temperature=1.0, calculate_entropy=True)
            torch.stack([values.sum() for values in outputs.values()]).sum().backward()
    parameters = sum(each.numel() for each in model.parameters()) - (0 if tied else hidden * vocab)
    passes = 6 + 2 * recomputed
    assert cost.total["TFLOP"] > passes * parameters * packed.input_ids.shape[1] / 1e12 * 0.9
    return cost
