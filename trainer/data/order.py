"""In which order the training prompts come: shuffled epochs, sources mixed by weight, or a sampler of the user's own.

An order is a batch sampler of the data loader: lists of positions in a `PromptDataset`, one list a step. A state saved
after a step and loaded again goes on as if nothing had happened. Shares are exact, which those of
`datasets.interleave_datasets`, drawn at random, are not.
"""

import copy
import functools
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import islice
from typing import Any, Protocol

import numpy as np
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from trainer.data.prompts import PromptDataset
from verl_lite.config import DataConfig, PPOConfig
from verl_lite.errors import UserError
from verl_lite.protocol import DataProto
from verl_lite.registry import accepts, load_object


class Sampler(Protocol):
    """What data.sampler names: a class made as `Sampler(data_source=PromptDataset, data_config=DataConfig)`.

    data_config.seed is always a number. Each iteration gives the `len` positions of one epoch, each from 0 to
    len(data_source) - 1; it is asked for no more of them than the next step needs. A prompt that comes twice in one
    step is two groups of answers.

    `state_dict()` and `load_state_dict(state)` make a resumed run exact: after loading, the next iteration gives what
    was left of the epoch. A sampler may have `update(batch)`, which is called once a step, when the batch has its
    advantages and before the checkpoint; it may return numbers, which are logged as sampler/<name>.
    """

    def __init__(self, data_source: PromptDataset, data_config: DataConfig) -> None: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[int]: ...

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> None: ...


