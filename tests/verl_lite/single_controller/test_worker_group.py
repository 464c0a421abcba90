"""The same calls give the same results inline and in Ray."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from tests.verl_lite.single_controller.workers import (
    Calculator,
    Client,
    Collective,
    Counter,
    Neighbour,
    TensorParallel,
)
from verl_lite.protocol import DataProto, DataProtoFuture
from verl_lite.single_controller import (
    ClassWithInitArgs,
    PerRank,
    ResourcePool,
    WorkerGroup,
    create_worker_groups,
    start_service,
)

Make = Callable[..., WorkerGroup]


@pytest.fixture
def make(backend: str) -> Iterator[Make]:
    groups = []

    def make_one(cls: type, world_size: int, *args, **kwargs) -> WorkerGroup:
        recipe = ClassWithInitArgs(cls, *args, **kwargs)
        pool = ResourcePool([world_size], cpus_per_process=0.5)
        groups.append(create_worker_groups(backend, pool, {"only": recipe})["only"])
        return groups[-1]

    yield make_one
    for group in groups:
        group.shutdown()


def batch(rows: int) -> DataProto:
    x = torch.arange(rows, dtype=torch.float32)
    mask = torch.ones(rows, 9, dtype=torch.long)
    return DataProto.from_dict({"x": x, "response_mask": mask}, {"name": [f"n{i}" for i in range(rows)]}, {"list": []})


def test_every_mode(make: Make) -> None:
    group = make(Calculator, 2, offset=5)
    assert group.world_size == 2
    # a list of length world_size is one argument, not one entry per rank
    assert group.whoami([1, 2], key=(3, 4)) == [(r, 2, "only", ([1, 2],), {"key": (3, 4)}) for r in range(2)]
    assert group.echo([7, 8]) == [(0, [7, 8]), (1, [7, 8])]
    assert group.echo(PerRank([7, 8])) == [(0, 7), (1, 8)]
    assert group.only_zero("v") == (0, "v")
    assert group.executed_on_zero() == 0
    assert group.from_lists([1, 2], b=[10, 20]) == [11, 22]
    assert group.weighted([1, 10]) == 10 * 1 + 1 * 2
    assert group.asynchronous() == [0, 1]
    assert group.execute_all_sync("whoami")[1][:3] == (1, 2, "only")
    assert group.execute_rank_zero_sync("echo", 4) == (0, 4)
    assert group.object_of(batch(4)) == [6.0, 6.0]
    with pytest.raises(ValueError, match="one entry per rank"):
        group.from_lists([1, 2, 3], b=[1, 2])
    with pytest.raises(ValueError, match="PerRank has 3 entries"):
        group.echo(PerRank([1, 2, 3]))
    with pytest.raises(AttributeError, match="whoami"):
        group.no_such_method()


@pytest.mark.parametrize("rows", [1, 2, 4, 5, 7])
def test_batches_of_any_size(make: Make, rows: int) -> None:
    world_size = 3
    group = make(Calculator, world_size)
    data = batch(rows)
    before = copy.deepcopy(data)
    result = group.add(data, amount=100.0)
    assert torch.equal(result.batch["y"], torch.arange(rows) + 100.0)
    assert list(result.batch.keys()) == ["y"]  # the column that only the dispatch needed is gone
    per_rank = -(-rows // world_size)
    assert result.meta_info["metrics"] == {"rows": [per_rank] * world_size, "rank": [0, 1, 2]}
    counted = group.count(data)
    assert sum(c["tokens"] for c in counted) == rows * 9
    assert sum(c["padding"] for c in counted) == world_size * per_rank - rows
    assert group.three_each(data).batch["x"].tolist() == [i for i in range(rows) for _ in range(3)]
    assert set(data.batch.keys()) == {"x", "response_mask"} and data.meta_info == {"list": []}
    assert torch.equal(data.batch["x"], before.batch["x"])
    assert torch.equal(data.batch["response_mask"], before.batch["response_mask"])
    assert np.array_equal(data.non_tensor_batch["name"], before.non_tensor_batch["name"])


def test_wrong_arguments(make: Make) -> None:
    group = make(Calculator, 2)
    with pytest.raises(TypeError, match="DataProto"):
        group.add(3)
    with pytest.raises(ValueError, match=r"same number of rows.*\[4, 6\]"):
        group.add(batch(4), other=batch(6))
    with pytest.raises(TypeError, match="'int'"):
        group.not_a_batch(batch(4))


@pytest.mark.parametrize("rows", [6, 5])
def test_futures_as_results_and_arguments(make: Make, rows: int) -> None:
    group = make(Calculator, 2)
    future = group.later(batch(rows))
    assert isinstance(future, DataProtoFuture)
    assert future.padded == (rows % 2 == 1)
    result = group.add(batch(rows), other=future)
    assert result.batch["y"].tolist() == [11.0 * i for i in range(rows)]
    assert future.get().batch["z"].tolist() == [10.0 * i for i in range(rows)]
    assert future.get() is future.get()
    assert group.whoami(blocking=False).get()[1][0] == 1
    failing = group.fail_on(1, blocking=False)
    with pytest.raises(ValueError, match="bad luck on 1"):
        failing.get()


def test_mesh(make: Make) -> None:
    group = make(TensorParallel, 4)
    data = batch(5)
    data.meta_info["step"] = 3
    result = group.mark(data)
    assert result.batch["x"].tolist() == [0, 1, 2, 3, 4]
    assert result.batch["by"].tolist() == [2, 2, 2, 0, 0]  # part 0 is answered by rank 2
    assert group.first_only(data).batch["x"].tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="no mesh 'unheard_of'.*'default', 'model'"):
        group.unknown(data)


@pytest.mark.parametrize(("kind", "expected"), [("value", ValueError), ("odd", None)])
def test_exceptions_arrive_as_they_were_raised(make: Make, backend: str, kind: str, expected: type | None) -> None:
    from tests.verl_lite.single_controller.workers import OddError

    group = make(Calculator, 2)
    expected = expected or (OddError if backend == "inline" else RuntimeError)
    with pytest.raises(expected) as caught:
        group.fail_on(1, kind)
    assert type(caught.value) is expected
    notes = "\n".join(caught.value.__notes__)
    assert "raised in only, rank 1, fail_on" in notes
    assert ("bad luck on 1" if kind == "value" else "odd (7)") in str(caught.value)
    if backend == "ray":
        assert "workers.py" in notes and "in fail_on" in notes
    assert group.fail_on(-1) == ["fine", "fine"]  # the group lives on: every rank had come back


def test_constructor_errors_surface_at_construction(make: Make) -> None:
    with pytest.raises(KeyError, match="no such thing on rank 1") as caught:
        make(Calculator, 2, broken_rank=1)
    assert "raised in only, rank 1, its constructor" in caught.value.__notes__


def test_colocated_roles_share_a_process(backend: str) -> None:
    roles = {"calculator": ClassWithInitArgs(Calculator, 42), "neighbour": ClassWithInitArgs(Neighbour)}
    groups = create_worker_groups(backend, ResourcePool([2], cpus_per_process=0.5), roles)
    assert groups["calculator"].process() == groups["neighbour"].process()
    assert groups["neighbour"].neighbours_offset() == [42, 42]
    assert groups["calculator"].whoami()[0][2] == "calculator"
    for group in groups.values():
        group.shutdown()


def test_process_group(make: Make, backend: str) -> None:
    world_size = 1 if backend == "inline" else 2
    assert make(Collective, world_size).sum_of_ranks() == [sum(range(world_size))] * world_size


def test_inline_has_room_for_one_rank_of_torch_distributed() -> None:
    group = create_worker_groups("inline", ResourcePool([2]), {"c": ClassWithInitArgs(Collective)})["c"]
    with pytest.raises(ValueError, match="n_gpus_per_node=1"):
        group.sum_of_ranks()
    group.shutdown()


def test_service(make: Make, backend: str) -> None:
    with pytest.raises(ValueError, match="not be negative, found -1"):
        start_service(backend, ClassWithInitArgs(Counter, -1))
    service = start_service(backend, ClassWithInitArgs(Counter, 100))
    service.send("add", 1)
    assert service.call("value") == 101
    client = make(Client, 2, service)
    client.add(10)
    assert service.call("value") == 121
    service.send("fail", "lost one")
    with pytest.raises(LookupError, match="lost one"):
        service.call("value")
    assert service.call("value") == 121
    with pytest.raises(LookupError, match="direct"):
        service.call("fail", "direct")
    service.stop()


def test_unknown_backend() -> None:
    with pytest.raises(ValueError, match="trainer.backend='horovod'.*ray.*inline"):
        create_worker_groups("horovod", ResourcePool([1]), {"c": ClassWithInitArgs(Calculator)})
