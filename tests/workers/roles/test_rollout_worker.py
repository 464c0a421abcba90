"""The worker of an engine in a separate pool, in this process: its thread, its queue, weights over a real channel."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny_model import tiny_qwen2
from verl_lite.config import ModelConfig, PPOConfig
from verl_lite.errors import TransferError
from verl_lite.single_controller.resource_pool import LocalService
from verl_lite.single_controller.worker import host_store
from workers.engines.base import SamplingParams
from workers.engines.weight_transfer import ChannelEnd
from workers.roles.rollout_worker import RolloutWorker
from workers.rollout.group_queue import GroupQueue, QueuedGroup
from workers.rollout.specs import AnswerSpec, GroupPlan

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_qwen2(tmp_path_factory.mktemp("model"))


class Trainer:
    """The trainer's end of the channel, and the queue, for one engine."""

    def __init__(
        self, folder: str, partial: bool = False, response: int = 16, seats: int = 8, model: ModelConfig | None = None
    ) -> None:
        config = PPOConfig()
        config.model = model or ModelConfig(path=folder)
        config.hybrid_engine, config.rollout.nnodes = False, 1
        config.rollout.name, config.rollout.max_num_seqs, config.rollout.kv_cache_memory_mb = "hf", seats, 32
        config.data.max_prompt_length, config.data.max_response_length = 16, response
        if partial:
            config.async_training.max_off_policy_threshold = 2
        self.response, self.queue = response, LocalService(GroupQueue)
        self.worker = RolloutWorker(config, None, self.queue, engine=3, num_engines=4)
        self.worker.init_model()
        self.model = AutoModelForCausalLM.from_pretrained(folder)
        self.store = host_store("127.0.0.1")
        self.channel: Any = None

    def put(self, keys: range, size: int = 2) -> None:
        sampling = SamplingParams(max_tokens=self.response, ignore_eos=True)
        for key in keys:
            specs = tuple(AnswerSpec((3 + key % 50, 4, 5), 16, seed=10 * key + number) for number in range(size))
            data = pickle.dumps((GroupPlan(str(key), specs), sampling))
            self.queue.call("put", [QueuedGroup(str(key), size, data)])

    def send(self, version: int, weights: Callable[[], Iterator[tuple[str, torch.Tensor]]] | None = None) -> Any:
        """Sends the model's weights, or others. Returns what the engine returns."""
        ends = [ChannelEnd(("127.0.0.1", self.store.port), ("the trainer", "engine 3"), rank, 5.0) for rank in (0, 1)]
        failed: list[Exception] = []

        def run() -> None:
            try:
                self.channel = self.channel or ends[0].connect(CPU, self.store)
                self.channel.send(weights() if weights else iter(self.model.named_parameters()), 4096)
            except Exception as error:
                failed.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        result = self.worker.receive_weights(version, ends[1])
        thread.join(30)
        if failed:  # a new channel, as after a failed update of a run
            self.channel, self.store = None, host_store("127.0.0.1")
        return result

    def collect(self, number: int, patience_s: float = 60.0) -> dict[str, list[list[int]]]:
        """Waits for so many groups. Returns the versions of the tokens of their rows, by key."""
        found: dict[str, list[list[int]]] = {}
        deadline = time.monotonic() + patience_s
        while len(found) < number:
            assert time.monotonic() < deadline, f"{len(found)} of {number} groups after {patience_s} s"
            results = self.worker.take_groups(0.1)
            assert results is not None
            row = 0
            for report in results.reports:
                assert report.key not in found and results.rows is not None
                found[report.key] = results.rows.batch["rollout_versions"][row : row + report.num_rows].tolist()
                row += report.num_rows
        return found


@pytest.fixture
def trainer(folder: str, request: pytest.FixtureRequest) -> Iterator[Trainer]:
    made = Trainer(folder, **getattr(request, "param", {}))
    yield made
    made.worker.close()


def test_an_engine_without_weights_takes_no_group(trainer: Trainer) -> None:
    """An engine that joins late would otherwise sample with arbitrary weights and call them version 0."""
    trainer.put(range(3))
    time.sleep(0.3)
    assert trainer.queue.call("taken_by", 3) == []
    assert trainer.send(version=7) is None
    found = trainer.collect(3)
    assert {version for rows in found.values() for row in rows for version in row} == {7}


@pytest.mark.parametrize("trainer", [{"response": 600}], indirect=True)
def test_groups_wait_in_the_queue_until_the_engine_has_room(trainer: Trainer) -> None:
    trainer.send(1)
    trainer.put(range(12), size=4)
    most, found = 0, dict[str, Any]()
    while len(found) < 12:
        time.sleep(0.05)
        most = max(most, len(trainer.queue.call("taken_by", 3)) - len(found))
        found |= trainer.collect(1) if trainer.worker.groups.has_complete else {}
    assert 1 <= most <= 4, "8 seats hold two groups of 4, and a third starts when a seat is free"


