"""Base classes of workers with an FSDP engine: construction of the engine and checkpoints of trained models."""

from collections.abc import Mapping

import torch
import torch.distributed as dist

from verl_lite.config import FSDPConfig, OptimConfig, RunOptions
from verl_lite.machine.device import device_memory, dist_backend, get_device, set_deterministic
from verl_lite.metrics import Metric
from verl_lite.single_controller.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl_lite.single_controller.worker import Worker
from workers.engine.fsdp import FSDPEngine
from workers.engine.network import NetworkBuilder
from workers.engine.phase import process_phases
from workers.engines.base import resolve_engine_name

COMPUTE_PROTO = make_nd_compute_dataproto_dispatch_fn("train")
"""Dispatch mode that splits batches over the training engine's data-parallel ranks and returns one batch."""
COMPUTE_METRIC = make_nd_compute_dataproto_dispatch_fn("train", concat=False)
"""The same, but returns a list with one result per data-parallel rank."""


class ModelWorker(Worker):
    """A worker with an FSDP engine, which `init_model` of the subclass builds.

    Args:
        config: the whole configuration.
        total_training_steps: number of steps of the learning-rate schedule.
    """

    config: RunOptions
    engine: FSDPEngine
    device: torch.device

    def __init__(self, config: RunOptions, total_training_steps: int = 0) -> None:
        super().__init__()
        self.config = config
        self.total_training_steps = total_training_steps
        self.phases = process_phases()

    def build_engine(
        self, network: NetworkBuilder, fsdp_config: FSDPConfig, optim_config: OptimConfig | None = None
    ) -> None:
        """Builds `engine` in the process group of this worker class, and moves it off the device until it is needed.

        Registers the mesh "train", in which the ranks of a sequence group are one data-parallel rank.

        Args:
            network: builds the network.
            fsdp_config: sharding, precision and offload.
            optim_config: optimizer options; None for a network that is never trained.
        """
        set_deterministic(self.config.trainer.deterministic)
        self.device = get_device(self.config.trainer.device)
        # a flow model has no rollout engine
        rollout = getattr(self.config, "rollout", None)
        engine_name = getattr(rollout, "name", "")
        # vLLM creates gloo groups of some of the ranks. If a device is bound to the default group, torch makes the
        # ranks outside of such a group split NCCL's communicator (`_new_process_group_helper`) and wait for the ranks
        # inside, which do not split it: a deadlock.
        bound_device = None
        if self.device.type == "cuda" and resolve_engine_name(engine_name) != "vllm":
            bound_device = self.device
        self.init_process_group(dist_backend(self.device), device_id=bound_device)

        self.engine = self.new_engine(network, fsdp_config, optim_config)
        sequence_group = self.engine.policy.sequence_group
        if sequence_group is None:
            self.register_mesh("train", self.rank, self.world_size)
            return
        # all ranks of a sequence group get the same rows and compute the same outputs; its first rank returns them
        dp_rank = dist.get_rank() // sequence_group.size
        dp_size = dist.get_world_size() // sequence_group.size
        self.register_mesh("train", dp_rank, dp_size, is_collect=sequence_group.rank == 0)

    def new_engine(
        self, network: NetworkBuilder, fsdp_config: FSDPConfig, optim_config: OptimConfig | None = None
    ) -> FSDPEngine:
        """Returns a new engine in the process group of `build_engine`, and moves it off the device until it is needed.
        For the arguments see `build_engine`."""
        engine = FSDPEngine(
            network,
            fsdp_config,
            optim_config,
            device=self.device,
            total_training_steps=self.total_training_steps,
            seed=self.config.trainer.seed,
            deterministic=self.config.trainer.deterministic,
        )
        self.phases.add(engine)
        engine.move_out()
        return engine


class TrainingWorker(ModelWorker):
    """A worker that trains its network."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path: str, background: bool) -> None:
        """Writes model, optimizer, schedule and random states under `path`, sharded over the ranks.

        Args:
            path: the folder to write.
            background: True returns after copying them to the host; `finish_save` waits until the files are written.
        """
        self.phases.enter(self.engine)
        self.engine.save(path, background=background)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def finish_save(self) -> None:
        """Waits until the files of a save in the background are written, and raises its error if it failed."""
        self.engine.finish_save()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: str) -> None:
        """Loads a checkpoint of `save_checkpoint`, which may have been written by another number of ranks."""
        self.phases.enter(self.engine)
        self.engine.load(path)

    def memory_metrics(self, prefix: str) -> dict[str, Metric]:
        """Returns the memory of this rank's device as metrics, whose names begin with `prefix`."""
        metrics = {}
        for name, value in device_memory(self.device).items():
            metrics[prefix + name] = Metric.max(value)
        return metrics


def with_prefix(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """Adds the prefix actor/ to names of metrics without a prefix."""
    prefixed = {}
    for name, metric in metrics.items():
        full_name = name if "/" in name else f"actor/{name}"
        prefixed[full_name] = metric
    return prefixed