class BatchOrder:
    """Every prompt once an epoch; the last batch of one may be short. The order depends on (seed, epoch) alone.

    One pass of the iterator is one epoch, or the rest of it after `load_state_dict`. rows: prompts of an epoch; served:
    how many of them this epoch has given. fingerprint: of the dataset; a state of another dataset is refused.
    """

    def __init__(self, rows: int, batch_size: int, *, seed: int, fingerprint: str, shuffle: bool = True) -> None:
        self.rows, self.batch_size, self.shuffle = rows, batch_size, shuffle
        self.seed, self.fingerprint = seed, fingerprint
        self.epoch = self.served = 0

    def __len__(self) -> int:
        """Batches per epoch."""
        return -(-self.rows // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self._rest_of_epoch():
            self.served += len(batch)
            yield batch
        self.epoch, self.served = self.epoch + 1, 0

    def _rest_of_epoch(self) -> Iterator[list[int]]:
        """The batches after the rows that are served, which are counted between them."""
        order = self._shuffled(np.arange(self.rows), self.epoch)
        for start in range(self.served, self.rows, self.batch_size):
            yield order[start : start + self.batch_size].tolist()

    def _shuffled(self, values: np.ndarray, *stream: int) -> np.ndarray:
        return np.random.default_rng([self.seed, *stream]).permutation(values) if self.shuffle else values

    def update(self, batch: DataProto) -> dict[str, float]:
        """Hears what became of a batch; gives numbers to log."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "served": self.served, "dataset": [self.rows, self.fingerprint]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        found = [self.rows, self.fingerprint]
        if state["dataset"] != found:
            raise UserError(
                f"The training prompts are not those of the checkpoint: rows and fingerprint are {found}, those "
                f"of the checkpoint {state['dataset']}. Resume with the same data.train_files, tokenizer and template."
            )
        self.epoch, self.served = state["epoch"], state["served"]


class MixtureBatches(BatchOrder):
    """Batches in which each source has its share (data.sources.NAME.weight over the sum of weights).

    A batch's seats go one by one to the source that is furthest behind its share of all batches so far: it gets its
    share rounded, what was rounded is made up for in the next batch, and it is never a whole prompt ahead. A source
    that ends begins again, shuffled anew; an epoch is as many prompts as the dataset has, and its batches are full.

    sources: positions by name. weights: for exactly these.
    """

    def __init__(
        self, sources: dict[str, np.ndarray], weights: dict[str, float], rows: int, batch_size: int, **options: Any
    ) -> None:
        super().__init__(-(-rows // batch_size) * batch_size, batch_size, **options)
        exact = {name: Fraction(str(weight)) for name, weight in weights.items() if weight}
        self.shares = {name: exact[name] / sum(exact.values()) for name in sorted(exact)}
        self.positions = sources
        self.behind = dict.fromkeys(self.shares, Fraction(0))  # its share of all batches, less what it gave
        self.drawn = dict.fromkeys(self.shares, 0)
        # the positions of a source after it has ended so many times
        self._order = functools.lru_cache(maxsize=len(self.shares))(
            lambda name, times: self._shuffled(self.positions[name], zlib.crc32(name.encode()), times)
        )

    def _rest_of_epoch(self) -> Iterator[list[int]]:
        while self.served < self.rows:
            for name, share in self.shares.items():
                self.behind[name] += share * self.batch_size
            batch = np.array([self._draw() for _ in range(self.batch_size)])
            yield self._shuffled(batch, self.epoch, self.served).tolist()  # else a mini-batch could be of one source

    def _draw(self) -> int:
        name = max(self.behind, key=self.behind.__getitem__)
        times, place = divmod(self.drawn[name], len(self.positions[name]))
        self.behind[name] -= 1
        self.drawn[name] += 1
        return int(self._order(name, times)[place])

    def state_dict(self) -> dict[str, Any]:
        sources = {name: {"behind": str(self.behind[name]), "drawn": self.drawn[name]} for name in self.shares}
        return super().state_dict() | {"sources": sources}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """A source that had no weight then starts anew (data.sources may differ where trainer.resume_allow says so)."""
        super().load_state_dict(state)
        for name, saved in state.get("sources", {}).items():
            if name in self.shares:
                self.behind[name], self.drawn[name] = Fraction(saved["behind"]), saved["drawn"]


class SamplerBatches(BatchOrder):
    """Batches of what a sampler gives; the last one of an epoch may be short. See `Sampler`."""

    def __init__(self, sampler: Any, positions: int, batch_size: int, **options: Any) -> None:
        super().__init__(len(sampler), batch_size, **options)
        self.sampler, self.positions, self.name = sampler, positions, type(sampler).__name__

    def _rest_of_epoch(self) -> Iterator[list[int]]:
        # not asked for where the epoch at hand is already done
        positions = iter(self.sampler) if self.served < self.rows else iter(())
        while self.served < self.rows:
            count = min(self.batch_size, self.rows - self.served)
            batch = list(islice(positions, count))
            # at an epoch's end one more is asked for, which also runs what the sampler does there
            is_more = self.served + count == self.rows and next(positions, None) is not None
            is_index = [isinstance(place, int | np.integer) and 0 <= place < self.positions for place in batch]
            if is_more or len(batch) < count or not all(is_index):
                raise UserError(
                    f"data.sampler: an epoch of {self.name} gave {'more' if is_more else self.served + len(batch)} "
                    f"positions, of the last step {batch!r:.200}; expected are {self.rows} (its len), each from 0 to "
                    f"{self.positions - 1}"
                )
            yield [int(position) for position in batch]

    def update(self, batch: DataProto) -> dict[str, float]:
        if not hasattr(self.sampler, "update"):
            return {}
        logged = self.sampler.update(batch)
        return {f"sampler/{name}": float(value) for name, value in (logged or {}).items()}

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"sampler": copy.deepcopy(self.sampler.state_dict())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.sampler.load_state_dict(state["sampler"])


def build_order(data: PromptDataset, config: PPOConfig) -> BatchOrder:
    """The order that data.sampler, data.sources or data.shuffle ask for.

    Raises:
        UserError: if they cannot be met; also where an epoch has fewer prompts than a step.
    """
    options, size = config.data, config.data.train_batch_size
    seed = config.trainer.seed if options.seed is None else options.seed
    shared: dict[str, Any] = {"seed": seed, "fingerprint": data.fingerprint(), "shuffle": options.shuffle}
    weights = {name: entry["weight"] for name, entry in options.sources.items() if entry.get("weight") is not None}
    if options.sampler.class_path is not None:
        sampler = _make_sampler(data, replace(options, seed=seed))
        order: BatchOrder = SamplerBatches(sampler, len(data), size, **shared)
    elif weights:
        positions = data.positions_by_source()
        if odd := sorted(positions.keys() ^ weights.keys()):
            lacks = "no weight" if odd[0] in positions else f"no prompt of up to {options.max_prompt_length} tokens"
            raise UserError(
                f"data.sources: each source needs a weight and prompts in train_files, and {odd[0]!r} has {lacks}: set "
                f"data.sources.{odd[0]}.weight (0 leaves it out), or leave the source out"
            )
        return MixtureBatches(positions, weights, len(data), size, **shared)
    else:
        order = BatchOrder(len(data), size, **shared)
    # verl drops a short last batch, and refuses data of which nothing would be left
    if order.rows < size and not config.trainer.val_only:
        raise UserError(
            f"data.train_batch_size={size}: an epoch has only {order.rows} prompts, so no step would have as many as "
            f"asked for. Set data.train_batch_size={order.rows} or less, or give more rows in data.train_files"
        )
    return order


def _make_sampler(data: PromptDataset, options: DataConfig) -> Any:
    path, name = options.sampler.class_path or "", options.sampler.class_name or ""
    made = load_object(path, name, "data.sampler.class_path", "data.sampler.class_name")
    is_callable = accepts(made, "data_source") and accepts(made, "data_config")
    sampler = made(data_source=data, data_config=options) if is_callable else None
    if not all(hasattr(sampler, method) for method in ("__len__", "__iter__", "state_dict", "load_state_dict")):
        raise UserError(
            f"data.sampler.class_name={name}: expected {name}(data_source=..., data_config=...) with __len__ and "
            "__iter__ (the positions of one epoch), and state_dict() and load_state_dict(state), so that a resumed run "
            "is the one that was interrupted"
        )
    return sampler


def build_train_loader(data: PromptDataset, config: PPOConfig, order: BatchOrder | None = None) -> StatefulDataLoader:
    """Training batches of data.train_batch_size prompts (`DataProto`, see `PromptDataset.__getitems__`).

    Each iteration is one epoch of `order` (None = as the configuration says). `state_dict()` after a batch, loaded into
    a new loader, continues with the next one.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torchdata warns of its own use of a deprecated call
        return StatefulDataLoader(
            data,
            batch_sampler=order or build_order(data, config),
            num_workers=0,
            collate_fn=lambda batch: batch,
            generator=torch.Generator(),  # its own, so that a new iterator draws nothing from the global one
        )
