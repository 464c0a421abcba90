"""How workers start on a GPU, as far as it can be seen without one: their environment, group, kernels, and what the
plan decides for them."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.tiny_model import tiny_qwen2
from tests.trainer.planner.test_run_memory import H100, grpo
from tests.workers.engine_cases import TEMPERATURE, Batch, Case, build_engine, planned, ragged_batch
from trainer import cli
from trainer.cli import ALLOCATOR, SPINNING, worker_environment
from trainer.plan import main
from trainer.planner import launched
from trainer.planner.accelerators import ACCELERATORS
from trainer.planner.fit import decide_sharding
from trainer.planner.launched import update_flops, update_work
from trainer.planner.model_shape import config_like, read_shape, shape_of
from trainer.planner.networks import Networks
from trainer.ppo.step_metrics import compute_mfu, sequence_lengths
from verl_lite.config import FSDPConfig, OptimConfig, PPOConfig
from verl_lite.config.flow_grpo import FlowGRPOConfig
from verl_lite.machine import device as verl_device
from verl_lite.machine.device import DETERMINISTIC
from verl_lite.protocol import DataProto
from workers.roles import training_worker
from workers.roles.training_worker import ModelWorker


def test_segments_grow_where_no_engine_sleeps_and_the_user_has_not_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    growing = dict.fromkeys(ALLOCATOR, "expandable_segments:True")
    assert growing.items() <= worker_environment(False, 1, sleeps=False).items()
    assert not growing.keys() & worker_environment(False, 1, sleeps=True).keys(), "vLLM's sleep has an allocator"
    assert not growing.keys() & worker_environment(True, 1, sleeps=False).keys()
    monkeypatch.setitem(cli.os.environ, ALLOCATOR[1], "max_split_size_mb:64")
    assert not growing.keys() & worker_environment(False, 1, sleeps=False).keys()


def test_threads_on_a_cpu_do_not_spin_unless_the_user_has_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs of two spinning threads each on two cores made no progress in a minute; these took 2 s per step."""
    for name in SPINNING:
        monkeypatch.delenv(name, raising=False)
    assert worker_environment(True, 2)["GOMP_SPINCOUNT"] == "1000"
    assert "GOMP_SPINCOUNT" not in worker_environment(False, 2)
    monkeypatch.setitem(cli.os.environ, "OMP_WAIT_POLICY", "ACTIVE")
    assert "GOMP_SPINCOUNT" not in worker_environment(True, 2)


