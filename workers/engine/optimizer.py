"""AdamW on the local shards of the parameters, clipping by the global gradient norm, and the learning-rate schedule.

FSDP keeps each parameter as a DTensor. The element-wise update needs only this rank's shard, so the optimizer works on
plain local tensors without DTensor dispatch, and wraps its state as DTensors for writing and reading checkpoints.
"""

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from verl_lite.config import OptimConfig
from verl_lite.metrics import Metric
from verl_lite.profiling import count_moved


class ShardedAdamW:
    """AdamW (decoupled weight decay, Loshchilov and Hutter 2019) on this rank's shards.

    Moments have the dtype of the parameters, fp32. `to` moves them to the host between updates. parameters: sharded
    parameters by name. shard_group: process group of the ranks that together hold one copy of the parameters.
    """

    def __init__(self, parameters: Mapping[str, DTensor], config: OptimConfig, shard_group: dist.ProcessGroup) -> None:
        self.config, self.shard_group = config, shard_group
        self.bind(parameters)
        self.exp_avg = [torch.zeros_like(shard) for shard in self.shards]
        self.exp_avg_sq = [torch.zeros_like(shard) for shard in self.shards]
        self.steps_taken = 0

    def bind(self, parameters: Mapping[str, DTensor]) -> None:
        """Replaces the references to the parameters, for example after they moved to another device."""
        self.parameters = parameters
        with torch.no_grad():
            self.shards = [parameter.to_local() for parameter in parameters.values()]

    def step(self, lr: float) -> dict[str, Metric]:
        """Clips the gradients, updates the parameters and clears the gradients.

        If the gradient norm is not finite, the step is skipped: parameters and moments do not change. Returns grad_norm
        (before clipping, mean over the steps taken) and grad_norm_nonfinite (share of skipped steps). Raises ValueError
        if a parameter has no gradient.
        """
        gradients = []
        for name, parameter in self.parameters.items():
            if not isinstance(parameter.grad, DTensor):
                raise ValueError(f"parameter {name} got no gradient; the forward must use every trained parameter")
            gradients.append(parameter.grad.to_local())
        square = torch.nn.utils.get_total_norm(gradients).float().square()  # of this rank only, before the all-reduce
        if dist.get_world_size(self.shard_group) > 1:
            dist.all_reduce(square, group=self.shard_group)
        norm = math.sqrt(square.item()) if square.isfinite() else math.nan
        finite = math.isfinite(norm)
        if finite:
            self._update(gradients, norm, lr)
        self.zero_grad()
        return {
            "grad_norm": Metric.mean(norm if finite else 0.0, float(finite)),
            "grad_norm_nonfinite": Metric.mean(float(not finite), 1),
        }

    @torch.no_grad()
    def _update(self, gradients: list[torch.Tensor], norm: float, lr: float) -> None:
        config = self.config
        if norm > config.clip_grad > 0:
            torch._foreach_mul_(gradients, config.clip_grad / (norm + 1e-6))
        beta1, beta2 = config.betas
        # if a parameter has fewer rows than there are ranks, its shard is empty on some ranks
        filled = [index for index, shard in enumerate(self.shards) if shard.numel()]
        device = self.shards[0].device
        counters = [torch.tensor(float(self.steps_taken), device=device) for _ in filled]
        adamw(
            [self.shards[index] for index in filled],
            [gradients[index] for index in filled],
            [self.exp_avg[index] for index in filled],
            [self.exp_avg_sq[index] for index in filled],
            [],
            counters,
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=lr,
            weight_decay=config.weight_decay,
            eps=config.eps,
            maximize=False,
        )
        self.steps_taken += 1

    def zero_grad(self) -> None:
        """Sets all gradients to None."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def to(self, device: torch.device) -> None:
        """Moves the moments, but not the parameters, to `device`."""
        moments = self.exp_avg + self.exp_avg_sq
        count_moved(sum(tensor.nbytes for tensor in moments if tensor.device.type != device.type))
        self.exp_avg = [tensor.to(device, non_blocking=device.type == "cuda") for tensor in self.exp_avg]
        self.exp_avg_sq = [tensor.to(device, non_blocking=device.type == "cuda") for tensor in self.exp_avg_sq]

    def moments(self) -> dict[str, DTensor]:
        """The moments as DTensors that share this rank's memory, by the names exp_avg.NAME and exp_avg_sq.NAME."""
        result = {}
        for kind, tensors in (("exp_avg", self.exp_avg), ("exp_avg_sq", self.exp_avg_sq)):
            for (name, parameter), tensor in zip(self.parameters.items(), tensors, strict=True):
                result[f"{kind}.{name}"] = DTensor.from_local(
                    tensor,
                    parameter.device_mesh,
                    parameter.placements,
                    run_check=False,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
        return result


def lr_factor(step: int, config: OptimConfig, total_steps: int) -> float:
    """Learning rate at `step` (number of training steps completed before this one) divided by the peak learning rate.

    The schedule is a linear warm-up that reaches the peak at its last step (verl's warm-up starts with a step of
    learning rate 0), followed by a constant rate or by a cosine that ends with min_lr_ratio at total_steps.
    """
    warmup = config.lr_warmup_steps if config.lr_warmup_steps >= 0 else int(config.lr_warmup_steps_ratio * total_steps)
    if step < warmup:
        return (step + 1) / warmup
    if config.lr_scheduler_type == "constant":
        return 1.0
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    wave = 0.5 * (1.0 + math.cos(math.pi * config.num_cycles * 2.0 * progress))
    return config.min_lr_ratio + (1.0 - config.min_lr_ratio) * max(0.0, wave)
