"""The order of training prompts: shuffled epochs, sources mixed by weight, or a sampler written by the user.

An order is a batch sampler for the data loader. It yields one list of positions in a `PromptDataset` per step. After
loading a saved state, an order continues exactly where the state was saved. The shares of a mixture are exact, unlike
in `datasets.interleave_datasets`, which draws the source of each row at random.
"""

import copy
import functools
import math
import warnings
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from itertools import islice
from typing import Protocol, TypeGuard

import numpy as np
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from trainer.data.prompts import PromptDataset
from verl_lite.config import DataConfig, PPOConfig
from verl_lite.errors import UserError
from verl_lite.json_types import JsonObject
from verl_lite.protocol import DataProto
from verl_lite.registry import accepts, load_object

OrderState = JsonObject
"""The state of an order in a checkpoint, including that of a user's sampler."""


class Sampler(Protocol):
    """The interface of a class configured with data.sampler.

    The trainer constructs it as `Sampler(data_source=PromptDataset, data_config=DataConfig)`; data_config.seed is
    always a number. Each iteration yields the positions of one epoch: `len(self)` integers from 0 to
    len(data_source) - 1. The trainer draws only as many positions as the next step needs. If a prompt occurs twice in
    one step, each occurrence gets its own group of answers.

    `state_dict()` and `load_state_dict(state)` make a resumed run exact: after loading a state, the next iteration
    yields the remaining positions of the epoch. A sampler may define `update(batch)`. The trainer calls it once per
    step, after the advantages are computed and before the checkpoint is saved. It may return a dict of numbers, which
    are logged as sampler/<name>.
    """

    def __init__(self, data_source: PromptDataset, data_config: DataConfig) -> None: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[int]: ...

    def state_dict(self) -> object: ...

    def load_state_dict(self, state: object) -> None: ...


