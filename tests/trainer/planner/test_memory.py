"""Memory by hand: shapes against published counts and the modules themselves, and bytes worked out on paper."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from trainer.planner.engine_bytes import copied_matrices, sync_bytes
from trainer.planner.model_shape import ModelShape, config_like, shape_of
from trainer.planner.networks import HeldNetwork
from trainer.planner.pass_bytes import (
    Pass,
    forward_only,
    kept_after_update,
    kept_when_freed,
    layer_activations,
    logits_bytes,
    training_pass,
)
from verl_lite.errors import UserError

# the models' own pages on the Hugging Face hub (number of parameters of the safetensors files)
PUBLISHED = {
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
}
SEVEN = shape_of(config_like("qwen2.5-7b"))
SMALL = ModelShape(hidden=8, layers=2, heads=2, kv_heads=1, head_dim=4, inner=16, vocab=100)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_published(name: str) -> None:
    assert shape_of(config_like(name)).parameters == PUBLISHED[name]


def test_a_config_without_sizes_is_a_sentence() -> None:
    with pytest.raises(UserError, match="has no num_hidden_layers, .*--like"):
        shape_of({"model_type": "mamba", "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 9})


def test_seven_billion_parameters_on_eight_ranks() -> None:
    """fp32 masters and moments, bf16 compute; what a rank holds of them is in the phases of test_run_memory."""
    network = HeldNetwork(SEVEN, ranks=8, compute=2, trained=SEVEN.parameters)
    # embedding and output layer of 152064 x 3584 each, the last norm, and two layers of 233,057,792, in bf16
    assert network.gathered == 2 * (2 * 152064 * 3584 + 3584 + 2 * 233_057_792)
    # several micro-batches: whole gradients on every rank, in fp32, whatever the number of ranks
    assert network.gradients(2) == (4 * 7_615_616_512, 0), "the shard takes the place of the whole ones"
    one = HeldNetwork(SEVEN, ranks=1, compute=2, reduce=2, trained=SEVEN.parameters)
    assert one.gradients(2)[1] == (4 - 2) * 7_615_616_512, "fp32 in place of bf16"
    assert replace(network, reduce=2).gradients(2)[0] == 2 * 7_615_616_512


def test_an_adapter_costs_moments_for_itself_alone() -> None:
    # rank 16: query 3584+3584, output the same, key and value 3584+512 each, three times 3584+18944 for the MLP
    adapter = SEVEN.adapter_parameters(16)
    assert adapter == 28 * 16 * (2 * 7168 + 2 * 4096 + 3 * 22528)
    network = HeldNetwork(SEVEN, ranks=1, compute=2, trained=adapter, adapter=adapter)
    assert network.weights == 2 * SEVEN.parameters + 4 * adapter
    assert network.moments == 8 * adapter


def test_activations_of_a_layer() -> None:
    """Of each of 10 tokens, in fp32: two norms of 3 x 8; query, output and its copy of 8 each, key and value of 4; four
    times 16 in the MLP."""
    run = Pass(tokens=10, predicted=5, chunk=1024, size=4)
    assert layer_activations(SMALL, run) == 10 * 4 * (2 * 3 * 8 + 3 * 8 + 2 * 4 + 4 * 16)
    # in bf16 a norm keeps its input in fp32
    assert layer_activations(SMALL, replace(run, size=2)) == 10 * (2 * 8 * 8 + 2 * (3 * 8 + 2 * 4 + 4 * 16))


def test_gradient_checkpointing_keeps_a_layers_input() -> None:
    network = HeldNetwork(SMALL, ranks=1, compute=4, trained=SMALL.parameters)
    run = Pass(tokens=1000, predicted=10, chunk=1024, size=4)
    ends = 1000 * 3 * 8 * 4
    with_it = training_pass(network, run, 1, recomputed=2)["kept activations"]
    assert with_it == 2 * 1000 * 8 * 4 + ends
    without = training_pass(network, run, 1, recomputed=0)["kept activations"]
    assert without == 2 * layer_activations(SMALL, run) + ends


def test_a_backward_pass_needs_the_most_at_its_start_or_at_its_end() -> None:
    """One micro-batch of 50 tokens, of which 2 are predicted, by a network with an embedding of 1000 x 8, tied."""
    shape = replace(SMALL, vocab=1000, tied=True)
    network = HeldNetwork(shape, ranks=1, compute=4, trained=shape.parameters)
    layer = 2 * 8 * (8 + 4) + 3 * 8 * 16 + 2 * 8  # attention, MLP and norms
    assert shape.parameters == 8000 + 8 + 2 * layer
    run = Pass(tokens=50, predicted=2, chunk=1024, size=4)
    activations = 50 * 4 * (2 * 3 * 8 + 3 * 8 + 2 * 4 + 4 * 16)  # of one layer

    # few tokens: the gradients of embedding and layers, each with a copy in their reduction, and the shard of all
    end = training_pass(network, run, 1, recomputed=0)
    assert end["gradients before their reduction"] == 8 * (8008 + 2 * layer)
    assert end["gradients, this rank's shard"] == 4 * shape.parameters
    assert end["one layer"] == activations + 50 * 4 * 3 * 16 + 2 * 50 * 4 * 8
    assert end["kept activations"] == 50 * 4 * 8

    # many tokens: all activations, and no gradient but that of the output layer
    start = training_pass(network, replace(run, tokens=10_000), 1, recomputed=0)
    assert start["kept activations"] == 2 * 200 * activations + 10_000 * 4 * 3 * 8
    assert start["gradients before their reduction"] == start["gradients, this rank's shard"] == 0.0
    # unless an earlier micro-batch has left gradients
    assert training_pass(network, replace(run, tokens=10_000), 2, recomputed=0)[
        "gradients before their reduction"
    ] == 4 * (8008 + 2 * layer)


def test_freed_memory_is_kept_up_to_a_limit() -> None:
    parts = {"gathered weights": 3.0, "logits and output layer": 4.0, "gradients, this rank's shard": 9.0}
    assert kept_when_freed(parts) == 7
    assert kept_when_freed({"logits and output layer": 5e9}) == 512 << 20, "the rest is given back"

    # one micro-batch of 100 tokens leaves half of 2 layers x 4 bytes x (3 x 16 + 2 x 8)
    run = Pass(tokens=100, predicted=50, chunk=1024, size=4)
    large = {"kept activations": 5e9}
    assert kept_after_update(large, SMALL, run, 1) == 0.5 * 2 * 100 * 4 * (3 * 16 + 2 * 8)
    assert kept_after_update(large, SMALL, run, 2) == 512 << 20
    assert kept_after_update(parts, SMALL, run, 1) == 7, "less than that was freed"


def test_the_hf_engine_has_its_large_matrices_twice_while_it_decodes() -> None:
    """In fp32 on a CPU. The joined matrices of a layer have 600 x (600 + 2 x 60), 600 x 600, 2 x 600 x 1000 and 1000 x
    600 elements; the output layer has 400 x 600, less than the 262,144 from which copies pay."""
    shape = ModelShape(hidden=600, layers=3, heads=10, kv_heads=1, head_dim=60, inner=1000, vocab=400, is_lean=True)
    a_layer = 600 * 720 + 600 * 600 + 2 * 600 * 1000 + 1000 * 600
    assert copied_matrices(shape) == 4 * 3 * a_layer
    assert copied_matrices(replace(shape, vocab=1000)) == 4 * (3 * a_layer + 1000 * 600)
    assert copied_matrices(replace(shape, is_lean=False)) == 0


@pytest.mark.parametrize(
    ("config", "is_lean"),
    [
        ({"model_type": "llama"}, True),
        ({"model_type": "qwen2_5_vl_text"}, True),
        ({"model_type": "gemma2"}, False),
        ({"model_type": "llama", "rope_parameters": {"rope_type": "longrope"}}, False),
    ],
)
def test_the_plan_knows_which_models_have_copies(config: dict[str, Any], is_lean: bool) -> None:
    assert shape_of(config_like("qwen2.5-0.5b") | config).is_lean is is_lean


def test_logits_exist_in_tiles() -> None:
    shape = replace(SMALL, vocab=100_000)
    run = Pass(tokens=9000, predicted=4000, chunk=1024, size=4)
    assert logits_bytes(shape, run) == 96 << 20
    assert logits_bytes(shape, replace(run, tile=16 << 20)) == 16 << 20
    assert logits_bytes(shape, replace(run, chunk=100)) == 100 * 100_000 * 4
    assert logits_bytes(shape, replace(run, predicted=50)) == 50 * 100_000 * 4
    assert logits_bytes(shape, replace(run, predicted=83, chunk=8)) == 83 * 100_000 * 4, "up to 32 MiB they are kept"
    assert logits_bytes(shape.as_scorer(), run) == 0
    assert forward_only(HeldNetwork(shape, 1, 4), run)["logits"] == 2 * logits_bytes(shape, run)


def test_a_weight_update_holds_a_bucket_and_this_ranks_part_and_then_one_tensor() -> None:
    network = HeldNetwork(SEVEN, ranks=8, compute=2, trained=SEVEN.parameters)
    bucket, largest = 2048 << 20, 2 * 152064 * 3584
    assert sync_bytes(network, bucket) == bucket + largest, "more than this rank's eighth"
    assert sync_bytes(replace(network, ranks=2), bucket) == bucket + largest
    small_layers = HeldNetwork(replace(SMALL, layers=100), ranks=2, compute=4, trained=1)
    whole = 4 * small_layers.shape.parameters
    assert sync_bytes(small_layers, 1 << 30) == whole * 1.5, "this rank's half, while it is gathered"
    assert sync_bytes(small_layers, 1 << 30, on_cpu=True) == whole * 2.5, "gloo fills a copy of the bucket"
    assert sync_bytes(network, 1 << 20) == 2 * largest, "a bucket holds the largest tensor"
    assert sync_bytes(replace(network, ranks=1, compute=4), bucket) == 0, "one rank hands its own tensors over"
