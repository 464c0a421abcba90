"""The same calls give the same results inline and in Ray."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from tests.verl_lite.single_controller import workers
from tests.verl_lite.single_controller.workers import Calculator, Collective, OddError, TensorParallel
from verl_lite.protocol import DataProto, DataProtoFuture
from verl_lite.single_controller import ClassWithInitArgs, ResourcePool, create_worker_groups, start_service
from verl_lite.single_controller.decorator import Dispatch, Execute, PerRank, register, register_dispatch_mode
from verl_lite.single_controller.worker import Worker
from verl_lite.single_controller.worker_group import LocalTransport, WorkerGroup

WORLD_SIZE = 4
Groups = dict[str, WorkerGroup]


@pytest.fixture(scope="module")
def groups(backend: str) -> Iterator[Groups]:
    """All roles in the same four slots."""
    roles = {
        "calculator": ClassWithInitArgs(Calculator, offset=5),
        "neighbour": ClassWithInitArgs(workers.Neighbour),
        "mesh": ClassWithInitArgs(TensorParallel),
        "collective": ClassWithInitArgs(Collective),
    }
    made = create_worker_groups(backend, ResourcePool([WORLD_SIZE], cpus_per_process=0.25), roles)
    yield made
    for group in made.values():
        group.shutdown()


def batch(rows: int) -> DataProto:
    x = torch.arange(rows, dtype=torch.float32)
    mask = torch.ones(rows, 9, dtype=torch.long)
    return DataProto.from_dict({"x": x, "response_mask": mask}, {"name": [f"n{i}" for i in range(rows)]}, {"list": []})


def test_every_mode(groups: Groups) -> None:
    group = groups["calculator"]
    assert group.world_size == WORLD_SIZE
    # a list of length world_size is one argument, not one entry per rank
    numbers = [1, 2, 3, 4]
    expected = [(r, 4, "calculator", (numbers,), {"key": (3, 4)}) for r in range(4)]
    assert group.whoami(numbers, key=(3, 4)) == expected
    assert group.echo(numbers) == [(r, numbers) for r in range(4)]
    assert group.echo(PerRank(numbers)) == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert group.only_zero("v") == (0, "v")
    assert group.executed_on_zero() == 0
    assert group.from_lists(numbers, b=[10, 20, 30, 40]) == [11, 22, 33, 44]
    assert group.weighted(numbers) == 4 * 1 + 3 * 2 + 2 * 3 + 1 * 4
    assert group.asynchronous() == [0, 1, 2, 3]
    assert group.ends_what_it_starts() == [-signal.SIGTERM] * 4, "Ray's processes, which hear no SIGTERM, pass that on"
    assert group.object_of(batch(4)) == [6.0] * 4
    with pytest.raises(ValueError, match="one entry per rank"):
        group.from_lists([1, 2, 3], b=[1, 2])
    with pytest.raises(ValueError, match="PerRank has 3 entries"):
        group.echo(PerRank([1, 2, 3]))
    with pytest.raises(AttributeError, match="whoami"):
        group.no_such_method()


def test_any_method_by_its_name(groups: Groups) -> None:
    group = groups["calculator"]
    assert group.execute_all_sync("echo", 4) == [(rank, 4) for rank in range(4)]
    assert group.execute_rank_zero_sync("echo", 4) == (0, 4)
    for name in ("execute_all", "execute_all_async", "execute_rank_zero", "execute_rank_zero_async"):
        future = getattr(group, name)("echo", 4)
        assert isinstance(future, DataProtoFuture), "as verl's, it goes on while the workers are at work"
        assert future.get() == getattr(group, name.removesuffix("_async") + "_sync")("echo", 4)


@pytest.mark.parametrize("rows", [1, 4, 9])
def test_batches_of_any_size(groups: Groups, rows: int) -> None:
    group = groups["calculator"]
    data = batch(rows)
    result = group.add(data, amount=100.0)
    assert torch.equal(result.batch["y"], torch.arange(rows) + 105.0)
    assert list(result.batch.keys()) == ["y"]  # the column that only the dispatch needed is gone
    per_rank = -(-rows // WORLD_SIZE)
    assert result.meta_info["metrics"] == {"rows": [per_rank] * WORLD_SIZE, "rank": [0, 1, 2, 3]}
    counted = group.count(data)
    assert sum(c["tokens"] for c in counted) == rows * 9
    assert sum(c["padding"] for c in counted) == WORLD_SIZE * per_rank - rows
    assert group.three_each(data).batch["x"].tolist() == [i for i in range(rows) for _ in range(3)]
    assert set(data.batch.keys()) == {"x", "response_mask"} and data.meta_info == {"list": []}
    assert len(data.union(batch(rows))) == rows  # which raises where anything has changed


def test_wrong_arguments(groups: Groups) -> None:
    group = groups["calculator"]
    with pytest.raises(ValueError, match="DataProto"):
        group.add(3)
    with pytest.raises(ValueError, match=r"same number of rows.*\[4, 6\]"):
        group.add(batch(4), other=batch(6))
    with pytest.raises(TypeError, match="'int'"):
        group.not_a_batch(batch(4))


def test_futures_as_results_and_arguments(groups: Groups) -> None:
    group, rows = groups["calculator"], 5
    future = group.later(batch(rows))
    assert isinstance(future, DataProtoFuture)
    result = group.add(batch(rows), other=future)
    assert result.batch["y"].tolist() == [11.0 * i + 5 for i in range(rows)]
    assert future.get().batch["z"].tolist() == [10.0 * i for i in range(rows)]
    assert future.get() is future.get()
    assert group.whoami(blocking=False).get()[1][0] == 1
    failing = group.fail_on(1, blocking=False)
    with pytest.raises(ValueError, match="bad luck on 1"):
        failing.get()


def test_mesh(groups: Groups) -> None:
    group = groups["mesh"]
    data = batch(5)
    result = group.mark(data)
    assert result.batch["x"].tolist() == [0, 1, 2, 3, 4]
    assert result.batch["by"].tolist() == [2, 2, 2, 0, 0]  # part 0 is answered by rank 2
    with pytest.raises(ValueError, match="no mesh 'unheard_of'.*'model'"):
        group.unknown(data)


def test_exceptions_arrive_as_they_were_raised(groups: Groups, backend: str) -> None:
    group = groups["calculator"]
    with pytest.raises(ValueError, match="bad luck on 1") as caught:
        group.fail_on(1)
    assert type(caught.value) is ValueError
    notes = "\n".join(caught.value.__notes__)
    assert "raised in calculator, rank 1, fail_on" in notes
    if backend == "ray":
        assert "workers.py" in notes and "in fail_on" in notes
    with pytest.raises(OddError if backend == "inline" else RuntimeError, match=r"odd \(7\)"):
        group.fail_on(2, "odd")  # cannot be unpickled
    assert group.fail_on(-1) == ["fine"] * 4  # the group lives on: every rank had come back


def test_colocated_roles_share_a_process(groups: Groups) -> None:
    assert groups["neighbour"].neighbours_offset() == [(5, pid) for pid in groups["calculator"].process()]


def test_process_group(groups: Groups, backend: str) -> None:
    if backend == "ray":
        assert groups["collective"].sum_of_ranks() == [0 + 1 + 2 + 3] * 4
        return
    with pytest.raises(ValueError, match="n_gpus_per_node=1"):  # one process cannot be four ranks
        groups["collective"].sum_of_ranks()
    if torch.distributed.is_initialized():  # an engine that an earlier test built in this process made it
        torch.distributed.destroy_process_group()
    alone = create_worker_groups("inline", ResourcePool([1]), {"c": ClassWithInitArgs(Collective)})["c"]
    assert alone.sum_of_ranks() == [0.0]
    alone.shutdown()
    assert not torch.distributed.is_initialized()


def test_constructor_errors_surface_at_construction(backend: str) -> None:
    with pytest.raises(KeyError, match="no such thing on rank 1") as caught:
        recipe = ClassWithInitArgs(Calculator, broken_rank=1)
        create_worker_groups(backend, ResourcePool([2], cpus_per_process=0.25), {"only": recipe})
    assert "raised in only, rank 1, its constructor" in caught.value.__notes__


def test_service(backend: str) -> None:
    with pytest.raises(ValueError, match="not be negative, found -1"):
        start_service(backend, ClassWithInitArgs(workers.Counter, -1))
    service = start_service(backend, ClassWithInitArgs(workers.Counter, 100))
    service.send("add", 1)
    assert service.call("value") == 101
    pool = ResourcePool([1], cpus_per_process=0.25)
    client = create_worker_groups(backend, pool, {"client": ClassWithInitArgs(workers.Client, service)})["client"]
    assert client.add(10) == [111]
    service.send("fail", "lost one")
    with pytest.raises(LookupError, match="lost one"):
        service.call("value")
    assert service.call("value") == 111
    with pytest.raises(LookupError, match="direct"):
        service.call("fail", "direct")
    client.shutdown()
    service.stop()


def test_peers_share_one_copy_and_a_broadcast_is_stored_once() -> None:
    class Counting(LocalTransport):
        shared = 0

        def share(self, value: object) -> object:
            Counting.shared += 1
            return super().share(value)

    recipe = ClassWithInitArgs(TensorParallel)
    group = WorkerGroup("mesh", TensorParallel, Counting(ResourcePool([4]), {"mesh": recipe}))
    group.mark(batch(4))
    assert Counting.shared == 2  # two parts for four ranks
    Counting.shared = 0
    group.execute_all_sync("mesh_info")
    assert Counting.shared == 0
    calculators = Counting(ResourcePool([3]), {"c": ClassWithInitArgs(Calculator)})
    WorkerGroup("c", Calculator, calculators).object_of(batch(4))
    assert Counting.shared == 1


def test_wrong_registrations_are_refused() -> None:
    class Clash(Worker):
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def shutdown(self) -> None: ...

    with pytest.raises(ValueError, match="Clash.shutdown"):
        create_worker_groups("inline", ResourcePool([1]), {"c": ClassWithInitArgs(Clash)})
    with pytest.raises(ValueError, match="trainer.backend='horovod'.*ray.*inline"):
        create_worker_groups("horovod", ResourcePool([1]), {"c": ClassWithInitArgs(Calculator)})
    with pytest.raises(ValueError, match="would lose all parts but the first"):
        register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, execute_mode=Execute.RANK_ZERO)
    with pytest.raises(TypeError, match="dispatch_mode must be"):
        register(dispatch_mode="ONE_TO_ALL")
    with pytest.raises(ValueError, match="'ONE_TO_ALL' exists"):
        register_dispatch_mode("ONE_TO_ALL", lambda group: [], lambda group, answers: answers)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("verl_lite.single_controller.guard", ("torch", "ray")),
        ("verl_lite.single_controller.ray_service", ("torch", "verl_lite.config")),
        ("verl_lite.single_controller.worker_group", ("ray", "tensordict")),
        ("trainer.sweeps.tuning", ("transformers", "tensordict")),
        ("trainer.launch.start", ("torch", "transformers", "ray", "vllm")),
        ("trainer.launch.ppo_job", ("openai", "matplotlib", "pandas", "datasets", "peft", "ray", "vllm", "tensordict")),
    ],
)
def test_a_process_imports_no_more_than_it_needs(module: str, absent: tuple[str, ...]) -> None:
    """Torch takes 1.5 s of processor time, tensordict as much again, transformers twice that."""
    code = f"import sys, verl_lite.machine.gpus, {module}; "
    subprocess.run([sys.executable, "-c", f"{code} assert not sys.modules.keys() & {set(absent)}"], check=True)


SEVERAL_RUNS = """
import os, torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from verl_lite.single_controller import worker

def run(width):
    worker.open_store("127.0.0.1")
    dist.init_process_group("gloo", store=worker._held_store, rank=0, world_size=1)
    model = fully_shard(torch.nn.Linear(4, width), mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (1,)))
    model(torch.ones(2, 4)).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.optim.AdamW(model.parameters()).step()

for width in (3, 4, 5, 6):  # other shapes, which DTensor's caches do not know
    run(width)
    worker.close_process_group()
    print(len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")))
"""


@pytest.mark.slow
def test_process_groups_of_earlier_runs_leave_no_files_and_threads() -> None:
    """A user calls `train` many times in one notebook."""
    code = [sys.executable, "-c", SEVERAL_RUNS]
    counts = subprocess.run(code, check=True, capture_output=True, text=True).stdout.splitlines()
    assert len(counts) == 4 and len(set(counts[1:])) == 1, counts
