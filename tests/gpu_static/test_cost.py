"""What a micro-batch costs on a GPU, counted without one: tensors that are not there go through the code of CUDA.

Of Qwen2.5-1.5B, 21 rows of 768 tokens that share prompts in eights, 16,128 before and 11,499 after the prompts are
shared: kernels, arithmetic, and bytes moved by what is no matrix product. Each may be 2% above the ceiling that stands
here; whoever lowers one lowers its ceiling. A wait for the device (`nonzero`, `item`) would be an error.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from transformers import AutoModelForCausalLM, Qwen2Config

from tests.workers.engine_cases import token_columns
from workers.engine import packing
from workers.engine.packing import PACKED_ATTENTION, ModelInputs, pack
from workers.policy import causal_lm
from workers.policy.causal_lm import CausalLMPolicy

ROWS, GROUP, PROMPT, RESPONSE, CHUNK = 21, 8, 256, 512, 1024
LAYERS, HEADS, HEAD_DIM = 28, 12, 128
CEILINGS = {"kernels": 5_133, "TFLOP": 141.3, "GB": 541.2}
NO_KERNEL = set(
    "view _unsafe_view t transpose expand slice select unsqueeze squeeze alias detach permute split split_with_sizes "
    "unflatten as_strided _reshape_alias unbind empty empty_like empty_strided new_empty new_empty_strided lift_fresh "
    "device sym_size".split()
)


class Cost(TorchDispatchMode):
    """attention_flop: of one layer's attention, forward."""

    def __init__(self, attention_flop: float) -> None:
        super().__init__()
        self.attention_flop = attention_flop
        self.total: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket._qualified_op_name.split("::")[-1]
        if name in NO_KERNEL:
            return result
        flop = {"_varlen_attn": 1.0, "_varlen_attn_backward": 2.5}.get(name, 0.0) * self.attention_flop
        if func.overloadpacket in flop_registry:
            flop = flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=result)
        tensors = {id(each): each for each in tree_leaves((args, kwargs, result)) if isinstance(each, torch.Tensor)}
        self.total["kernels"] += 1
        self.total["TFLOP"] += flop / 1e12
        self.total["GB"] += 0 if flop else sum(each.nbytes for each in tensors.values()) / 1e9
        return result


def inputs() -> ModelInputs:
    ids = torch.randint(0, 1000, (ROWS, PROMPT + RESPONSE))
    for row in range(ROWS):
        ids[row, :PROMPT] = ids[row // GROUP * GROUP, :PROMPT]
    return pack(token_columns(ids, torch.ones_like(ids), PROMPT))


def not_there(value: Any, mode: FakeTensorMode) -> Any:
    """A dataclass of tensors with tensors in their place that have a shape alone."""
    made = {
        name: mode.from_tensor(each) if isinstance(each, torch.Tensor) else not_there(each, mode)
        for name, each in vars(value).items()
        if isinstance(each, torch.Tensor | packing.PackedSequences)
    }
    return replace(value, **made)


@pytest.mark.slow
def test_a_micro_batch_costs_no_more_than_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_sdpa_runs", packing._varlen_attention)  # what CUDA takes
    monkeypatch.setattr(packing, "_flash_attn_varlen", lambda: None)
    monkeypatch.setattr(causal_lm, "has_wide_products", lambda device: True)
    monkeypatch.setattr(causal_lm, "logit_transform", lambda model: causal_lm.PLAIN_LOGITS)  # found with real numbers
    packed = inputs()
    assert packed.sequences is not None and packed.input_ids.shape[1] == 11_499
    config = Qwen2Config(
        hidden_size=HEADS * HEAD_DIM,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        intermediate_size=8960,
        vocab_size=151_936,
        tie_word_embeddings=True,
        max_position_embeddings=32_768,
    )
    pairs = sum(number * length * length / 2 for number, length in packed.sequences.runs)
    cost = Cost(4 * HEADS * HEAD_DIM * pairs)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=PACKED_ATTENTION)
        policy = CausalLMPolicy(model, CHUNK)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        policy.train()
        with cost:
            outputs = policy(not_there(packed, mode), temperature=1.0, calculate_entropy=True)
            torch.stack([values.sum() for values in outputs.values()]).sum().backward()
    parameters = sum(each.numel() for each in model.parameters())
    assert cost.total["TFLOP"] > 8 * parameters * packed.input_ids.shape[1] / 1e12 * 0.9, "forward twice, backward once"
    for name, ceiling in CEILINGS.items():
        assert cost.total[name] <= 1.02 * ceiling, f"{name}: {cost.total[name]:,.1f}"
