"""Dynamic sampling (DAPO, arXiv:2503.14476, section 3.2): only groups from which something can be learnt fill a batch.

A group is the answers to one prompt. Where all are as good as each other, their advantages are 0; with
`algorithm.filter_groups` such groups are dropped and further prompts are answered, with the same weights, until
data.train_batch_size groups are kept. What this costs, and how it goes with epochs and checkpoints, stands in
DATA.md.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from trainer.data.prompts import PromptDataset
from trainer.rewards.groups import Groups, groups_of
from trainer.steps import TrainingSteps
from verl_lite.algos.group_outcomes import KINDS
from verl_lite.config import PPOConfig
from verl_lite.errors import UserError
from verl_lite.metrics import Metric
from verl_lite.protocol import DataProto

ANSWERS = "answers_per_prompt"
SPARE_DEVIATIONS = 2.0
"""How many standard deviations of luck a further generation batch allows for; see `refill_size`."""


class FilterBudgetExceeded(UserError):
    """The budget of a step is used up, or all prompts were asked, and too few groups were kept."""


class PromptLoader(TrainingSteps):
    """Training steps of which each may ask for more prompts than it began with.

    A step begins with data.train_batch_size prompts, also where an epoch ends within them. Prompts that were drawn and
    not asked wait for the next step, and are saved with it; so each prompt is asked once an epoch, in the loader's
    order. No step asks for a group (uid) twice. before: the state at the end of the step before; None in the first one
    of this process.
    """

    before: dict[str, Any] | None = None

    def __init__(self, config: PPOConfig, data: PromptDataset) -> None:
        super().__init__(config, data)
        self._prompts = len(data)
        self._waiting: DataProto | None = None
        self._batches: Iterator[DataProto] | None = None
        self._asked: dict[str, int] = {}  # uid of each prompt of this step, and its row in the dataset
        self._again: DataProto | None = None

    def __iter__(self) -> Iterator[DataProto]:
        while self.global_step < self.total:
            self.global_step += 1
            self._asked = {}
            yield self._first()
            if self.stopping:
                return
            self.before = self.state_dict()

    def more(self, number: int) -> DataProto | None:
        """So many prompts that this step has not asked; fewer where the data has no more, None where it has none."""
        taken: list[DataProto] = []
        waiting: list[DataProto] = []
        missing, idle = number, 0
        while missing and len(set(self._asked.values())) < self._prompts and idle <= len(self.loader):
            batch = self._next_batch()
            chosen = self._choose(batch, missing)
            missing, idle = missing - int(chosen.sum()), 0 if chosen.any() else idle + 1
            taken += [batch.select_idxs(chosen)] if chosen.any() else []
            waiting += [batch.select_idxs(~chosen)] if not chosen.all() else []
        if waiting:
            self._waiting = joined(waiting, self.config)
            # a prompt that waits twice, because its source is small and its share large, is asked once
            _, first = np.unique(self._waiting.non_tensor_batch["uid"].astype(str), return_index=True)
            self._waiting = self._waiting.select_idxs(np.sort(first))
        return joined(taken, self.config) if taken else None

    def _choose(self, batch: DataProto, number: int) -> np.ndarray:
        """(B,) bool: the first `number` prompts that this step has not asked; from now on it has."""
        chosen = np.zeros(len(batch), dtype=bool)
        columns = batch.non_tensor_batch
        for place, (uid, row) in enumerate(zip(columns["uid"], columns["index"].tolist(), strict=True)):
            if number and uid not in self._asked:
                self._asked[uid] = row
                chosen[place], number = True, number - 1
        return chosen

    def only(self, step: int, epoch: int, prompts: DataProto) -> None:
        """Leaves one step to do, which begins with these prompts and goes on with those that followed them."""
        if "position" in prompts.meta_info:
            self.load_state_dict(prompts.meta_info["position"])
        self._again, self.global_step, self.epoch, self.total = prompts, step - 1, epoch, step

    def state_dict(self) -> dict[str, Any]:
        columns, waiting = None, self._waiting
        if waiting is not None:
            columns = {"tensors": dict(waiting.batch.items()), "others": waiting.non_tensor_batch}
        return super().state_dict() | {"waiting": columns}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        columns, self._batches = state.get("waiting"), None
        self._waiting = None if columns is None else DataProto.from_dict(columns["tensors"], columns["others"])

    def _first(self) -> DataProto:
        """The prompts that a step begins with. meta_info position: where the data stands after them, for a replay."""
        if self._again is not None:
            self._choose(self._again, len(self._again))
            return self._again
        prompts = self.more(self.config.data.train_batch_size)
        assert prompts is not None  # a dataset has rows
        prompts.meta_info["position"] = self.state_dict()
        return prompts

    def _next_batch(self) -> DataProto:
        """What waits, or the loader's next batch; an epoch follows the other."""
        if self._waiting is not None:
            batch, self._waiting = self._waiting, None
            return batch
        if self._batches is None:
            self._batches = iter(self.loader)
        for batch in self._batches:
            return batch
        self.epoch, self._batches = self.epoch + 1, iter(self.loader)
        return next(self._batches)


