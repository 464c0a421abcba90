"""What a run asks of the machine: devices, memory of the machine, a name for its neighbours."""

from __future__ import annotations

import pytest

from tests.tiny_model import tiny_qwen2
from trainer.build import request_of
from trainer.resources import reserved_devices
from verl_lite.config import PPOConfig, load_config

GIB = 1 << 30


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_qwen2(tmp_path_factory.mktemp("model"))


def config_of(model: str, *options: str) -> PPOConfig:
    common = [f"model.path={model}", "data.train_files=x.jsonl", "trainer.device=cpu", "rollout.name=hf"]
    return load_config([*common, *options]).config


def test_memory_grows_with_slots_models_and_the_engine(model: str) -> None:
    def asked(slots: int, *options: str) -> int:
        return request_of(config_of(model, *options), slots).host_bytes

    one = asked(1)
    assert one < asked(1, "actor.use_kl_loss=true") < asked(1, "algorithm.adv_estimator=gae") < asked(2) < 3 * GIB
    assert asked(1, "rollout.name=vllm", "rollout.kv_cache_memory_mb=1024") - one > GIB


def test_a_run_asks_for_its_share_of_one_machine(model: str) -> None:
    request = request_of(config_of(model, "rollout.gpu_memory_utilization=0.4", "rollout.name=vllm"), 2)
    assert (request.count, request.shared, request.memory_share) == (2, False, 0.4)
    request = request_of(config_of(model, "trainer.share_devices=true", "trainer.nnodes=2"), 4)
    assert (request.count, request.shared, request.memory_share) == (2, True, 0.0)


def test_on_a_cpu_nothing_is_claimed_and_a_run_too_large_is_told(model: str) -> None:
    told: list[str] = []
    config = config_of(model, "rollout.name=vllm", "rollout.kv_cache_memory_mb=100000000")
    with reserved_devices(config, request_of(config, 1), told.append):
        pass
    assert "this run takes about 97" in told[0]
