"""Rooflines by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from trainer.plan import main as plan
from trainer.planner.accelerators import ACCELERATORS, with_measured_rate
from trainer.planner.memory import Accelerator
from trainer.planner.model_shape import config_like, shape_of
from trainer.planner.step_time import READING, Lengths, Spread, forward_flops, generation_stages, reduction_seconds

SEVEN = shape_of(config_like("qwen2.5-7b"))
WHOLE_PEAKS = {"training": 1.0, "prefill": 1.0, "reading": 1.0}
DEVICE = Accelerator("round", 100.0, flops=1e15, bandwidth=4e12, link=1e11, network=1e10, **WHOLE_PEAKS)


def test_a_forward_is_two_operations_for_each_number_and_causal_attention() -> None:
    # 7,070,285,824 numbers that tokens are multiplied with; attention: 2 x 28 layers x 3584 x 1000 tokens
    assert forward_flops(SEVEN, 1, 0) == 2 * 7_070_285_824
    assert forward_flops(SEVEN, 10, 1000) == 10 * (2 * 7_070_285_824 + 2 * 28 * 3584 * 1000)
    # logits of three of the ten tokens: seven tokens are not multiplied with the output layer of 152064 x 3584
    assert forward_flops(SEVEN, 10, 0, predicted=3) == 20 * 7_070_285_824 - 14 * 152_064 * 3584
    assert forward_flops(SEVEN.as_scorer(), 10, 0, predicted=3) == forward_flops(SEVEN.as_scorer(), 10, 0)


def test_decoding_reads_weights_once_and_all_keys_and_values() -> None:
    mean = Lengths(prompt=100, response=200)
    prefill, decode = generation_stages(SEVEN, DEVICE, mean, sequences=512, prompts=64, at_once=256, size=2)
    # 64 of the 6400 tokens are the last of their prompt, whose logits are computed
    without_head = 2 * 6336 * 152_064 * 3584
    assert prefill.seconds == pytest.approx((6400 * (2 * 7_070_285_824 + 2 * 28 * 3584 * 100) - without_head) / 1e15)
    # two waves of 200 steps; a step reads 15.2 GB of weights and 256 contexts of 200 tokens x 57,344 bytes
    assert decode.bound == READING and decode.seconds == pytest.approx(
        400 * (2 * 7_615_616_512 + 256 * 200 * 57_344) / 4e12
    )


def test_small_operations_of_a_layer_add_to_every_decode_step() -> None:
    mean = Lengths(prompt=100, response=200)
    slow = replace(DEVICE, layer_s=0.001)
    stages = [generation_stages(SEVEN, device, mean, 512, 64, at_once=256, size=2)[1] for device in (DEVICE, slow)]
    # two waves of 200 steps of 28 layers
    assert stages[1].seconds - stages[0].seconds == pytest.approx(400 * 28 * 0.001)


def test_the_rate_of_a_cpu_is_measured_and_that_of_a_gpu_is_not() -> None:
    h100 = ACCELERATORS["h100"]
    assert with_measured_rate(h100) is h100
    threads = torch.get_num_threads()
    measured = with_measured_rate(ACCELERATORS["cpu"])
    assert 1e8 < measured.flops < 1e13, "between a slow emulation and more than any core"
    assert replace(measured, flops=ACCELERATORS["cpu"].flops) == ACCELERATORS["cpu"]
    assert torch.get_num_threads() == threads


def test_weights_and_gradients_travel_within_a_copy_and_then_over_copies() -> None:
    trained = 7_615_616_512
    weights, gradients = 2.0 * trained, 4.0 * trained
    assert Spread(8).gather_seconds(weights, DEVICE) == pytest.approx(weights * 7 / 8 / 1e11)
    assert Spread(16).gather_seconds(weights, DEVICE) == pytest.approx(weights * 15 / 16 / 1e10)
    # 16 ranks of two machines: six gathers of the weights, two sums of the gradients, all over the network
    spreads = (Spread(16), Spread(8, 2), Spread(1))
    found = [reduction_seconds(weights, trained, spread, DEVICE, 3, 2) for spread in spreads]
    assert found[0] == pytest.approx((6 * weights + 2 * gradients) * 15 / 16 / 1e10)
    # a copy in each machine: the same within it, and an eighth of the gradients to and fro between the two
    inside, between = (6 * weights + 2 * gradients) * 7 / 8 / 1e11, 2 * (2 * gradients / 8) / 2 / 1e10
    assert found[1:] == [pytest.approx(inside + between), 0.0]


def test_an_engine_without_room_for_a_sequence_has_no_time(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--like", "qwen2.5-7b", "--memory_gb", "16", "trainer.n_gpus_per_node=2", "data.train_files=x.parquet"]
    assert plan([*words, "rollout.gpu_memory_utilization=0.3", "rollout.n=8"]) == 1
    text = capsys.readouterr().out
    assert "rollout.gpu_memory_utilization=0.3: leaves 0.00 GiB for the KV cache" in text
    assert "no time of a step: the engine has no room for one sequence" in text and "a step  " not in text
