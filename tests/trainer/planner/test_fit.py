"""Long context: partial recomputation, offload and shared sequences by hand, and the changes that make a run fit."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace

import pytest

from tests.trainer.planner.test_memory import SEVEN, SMALL
from tests.trainer.planner.test_run_memory import CPU, H100, grpo
from trainer.checkpoint.resume import flat_config, is_bound
from trainer.plan import main
from trainer.planner.fit import decide_sharding, find_fit
from trainer.planner.memory import memory_plan
from trainer.planner.memory_table import GIB
from trainer.planner.model_shape import config_like, shape_of
from trainer.planner.networks import HeldNetwork, Networks
from trainer.planner.pass_bytes import Pass, layer_activations, training_pass
from trainer.planner.step_time import Lengths, step_stages
from verl_lite.config import PPOConfig

NETWORKS, SMALLER = Networks(SEVEN), Networks(shape_of(config_like("qwen2.5-1.5b")))
KEPT = "kept activations"


def long(answer: int = 32_256) -> PPOConfig:
    """One answer in a micro-batch, of 512 + 32,256 tokens unless given."""
    config = grpo()
    config.data.max_response_length = answer
    config.actor.ppo_max_token_len_per_gpu = 512 + answer
    return config


def test_layers_that_are_not_recomputed_keep_all_and_offload_keeps_few_tensors() -> None:
    network = HeldNetwork(SMALL, ranks=1, compute=4, trained=SMALL.parameters)
    run = Pass(tokens=1000, predicted=10, chunk=1024, size=4)
    ends, layer_input = 1000 * 3 * 8 * 4, 1000 * 8 * 4
    assert training_pass(network, run, 1, recomputed=1)[KEPT] == layer_input + layer_activations(SMALL, run) + ends
    deep = replace(network, shape=replace(SMALL, layers=40))
    assert training_pass(deep, run, 1, recomputed=40, offload=True)[KEPT] == 5 * layer_input + ends
    assert training_pass(deep, run, 1, recomputed=0, offload=True)[KEPT] == 8 * 1000 * 16 * 4 + ends
    config = long()
    config.model.enable_activation_offload = True
    plan = memory_plan(config, NETWORKS, 8, H100)
    assert plan.host == {"actor: activations": 28 * 2 * 32_768 * 3584}
    assert not memory_plan(config, NETWORKS, 8, CPU).host, "on a CPU nothing is freed"


def test_ranks_that_share_sequences_divide_their_tokens() -> None:
    one, two = long(), long()
    two.actor.ulysses_sequence_parallel_size, two.actor.ppo_max_token_len_per_gpu = 2, 16_384
    found = [memory_plan(config, NETWORKS, 8, H100) for config in (one, two)]
    assert found[0].phases["update"][KEPT] == 2 * found[1].phases["update"][KEPT] == 32_768 * 3584 * (2 * 28 + 8)
    assert found[0].always == found[1].always, "weights and moments are divided over all ranks already"
    assert (found[0].micro_batches, found[1].micro_batches) == (64, 128), "a pair of devices has both devices' rows"
    two.critic.ulysses_sequence_parallel_size, two.algorithm.adv_estimator = 1, "gae"
    two.critic.ppo_max_token_len_per_gpu = 32_768
    phases = memory_plan(two, replace(NETWORKS, critic=SEVEN.as_scorer()), 8, H100).phases
    assert phases["critic update"][KEPT] == 2 * phases["update"][KEPT]
    run = Pass(tokens=10, predicted=5, chunk=1024, size=4, ranks=4)
    more = layer_activations(SMALL, run) - layer_activations(SMALL, replace(run, ranks=1))
    assert more == 10 * 4 * 2 * 3 * 4, "four ranks repeat the one key and value head"


def test_a_launch_recomputes_as_few_layers_as_fit() -> None:
    def decided(given: int | None = None, like: str = "qwen2.5-3b") -> tuple[PPOConfig, str]:
        config = grpo()
        config.model.gradient_checkpointing_layers = given
        return config, decide_sharding(config, Networks(shape_of(config_like(like))), 8, H100, H100.memory_gib)

    config, line = decided()
    number, networks = config.model.gradient_checkpointing_layers, Networks(shape_of(config_like("qwen2.5-3b")))
    assert number is not None and 0 < number < 36
    assert f"{36 - number} of 36 layers keep their activations: model.gradient_checkpointing_layers={number}" in line

    def fits(layers: int) -> bool:
        config.model.gradient_checkpointing_layers = layers
        return memory_plan(config, networks, 8, H100).fits(0.85 * 79.1 * GIB)

    assert fits(number) and not fits(number - 1)
    assert decided(20)[0].model.gradient_checkpointing_layers == 20
    config.model.gradient_checkpointing_layers, config.model.enable_activation_offload = None, True
    assert not decide_sharding(config, networks, 8, H100, 79.1), "not all activations to the host"
    assert decided(like="qwen2.5-32b")[0].model.gradient_checkpointing_layers is None, "all, as too little fits"
    mean = Lengths(512, 1536)
    config.model.gradient_checkpointing_layers = 9
    seconds = {name: stage.seconds for name, stage in step_stages(config, networks, 8, H100, mean).items()}
    # the backward pass computes 9 of 36 layers again, and always the logits
    predicted = config.data.train_batch_size * config.rollout.n / 8 * 1536
    logits = 2 * predicted * 2048 * 151_936 / (H100.flops * H100.training)
    forward = seconds["old log-probs"]
    assert seconds["update"] == pytest.approx(3 * forward + 9 / 36 * (forward - logits) + logits)


def test_a_launch_on_a_cpu_recomputes_as_few_layers_as_fit_the_free_memory() -> None:
    networks = Networks(shape_of(config_like("qwen2.5-0.5b")))

    def needed(layers: int) -> float:
        config = grpo()
        config.model.gradient_checkpointing_layers = layers
        return memory_plan(config, networks, 2, CPU).device_bytes / GIB

    assert needed(0) > needed(10) > needed(24)
    for layers in (0, 10):
        config = grpo()
        # 85% of this memory is enough for the plan with this number of layers, and not for one layer less
        line = decide_sharding(config, networks, 2, CPU, needed(layers) * 1.0001 / 0.85)
        assert config.model.gradient_checkpointing_layers == layers
        assert f"{24 - layers} of 24 layers keep their activations" in line

    config = grpo()
    assert not decide_sharding(config, networks, 2, CPU, needed(24) * 0.9)
    assert config.model.gradient_checkpointing_layers is None, "all layers, because nothing fits"


def test_the_first_sets_of_changes_that_fit_and_the_configuration_stays() -> None:
    config = long(130_560)
    before = flat_config(config)
    fits = {
        memory_gib: find_fit(config, NETWORKS, 8, H100, memory_gib) for memory_gib in (139.8, 79.1, 64.0, 40.0, 8.0)
    }
    budget, ranks = "actor.ppo_max_token_len_per_gpu", "actor.ulysses_sequence_parallel_size"
    assert [changes for changes, _ in fits.values()] == [
        {},
        {ranks: 2, budget: 65_536},
        {ranks: 4, budget: 32_768},
        {ranks: 4, budget: 32_768, "rollout.gpu_memory_utilization": 0.7, "model.lora_rank": 32},
        None,
    ]
    for memory_gib, (changes, plan) in fits.items():
        assert plan.fits(memory_gib * GIB) == (changes is not None)
    assert flat_config(config) == before
    config.model.lora_rank, config.model.enable_gradient_checkpointing, config.data.max_response_length = (
        8,
        False,
        32_256,
    )
    found = [find_fit(config, SMALLER, 1, H100, memory_gib)[0] for memory_gib in (20.0, 15.0)]
    needed = {budget: 32_768, "model.enable_gradient_checkpointing": True}
    assert found == [needed, needed | {"model.enable_activation_offload": True}], "one device has no rank to share with"
    for key in ("model.gradient_checkpointing_layers", "critic.model.enable_activation_offload"):
        assert not is_bound(key, config), "a resumed run may decide differently"


def test_the_command_prints_what_fits_and_a_command_that_does(capsys: pytest.CaptureFixture[str]) -> None:
    like = ["--like", "qwen2.5-7b", "--memory_gb", "24"]
    assert main([*like, "--fit", "rollout.name=vllm", "rollout.n=8", "data.max_response_length=32768"]) == 0
    text = capsys.readouterr().out
    assert re.findall(r"a device of (\S+) GiB", text) == ["8", "16", "24", "80"]
    [command] = re.findall(r"python -m trainer.main_ppo (.*)", text)
    assert "data.max_response_length=32768" in command and "ulysses_sequence_parallel_size=2" in command
    assert main([*like, *shlex.split(command)]) == 0
    assert "fits 24.0 GiB" in capsys.readouterr().out


def test_a_model_without_so_many_positions_and_a_cpu_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--like", "qwen2.5-7b", "rollout.n=8", "rollout.name=vllm", "data.max_response_length=131072"]
    assert main([*options, "actor.ppo_max_token_len_per_gpu=131584"]) == 2
    assert re.search("131584 tokens are more than the 131072 positions of .*qwen2.5-7b", capsys.readouterr().err)
    assert main([*options, "--device", "cpu", "--fit"]) == 2
    assert "--fit with --device cpu" in capsys.readouterr().err