class BatchOrder:
    """Batches in which every prompt occurs once per epoch. The order depends only on (seed, epoch).

    One pass of the iterator is one epoch, or the rest of the epoch after `load_state_dict`. The last batch of an epoch
    may be short. The order of an epoch is computed again after a resume instead of being stored.

    Args:
        rows: Prompts per epoch.
        batch_size: Prompts per batch.
        seed: Seed of the shuffles.
        fingerprint: See the attribute.
        shuffle: False to keep the order of the dataset.

    Attributes:
        rows: Prompts per epoch.
        served: Prompts already yielded in the current epoch.
        fingerprint: Digest of the dataset. A state saved with another dataset is refused.
    """

    def __init__(self, rows: int, batch_size: int, *, seed: int, fingerprint: str, shuffle: bool = True) -> None:
        self.rows = rows
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.fingerprint = fingerprint
        self.epoch = 0
        self.served = 0

    def __len__(self) -> int:
        """Number of batches per epoch."""
        return math.ceil(self.rows / self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self._rest_of_epoch():
            # counted before the batch is used, because a checkpoint after its step must not serve it again
            self.served += len(batch)
            yield batch
        self.epoch += 1
        self.served = 0

    def _rest_of_epoch(self) -> Iterator[list[int]]:
        """Yields the batches after the first `self.served` rows. The caller updates `served` after each batch."""
        positions = np.arange(self.rows)
        order = self._shuffled(positions, self.epoch)
        for start in range(self.served, self.rows, self.batch_size):
            batch = order[start : start + self.batch_size]
            yield batch.tolist()

    def _shuffled(self, values: np.ndarray, *stream: int) -> np.ndarray:
        """Returns the values in random order, or unchanged with shuffle=False.

        Args:
            values: What to shuffle, along its first dimension.
            stream: Numbers that select the random generator, together with the seed.
        """
        if not self.shuffle:
            return values
        # a separate generator for each stream, so that a resumed run need not repeat earlier shuffles
        generator = np.random.default_rng([self.seed, *stream])
        return generator.permutation(values)

    def update(self, batch: DataProto) -> dict[str, float]:
        """Receives a finished training batch; returns metrics to log."""
        return {}

    def state_dict(self) -> OrderState:
        return {
            "epoch": self.epoch,
            "served": self.served,
            "dataset": [self.rows, self.fingerprint],
        }

    def load_state_dict(self, state: OrderState) -> None:
        """Restores a state. Raises UserError if it belongs to another dataset, in which positions differ."""
        dataset = [self.rows, self.fingerprint]
        if state["dataset"] != dataset:
            raise UserError(
                f"The training prompts differ from the checkpoint: their rows and fingerprint are {dataset}, in the "
                f"checkpoint {state['dataset']}. Resume with the same data.train_files, tokenizer and template."
            )
        self.epoch = state["epoch"]
        self.served = state["served"]


class MixtureBatches(BatchOrder):
    """Batches in which each source has its share: data.sources.NAME.weight divided by the sum of the weights.

    Each slot of a batch goes to the source that is furthest behind its share of all batches so far. A source therefore
    gets its share of each batch up to rounding, later batches compensate the rounding, and no source is ever a whole
    prompt ahead of its share. After its last prompt, a source is reshuffled and starts again. An epoch has as many
    prompts as the dataset, rounded up to full batches.

    Args:
        sources: Positions in the dataset by source name.
        weights: Weight by source name, for the same names. A source with the weight 0 is left out.
        rows: Prompts of the dataset.
        batch_size: Prompts per batch.
        seed, fingerprint, shuffle: See `BatchOrder`.
    """

    def __init__(
        self,
        sources: dict[str, np.ndarray],
        weights: dict[str, float],
        rows: int,
        batch_size: int,
        *,
        seed: int,
        fingerprint: str,
        shuffle: bool = True,
    ) -> None:
        # a short last batch would not have the shares
        rows_of_full_batches = math.ceil(rows / batch_size) * batch_size
        super().__init__(rows_of_full_batches, batch_size, seed=seed, fingerprint=fingerprint, shuffle=shuffle)
        self.positions = sources

        # fractions, because the error of floating-point shares would add up over the batches
        exact_weights = {name: Fraction(str(weight)) for name, weight in weights.items() if weight}
        total_weight = sum(exact_weights.values())
        self.shares: dict[str, Fraction] = {}
        # sorted by name, because of equally late sources the first is drawn, whatever the order of the options
        for name in sorted(exact_weights):
            self.shares[name] = exact_weights[name] / total_weight
        # by source: its share of all prompts so far, minus the prompts drawn from it
        self.behind = dict.fromkeys(self.shares, Fraction(0))
        self.drawn = dict.fromkeys(self.shares, 0)
        # the current pass of each source; other passes are never needed again
        cache = functools.lru_cache(maxsize=len(self.shares))
        self._order_in_pass = cache(self._shuffled_source)

    def _shuffled_source(self, name: str, pass_number: int) -> np.ndarray:
        """Returns the positions of a source in the order of one pass over it."""
        # crc32 of the name, because Python's hash of a text differs between processes
        source_number = zlib.crc32(name.encode())
        return self._shuffled(self.positions[name], source_number, pass_number)

    def _rest_of_epoch(self) -> Iterator[list[int]]:
        """Yields full batches whose slots the sources share; see the class."""
        while self.served < self.rows:
            # all shares of the batch first, so that each slot sees how far a source is behind at the end of the batch
            for name, share in self.shares.items():
                self.behind[name] += share * self.batch_size
            batch = [self._draw() for _ in range(self.batch_size)]
            # shuffled, because otherwise a mini-batch could consist of a single source
            shuffled_batch = self._shuffled(np.array(batch), self.epoch, self.served)
            yield shuffled_batch.tolist()

    def _draw(self) -> int:
        """Returns the next position of the source that is furthest behind its share."""
        name = max(self.behind, key=self.behind.__getitem__)
        source_size = len(self.positions[name])
        pass_number, offset = divmod(self.drawn[name], source_size)
        order = self._order_in_pass(name, pass_number)

        self.behind[name] -= 1
        self.drawn[name] += 1
        return int(order[offset])

    def state_dict(self) -> OrderState:
        sources = {}
        for name in self.shares:
            sources[name] = {
                # as text, which keeps a fraction exact
                "behind": str(self.behind[name]),
                "drawn": self.drawn[name],
            }
        state = super().state_dict()
        return state | {"sources": sources}

    def load_state_dict(self, state: OrderState) -> None:
        """Restores a state. A source that the state lacks starts from its first prompt."""
        super().load_state_dict(state)
        for name, source_state in state.get("sources", {}).items():
            if name in self.shares:
                self.behind[name] = Fraction(source_state["behind"])
                self.drawn[name] = source_state["drawn"]


class SamplerBatches(BatchOrder):
    """Batches of the positions that a user's sampler yields. The last batch of an epoch may be short.

    Args:
        sampler: The sampler, see `Sampler`.
        positions: Prompts of the dataset, which the sampler may repeat or leave out.
        batch_size: Prompts per batch.
        seed, fingerprint: See `BatchOrder`.
    """

    def __init__(self, sampler: Sampler, positions: int, batch_size: int, *, seed: int, fingerprint: str) -> None:
        super().__init__(len(sampler), batch_size, seed=seed, fingerprint=fingerprint)
        self.sampler = sampler
        self.positions = positions
        self.name = type(sampler).__name__

    def _rest_of_epoch(self) -> Iterator[list[int]]:
        """Yields the positions of one iteration of the sampler, in batches.

        Raises:
            UserError: If the sampler yields another number of positions than its length, or an invalid position.
        """
        # the epoch was complete when its state was saved: no new iteration of the sampler is started
        if self.served >= self.rows:
            return
        positions = iter(self.sampler)
        while self.served < self.rows:
            count = min(self.batch_size, self.rows - self.served)
            batch = list(islice(positions, count))
            is_last = self.served + count == self.rows
            # one more request at the end of an epoch detects surplus positions and runs the code after the last `yield`
            has_surplus = is_last and next(positions, None) is not None
            are_positions = all(self._is_position(value) for value in batch)
            if has_surplus or len(batch) < count or not are_positions:
                yielded = "more" if has_surplus else self.served + len(batch)
                raise UserError(
                    f"data.sampler: an epoch of {self.name} yielded {yielded} positions, in the last step "
                    f"{batch!r:.200}; expected {self.rows} (its len), each from 0 to {self.positions - 1}"
                )
            yield [int(position) for position in batch]

    def _is_position(self, value: object) -> bool:
        """Returns True for an integer that is the position of a prompt."""
        if not isinstance(value, int | np.integer):
            return False
        return bool(0 <= value < self.positions)

    def update(self, batch: DataProto) -> dict[str, float]:
        """Passes a finished batch to the sampler, if it has `update`. Returns its numbers as sampler/<name>."""
        if not hasattr(self.sampler, "update"):
            return {}
        numbers = self.sampler.update(batch) or {}
        metrics = {}
        for name, value in numbers.items():
            metrics[f"sampler/{name}"] = float(value)
        return metrics

    def state_dict(self) -> OrderState:
        # a copy, because the sampler may change its state before the checkpoint is written
        sampler_state = copy.deepcopy(self.sampler.state_dict())
        return super().state_dict() | {"sampler": sampler_state}

    def load_state_dict(self, state: OrderState) -> None:
        super().load_state_dict(state)
        self.sampler.load_state_dict(state["sampler"])


def build_order(data: PromptDataset, config: PPOConfig) -> BatchOrder:
    """Builds the order configured with data.sampler, data.sources or data.shuffle.

    Raises:
        UserError: If the settings do not fit the dataset, or an epoch has fewer prompts than a step.
    """
    options = config.data
    batch_size = options.train_batch_size
    seed = options.seed
    if seed is None:
        seed = config.trainer.seed
    fingerprint = data.fingerprint()
    shuffle = options.shuffle

    weights = {}
    for name, source_options in options.sources.items():
        if source_options.get("weight") is not None:
            weights[name] = source_options["weight"]

    order: BatchOrder
    # a sampler replaces data.shuffle
    if options.sampler.class_path is not None:
        sampler = _make_sampler(data, replace(options, seed=seed))
        order = SamplerBatches(sampler, len(data), batch_size, seed=seed, fingerprint=fingerprint)
    elif weights:
        positions = data.positions_by_source()
        _check_weights(weights, positions, options)
        # not checked below: its epochs consist of full batches
        return MixtureBatches(
            positions, weights, len(data), batch_size, seed=seed, fingerprint=fingerprint, shuffle=shuffle
        )
    else:
        order = BatchOrder(len(data), batch_size, seed=seed, fingerprint=fingerprint, shuffle=shuffle)

    # verl drops a short last batch, and refuses data of which nothing would be left
    if order.rows < batch_size and not config.trainer.val_only:
        raise UserError(
            f"data.train_batch_size={batch_size}: an epoch has only {order.rows} prompts, so no step would have a full "
            f"batch. Set data.train_batch_size={order.rows} or less, or add rows to data.train_files"
        )
    return order


def _check_weights(weights: Mapping[str, float], positions: Mapping[str, np.ndarray], options: DataConfig) -> None:
    """Raises UserError unless the sources with a weight are those with prompts."""
    # the names in only one of the two
    incomplete = sorted(positions.keys() ^ weights.keys())
    if not incomplete:
        return
    source = incomplete[0]
    lacks = "no weight"
    if source not in positions:
        lacks = f"no prompt of up to {options.max_prompt_length} tokens"
    raise UserError(
        f"data.sources: each source needs a weight and prompts in train_files, and {source!r} has {lacks}: set "
        f"data.sources.{source}.weight (0 leaves it out), or leave the source out"
    )


def _make_sampler(data: PromptDataset, options: DataConfig) -> Sampler:
    """Returns the sampler configured with data.sampler. Raises UserError if its class does not fit `Sampler`."""
    path = options.sampler.class_path or ""
    name = options.sampler.class_name or ""
    sampler_class = load_object(path, name, "data.sampler.class_path", "data.sampler.class_name")
    sampler = None
    # the constructor's own errors propagate, so its parameters are checked before the call
    if accepts(sampler_class, "data_source") and accepts(sampler_class, "data_config"):
        sampler = sampler_class(data_source=data, data_config=options)
    if not _is_sampler(sampler):
        raise UserError(
            f"data.sampler.class_name={name}: expected {name}(data_source=..., data_config=...) with __len__ and "
            "__iter__ (the positions of one epoch), and state_dict() and load_state_dict(state), so that a resumed run "
            "continues exactly where it was interrupted"
        )
    return sampler


def _is_sampler(value: object) -> TypeGuard[Sampler]:
    """Returns True if an object has the methods of `Sampler`."""
    methods = ("__len__", "__iter__", "state_dict", "load_state_dict")
    return all(hasattr(value, method) for method in methods)


def build_train_loader(data: PromptDataset, config: PPOConfig, order: BatchOrder | None = None) -> StatefulDataLoader:
    """Returns a loader of training batches with data.train_batch_size prompts each.

    A batch is a `DataProto`, see `PromptDataset.__getitems__`. Each iteration of the loader is one epoch of `order`. A
    new loader with the `state_dict()` saved after a batch continues with the next batch.

    Args:
        data: The training prompts.
        config: Configuration of the run.
        order: Order of the prompts; None: the configured order.
    """
    if order is None:
        order = build_order(data, config)
    with warnings.catch_warnings():
        # torchdata itself calls a deprecated function
        warnings.simplefilter("ignore", UserWarning)
        return StatefulDataLoader(
            data,
            batch_sampler=order,
            num_workers=0,
            collate_fn=lambda batch: batch,  # `__getitems__` already returns a batch
            generator=torch.Generator(),  # a separate one, so that new iterators draw nothing from the global generator
        )
