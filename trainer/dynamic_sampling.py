"""Dynamic sampling (DAPO, arXiv:2503.14476, section 3.2): a batch consists of groups with a learning signal.

A group is the set of answers to one prompt. If all answers of a group have the same outcome, their advantages are 0.
With `algorithm.filter_groups`, such groups are dropped, and answers to further prompts are sampled with the same
weights until data.train_batch_size groups are kept. DATA.md describes the cost, and the effect on epochs and
checkpoints.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from trainer.data.prompts import PromptDataset
from trainer.rewards.groups import KINDS, Groups, groups_of
from trainer.steps import TrainingSteps
from verl_lite.config import PPOConfig
from verl_lite.errors import UserError
from verl_lite.metrics import Metric
from verl_lite.protocol import DataProto

ANSWERS = "answers_per_prompt"
SPARE_DEVIATIONS = 2.0
"""Number of standard deviations that `refill_size` adds to the expected number of prompts."""


class FilterBudgetExceeded(UserError):
    """Too few groups were kept although the budget of the step or the dataset is exhausted."""


class DynamicSamplingSteps(TrainingSteps):
    """Training steps that may draw more prompts than they start with.

    A step starts with data.train_batch_size prompts, even if an epoch ends among them, and draws no prompt twice. The
    unused rest of a drawn batch is kept for the next prompts and saved in checkpoints.
    """

    def __init__(self, config: PPOConfig, data: PromptDataset) -> None:
        super().__init__(config, data)
        self._prompts = len(data)
        self._asked: dict[str, int] = {}  # prompts of this step: uid -> row in the dataset
        self._waiting: DataProto | None = None
        self._batches = self._epochs()
        self._again: DataProto | None = None
        self._before: dict[str, Any] | None = None  # the state after the last step of this process

    def __iter__(self) -> Iterator[DataProto]:
        while self.global_step < self.total:
            self.global_step += 1
            self._asked = {}
            if self._again is not None:
                self._ask(self._again, len(self._again))
                yield self._again
            else:
                prompts = self.draw_prompts(self.config.data.train_batch_size)
                assert prompts is not None  # a dataset has rows
                prompts.meta_info["position"] = self.state_dict()  # position of the data after them, for a replay
                yield prompts
            if self.stopping:
                return
            self._before = self.state_dict()

    def draw_prompts(self, number: int) -> DataProto | None:
        """Returns up to `number` prompts that this step has not drawn yet, or None if the data has no more."""
        taken, idle = [], 0
        while number and len(set(self._asked.values())) < self._prompts and idle <= len(self.loader):
            batch = self._waiting or next(self._batches)
            new = self._ask(batch, number)
            end = new[-1] + 1 if len(new) == number else len(batch)
            self._waiting = batch.select_idxs(np.arange(end, len(batch))) if end < len(batch) else None
            taken += [batch.select_idxs(new)] if len(new) else []
            number, idle = number - len(new), 0 if len(new) else idle + 1
        return joined(taken, self.config) if taken else None

    def back_to_last_step(self) -> bool:
        """Restores the state at the end of the previous step, as if the run ended there. Returns False if this process
        has not completed a step."""
        if self._before is not None:
            self.load_state_dict(self._before)
            self.stopping = True
        return self._before is not None

    def restrict_to_step(self, step: int, epoch: int, prompts: DataProto) -> None:
        """Restricts the iteration to one step, which starts with these prompts and continues with their successors."""
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
        columns, self._batches = state.get("waiting"), self._epochs()
        self._waiting = None if columns is None else DataProto.from_dict(columns["tensors"], columns["others"])

    def _ask(self, batch: DataProto, most: int) -> np.ndarray:
        """Returns the indices of the first `most` prompts that this step has not drawn, and marks them as drawn."""
        uids, rows = batch.non_tensor_batch["uid"], batch.non_tensor_batch["index"]
        new = np.flatnonzero([uid not in self._asked for uid in uids])[:most]
        self._asked |= dict(zip(uids[new], rows[new].tolist(), strict=True))
        return new

    def _epochs(self) -> Iterator[DataProto]:
        """Yields the batches of the loader, epoch after epoch."""
        while True:
            yield from self.loader
            self.epoch += 1


class FilterStats:
    """Counts the groups that a step sampled by kind and data_source, and their rows and tokens."""

    def __init__(self) -> None:
        self.by_source: dict[str, Counter[str]] = {}
        self.batches = self.tokens = self.kept_tokens = self.evicted_samples = self.surplus_samples = 0

    def add(self, batch: DataProto, groups: Groups, chosen: torch.Tensor) -> None:
        """Counts a generation batch. chosen: (B,) bool, rows of the training batch."""
        sources = dict(zip(groups.of_row.tolist(), batch.non_tensor_batch["data_source"], strict=True))
        for kind, of_kind in groups.kinds.items():
            for group, is_so in enumerate(of_kind.tolist()):
                self.by_source.setdefault(sources[group], Counter())[kind] += is_so
        kept = groups.kinds["kept"][groups.of_row]
        tokens = batch.batch["attention_mask"][:, -batch.batch["responses"].shape[1] :].sum(1)
        self.batches += 1
        self.tokens += int(tokens.sum())
        self.kept_tokens += int(tokens[chosen].sum())
        self.evicted_samples += int((~kept).sum())
        self.surplus_samples += int((kept & ~chosen).sum())

    def number(self, *kinds: str) -> int:
        """Returns the number of groups of these kinds over all sources."""
        return sum(counts[kind] for counts in self.by_source.values() for kind in kinds)

    def metrics(self) -> dict[str, Metric]:
        """Returns groups/{generated,gen_batches,wasted_tokens_frac}, and verl's training/filter_groups/* in rows."""
        return {
            "groups/generated": Metric.last(self.number(*KINDS)),
            "groups/gen_batches": Metric.last(self.batches),
            "groups/wasted_tokens_frac": Metric.mean(self.tokens - self.kept_tokens, self.tokens),
            "training/filter_groups/evicted_samples": Metric.last(self.evicted_samples),
            "training/filter_groups/discarded_surplus_samples": Metric.last(self.surplus_samples),
        }

    def failure(self, end: str, steps: DynamicSamplingSteps) -> FilterBudgetExceeded:
        """Returns the error of a step that cannot fill its batch. end: description of the exhausted resource."""
        config, options = steps.config, steps.config.algorithm.filter_groups
        harder = "harder" if self.number("all_right") > self.number("all_wrong") else "easier"
        lines = []
        for source, counts in sorted(self.by_source.items()):
            shown = ", ".join(f"{counts[kind]} {kind.replace('_', ' ')}" for kind in KINDS if counts[kind])
            lines.append(f"\n  {source}: {counts.total()} asked: {shown}")
        return FilterBudgetExceeded(
            f"Step {steps.global_step}: {end}, and {self.number('kept')} of the {config.data.train_batch_size} groups "
            f"of data.train_batch_size have answers of different outcome, after {self.batches} generation batches "
            f"(algorithm.filter_groups.max_num_gen_batches={options.max_num_gen_batches}). By data_source:"
            f"{''.join(lines)}\nGive {harder} data, or more of it; more answers to a prompt "
            f"(rollout.n={config.rollout.n}); another algorithm.filter_groups.metric than "
            f"{options.metric} (unjudged: the reward gave no such number); a smaller batch; or a larger budget. "
            "trainer.resume_mode=auto continues from the last checkpoint"
        )


