"""A decoder layer with packed attention is one graph to torch.compile, and other lengths do not make many."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from transformers import AutoModelForCausalLM, Qwen2Config

from tests.workers.engine_cases import token_columns
from workers.engine.packed_attention import PACKED_ATTENTION
from workers.engine.packing import ModelInputs, pack

ROWS, PROMPT, RESPONSE, HIDDEN = 6, 16, 16, 64
LENGTHS = (16, 12, 9, 14)


def inputs(length: int, shared: bool) -> ModelInputs:
    """Rows of which all but the first have answers of that length; with one prompt where it is shared."""
    ids = torch.randint(3, 500, (ROWS, PROMPT + RESPONSE), generator=torch.Generator().manual_seed(length))
    if shared:
        ids[:, :PROMPT] = ids[0, :PROMPT]
    attention = torch.ones_like(ids)
    attention[1:, PROMPT + length :] = 0
    return pack(token_columns(ids, attention, PROMPT))


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True], ids=["own prompts", "shared prompt"])
@torch._dynamo.config.patch(disable=False)  # vLLM's engine on a CPU switches it off
def test_a_layer_is_one_graph_for_any_lengths(shared: bool) -> None:
    torch._dynamo.reset()
    config = Qwen2Config(
        hidden_size=HIDDEN, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, vocab_size=512
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation=PACKED_ATTENTION).get_decoder()
    counter = CompileCounter()
    layer = torch.compile(model.layers[0], backend=counter, fullgraph=True, dynamic=True)
    for length in LENGTHS:
        packed = inputs(length, shared)
        assert packed.sequences is not None and (packed.sequences.expand is not None) == shared
        hidden = torch.randn(1, packed.input_ids.shape[1], HIDDEN)
        arguments = {
            "position_embeddings": model.rotary_emb(hidden, packed.position_ids),
            "position_ids": packed.position_ids,
            "attention_mask": None,
            "packed_sequences": packed.sequences,
            "use_cache": False,
        }
        torch.testing.assert_close(layer(hidden, **arguments), model.layers[0](hidden, **arguments))
    assert counter.frame_count <= 2
