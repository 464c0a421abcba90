"""The training engine: a network sharded by FSDP2, its optimizer, training, and inference (log-probs, values).

The same code runs on one process or many, with gloo on CPUs and NCCL on GPUs. Gradients are summed over ranks, not
averaged, because losses are already divided by the global denominators. Within a mini-batch gradients stay local until
the last micro-batch, so that one optimizer step costs one reduction; `reduce_every_micro_batch` reduces after each
micro-batch to save memory.
"""

from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from verl_lite.config import FSDPConfig, OptimConfig
from verl_lite.errors import UserError
from verl_lite.machine.device import (
    compute_dtype,
    deterministic_kernels,
    dist_backend,
    empty_cache,
    keep_freed_memory,
    release_freed_memory,
)
from verl_lite.machine.profiling import count_moved
from verl_lite.machine.random_state import seed_random_state
from verl_lite.metrics import Metric
from verl_lite.protocol import DataProto
from workers.engine import checkpoint
from workers.engine.lora import adapter_off, merged, scale_of
from workers.engine.network import BuildArguments, EngineNetwork, NetworkBuilder
from workers.engine.optimizer import ShardedAdamW, ShardedMuon, hidden_matrices, lr_factor
from workers.engine.parameters import WholeWeights, fill_shards, gather_full, saved_buffers
from workers.engine.update import Interleave, LossFunction, infer_batch, train_epochs