@pytest.mark.parametrize("trainer", [{"partial": True, "response": 600}], indirect=True)
def test_new_weights_arrive_while_many_groups_run(trainer: Trainer) -> None:
    """An update that waits for open requests, which themselves wait for it, would be a deadlock."""
    trainer.send(1)
    trainer.put(range(30))
    for version in (2, 3, 4):
        time.sleep(0.2)
        started = time.monotonic()
        assert trainer.send(version) is None
        assert time.monotonic() - started < 5
    found = trainer.collect(30)
    rows = [row for rows in found.values() for row in rows]
    assert all(row == sorted(row) for row in rows), "versions grow within a sample"
    assert any(len(set(row)) > 1 for row in rows), "some sample continued under new weights"


def test_weights_do_not_change_under_running_groups_unless_samples_may_continue(trainer: Trainer) -> None:
    trainer.send(1)
    trainer.put(range(200))
    time.sleep(0.2)
    with pytest.raises(RuntimeError, match="groups are running"):
        trainer.worker.receive_weights(2, ChannelEnd(("127.0.0.1", 1), ("the trainer", "engine 3"), 1, 1.0))
    trainer.worker.abort_groups([str(key) for key in range(200)])


@pytest.mark.parametrize("trainer", [{"partial": True, "response": 600}], indirect=True)
def test_after_an_interrupted_update_no_token_is_sampled_from_a_mixture(trainer: Trainer) -> None:
    trainer.send(1)
    trainer.put(range(4))
    time.sleep(0.2)

    def interrupted() -> Iterator[tuple[str, torch.Tensor]]:
        for number, (name, parameter) in enumerate(trainer.model.named_parameters()):
            if number == 5:
                raise RuntimeError("the trainer fails between two buckets")
            yield name, parameter + 1.0

    assert isinstance(trainer.send(2, interrupted), TransferError)
    assert not trainer.worker.rollout.has_weights
    time.sleep(0.3)
    assert trainer.worker.take_groups(0.0).reports == []  # type: ignore[union-attr]
    assert trainer.send(3) is None
    versions = {version for rows in trainer.collect(4).values() for row in rows for version in row}
    assert versions <= {1, 3} and 3 in versions


def test_commands_are_answered_while_the_engine_is_idle_and_closing_does_not_wait(trainer: Trainer) -> None:
    trainer.send(1)
    trainer.put(range(2))
    trainer.collect(2)
    started = time.monotonic()
    assert trainer.worker.snapshot_groups() == []
    results = trainer.worker.take_groups(0.0, with_metrics=True)
    assert results is not None and results.reports == []
    assert 0 <= results.metrics["rollout/active_frac/engine_3"].value <= 1
    assert time.monotonic() - started < 1


def test_an_error_of_the_engine_reaches_whoever_waits(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(folder)
    trainer.send(1)

    def fail() -> None:
        raise ArithmeticError("in the engine")

    monkeypatch.setattr(trainer.worker.rollout, "step", fail)
    trainer.put(range(1))
    with pytest.raises(ArithmeticError, match="in the engine"):
        trainer.collect(1)
    with pytest.raises(ArithmeticError, match="in the engine"):
        trainer.worker.snapshot_groups()


def test_only_the_adapter_travels_after_the_first_update(folder: str, tmp_path: Path) -> None:
    """The merged weights equal those that the trainer merges."""
    from workers.engine.lora import is_adapter_parameter, merged
    from workers.policy.adapter import add_adapter

    options = ModelConfig(path=folder, lora_rank=4, lora_alpha=8)
    trainer = Trainer(folder, model=options)
    add_adapter(trainer.model, options)
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if is_adapter_parameter(name):
                parameter.copy_(torch.randn_like(parameter))
    everything = dict(trainer.model.named_parameters())
    adapter = {name: tensor for name, tensor in everything.items() if is_adapter_parameter(name)}
    assert trainer.send(1, lambda: iter([*everything.items()])) is None
    with torch.no_grad():
        for tensor in adapter.values():
            tensor.mul_(2.0)
    assert trainer.send(2, lambda: iter(adapter.items())) is None
    rest = {name: tensor for name, tensor in everything.items() if name not in adapter}
    expected = dict(merged(rest.items(), adapter, 2.0))
    loaded = trainer.worker.rollout._model.state_dict()  # type: ignore[attr-defined]
    for name, tensor in expected.items():
        assert torch.equal(loaded[name], tensor), name
    trainer.worker.close()
