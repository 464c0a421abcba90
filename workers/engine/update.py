"""The loop over mini-batches and micro-batches, shared by all learners; the loss is an argument.

The driver plans the batch (`verl_lite.seqlen_balance`). Columns contain the mini-batch and the micro-batch of each row
in each epoch, and `meta_info["schedule"]` has the number of micro-batches and the denominators of the losses. All ranks
run the same number of micro-batches, some of which may be empty.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from verl_lite.machine.profiling import span
from verl_lite.metrics import Metric, combine, to_host
from verl_lite.protocol import DataProto
from verl_lite.seqlen_balance import MiniBatch

# (micro-batch, outputs of the forward with gradient) -> (loss to be summed over micro-batches and ranks, metrics)
LossFunction = Callable[[DataProto, dict[str, torch.Tensor]], tuple[torch.Tensor, dict[str, Metric]]]


class TrainableEngine(Protocol):
    """The interface of an engine that the loops need."""

    def forward(self, micro_batch: DataProto) -> tuple[dict[str, torch.Tensor], bool]:
        """Returns outputs (b, ...) by name, and True if any of their entries counts."""
        ...

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        """Accumulates gradients; on the last micro-batch of a mini-batch also sums them over ranks."""
        ...

    def optimizer_step(self) -> dict[str, Metric]:
        """Updates the parameters with the accumulated gradients. Returns metrics."""
        ...


Interleave = Callable[[], None]
"""A function with other work of the process, called after the passes of each micro-batch and each optimizer step."""


def train_epochs(
    engine: TrainableEngine,
    data: DataProto,
    loss_fn: LossFunction,
    interleave: Interleave = lambda: None,
) -> dict[str, Metric]:
    """Runs one optimizer step per mini-batch, in the planned order, over all planned epochs.

    A mini-batch in which no token counts on any rank (all rewards failed, all samples rejected) is skipped: weights and
    moments do not change, not even by decay.

    Args:
        engine: the engine that trains.
        data: this rank's part of a planned batch.
        loss_fn: computes the loss of a micro-batch.
        interleave: other work of the process; see `Interleave`.

    Returns:
        The metrics of the losses and of the optimizer, combined over all micro-batches, and empty_mini_batch_frac, the
        share of skipped mini-batches.
    """
    metrics: list[Mapping[str, Metric]] = []
    for epoch, mini_batches in enumerate(data.meta_info["schedule"]):
        for mini_index, mini_batch in enumerate(mini_batches):
            # counted over all ranks, so that all of them skip the mini-batch
            is_empty = mini_batch.num_tokens == 0
            metrics.append({"empty_mini_batch_frac": Metric.mean(float(is_empty), 1)})
            if is_empty:
                continue

            last_index = mini_batch.num_micro_batches - 1
            for micro_index in range(mini_batch.num_micro_batches):
                with span("micro_batch"):
                    rows = _rows_of(data, epoch, mini_index, micro_index)
                    micro_batch = _select(data, rows, mini_batch)
                    loss_metrics = _train_on(engine, micro_batch, loss_fn, is_last=micro_index == last_index)
                metrics.append(loss_metrics)
                interleave()
            with span("optimizer_step"):
                optimizer_metrics = engine.optimizer_step()
            metrics.append(optimizer_metrics)
            interleave()
    # one copy to the host for all of them: a copy for each micro-batch would wait for its passes
    return combine(to_host(metrics))


def _train_on(
    engine: TrainableEngine,
    micro_batch: DataProto,
    loss_fn: LossFunction,
    *,
    is_last: bool,
) -> Mapping[str, Metric]:
    """Accumulates the gradients of one micro-batch. Returns the metrics of the loss."""
    outputs, is_counting = engine.forward(micro_batch)
    if is_counting:
        loss, metrics = loss_fn(micro_batch, outputs)
        engine.backward(loss, is_last=is_last)
        return metrics

    # no loss on this rank, but the other ranks wait for its backward, which must reach every parameter
    zero = torch.zeros(())
    for output in outputs.values():
        zero = zero + 0.0 * output.sum()
    engine.backward(zero, is_last=is_last)
    return {}


@torch.no_grad()
def infer_batch(
    engine: TrainableEngine, data: DataProto, interleave: Interleave = lambda: None
) -> dict[str, torch.Tensor]:
    """Returns the outputs (n, ...) of the forward by name for all rows in order, zero at tokens that are not predicted;
    on the CPU."""
    results: dict[str, torch.Tensor] = {}
    # a single epoch
    [mini_batches] = data.meta_info["schedule"]
    for mini_index, mini_batch in enumerate(mini_batches):
        for micro_index in range(mini_batch.num_micro_batches):
            with span("micro_batch"):
                # an empty micro-batch runs, too: all ranks take part in the forward's collectives
                rows = _rows_of(data, 0, mini_index, micro_index)
                micro_batch = _select(data, rows)
                outputs, _ = engine.forward(micro_batch)
                for name, values in outputs.items():
                    if name not in results:
                        shape = (len(data), *values.shape[1:])
                        results[name] = torch.zeros(shape, dtype=values.dtype)
                    results[name][rows] = values.cpu()
            interleave()
    return results


def _rows_of(data: DataProto, epoch: int, mini_index: int, micro_index: int) -> torch.Tensor:
    """Returns the indices of this rank's rows of one micro-batch, possibly none."""
    mini_batch_of_row = data.batch["mini_batch"][:, epoch]
    micro_batch_of_row = data.batch["micro_batch"][:, epoch]
    is_selected = (mini_batch_of_row == mini_index) & (micro_batch_of_row == micro_index)
    return is_selected.nonzero().squeeze(1)


def _select(data: DataProto, rows: torch.Tensor, mini_batch: MiniBatch | None = None) -> DataProto:
    """Selects rows, with the global denominators of a mini-batch, if given, in meta_info."""
    row_numbers = rows.numpy()
    arrays = {}
    for name, column in data.non_tensor_batch.items():
        arrays[name] = column[row_numbers]
    meta_info = dict(data.meta_info)
    del meta_info["schedule"]
    # not counted here: no rank has the rows of the others
    if mini_batch is not None:
        meta_info["num_tokens"] = mini_batch.num_tokens
        meta_info["num_sequences"] = mini_batch.num_sequences
        meta_info["num_distilled"] = mini_batch.num_distilled
    return DataProto(data.batch[rows], arrays, meta_info)
