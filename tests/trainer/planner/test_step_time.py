"""Rooflines by hand."""

from __future__ import annotations

import pytest

from trainer.planner.model_shape import config_like, shape_of
from trainer.planner.step_time import (
    ACCELERATORS,
    Accelerator,
    Efficiency,
    Generation,
    Spread,
    accelerator,
    forward_flops,
    generation_seconds,
    pass_seconds,
    reduction_seconds,
    sync_seconds,
    update_seconds,
)
from verl_lite.errors import UserError

SEVEN = shape_of(config_like("qwen2.5-7b"))
DEVICE = Accelerator("round", 100.0, flops=1e15, bandwidth=4e12, link=1e11, network=1e10)
WHOLE = Efficiency(1.0, 1.0, 1.0)


def test_a_forward_is_two_operations_for_each_number_and_causal_attention() -> None:
    # 7,070,285,824 numbers that tokens are multiplied with; attention: 2 x 28 layers x 3584 x 1000 tokens
    assert forward_flops(SEVEN, 1, 0) == 2 * 7_070_285_824
    assert forward_flops(SEVEN, 10, 1000) == 10 * (2 * 7_070_285_824 + 2 * 28 * 3584 * 1000)


def test_an_update_is_three_forwards_and_one_more_where_activations_are_recomputed() -> None:
    one = pass_seconds(SEVEN, 1e6, 0, DEVICE, WHOLE)
    assert one == pytest.approx(14.140571648)  # 1e6 x 14.14e9 / 1e15
    for checkpointing, has_adapter, passes in ((False, False, 3), (True, False, 4), (True, True, 3)):
        found = update_seconds(SEVEN, 1e6, 0, DEVICE, WHOLE, checkpointing=checkpointing, has_adapter=has_adapter)
        assert found == pytest.approx(passes * one)
    assert pass_seconds(SEVEN, 1e6, 0, DEVICE, Efficiency(training=0.4)) == pytest.approx(one / 0.4)


def test_decoding_reads_weights_once_and_all_keys_and_values() -> None:
    run = Generation(512, 64, prompt_length=100, response_length=200, at_once=256, size=2)
    prefill, decode = generation_seconds(SEVEN, run, DEVICE, WHOLE)
    assert prefill == pytest.approx(6400 * (2 * 7_070_285_824 + 2 * 28 * 3584 * 100) / 1e15)
    # two waves of 200 steps; a step reads 15.2 GB of weights and 256 contexts of 200 tokens x 57,344 bytes
    assert decode == pytest.approx(400 * (2 * 7_615_616_512 + 256 * 200 * 57_344) / 4e12)


def test_a_weight_update_gathers_and_copies() -> None:
    whole = 2 * 7_615_616_512
    assert sync_seconds(SEVEN, Spread(8), 2, DEVICE) == pytest.approx(whole * 7 / 8 / 1e11 + 2 * whole / 4e12)
    assert sync_seconds(SEVEN, Spread(16), 2, DEVICE) == pytest.approx(whole * 15 / 16 / 1e10 + 2 * whole / 4e12)


def test_gradients_are_summed_within_a_copy_and_then_over_copies() -> None:
    weights, gradients = 2 * 7_615_616_512, 4 * 7_615_616_512

    def reduction(spread: Spread) -> float:
        trained = 7_615_616_512
        return reduction_seconds(SEVEN, trained, spread, 2, DEVICE, micro_batches=3, reductions=2)

    # 16 ranks of two machines: six gathers of the weights, two sums of the gradients, all over the network
    assert reduction(Spread(16)) == pytest.approx((6 * weights + 2 * gradients) * 15 / 16 / 1e10)
    # a copy in each machine: the same within it, and an eighth of the gradients to and fro between the two
    inside, between = (6 * weights + 2 * gradients) * 7 / 8 / 1e11, 2 * (2 * gradients / 8) / 2 / 1e10
    assert reduction(Spread(8, copies=2)) == pytest.approx(inside + between)
    assert reduction(Spread(1)) == 0.0


def test_an_unknown_device_gets_the_nearest() -> None:
    assert accelerator("H100") is ACCELERATORS["h100"]
    with pytest.raises(UserError, match="--device h1000: expected one of h100, .*; did you mean h100"):
        accelerator("h1000")
