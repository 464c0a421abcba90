"""The order of training prompts: shuffled epochs, sources mixed by weight, or a sampler written by the user.

An order is a batch sampler for the data loader. It yields one list of positions in a `PromptDataset` per step. After
loading a saved state, an order continues exactly where the state was saved. The shares of a mixture are exact, unlike
in `datasets.interleave_datasets`, which draws the source of each row at random.
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

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> None: ...


class BatchOrder:
    """Batches in which every prompt occurs once per epoch. The order depends only on (seed, epoch).

    One pass of the iterator is one epoch, or the rest of the epoch after `load_state_dict`. The last batch of an epoch
    may be short. rows: prompts per epoch. served: prompts already yielded in the current epoch. fingerprint: digest of
    the dataset; a state saved with another dataset is refused.
    """

    def __init__(self, rows: int, batch_size: int, *, seed: int, fingerprint: str, shuffle: bool = True) -> None:
        self.rows, self.batch_size, self.shuffle = rows, batch_size, shuffle
        self.seed, self.fingerprint = seed, fingerprint
        self.epoch = self.served = 0

    def __len__(self) -> int:
        """Number of batches per epoch."""
        return -(-self.rows // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self._rest_of_epoch():
            self.served += len(batch)
            yield batch
        self.epoch, self.served = self.epoch + 1, 0

    def _rest_of_epoch(self) -> Iterator[list[int]]:
        """Yields the batches after the first `self.served` rows. The caller updates `served` after each batch."""
        order = self._shuffled(np.arange(self.rows), self.epoch)
        for start in range(self.served, self.rows, self.batch_size):
            yield order[start : start + self.batch_size].tolist()

    def _shuffled(self, values: np.ndarray, *stream: int) -> np.ndarray:
        return np.random.default_rng([self.seed, *stream]).permutation(values) if self.shuffle else values

    def update(self, batch: DataProto) -> dict[str, float]:
        """Receives a finished training batch; returns metrics to log."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "served": self.served, "dataset": [self.rows, self.fingerprint]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        found = [self.rows, self.fingerprint]
        if state["dataset"] != found:
            raise UserError(
                f"The training prompts differ from the checkpoint: their rows and fingerprint are {found}, in the "
                f"checkpoint {state['dataset']}. Resume with the same data.train_files, tokenizer and template."
            )
        self.epoch, self.served = state["epoch"], state["served"]


class MixtureBatches(BatchOrder):
    """Batches in which each source has its share: data.sources.NAME.weight divided by the sum of the weights.

    Each slot of a batch goes to the source that is furthest behind its share of all batches so far. A source therefore
    gets its share of each batch up to rounding, later batches compensate the rounding, and no source is ever a whole
    prompt ahead of its share. After its last prompt, a source is reshuffled and starts again. An epoch has as many
    prompts as the dataset, rounded up to full batches.

    sources: positions in the dataset by source name. weights: weight by source name, for the same names.
    """

    def __init__(
        self, sources: dict[str, np.ndarray], weights: dict[str, float], rows: int, batch_size: int, **options: Any
    ) -> None:
        super().__init__(-(-rows // batch_size) * batch_size, batch_size, **options)
        exact = {name: Fraction(str(weight)) for name, weight in weights.items() if weight}
        self.shares = {name: exact[name] / sum(exact.values()) for name in sorted(exact)}
        self.positions = sources
        # by source: its share of all prompts so far, minus the prompts drawn from it
        self.behind = dict.fromkeys(self.shares, Fraction(0))
        self.drawn = dict.fromkeys(self.shares, 0)
        # the shuffled positions of a source in its pass number `times`
        self._order = functools.lru_cache(maxsize=len(self.shares))(
            lambda name, times: self._shuffled(self.positions[name], zlib.crc32(name.encode()), times)
        )

    def _rest_of_epoch(self) -> Iterator[list[int]]:
        while self.served < self.rows:
            for name, share in self.shares.items():
                self.behind[name] += share * self.batch_size
            batch = np.array([self._draw() for _ in range(self.batch_size)])
            # shuffled, because otherwise a mini-batch could consist of a single source
            yield self._shuffled(batch, self.epoch, self.served).tolist()

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
        """Restores a state. A source that the state lacks starts from its first prompt."""
        super().load_state_dict(state)
        for name, saved in state.get("sources", {}).items():
            if name in self.shares:
                self.behind[name], self.drawn[name] = Fraction(saved["behind"]), saved["drawn"]


class SamplerBatches(BatchOrder):
    """Batches of the positions that a user's sampler yields. The last batch of an epoch may be short. See `Sampler`."""

    def __init__(self, sampler: Any, positions: int, batch_size: int, **options: Any) -> None:
        super().__init__(len(sampler), batch_size, **options)
        self.sampler, self.positions, self.name = sampler, positions, type(sampler).__name__

    def _rest_of_epoch(self) -> Iterator[list[int]]:
        # if the epoch was complete when its state was saved, no new iteration of the sampler is started
        positions = iter(self.sampler) if self.served < self.rows else iter(())
        while self.served < self.rows:
            count = min(self.batch_size, self.rows - self.served)
            batch = list(islice(positions, count))
            # one more request at the end of an epoch detects surplus positions and runs the code after the last `yield`
            is_more = self.served + count == self.rows and next(positions, None) is not None
            is_index = [isinstance(place, int | np.integer) and 0 <= place < self.positions for place in batch]
            if is_more or len(batch) < count or not all(is_index):
                raise UserError(
                    f"data.sampler: an epoch of {self.name} yielded {'more' if is_more else self.served + len(batch)} "
                    f"positions, in the last step {batch!r:.200}; expected {self.rows} (its len), each from 0 to "
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
    """Builds the order configured with data.sampler, data.sources or data.shuffle.

    Raises:
        UserError: If the settings do not fit the dataset, or an epoch has fewer prompts than a step.
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
            f"data.train_batch_size={size}: an epoch has only {order.rows} prompts, so no step would have a full "
            f"batch. Set data.train_batch_size={order.rows} or less, or add rows to data.train_files"
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
            "continues exactly where it was interrupted"
        )
    return sampler


def build_train_loader(data: PromptDataset, config: PPOConfig, order: BatchOrder | None = None) -> StatefulDataLoader:
    """Returns a loader of training batches with data.train_batch_size prompts each.

    A batch is a `DataProto`, see `PromptDataset.__getitems__`. Each iteration of the loader is one epoch of `order`
    (None: the configured order). A new loader with the `state_dict()` saved after a batch continues with the next one.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torchdata itself calls a deprecated function
        return StatefulDataLoader(
            data,
            batch_sampler=order or build_order(data, config),
            num_workers=0,
            collate_fn=lambda batch: batch,
            generator=torch.Generator(),  # a separate one, so that new iterators draw nothing from the global generator
        )