@dataclass
class FilterStats:
    """What became of the groups that one step asked for. by_source: counts of each kind, by data_source."""

    by_source: dict[str, Counter[str]] = field(default_factory=dict)
    batches: int = 0
    tokens: int = 0
    kept_tokens: int = 0
    evicted_samples: int = 0
    surplus_samples: int = 0

    def add(self, batch: DataProto, groups: Groups) -> None:
        """Takes in a generation batch."""
        sources = dict(zip(groups.of_row.tolist(), batch.non_tensor_batch["data_source"], strict=True))
        for kind in KINDS:
            for group, is_so in enumerate(getattr(groups.kinds, kind).tolist()):
                self.by_source.setdefault(sources[group], Counter())[kind] += is_so
        self.batches += 1
        self.tokens += answer_tokens(batch)
        self.evicted_samples += int((~groups.kinds.kept[groups.of_row]).sum())

    def number(self, *kinds: str) -> int:
        """Groups of these kinds, over all sources."""
        return sum(counts[kind] for counts in self.by_source.values() for kind in kinds)

    def metrics(self) -> dict[str, Metric]:
        """groups/{generated,gen_batches,wasted_tokens_frac}, and verl's training/filter_groups/*, in rows."""
        return {
            "groups/generated": Metric.last(self.number(*KINDS)),
            "groups/gen_batches": Metric.last(self.batches),
            "groups/wasted_tokens_frac": Metric.mean(self.tokens - self.kept_tokens, self.tokens),
            "training/filter_groups/evicted_samples": Metric.last(self.evicted_samples),
            "training/filter_groups/discarded_surplus_samples": Metric.last(self.surplus_samples),
        }

    def __str__(self) -> str:
        lines = []
        for source, counts in sorted(self.by_source.items()):
            shown = ", ".join(f"{counts[kind]} {kind.replace('_', ' ')}" for kind in KINDS if counts[kind])
            lines.append(f"  {source}: {counts.total()} asked: {shown}")
        return "\n".join(lines)


def collect_groups(
    prompts: DataProto, steps: PromptLoader, answer: Callable[[DataProto], DataProto]
) -> tuple[DataProto, dict[str, Metric]]:
    """A batch of data.train_batch_size groups whose outcomes differ, and groups/* metrics.

    The groups that are kept stand in the order in which they were asked; those of the last generation batch that are
    too many are dropped, because in the next step their answers would be of old weights.

    Args:
        prompts: what the step begins with. steps: gives more of them.
        answer: samples and scores a generation batch of prompts.

    Raises:
        FilterBudgetExceeded: algorithm.filter_groups.max_num_gen_batches, or all prompts, were not enough.
    """
    options, wanted = steps.config.algorithm.filter_groups, steps.config.data.train_batch_size
    stats, parts, missing = FilterStats(), [], wanted
    while True:
        batch = answer(prompts)
        groups = groups_of(batch, options.metric)
        stats.add(batch, groups)
        kept = groups.kinds.kept
        chosen = (kept & (kept.cumsum(0) <= missing))[groups.of_row]
        rows = batch.select_idxs(chosen)
        stats.surplus_samples += int((kept[groups.of_row] & ~chosen).sum())
        stats.kept_tokens += answer_tokens(rows)
        parts += [rows] if len(rows) else []
        found = stats.number("kept")
        missing = wanted - found
        if missing <= 0:
            return joined(parts, steps.config), stats.metrics()
        if stats.batches == options.max_num_gen_batches:
            raise FilterBudgetExceeded(_why(stats, "its budget of generation batches is used up", steps))
        more = steps.more(refill_size(missing, found, stats.number(*KINDS), wanted))
        if more is None:
            raise FilterBudgetExceeded(_why(stats, "all training prompts were asked", steps))
        prompts = more


def _why(stats: FilterStats, end: str, steps: PromptLoader) -> str:
    config, options = steps.config, steps.config.algorithm.filter_groups
    harder = "harder" if stats.number("all_right") > stats.number("all_wrong") else "easier"
    return (
        f"Step {steps.global_step}: {end}, and {stats.number('kept')} of the {config.data.train_batch_size} groups of "
        f"data.train_batch_size have answers of different outcome, after {stats.batches} generation batches "
        f"(algorithm.filter_groups.max_num_gen_batches={options.max_num_gen_batches}). By data_source:\n{stats}\n"
        f"The outcome is algorithm.filter_groups.metric={options.metric or 'null (acc, else the score)'}. Give "
        f"{harder} data, or more of it; more answers to a prompt (rollout.n={config.rollout.n}); a metric of more "
        "values; a smaller batch; or a larger budget. trainer.resume_mode=auto continues from the last checkpoint"
    )


def refill_size(missing: int, kept: int, asked: int, most: int, spare: float = SPARE_DEVIATIONS) -> int:
    """Prompts of the next generation batch, so that very likely enough groups of it are kept; at most `most`.

    missing: groups still to be kept. kept, asked: groups of this step so far. With the share p = kept / asked, n
    prompts give n p groups on average, with a standard deviation of sqrt(n p (1 - p)): n is the mean that is needed,
    and `spare` deviations more.
    """
    if not kept:
        return most
    share = kept / asked
    return min(most, math.ceil((missing + spare * math.sqrt(missing * (1 - share))) / share))


def answer_tokens(batch: DataProto) -> int:
    """Tokens of all answers, those without a score too."""
    return int(batch.batch["attention_mask"][:, -batch.batch["responses"].shape[1] :].sum())


def joined(parts: Sequence[DataProto], config: PPOConfig) -> DataProto:
    """Batches one after another, where some may lack columns: `reward/<name>`, if every reward failed, and
    answers_per_prompt, if it is rollout.n in all rows."""
    names = dict.fromkeys(name for part in parts for name in part.non_tensor_batch)
    has_number = any(ANSWERS in part for part in parts)
    complete = []
    for part in parts:
        part = part.select(meta_info_keys=[])
        part.non_tensor_batch = {name: part.non_tensor_batch.get(name, np.full(len(part), None)) for name in names}
        if has_number and ANSWERS not in part:
            part.batch[ANSWERS] = torch.full((len(part),), config.rollout.n)
        complete.append(part)
    return DataProto.concat(complete)
