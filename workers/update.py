"""The loop over mini-batches and micro-batches, shared by actor and critic; the loss is passed in.

The driver planned the batch (`verl_lite.seqlen_balance`): columns say to which mini-batch and micro-batch each row
belongs in each epoch, `meta_info["schedule"]` how many there are and what the losses divide by. Ranks obey: all run
the same number of micro-batches, some of them perhaps empty.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from verl_lite.metrics import Metric, combine, to_host
from verl_lite.protocol import DataProto

# (micro-batch, outputs of the forward with gradient) -> (loss to be summed over micro-batches and ranks, metrics)
LossFunction = Callable[[DataProto, dict[str, torch.Tensor]], tuple[torch.Tensor, dict[str, Metric]]]


class TrainableEngine(Protocol):
    """What the loops need of an engine."""

    def forward(self, micro_batch: DataProto) -> tuple[dict[str, torch.Tensor], bool]:
        """Outputs (b, ...) by name, and whether any of their entries counts."""
        ...

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        """Adds gradients; on the last micro-batch of a mini-batch also sums them over ranks."""
        ...

    def optimizer_step(self) -> dict[str, Metric]:
        """One update from the accumulated gradients."""
        ...


Interleave = Callable[[], None]
"""Called after each forward and backward pass and each optimizer step: other work that the process does meanwhile."""


def train_epochs(
    engine: TrainableEngine, data: DataProto, loss_fn: LossFunction, interleave: Interleave = lambda: None
) -> dict[str, Metric]:
    """One optimizer step per mini-batch, in the planned order, over all planned epochs. Returns combined metrics.

    A mini-batch in which no token counts on any rank (all rewards failed, all samples rejected) is no step: weights,
    moments and their decay stay as they are. empty_mini_batch_frac says how many of the mini-batches were such.
    """
    metrics: list[Mapping[str, Metric]] = []
    for epoch, mini_batches in enumerate(data.meta_info["schedule"]):
        for mini_index, mini_batch in enumerate(mini_batches):
            counts = {"num_tokens": mini_batch.num_tokens, "num_sequences": mini_batch.num_sequences}
            is_empty = mini_batch.num_tokens == 0
            metrics.append({"empty_mini_batch_frac": Metric.mean(float(is_empty), 1)})
            if is_empty:
                continue
            for micro_index in range(mini_batch.num_micro_batches):
                _, micro_batch = _micro_batch(data, epoch, mini_index, micro_index, counts)
                outputs, counting = engine.forward(micro_batch)
                if counting:
                    loss, parts = loss_fn(micro_batch, outputs)
                    metrics.append(parts)
                else:  # nothing to train here, but the other ranks wait for this one's backward
                    loss = sum((0.0 * output.sum() for output in outputs.values()), start=torch.zeros(()))
                engine.backward(loss, is_last=micro_index == mini_batch.num_micro_batches - 1)
                interleave()
            metrics.append(engine.optimizer_step())
            interleave()
    return combine(to_host(metrics))


@torch.no_grad()
def infer_batch(
    engine: TrainableEngine, data: DataProto, interleave: Interleave = lambda: None
) -> dict[str, torch.Tensor]:
    """The forward's outputs (n, ...) for all rows in their order, zero where nothing was predicted; on the CPU."""
    results: dict[str, torch.Tensor] = {}
    [mini_batches] = data.meta_info["schedule"]
    for mini_index, mini_batch in enumerate(mini_batches):
        for micro_index in range(mini_batch.num_micro_batches):
            rows, micro_batch = _micro_batch(data, 0, mini_index, micro_index, {})
            outputs, _ = engine.forward(micro_batch)
            for name, values in outputs.items():
                if name not in results:
                    results[name] = torch.zeros(len(data), *values.shape[1:], dtype=values.dtype)
                results[name][rows] = values.cpu()
            interleave()
    return results


def _micro_batch(
    data: DataProto, epoch: int, mini_index: int, micro_index: int, counts: dict[str, int]
) -> tuple[torch.Tensor, DataProto]:
    """Indices of this rank's rows of one micro-batch, perhaps none; and these rows, with the mini-batch's global
    denominators in meta_info."""
    chosen = (data.batch["mini_batch"][:, epoch] == mini_index) & (data.batch["micro_batch"][:, epoch] == micro_index)
    rows = chosen.nonzero().squeeze(1)
    columns = {name: column[rows.numpy()] for name, column in data.non_tensor_batch.items()}
    meta_info = {name: value for name, value in data.meta_info.items() if name != "schedule"} | counts
    return rows, DataProto(data.batch[rows], columns, meta_info)
