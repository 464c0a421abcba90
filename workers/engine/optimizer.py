"""AdamW on the local shards of the parameters, Muon on whole matrices, clipping by the global gradient norm, and the
learning-rate schedule.

FSDP keeps each parameter as a DTensor. The element-wise update needs only this rank's shard, so the optimizer works on
plain local tensors without DTensor dispatch, and wraps its state as DTensors for writing and reading checkpoints.
"""

import math
from collections.abc import Collection, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from verl_lite.config import OptimConfig
from verl_lite.errors import UserError
from verl_lite.machine.profiling import count_moved
from verl_lite.metrics import Metric


class ShardedAdamW:
    """AdamW (decoupled weight decay, Loshchilov and Hutter 2019) on this rank's shards.

    Moments have the dtype of the parameters, fp32. `to` moves them to the host between updates.

    Args:
        parameters: sharded parameters by name.
        config: options of the optimizer.
        shard_group: process group of the ranks that together hold one copy of the parameters.
    """

    def __init__(self, parameters: Mapping[str, DTensor], config: OptimConfig, shard_group: dist.ProcessGroup) -> None:
        self.config = config
        self.shard_group = shard_group
        self.bind(parameters)
        self.exp_avg = [torch.zeros_like(shard) for shard in self.shards]
        adamw_shards = [self.shards[index] for index in self._adamw_indices()]
        self.exp_avg_sq = [torch.zeros_like(shard) for shard in adamw_shards]
        self.steps_taken = 0

    def _adamw_indices(self) -> list[int]:
        """Returns the positions of the parameters that AdamW updates, in the order of exp_avg_sq."""
        return list(range(len(self.shards)))

    def bind(self, parameters: Mapping[str, DTensor]) -> None:
        """Replaces the references to the parameters, for example after they moved to another device."""
        self.parameters = parameters
        with torch.no_grad():
            self.shards = [parameter.to_local() for parameter in parameters.values()]

    def step(self, lr: float) -> dict[str, Metric]:
        """Clips the gradients, updates the parameters and clears the gradients.

        If the gradient norm is not finite, the step is skipped: parameters and moments do not change.

        Returns:
            grad_norm, before clipping, whose mean is over the steps taken; and grad_norm_nonfinite, the share of
            skipped steps.

        Raises:
            ValueError: a parameter has no gradient.
        """
        gradients = []
        for name, parameter in self.parameters.items():
            # an error of the network's forward: leaving the parameter out would hide that it is not trained
            if not isinstance(parameter.grad, DTensor):
                raise ValueError(f"parameter {name} got no gradient; the forward must use every trained parameter")
            gradients.append(parameter.grad.to_local())

        # the squares of the shards' norms add up to the square of the whole norm
        shard_norm = torch.nn.utils.get_total_norm(gradients)
        square = shard_norm.float().square()
        if dist.get_world_size(self.shard_group) > 1:
            dist.all_reduce(square, group=self.shard_group)

        # after the all-reduce all ranks have the same square, and skip the same steps
        norm = 0.0
        is_finite = bool(square.isfinite())
        if is_finite:
            norm = math.sqrt(square.item())
            self._update(gradients, norm, lr)
        # also after a skipped step, whose gradients must not enter the next one
        self.zero_grad()
        return {
            "grad_norm": Metric.mean(norm, float(is_finite)),
            "grad_norm_nonfinite": Metric.mean(float(not is_finite), 1),
        }

    @torch.no_grad()
    def _update(self, gradients: list[torch.Tensor], norm: float, lr: float) -> None:
        clip_grad = self.config.clip_grad
        if norm > clip_grad > 0:
            # with the 1e-6 of torch's clip_grad_norm_
            factor = clip_grad / (norm + 1e-6)
            torch._foreach_mul_(gradients, factor)
        self._update_parameters(gradients, lr)
        self.steps_taken += 1

    def _update_parameters(self, gradients: list[torch.Tensor], lr: float) -> None:
        config = self.config
        beta1, beta2 = config.betas
        device = self.shards[0].device

        shards = []
        shard_gradients = []
        means = []
        squares = []
        steps = []
        for index, square in zip(self._adamw_indices(), self.exp_avg_sq, strict=True):
            # parameters with fewer rows than there are ranks have none on the last ranks
            if square.numel() == 0:
                continue
            shards.append(self.shards[index])
            shard_gradients.append(gradients[index])
            means.append(self.exp_avg[index])
            squares.append(square)
            # `adamw` increments each counter, so that every parameter needs one of its own
            steps.append(torch.tensor(float(self.steps_taken), device=device))

        adamw(
            params=shards,
            grads=shard_gradients,
            exp_avgs=means,
            exp_avg_sqs=squares,
            max_exp_avg_sqs=[],
            state_steps=steps,
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=lr,
            weight_decay=config.weight_decay,
            eps=config.eps,
            maximize=False,
        )

    def zero_grad(self) -> None:
        """Sets all gradients to None."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def to(self, device: torch.device) -> None:
        """Moves the moments, but not the parameters, to `device`."""
        moved_bytes = 0
        for moment in self.exp_avg + self.exp_avg_sq:
            if moment.device.type != device.type:
                moved_bytes += moment.nbytes
        count_moved(moved_bytes)
        # a copy to the host must be complete before the host reads it
        is_async = device.type == "cuda"
        self.exp_avg = [mean.to(device, non_blocking=is_async) for mean in self.exp_avg]
        self.exp_avg_sq = [square.to(device, non_blocking=is_async) for square in self.exp_avg_sq]

    def moments(self) -> dict[str, DTensor]:
        """Returns the moments as DTensors that share this rank's memory, named exp_avg.NAME and exp_avg_sq.NAME."""
        names = list(self.parameters)
        moments = {}
        for name, mean in zip(names, self.exp_avg, strict=True):
            moments[f"exp_avg.{name}"] = self._as_dtensor(name, mean)
        for index, square in zip(self._adamw_indices(), self.exp_avg_sq, strict=True):
            name = names[index]
            moments[f"exp_avg_sq.{name}"] = self._as_dtensor(name, square)
        return moments

    def _as_dtensor(self, name: str, shard: torch.Tensor) -> DTensor:
        """Returns this rank's `shard` as a DTensor that is placed like the parameter `name`."""
        parameter = self.parameters[name]
        return DTensor.from_local(
            shard,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )


