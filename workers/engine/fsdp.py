"""The training engine: a network sharded by FSDP2, its optimizer, and the loops that train it or compute outputs
(log-probs, values) with it.

The same code runs on one process or many, over gloo on CPUs and NCCL on GPUs. Gradients are summed over ranks, never
averaged: losses come already divided by the global denominators. Within a mini-batch gradients stay local until the
last micro-batch, so that one step costs one reduction, unless `reduce_every_micro_batch` asks for less memory.
"""

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from verl_lite.config import FSDPConfig, OptimConfig
from verl_lite.device import compute_dtype, deterministic_kernels, dist_backend, empty_cache, keep_freed_memory
from verl_lite.metrics import Metric
from verl_lite.protocol import DataProto
from verl_lite.random_state import seed_random_state
from workers.engine import checkpoint
from workers.engine.network import BuildArguments, EngineNetwork, NetworkBuilder
from workers.engine.optimizer import ShardedAdamW, lr_factor
from workers.engine.parameters import fill_shards, gather_full, saved_buffers
from workers.policy.adapter import adapter_off, merged, scale_of
from workers.update import Interleave, LossFunction, infer_batch, train_epochs


class FSDPEngine:
    """A network that can be trained and asked for its outputs.

    build_network: what the network is and gives (`workers.engine.network`). fsdp_config: sharding, precision and
    offload. optim_config: None for a frozen model. total_training_steps: calls of `train` in the whole run, for the
    learning-rate schedule. deterministic: see `verl_lite.device.deterministic_kernels`. All ranks of the default
    process group build it together; without a group it makes one of a single rank. What is frozen is held in the
    compute dtype, what learns in fp32; optimizer state and checkpoints are of the latter alone.
    """

    def __init__(
        self,
        build_network: NetworkBuilder,
        fsdp_config: FSDPConfig,
        optim_config: OptimConfig | None,
        *,
        device: torch.device,
        total_training_steps: int,
        seed: int,
        deterministic: bool = False,
    ) -> None:
        self.deterministic = deterministic
        self.fsdp_config, self.optim_config = fsdp_config, optim_config
        self.device, self.total_training_steps = device, total_training_steps
        self.scheduler_step = 0
        self.param_dtype = compute_dtype(fsdp_config.mixed_precision.param_dtype, device)
        keep_freed_memory(device)
        ensure_process_group(device)
        self.mesh = shard_mesh(device, fsdp_config.fsdp_size)
        seed_random_state(seed)
        self.policy = self._build_policy(build_network)
        self.parameters = self._sharded_parameters()
        self.optimizer = None
        if optim_config is not None:
            self.optimizer = ShardedAdamW(self.trained, optim_config, self.shard_group)
        self.interleave: Interleave = lambda: None  # other work of the process, done between micro-batches
        self._forward_arguments: dict[str, Any] = {}
        self._saving: Future[Any] | None = None
        self._save_group: dist.ProcessGroup | None = None  # of its own: its thread must not meet training's collectives

    # -- building ----------------------------------------------------------------------------------------------------

    def _build_policy(self, build_network: NetworkBuilder) -> EngineNetwork:
        trains = self.optim_config is not None
        master_dtype = torch.float32 if trains else self.param_dtype
        policy = build_network(
            BuildArguments(
                compute_dtype=self.param_dtype,
                dtype=master_dtype,
                trains=trains,
                with_weights=dist.get_rank() == 0,
                device=self.device,
            )
        )
        if not trains:
            policy.requires_grad_(False)
        full = {name: parameter.detach() for name, parameter in policy.named_parameters()}
        self._shard(policy, master_dtype)
        if dist.get_world_size() > 1:
            fill_shards(dict(policy.named_parameters()), full if dist.get_rank() == 0 else {}, self.device)
            for buffer in saved_buffers(policy).values():
                dist.broadcast(buffer, src=0)
        return policy

    def _shard(self, policy: EngineNetwork, master_dtype: torch.dtype) -> None:
        """fully_shard on each block that is large enough, then on the whole."""
        reduce_dtype = compute_dtype(self.fsdp_config.mixed_precision.reduce_dtype, self.device)
        arguments: dict[str, Any] = {
            "mesh": self.mesh,
            "reshard_after_forward": self.fsdp_config.reshard_after_forward,
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=None if self.param_dtype == master_dtype or not policy.is_cast else self.param_dtype,
                reduce_dtype=None if reduce_dtype == self.param_dtype else reduce_dtype,
            ),
        }
        least = self.fsdp_config.wrap_policy.min_num_params
        for block in policy.blocks():
            if sum(parameter.numel() for parameter in block.parameters()) >= max(1, least):
                fully_shard(block, **arguments)
        fully_shard(policy, **arguments)
        for module in self._fsdp_modules(policy):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no scaled sum

    @staticmethod
    def _fsdp_modules(policy: nn.Module) -> list[FSDPModule]:
        return [module for module in policy.modules() if isinstance(module, FSDPModule)]

    def _sharded_parameters(self) -> dict[str, DTensor]:
        """Parameters by the network's own name, tied ones once; DTensors: nothing is gathered outside a forward."""
        self._reshard()
        parameters = {name.removeprefix(self.policy.prefix): value for name, value in self.policy.named_parameters()}
        assert all(isinstance(value, DTensor) for value in parameters.values())
        return parameters  # type: ignore[return-value]

    @property
    def trained(self) -> dict[str, DTensor]:
        """The parameters that learn: all, or an adapter's."""
        return {name: value for name, value in self.parameters.items() if value.requires_grad}

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """See `saved_buffers`, by the network's own names."""
        return {name.removeprefix(self.policy.prefix): value for name, value in saved_buffers(self.policy).items()}

    @property
    def _state(self) -> dict[str, torch.Tensor]:
        """What a checkpoint has of the network; an adapter's base model stays where it is."""
        return dict(self.trained) if self.policy.adapter is not None else {**self.parameters, **self.buffers}

    def _reshard(self) -> None:
        for module in self._fsdp_modules(self.policy):
            module.reshard()

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """The ranks over which one copy of the weights is spread."""
        return self.mesh.get_group(self.mesh.ndim - 1)

    # -- training and inference ----------------------------------------------------------------------------------------

    def train(self, data: DataProto, loss_fn: LossFunction, **forward_arguments: Any) -> dict[str, Metric]:
        """Trains on a planned batch, one optimizer step per mini-batch; the learning rate advances once per call.

        loss_fn: (micro-batch, outputs (b, R) by name) -> (loss, metrics). forward_arguments: of the policy's forward.
        Metrics: the loss's own, grad_norm, lr.
        """
        if self.optimizer is None:
            raise ValueError("this engine was built without an optimizer and cannot train")
        self.move_in_optimizer()
        self.policy.train()
        self._forward_arguments = forward_arguments
        with self._kernels(True):
            metrics = train_epochs(self, data, loss_fn, self._run_interleaved)
        metrics["lr"] = Metric.last(self.lr)
        self.scheduler_step += 1
        return metrics

    def infer(self, data: DataProto, **forward_arguments: Any) -> dict[str, torch.Tensor]:
        """The policy's outputs by name, (n, R) on the CPU, of a planned batch; zero in padding rows.

        forward_arguments: of the policy's forward.
        """
        self.policy.eval()
        self._forward_arguments = forward_arguments
        with self._kernels(True):
            outputs = infer_batch(self, data, self._run_interleaved)
        self._reshard()
        return outputs

    def _run_interleaved(self) -> None:
        with self._kernels(False):  # vLLM's sampler has operations without a deterministic kernel
            self.interleave()

    def _kernels(self, repeat: bool) -> AbstractContextManager[None]:
        """Where the engine is not deterministic, torch stays as the user has set it."""
        return deterministic_kernels(repeat) if self.deterministic else nullcontext()

    def adapter_off(self) -> AbstractContextManager[None]:
        """Inside, the policy is the base model that its adapter started from."""
        return adapter_off(self.policy)

    @property
    def lr(self) -> float:
        """Learning rate of the current training step."""
        assert self.optim_config is not None
        return self.optim_config.lr * lr_factor(self.scheduler_step, self.optim_config, self.total_training_steps)

    def forward(self, micro_batch: DataProto) -> tuple[dict[str, torch.Tensor], bool]:
        """Outputs (b, ...) of one micro-batch, and whether any entry counts (see `workers.update`)."""
        inputs, is_counting = self.policy.prepare_inputs(micro_batch, self.device)
        micro_batch.to(self.device)
        return self.policy(inputs, **self._forward_arguments), is_counting

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        """Adds the gradients of `loss`. They are summed over the ranks on the last micro-batch of a mini-batch, or on
        each."""
        root = self.policy
        assert isinstance(root, FSDPModule)
        root.set_requires_gradient_sync(is_last or bool(self.fsdp_config.reduce_every_micro_batch))
        root.set_is_last_backward(is_last)
        if not self.fsdp_config.reshard_after_forward:
            root.set_reshard_after_backward(is_last)
        loss.backward()

    def optimizer_step(self) -> dict[str, Metric]:
        """Clips and updates from the accumulated gradients."""
        assert self.optimizer is not None
        return self.optimizer.step(self.lr)

    # -- weights out, checkpoints, memory ------------------------------------------------------------------------------

    def full_params(self, bucket_bytes: int = 512 << 20) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter whole, in the compute dtype, under the network's own name, tied ones once; and the buffers
        that are saved. All ranks call it.

        bucket_bytes: full tensors gathered at one time; an adapter is held whole beside them, and merged. A tensor may
        share memory with the engine's own parameters: use or copy it before the next training step.
        """
        yield from self.buffers.items()
        if self.policy.adapter is None:
            yield from gather_full(self.parameters, self.param_dtype, self.shard_group, bucket_bytes)
            return
        learnt = self.trained
        adapter = dict(gather_full(learnt, torch.float32, self.shard_group, bucket_bytes))
        frozen = {name: value for name, value in self.parameters.items() if name not in learnt}
        base = gather_full(frozen, self.param_dtype, self.shard_group, bucket_bytes)
        with torch.no_grad():
            yield from merged(base, adapter, scale_of(self.policy.adapter))

    def save(self, path: str, *, background: bool = False) -> None:
        """Writes model, optimizer, schedule and random states under `path`, with what the network adds.

        background: returns when model and optimizer are copied to the host (once more in its memory); `finish_save`
        waits for their files, which training may go on beside.
        """
        self.finish_save()
        self.move_in_optimizer()
        Path(path).mkdir(parents=True, exist_ok=True)
        if background:
            self._save_group = self._save_group or dist.new_group(backend="gloo")
        group = self._save_group if background else None
        self._saving = checkpoint.save(path, self._state, self.optimizer, self.scheduler_step, group)
        checkpoint.save_random_state(path, dist.get_rank())
        if dist.get_rank() == 0:
            self.policy.save_assets(path)
        dist.barrier()

    def finish_save(self) -> None:
        """Waits for a save in the background, if there is one; raises what went wrong with it."""
        saving, self._saving = self._saving, None
        if saving is not None:
            with checkpoint.naming_the_cause():
                saving.result()

    def load(self, path: str) -> None:
        """Reads what `save` wrote, on any number of ranks."""
        self.move_in_optimizer()
        self.scheduler_step = checkpoint.load(path, self._state, self.optimizer)
        checkpoint.load_random_state(path, dist.get_rank())

    def move_in(self) -> None:
        """Parameters on the device. Optimizer state comes when it is used: in `train`, `save` and `load`."""
        self._move_params(self.device)

    def move_in_optimizer(self) -> None:
        """Optimizer state on the device."""
        if self.optimizer is not None:
            self.optimizer.to(self.device)

    def move_out(self) -> None:
        """To the host what the settings let go there: parameters (param_offload), optimizer state
        (optimizer_offload)."""
        self.move_out_optimizer()
        if self.fsdp_config.param_offload:
            self._move_params(torch.device("cpu"))

    def move_out_optimizer(self) -> None:
        """Optimizer state to the host if optimizer_offload is set."""
        if self.optimizer is not None and self.fsdp_config.optimizer_offload:
            self.optimizer.to(torch.device("cpu"))
            empty_cache()

    def _move_params(self, device: torch.device) -> None:
        if next(iter(self.parameters.values())).device.type == device.type:
            return
        self.policy.to(device)
        self.parameters = self._sharded_parameters()
        if self.optimizer is not None:
            self.optimizer.bind(self.trained)
        empty_cache()


def ensure_process_group(device: torch.device) -> None:
    """A group of this process alone, where nobody made one: FSDP2 wants a group even for one rank."""
    if not dist.is_initialized():
        dist.init_process_group(dist_backend(device), store=dist.HashStore(), rank=0, world_size=1)


def shard_mesh(device: torch.device, fsdp_size: int | None) -> DeviceMesh:
    """All ranks in one dimension, or replicas x shards where fsdp_size ranks share one copy. ValueError if it does
    not divide."""
    world = dist.get_world_size()
    if fsdp_size is None or fsdp_size < 0 or fsdp_size >= world:
        return init_device_mesh(device.type, (world,), mesh_dim_names=("shard",))
    if fsdp_size == 0 or world % fsdp_size:
        divisors = [size for size in range(1, world + 1) if world % size == 0]
        raise ValueError(f"fsdp_config.fsdp_size={fsdp_size}: expected -1 or one of {divisors} ({world} ranks)")
    return init_device_mesh(device.type, (world // fsdp_size, fsdp_size), mesh_dim_names=("replicate", "shard"))