class FSDPEngine:
    """A sharded network with methods for training, inference, checkpoints and offloading.

    All ranks of the default process group construct the engine together; without a group the engine creates one with a
    single rank. Trained parameters are stored in fp32, frozen parameters in the compute dtype.

    Args:
        build_network: see `workers.engine.network`.
        fsdp_config: sharding, precision and offload.
        optim_config: options of the optimizer; None for a frozen model.
        device: the device of this rank.
        total_training_steps: number of calls of `train` in the whole run, for the learning-rate schedule.
        seed: seed of the random generators of this process.
        deterministic: see `verl_lite.machine.device.deterministic_kernels`.
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
        self.fsdp_config = fsdp_config
        self.optim_config = optim_config
        self.device = device
        self.total_training_steps = total_training_steps
        self.scheduler_step = 0
        self.param_dtype = compute_dtype(fsdp_config.mixed_precision.param_dtype, device)
        keep_freed_memory(device)
        ensure_process_group(device)
        self.mesh = shard_mesh(device, fsdp_config.fsdp_size)
        seed_random_state(seed)

        self.policy = self._build_policy(build_network)
        # the result of `whole_params`, as long as the parameters stay where they are
        self._whole: WholeWeights | None = None
        self.parameters = self._sharded_parameters()
        self.optimizer = None
        if optim_config is not None:
            self.optimizer = self._build_optimizer(optim_config)

        # other work of this process, called between micro-batches
        self.interleave: Interleave = lambda: None
        self._forward_arguments: dict[str, object] = {}
        self._saving: Future[object] | None = None
        # a separate group, because the collectives of the saving thread must not mix with those of training
        self._save_group: dist.ProcessGroup | None = None

    # -- building ----------------------------------------------------------------------------------------------------

    def _build_policy(self, build_network: NetworkBuilder) -> EngineNetwork:
        """Builds the network, shards it, and copies the weights of rank 0 to all ranks."""
        trains = self.optim_config is not None
        is_first_rank = dist.get_rank() == 0
        # small updates would be lost in bf16
        master_dtype = torch.float32 if trains else self.param_dtype
        arguments = BuildArguments(
            compute_dtype=self.param_dtype,
            dtype=master_dtype,
            trains=trains,
            with_weights=is_first_rank,
            device=self.device,
        )
        policy = build_on_all_ranks(build_network, arguments)
        if not trains:
            policy.requires_grad_(False)

        # before sharding: `fully_shard` changes the names of the classes, by which a network finds its blocks
        self._blocks = policy.blocks()
        # before sharding, which replaces the parameters; those of the other ranks are not initialised
        full_parameters = {}
        if is_first_rank:
            full_parameters = {name: parameter.detach() for name, parameter in policy.named_parameters()}
        self._shard(policy, master_dtype)
        # on a CPU, freed memory would grow with every layer of a pass, see `release_freed_memory`
        if self.device.type == "cpu":
            for block in self._blocks:
                block.register_forward_pre_hook(_release_before_layer)

        if dist.get_world_size() > 1:
            sharded_parameters = dict(policy.named_parameters())
            fill_shards(sharded_parameters, full_parameters, self.device)
            for buffer in saved_buffers(policy).values():
                dist.broadcast(buffer, src=0)
        return policy

    def _shard(self, policy: EngineNetwork, master_dtype: torch.dtype) -> None:
        """Applies `fully_shard` to each block with at least `min_num_params` parameters, then to the whole network."""
        # None: FSDP neither casts the parameters nor the gradients
        cast_dtype = None
        if policy.is_cast and self.param_dtype != master_dtype:
            cast_dtype = self.param_dtype
        mixed_precision = self.fsdp_config.mixed_precision
        reduce_dtype: torch.dtype | None = compute_dtype(mixed_precision.reduce_dtype, self.device)
        # None: gradients are reduced in the dtype in which the backward pass computes them
        if reduce_dtype == self.param_dtype:
            reduce_dtype = None
        precision = MixedPrecisionPolicy(param_dtype=cast_dtype, reduce_dtype=reduce_dtype)
        reshards = self.fsdp_config.reshard_after_forward

        # at least 1: a block without parameters has nothing to shard
        min_num_params = max(1, self.fsdp_config.wrap_policy.min_num_params)
        # the network after its blocks: FSDP puts the parameters that are left into the group of the outer module
        for block in self._blocks:
            num_params = sum(parameter.numel() for parameter in block.parameters())
            if num_params >= min_num_params:
                fully_shard(block, mesh=self.mesh, reshard_after_forward=reshards, mp_policy=precision)
        fully_shard(policy, mesh=self.mesh, reshard_after_forward=reshards, mp_policy=precision)

        # the losses are divided by the counts over all ranks, so that their gradients are added and not averaged
        for module in self._fsdp_modules(policy):
            # not on a single rank, which has no mean to replace: FSDP would divide a copy of its gradients by 1
            if dist.get_world_size() > 1:
                module.set_gradient_divide_factor(1.0)
            # otherwise FSDP implements the factor by a scaled sum (PREMUL_SUM), which gloo does not have
            module.set_force_sum_reduction_for_comms(True)

    def _build_optimizer(self, config: OptimConfig) -> ShardedAdamW:
        trained = self.trained
        if config.optimizer == "muon":
            matrices = hidden_matrices(self._blocks, trained)
            return ShardedMuon(trained, config, self.shard_group, matrices)
        return ShardedAdamW(trained, config, self.shard_group)

    @staticmethod
    def _fsdp_modules(policy: nn.Module) -> list[FSDPModule]:
        return [module for module in policy.modules() if isinstance(module, FSDPModule)]

    def _sharded_parameters(self) -> dict[str, DTensor]:
        """Returns the sharded parameters by the network's own names. A tied parameter appears once.

        Called again after a move, which replaces the tensors that `_whole` refers to.
        """
        self._whole = None
        # until then, gathered weights take the place of the shards among the network's parameters
        self._reshard()
        parameters: dict[str, DTensor] = {}
        for name, parameter in self.policy.named_parameters():
            assert isinstance(parameter, DTensor)
            parameters[name.removeprefix(self.policy.prefix)] = parameter
        return parameters

    @property
    def trained(self) -> dict[str, DTensor]:
        """The trained parameters: all parameters, or those of the adapter."""
        return {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}

    @property
    def _frozen(self) -> dict[str, DTensor]:
        """The parameters that are not trained."""
        return {name: parameter for name, parameter in self.parameters.items() if not parameter.requires_grad}

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """The persistent buffers (`saved_buffers`) by the names of the network, without the prefix of the policy."""
        saved = saved_buffers(self.policy)
        return {name.removeprefix(self.policy.prefix): buffer for name, buffer in saved.items()}

    @property
    def _state(self) -> dict[str, torch.Tensor]:
        """The tensors of the network that a checkpoint contains: the adapter's parameters, or all parameters and
        buffers."""
        if self.policy.adapter is not None:
            return dict(self.trained)
        state: dict[str, torch.Tensor] = dict(self.parameters)
        state.update(self.buffers)
        return state

    def _reshard(self) -> None:
        for module in self._fsdp_modules(self.policy):
            module.reshard()

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """The process group of the ranks that together hold one copy of the weights."""
        return self.mesh.get_group(self.mesh.ndim - 1)

    # -- training and inference ----------------------------------------------------------------------------------------

    def train(self, data: DataProto, loss_fn: LossFunction, **forward_arguments: object) -> dict[str, Metric]:
        """Trains on a planned batch, one optimizer step per mini-batch; the learning rate advances once per call.

        Args:
            data: a batch of `BatchPlan.apply`.
            loss_fn: (micro-batch, outputs (b, R) by name) -> (loss, metrics).
            forward_arguments: options of the policy's forward.

        Returns:
            The metrics of the loss, grad_norm and lr.
        """
        if self.optimizer is None:
            raise ValueError("this engine was built without an optimizer and cannot train")
        self.move_in_optimizer()
        self.policy.train()
        # the loops call `forward` with a micro-batch alone
        self._forward_arguments = forward_arguments
        with self._kernels(deterministic=True):
            metrics = train_epochs(self, data, loss_fn, self._run_interleaved)
        metrics["lr"] = Metric.last(self.lr)
        # once per training step of the run and not per optimizer step, as `total_training_steps` counts
        self.scheduler_step += 1
        return metrics

    def infer(self, data: DataProto, **forward_arguments: object) -> dict[str, torch.Tensor]:
        """Computes the policy's outputs (n, R) by name for a planned batch, on the CPU, zero in padding rows.

        Args:
            data: a batch of `BatchPlan.apply`.
            forward_arguments: options of the policy's forward.
        """
        self.policy.eval()
        self._forward_arguments = forward_arguments
        with self._kernels(deterministic=True):
            outputs = infer_batch(self, data, self._run_interleaved)
        # no backward pass follows, which would free the gathered weights
        self._reshard()
        return outputs

    def _run_interleaved(self) -> None:
        # some operations of vLLM's sampler have no deterministic kernel
        with self._kernels(deterministic=False):
            self.interleave()

    def _kernels(self, *, deterministic: bool) -> AbstractContextManager[None]:
        """Sets torch's choice of deterministic kernels inside, but only in an engine with `deterministic=True`."""
        return deterministic_kernels(deterministic) if self.deterministic else nullcontext()

    def adapter_off(self) -> AbstractContextManager[None]:
        """Returns a context manager in which the policy computes the outputs of its base model, without the adapter."""
        return adapter_off(self.policy)

    def copy_trained(self) -> dict[str, torch.Tensor]:
        """Returns a copy, on the host, of this rank's shards of the trained parameters."""
        self._reshard()
        copies = {}
        for name, parameter in self.trained.items():
            shard = parameter.to_local().detach()
            copies[name] = shard.to("cpu", copy=True)
        return copies

    @contextmanager
    def trained_replaced(self, shards: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Gives the trained parameters the values of `copy_trained` inside the context. For inference only."""
        current = self.copy_trained()
        self._set_trained(shards)
        try:
            yield
        finally:
            # weights that the inference gathered are those of `shards`
            self._reshard()
            self._set_trained(current)

    @torch.no_grad()
    def _set_trained(self, shards: Mapping[str, torch.Tensor]) -> None:
        for name, parameter in self.trained.items():
            shard = parameter.to_local()
            shard.copy_(shards[name])

    @property
    def lr(self) -> float:
        """Learning rate of the current training step."""
        assert self.optim_config is not None
        factor = lr_factor(self.scheduler_step, self.optim_config, self.total_training_steps)
        return self.optim_config.lr * factor

    def forward(self, micro_batch: DataProto) -> tuple[dict[str, torch.Tensor], bool]:
        """Computes the policy's outputs of one micro-batch, see `TrainableEngine.forward`."""
        inputs, is_counting = self.policy.prepare_inputs(micro_batch, self.device)
        # in place and only now: inputs are arranged on the host, and the loss needs the columns on the device
        micro_batch.to(self.device)
        outputs = self.policy(inputs, **self._forward_arguments)
        return outputs, is_counting

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        """Accumulates the gradients of `loss`. With is_last, or always with `reduce_every_micro_batch`, also sums the
        gradients over the ranks."""
        root = self.policy
        assert isinstance(root, FSDPModule)
        # without a reduction a rank keeps the whole gradients, unsharded, until the last micro-batch
        reduces = is_last or bool(self.fsdp_config.reduce_every_micro_batch)
        root.set_requires_gradient_sync(reduces)
        root.set_is_last_backward(is_last)
        if not self.fsdp_config.reshard_after_forward:
            # the next micro-batch needs the gathered weights again
            root.set_reshard_after_backward(is_last)
        loss.backward()

    def optimizer_step(self) -> dict[str, Metric]:
        """Clips the accumulated gradients and updates the parameters. Returns the optimizer's metrics."""
        assert self.optimizer is not None
        return self.optimizer.step(self.lr)

    # -- weights out, checkpoints, memory ------------------------------------------------------------------------------

    def full_params(self, bucket_bytes: int = 512 << 20) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields every saved buffer and every unsharded parameter, in the compute dtype, with the network's own name.

        Collective. A tied parameter appears once, and an adapter is merged into its base model. A tensor may share
        memory with the engine's parameters: use or copy it before the next training step.

        Args:
            bucket_bytes: size of the full tensors gathered at one time; the full adapter needs additional memory.
        """
        group = self.shard_group
        yield from self.buffers.items()
        if self.policy.adapter is None:
            yield from gather_full(self.parameters, self.param_dtype, group, bucket_bytes)
            return

        # the whole adapter first, because each base weight is merged as soon as it is gathered
        adapter = dict(gather_full(self.trained, torch.float32, group, bucket_bytes))
        base = gather_full(self._frozen, self.param_dtype, group, bucket_bytes)
        scale = scale_of(self.policy.adapter)
        with torch.no_grad():
            yield from merged(base, adapter, scale)

    def whole_params(self) -> WholeWeights | None:
        """Returns the weights of `full_params`, the same object until the parameters move; None if several ranks share
        the parameters or if only an adapter is trained."""
        if self.policy.adapter is not None or dist.get_world_size(self.shard_group) > 1:
            return None
        if self._whole is not None:
            return self._whole

        buffers = self.buffers
        nbytes = sum(buffer.nbytes for buffer in buffers.values())
        parameters = {}
        for name, sharded in self.parameters.items():
            parameter = sharded.to_local().detach()
            parameters[name] = parameter
            nbytes += parameter.numel() * self.param_dtype.itemsize
        self._whole = WholeWeights(buffers, parameters, self.param_dtype, nbytes)
        return self._whole

    def unmerged_params(self, with_base: bool, bucket_bytes: int = 512 << 20) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the adapter's parameters in fp32 with their names in the network. Collective.

        Args:
            with_base: True to yield the buffers and the frozen parameters before them. `policy.adapter.merged` makes
                the weights of `full_params` from both.
            bucket_bytes: size of the full tensors gathered at one time.
        """
        group = self.shard_group
        # the base first: a receiver merges the adapter when it has it whole
        if with_base:
            yield from self.buffers.items()
            yield from gather_full(self._frozen, self.param_dtype, group, bucket_bytes)
        # in fp32, because the receiver adds B A to the base in fp32
        yield from gather_full(self.trained, torch.float32, group, bucket_bytes)

    def save(self, path: str, *, background: bool = False) -> None:
        """Writes model, optimizer, schedule, random states and the network's assets under `path`. Collective.

        Args:
            path: the folder to write.
            background: return as soon as model and optimizer are copied to the host, which needs memory for one more
                copy. The files are written during further training; `finish_save` waits for them.
        """
        # one save at a time: a second copy of the state may not fit on the host
        self.finish_save()
        self.move_in_optimizer()
        Path(path).mkdir(parents=True, exist_ok=True)

        # torch's `async_save` needs a group of the host
        if background and self._save_group is None:
            self._save_group = dist.new_group(backend="gloo")
        group = self._save_group if background else None
        rank = dist.get_rank()
        self._saving = checkpoint.save(path, self._state, self.optimizer, self.scheduler_step, group)
        checkpoint.save_random_state(path, rank)
        if rank == 0:
            self.policy.save_assets(path)
        # when a rank returns, the small files of all ranks are written
        dist.barrier()

    def finish_save(self) -> None:
        """Waits for a running save in the background and raises its error if it failed."""
        # cleared first, so that a failed save raises its error once
        saving = self._saving
        self._saving = None
        if saving is not None:
            with checkpoint.naming_the_cause():
                saving.result()

    def load(self, path: str) -> None:
        """Loads a checkpoint of `save`, which may have been written by another number of ranks."""
        self.move_in_optimizer()
        self.scheduler_step = checkpoint.load(path, self._state, self.optimizer)
        checkpoint.load_random_state(path, dist.get_rank())

    def move_in(self) -> None:
        """Moves the parameters to the device. `train`, `save` and `load` also move the optimizer state there."""
        self._move_params(self.device)

    def move_in_optimizer(self) -> None:
        """Moves the optimizer state to the device."""
        if self.optimizer is not None:
            self.optimizer.to(self.device)

    def move_out(self) -> None:
        """Moves the parameters to the host if `param_offload` is set, and the optimizer state if `optimizer_offload`
        is set."""
        self.move_out_optimizer()
        if self.fsdp_config.param_offload:
            self._move_params(torch.device("cpu"))

    def move_out_optimizer(self) -> None:
        """Moves the optimizer state to the host if `optimizer_offload` is set."""
        if self.optimizer is not None and self.fsdp_config.optimizer_offload:
            self.optimizer.to(torch.device("cpu"))
            empty_cache()

    def _move_params(self, device: torch.device) -> None:
        # all parameters are on one device
        first_parameter = next(iter(self.parameters.values()))
        if first_parameter.device.type == device.type:
            return

        self.policy.to(device)
        self.parameters = self._sharded_parameters()
        moved_bytes = sum(parameter.to_local().nbytes for parameter in self.parameters.values())
        count_moved(moved_bytes)
        # moving replaces the parameters' storage
        if self.optimizer is not None:
            self.optimizer.bind(self.trained)
        # memory that torch caches is missing to the next tenant of the device, such as vLLM
        empty_cache()


def _release_before_layer(*_: object) -> None:
    """Gives freed memory back before a layer computes.

    The layer calls this hook in the forward pass and, with gradient checkpointing, again in the backward pass.
    """
    release_freed_memory()


class _BuildResult(NamedTuple):
    """What a rank tells the others about its network.

    Attributes:
        message: the error that it raised; an empty string if it built the network.
        is_user_error: whether this error is a `UserError`.
        shapes: shapes of its parameters by name.
    """

    message: str
    is_user_error: bool
    shapes: dict[str, tuple[int, ...]]


def build_on_all_ranks(build_network: NetworkBuilder, arguments: BuildArguments) -> EngineNetwork:
    """Builds the network on every rank. Collective.

    If a rank fails, or if its parameters differ from those of rank 0, all ranks raise an error. Without this exchange,
    the others would wait in the next collective for ever.
    """
    if dist.get_world_size() == 1:
        return build_network(arguments)

    policy: EngineNetwork | None = None
    failure: Exception | None = None
    result = _BuildResult("", False, {})
    try:
        policy = build_network(arguments)
        shapes = {name: tuple(parameter.shape) for name, parameter in policy.named_parameters()}
        result = _BuildResult("", False, shapes)
    except UserError as error:
        failure = error
        result = _BuildResult(str(error), True, {})
    except Exception as error:
        failure = error
        result = _BuildResult(f"{type(error).__name__}: {error}", False, {})

    results = [result] * dist.get_world_size()
    dist.all_gather_object(results, result)
    # with its traceback, which the other ranks do not have
    if failure is not None:
        raise failure
    expected_shapes = results[0].shapes
    for rank, other in enumerate(results):
        if other.message and other.is_user_error:
            raise UserError(other.message)
        if other.message:
            raise RuntimeError(f"rank {rank}: {other.message}")
        differing = sorted(expected_shapes.items() ^ other.shapes.items())
        if differing:
            name, shape = differing[0]
            raise RuntimeError(f"rank {rank} built another network than rank 0: they differ in {name} {shape}")
    assert policy is not None
    return policy


def ensure_process_group(device: torch.device) -> None:
    """Creates a process group with this process alone if there is none: FSDP2 needs a group even for one rank."""
    if dist.is_initialized():
        return
    # a store in memory: no port that another process could take or reach
    store = dist.HashStore()
    dist.init_process_group(dist_backend(device), store=store, rank=0, world_size=1)


def shard_mesh(device: torch.device, fsdp_size: int | None) -> DeviceMesh:
    """Returns the device mesh: all ranks in one dimension, or (replicas, shards) if fsdp_size ranks share one copy.

    Raises:
        ValueError: fsdp_size does not divide the number of ranks.
    """
    num_ranks = dist.get_world_size()
    if fsdp_size is None or fsdp_size < 0 or fsdp_size >= num_ranks:
        return init_device_mesh(device.type, (num_ranks,), mesh_dim_names=("shard",))
    if fsdp_size == 0 or num_ranks % fsdp_size > 0:
        divisors = [size for size in range(1, num_ranks + 1) if num_ranks % size == 0]
        raise ValueError(f"fsdp_config.fsdp_size={fsdp_size}: expected -1 or one of {divisors} ({num_ranks} ranks)")

    # shards in the last dimension: consecutive ranks, usually on one machine, gather from each other
    num_replicas = num_ranks // fsdp_size
    return init_device_mesh(device.type, (num_replicas, fsdp_size), mesh_dim_names=("replicate", "shard"))