@pytest.mark.parametrize("engine", ["hf", "vllm", None], ids=["hf", "vllm", "without engines"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_worker_meets_the_others_on_its_device_and_knows_what_repeats(
    deterministic: bool, engine: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config: PPOConfig | FlowGRPOConfig = FlowGRPOConfig()
    if engine is not None:
        config = PPOConfig()
        config.rollout.name = engine
    config.trainer.deterministic = deterministic
    worker, device, given = ModelWorker(config), torch.device("cuda", 0), {}
    environment = {name: value for name, value in os.environ.items() if name not in DETERMINISTIC}
    monkeypatch.setattr(verl_device.os, "environ", environment)
    monkeypatch.setattr(training_worker, "get_device", lambda name: device)
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: given.update(options, backend=backend))
    engines: list[dict[str, Any]] = []

    class Engine:
        policy = SimpleNamespace(sequence_group=None)

        def __init__(self, *arguments: Any, **options: Any) -> None:
            engines.append(options)

        def move_out(self) -> None:
            pass

    monkeypatch.setattr(training_worker, "FSDPEngine", Engine)
    worker.build_engine(lambda arguments: None, FSDPConfig())  # type: ignore[arg-type, return-value]
    assert given["device_id"] == (None if engine == "vllm" else device)
    assert given["backend"] == "cpu:gloo,cuda:nccl"
    assert given["timeout"] == timedelta(seconds=600)
    assert engines[0]["deterministic"] is deterministic
    assert {name: environment.get(name) for name in DETERMINISTIC} == (
        DETERMINISTIC if deterministic else dict.fromkeys(DETERMINISTIC)
    )


def test_torch_splits_a_bound_world_for_gloo_groups_of_other_ranks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why no device is bound where vLLM makes such groups: the ranks inside would never come to the split."""
    splits: list[Any] = []
    source = SimpleNamespace(perform_nocolor_split=splits.append)
    if dist.is_initialized():  # left by a test before
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        dist.group.WORLD.bound_device_id = torch.device("cuda", 0)  # type: ignore[union-attr]
        monkeypatch.setattr(dist.distributed_c10d, "_get_split_source", lambda group: source)
        dist.new_group([1], backend="gloo")
    finally:
        dist.destroy_process_group()
    assert splits == [torch.device("cuda", 0)]


def test_an_operation_that_does_not_repeat_is_told_by_name_and_other_work_may_use_it(tmp_path: Path) -> None:
    engine = build_engine(tiny_qwen2(tmp_path), Case(), OptimConfig())
    data, _ = planned(ragged_batch(Batch()), Case())
    done: list[bool] = []

    def put(data: DataProto, outputs: dict[str, torch.Tensor]) -> Any:
        loss = outputs["log_probs"].sum()
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))
        return loss, {}

    engine.interleave = lambda: done.append(torch.are_deterministic_algorithms_enabled())
    arguments: Any = {"temperature": TEMPERATURE, "calculate_entropy": False}
    engine.train(data, put, **arguments)
    engine.deterministic = True
    with pytest.raises(RuntimeError, match=r"put_ .*does not have a deterministic implementation"):
        engine.train(data, put, **arguments)
    engine.train(data, lambda data, outputs: (outputs["log_probs"].sum(), {}), **arguments)
    assert done and not any(done) and not torch.are_deterministic_algorithms_enabled()
    dist.destroy_process_group()


def test_gradients_are_summed_in_each_micro_batch_where_whole_ones_do_not_fit() -> None:
    def decided(like: str, device: Any = H100, given: bool | None = None) -> bool | None:
        config, networks = grpo(), Networks(shape_of(config_like(like)))
        config.actor.fsdp_config.reduce_every_micro_batch = given
        decide_sharding(config, networks, 8, device, device.memory_gib)
        return config.actor.fsdp_config.reduce_every_micro_batch

    assert decided("qwen2.5-7b") is False
    assert decided("qwen2.5-14b") is True
    assert decided("qwen2.5-14b", given=False) is False
    assert decided("qwen2.5-14b", replace(ACCELERATORS["cpu"], memory_gib=1.0)) is False


@pytest.mark.parametrize(
    ("like", "more", "told"),
    [
        ("qwen2.5-1.5b", [], "each machine has a copy of the weights: fsdp_config.fsdp_size=8"),
        ("qwen2.5-1.5b", ["trainer.nnodes=1"], ""),
        ("qwen2.5-1.5b", ["actor.fsdp_config.fsdp_size=-1"], ""),
        ("qwen2.5-14b", [], "whole gradients do not fit: fsdp_config.reduce_every_micro_batch=true"),
    ],
)
def test_machines_have_a_copy_of_the_weights_each_where_it_fits(
    like: str, more: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["--like", like, "--device", "h100", "rollout.n=8", "trainer.nnodes=2", "trainer.n_gpus_per_node=8", *more])
    text = capsys.readouterr().out
    assert told in text and ("each machine has" in text) == told.startswith("each machine")


def test_mfu_is_arithmetic_over_time_and_peak_of_a_known_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shape = shape_of(config_like("qwen2.5-1.5b"))
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    columns = {"attention_mask": torch.ones(2, 7).long(), "response_mask": mask, "responses": torch.zeros(2, 4).long()}
    batch = DataProto.from_single_dict(columns)
    batch.batch["attention_mask"][:, -4:] = mask
    lengths = sequence_lengths(batch)
    assert lengths == [7, 5]
    forward = sum(2 * shape.multiplied * n + 2 * shape.layers * shape.query * n * n for n in (7, 5))
    flops = update_flops(shape, 3, lengths)
    assert flops == pytest.approx(3 * forward)
    found = compute_mfu(flops, seconds=2.0, n_gpus=4, peak_flops=1e12)
    assert found == {"perf/mfu/actor": pytest.approx(3 * forward / (2.0 * 4 * 1e12))}
    config = PPOConfig()
    config.model.path = tiny_qwen2(tmp_path)
    assert update_work(config) is None, "a CPU"
    known = (("NVIDIA H200", 989e12), ("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA A100-SXM4-80GB", 312e12))
    unknown = (("NVIDIA GeForce", None), ("NVIDIA H100 PCIe", None), ("NVIDIA H100 NVL", None))
    for name, peak in (*known, *unknown):
        monkeypatch.setattr(launched, "launch_device", lambda config, name=name: replace(H100, name=name))
        work = update_work(config)
        assert (work and work.peak_flops) == peak
        if work:
            assert work.flops([7, 5]) == update_flops(read_shape(config.model), 3, [7, 5])