class ShardedMuon(ShardedAdamW):
    """Muon (Jordan et al. 2024) for hidden matrices, and AdamW for all other parameters.

    Muon replaces the momentum G of a matrix (m, n) by an approximation of U V^T, where G = U S V^T, computed by torch's
    `torch.optim.Muon`. The update is scaled by 0.2 sqrt(max(m, n)), which gives it the RMS of AdamW's updates, so both
    use the same learning rate and weight decay (Liu et al. 2025, arXiv:2502.16982). The momentum is Nesterov's.
    Every rank gathers the momentum of one matrix at a time and computes the whole update, so the result does not depend
    on the number of ranks. The state of a matrix is a single moment, momentum.NAME in checkpoints.

    Args:
        parameters, config, shard_group: see `ShardedAdamW`.
        matrices: names of the parameters that Muon updates, see `hidden_matrices`.
    """

    def __init__(
        self,
        parameters: Mapping[str, DTensor],
        config: OptimConfig,
        shard_group: dist.ProcessGroup,
        matrices: Collection[str],
    ) -> None:
        self.matrices = frozenset(matrices)
        super().__init__(parameters, config, shard_group)

    def _adamw_indices(self) -> list[int]:
        return [index for index, name in enumerate(self.parameters) if name not in self.matrices]

    def _update_parameters(self, gradients: list[torch.Tensor], lr: float) -> None:
        super()._update_parameters(gradients, lr)
        momentum = self.config.muon_momentum
        decay = 1.0 - lr * self.config.weight_decay
        # one matrix at a time, because the whole matrices of a model do not fit on one rank
        for index, (name, parameter) in enumerate(self.parameters.items()):
            if name not in self.matrices:
                continue
            gradient = gradients[index]
            mean = self.exp_avg[index].lerp_(gradient, 1.0 - momentum)
            nesterov_shard = gradient.lerp(mean, momentum)
            nesterov_momentum = self._as_dtensor(name, nesterov_shard).full_tensor()
            change = _muon_change(nesterov_momentum, lr)

            # every rank has the whole change, of which it keeps its rows: a DTensor without placements is replicated,
            # and its redistribution sends nothing
            replicated = DTensor.from_local(change, parameter.device_mesh, run_check=False)
            own_change = replicated.redistribute(placements=parameter.placements)
            shard = self.shards[index]
            shard.mul_(decay)
            shard.add_(own_change.to_local())

    def moments(self) -> dict[str, DTensor]:
        """Returns the moments as `ShardedAdamW.moments` does, but that of a matrix by the name momentum.NAME."""
        moments = {}
        for key, moment in super().moments().items():
            name = key.removeprefix("exp_avg.")
            if name in self.matrices:
                key = f"momentum.{name}"
            moments[key] = moment
        return moments