def collect_groups(
    prompts: DataProto, steps: DynamicSamplingSteps, answer: Callable[[DataProto], DataProto]
) -> tuple[DataProto, dict[str, Metric]]:
    """Returns a batch of data.train_batch_size groups with different outcomes, and groups/* metrics.

    The kept groups are in the order in which their prompts were drawn. Surplus groups of the last generation batch are
    dropped, because in the next step their answers would be off-policy.

    Args:
        prompts: first prompts of the step.
        steps: draws further prompts.
        answer: samples and scores a generation batch of prompts.

    Raises:
        FilterBudgetExceeded: algorithm.filter_groups.max_num_gen_batches, or all prompts, were not enough.
    """
    options, wanted = steps.config.algorithm.filter_groups, steps.config.data.train_batch_size
    stats, parts, missing = FilterStats(), [], wanted
    more: DataProto | None = prompts
    while more is not None:
        batch = answer(more)
        groups = groups_of(batch, options.metric)
        kept = groups.kinds["kept"]
        chosen = (kept & (kept.cumsum(0) <= missing))[groups.of_row]
        stats.add(batch, groups, chosen)
        parts += [batch.select_idxs(chosen)] if chosen.any() else []
        found = stats.number("kept")
        missing = wanted - found
        if missing <= 0:
            return joined(parts, steps.config), stats.metrics()
        if stats.batches == options.max_num_gen_batches:
            raise stats.failure("its budget of generation batches is used up", steps)
        more = steps.draw_prompts(refill_size(missing, found, stats.number(*KINDS), wanted))
    raise stats.failure("all training prompts were asked", steps)


def refill_size(missing: int, kept: int, asked: int, most: int) -> int:
    """Returns the number of prompts, at most `most`, of which very likely enough groups are kept.

    missing: number of groups still needed. kept, asked: numbers of kept and of sampled groups of this step. With the
    share p = kept / asked, n prompts yield n p groups on average, with a standard deviation of sqrt(n p (1 - p)). The
    result yields the needed groups on average, plus SPARE_DEVIATIONS standard deviations.
    """
    if not kept:
        return most
    share = kept / asked
    return min(most, math.ceil((missing + SPARE_DEVIATIONS * math.sqrt(missing * (1 - share))) / share))


def joined(parts: Sequence[DataProto], config: PPOConfig) -> DataProto:
    """Concatenates batches, some of which may lack columns: `reward/<name>` if all rewards failed, and
    answers_per_prompt if it is rollout.n in all rows."""
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
