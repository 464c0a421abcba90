"""Workers for the tests of the single controller: the same classes run inline and in Ray."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import torch

from verl_lite.protocol import DataProto
from verl_lite.single_controller.decorator import (
    Dispatch,
    Execute,
    make_nd_compute_dataproto_dispatch_fn,
    register,
    register_dispatch_mode,
)
from verl_lite.single_controller.worker import Worker

if not hasattr(Dispatch, "REVERSED"):
    register_dispatch_mode(
        "REVERSED", lambda group, numbers: [((n,), {}) for n in reversed(numbers)], lambda group, answers: sum(answers)
    )
everywhere = register(dispatch_mode=Dispatch.ONE_TO_ALL)
split = register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)


class OddError(Exception):
    """Its constructor takes other arguments than it stores: it pickles, and fails to unpickle."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{reason} ({code})")


class Calculator(Worker):
    """Calls of every dispatch mode."""

    def __init__(self, offset: int = 0, broken_rank: int | None = None) -> None:
        super().__init__()
        self.offset = offset
        self.seen_in_constructor = (self.rank, self.world_size, self.role)
        if broken_rank == self.rank:
            raise KeyError(f"no such thing on rank {self.rank}")

    @everywhere
    def whoami(self, *args, **kwargs):
        return (*self.seen_in_constructor, args, kwargs)

    @everywhere
    def ends_what_it_starts(self):
        process = subprocess.Popen(["sleep", "100"])
        process.terminate()
        return process.wait(5)

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def echo(self, value):
        return (self.rank, value)

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def only_zero(self, value):
        return (self.rank, value)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def executed_on_zero(self):
        return self.rank

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def from_lists(self, a, b):
        return a + b

    @register(dispatch_mode=Dispatch.REVERSED)
    def weighted(self, number):
        return number * (self.rank + 1)

    @split
    def add(self, data: DataProto, amount: float = 0.0, other: DataProto | None = None) -> DataProto:
        data.batch["x"] += amount + self.offset  # in place: the caller must not see it
        data.meta_info["touched"] = True
        data.meta_info["list"].append(self.rank) if "list" in data.meta_info else None
        data.non_tensor_batch["name"][:] = "changed"
        result = {"y": data.batch["x"] + (other.batch["z"] if other is not None else 0)}
        if "is_padding" in data.batch.keys():
            result["is_padding"] = data.batch["is_padding"]
        return DataProto.from_dict(result, meta_info={"metrics": {"rows": len(data), "rank": self.rank}})

    @split
    def three_each(self, data: DataProto) -> DataProto:
        return data.repeat(3)

    @register(dispatch_mode=Dispatch.DP_MP_DISPATCH_FIRST, blocking=False, clear_cache=True)
    def later(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"z": data.batch["x"] * 10})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def count(self, data: DataProto) -> dict:
        padding = data.batch["is_padding"] if "is_padding" in data.batch.keys() else torch.zeros(len(data))
        return {"tokens": int(data.batch["response_mask"].sum()), "padding": int(padding.sum())}

    @split
    def not_a_batch(self, data: DataProto) -> int:
        return 1

    @everywhere
    def fail_on(self, rank: int, kind: str = "value"):
        if rank == self.rank:
            raise OddError(7, "odd") if kind == "odd" else ValueError(f"bad luck on {self.rank}")
        return "fine"

    @everywhere
    async def asynchronous(self) -> int:
        return self.rank

    @everywhere
    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    @everywhere
    def say(self, text: str) -> None:
        print(text, flush=True)
        os.system(f"echo child says {text}")

    @everywhere
    def process(self) -> int:
        return os.getpid()

    @everywhere
    def object_of(self, data: DataProto) -> float:
        return float(data.batch["x"].sum())


class Neighbour(Worker):
    """A second role in the same slots."""

    @everywhere
    def neighbours_offset(self) -> tuple[int, int]:
        return self.slot.roles["calculator"].offset, os.getpid()


class TensorParallel(Worker):
    """Four ranks: two parts of two peers each, numbered so that part order is not rank order."""

    def __init__(self) -> None:
        self.register_mesh("model", dp_rank=1 - self.rank // 2, dp_size=2, is_collect=self.rank % 2 == 0)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("model"))
    def mark(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"x": data.batch["x"], "by": torch.full((len(data),), self.rank)})

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("unheard_of"))
    def unknown(self, data: DataProto) -> DataProto:
        return data


class Collective(Worker):
    """Ranks that wait for each other."""

    @everywhere
    def sum_of_ranks(self) -> float:
        self.init_process_group("gloo", timeout_s=60)
        self.init_process_group("gloo")
        value = torch.tensor([float(self.rank)])
        torch.distributed.all_reduce(value)
        return value.item()

    @everywhere
    def fail_before_collective(self, rank: int, how: str) -> None:
        self.init_process_group("gloo", timeout_s=60)
        if self.rank == rank:
            if how == "die":
                time.sleep(0.2)
                os.kill(os.getpid(), 9)
            raise LookupError(f"rank {rank} gives up")
        torch.distributed.barrier()

    @everywhere
    def hold_the_lock(self) -> int:
        return sum(range(60_000_000))  # a second or more in which no other Python thread runs

    @everywhere
    def hang(self, rank: int) -> None:
        if self.rank == rank:
            time.sleep(600)


class Counter:
    """A service."""

    def __init__(self, start: int) -> None:
        if start < 0:
            raise ValueError(f"start must not be negative, found {start}")
        self.total = start

    def add(self, amount: int) -> None:
        self.total += amount

    def value(self) -> int:
        return self.total

    def fail(self, text: str) -> None:
        raise LookupError(text)


class Client(Worker):
    """Holds a handle of a service."""

    def __init__(self, service) -> None:
        self.service = service

    @everywhere
    def add(self, amount: int) -> int:
        self.service.send("add", amount)
        return self.service.call("value")


class Place(Worker):
    """Tells where it runs."""

    def facts(self) -> tuple[int, bool, str | None, bool]:
        """The parent of the process, whether a module was preloaded, a variable, and whether it leads its group."""
        return os.getppid(), "wave" in sys.modules, os.environ.get("VL_FORKED"), os.getpgid(0) == os.getpid()