def _muon_change(momentum: torch.Tensor, lr: float) -> torch.Tensor:
    """Returns the change of a parameter that torch's Muon makes for `momentum` (m, n), without weight decay."""
    # A step from zero leaves the change in the parameter. Momentum and decay are already applied to the shards.
    change = nn.Parameter(torch.zeros_like(momentum))
    change.grad = momentum
    muon = torch.optim.Muon(
        [change], lr=lr, weight_decay=0.0, momentum=0.0, nesterov=False, adjust_lr_fn="match_rms_adamw"
    )
    muon.step()
    return change.detach()


def hidden_matrices(blocks: Collection[nn.Module], parameters: Mapping[str, DTensor]) -> set[str]:
    """Returns the names of the weights of linear layers in `blocks`, which include neither the embedding nor the output
    layer. Experts in stacked tensors (3-D), norms and biases are not among them.

    Raises:
        UserError: no block has a trained linear layer.
    """
    # by identity: the names in `parameters` lack the policy's prefix
    weights = set()
    for block in blocks:
        for module in block.modules():
            if isinstance(module, nn.Linear):
                weights.add(id(module.weight))
    matrices = {name for name, parameter in parameters.items() if id(parameter) in weights}
    if not matrices:
        raise UserError("optim.optimizer=muon: no layer of this network has a trained torch.nn.Linear; use adamw")
    return matrices


def lr_factor(step: int, config: OptimConfig, total_steps: int) -> float:
    """Returns the learning rate of a step, divided by the peak learning rate.

    The schedule is a linear warm-up that reaches the peak at its last step (verl's warm-up starts with a step of
    learning rate 0), followed by a constant rate or by a cosine that ends with min_lr_ratio at total_steps.

    Args:
        step: number of training steps completed before this one.
        config: options of the schedule.
        total_steps: number of training steps of the run.
    """
    warmup = config.lr_warmup_steps
    # verl's default is negative and leaves the number to the ratio
    if warmup < 0:
        warmup = int(config.lr_warmup_steps_ratio * total_steps)
    if step < warmup:
        return (step + 1) / warmup
    if config.lr_scheduler_type == "constant":
        return 1.0

    num_steps = max(1, total_steps - warmup)
    progress = min(1.0, (step - warmup) / num_steps)
    angle = math.pi * config.num_cycles * 2.0 * progress
    wave = 0.5 * (1.0 + math.cos(angle))
    lowest = config.min_lr_ratio
    return lowest + (1.0 - lowest) * max(0.0, wave)
