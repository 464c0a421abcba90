"""The filters of groups of answers: dynamic sampling (DAPO, arXiv:2503.14476, section 3.2), and none.

If all answers of a group have the same outcome, their advantages are 0. With `algorithm.filter_groups`, such groups
are dropped and replaced by answers to further prompts, sampled with the same weights, until data.train_batch_size
groups are kept. DATA.md describes the cost, and the effect on epochs and checkpoints.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from trainer.rewards.groups import KINDS, groups_of
from trainer.rewards.scores import RewardManager
from trainer.rollout_scheduler import Group, GroupFilter, Rows, assembled
from verl_lite.config import PPOConfig
from verl_lite.errors import UserError
from verl_lite.metrics import Metric
from verl_lite.protocol import DataProto


class FilterBudgetExceeded(UserError):
    """Too few groups were kept although the budget of the step or the dataset is exhausted."""


class AnswerGroups(GroupFilter):
    """Keeps all groups of answers. waits: True if groups may overtake each other; a group is then complete only when
    its rewards are available."""

    def __init__(self, rewards: RewardManager, waits: bool) -> None:
        self.rewards, self.waits = rewards, waits

    def judge(self, groups: Sequence[Group], wait: bool) -> None:
        for group in self.scored(groups, wait or not self.waits):
            group.kind = "kept"

    def scored(self, groups: Sequence[Group], wait: bool) -> list[Group]:
        """Returns the groups whose rewards are available, or all if `wait` is True."""
        if wait or not groups:
            return list(groups)
        ready = self.rewards.are_ready(assembled(groups))
        return [group for group, is_ready in zip(groups, _by_group(ready, groups), strict=True) if is_ready.all()]

    def discard(self, groups: Sequence[Group]) -> None:
        """Cancels the rewards of answers that will not be trained on."""
        parts = [part for group in groups if (part := group.columns or group.sampled) is not None]
        ids = [part.batch.non_tensor_batch["sample_id"][part.start : part.stop] for part in parts]
        self.rewards.cancel([str(one) for of_group in ids for one in of_group])

    def restore(self, groups: Sequence[Group]) -> None:
        """Submits the answers again whose rewards were not collected before the checkpoint."""
        if unscored := [group for group in groups if group.sampled and "token_level_scores" not in group.sampled.batch]:
            self.rewards.submit(assembled(unscored))


class DynamicSampling(AnswerGroups):
    """Drops groups whose answers all have the same outcome. score: adds the scores to the rows of groups."""

    drops = adds_scores = True

    def __init__(self, config: PPOConfig, rewards: RewardManager, score: Callable[[DataProto], DataProto]) -> None:
        super().__init__(rewards, waits=True)
        self.config, self.score = config, score

    def judge(self, groups: Sequence[Group], wait: bool) -> None:
        if not (judged := self.scored(groups, wait)):
            return
        rows = self.score(assembled(judged))
        found = groups_of(rows, self.config.algorithm.filter_groups.metric)
        starts = np.searchsorted(found.of_row.numpy(), np.arange(len(judged) + 1))
        for number, group in enumerate(judged):
            group.kind = next(kind for kind in KINDS if found.kinds[kind][number])
            group.sampled = Rows(rows, int(starts[number]), int(starts[number + 1]))

    def most(self, wanted: int) -> float:
        return self.config.algorithm.filter_groups.max_num_gen_batches * wanted or math.inf

    def complete(self, step: int, groups: Sequence[Group], missing: int) -> None:
        """Raises FilterBudgetExceeded, which describes the outcomes by data_source."""
        config, options = self.config, self.config.algorithm.filter_groups
        by_source: dict[str, Counter[str]] = {}
        for group in groups:
            source = str(rows_of(group).non_tensor_batch["data_source"][0])
            by_source.setdefault(source, Counter())[str(group.kind)] += 1
        total = sum(by_source.values(), start=Counter())
        harder = "harder" if total["all_right"] > total["all_wrong"] else "easier"
        is_used_up = len(groups) >= self.most(config.data.train_batch_size)
        end = "its budget of generation batches is used up" if is_used_up else "all training prompts were asked"
        lines = []
        for source, counts in sorted(by_source.items()):
            shown = ", ".join(f"{counts[kind]} {kind.replace('_', ' ')}" for kind in KINDS if counts[kind])
            lines.append(f"\n  {source}: {counts.total()} asked: {shown}")
        raise FilterBudgetExceeded(
            f"Step {step}: {end}, and {total['kept']} of the {config.data.train_batch_size} groups of "
            f"data.train_batch_size have answers of different outcome, after {len(groups)} groups "
            f"(algorithm.filter_groups.max_num_gen_batches={options.max_num_gen_batches}). By data_source:"
            f"{''.join(lines)}\nGive {harder} data, or more of it; more answers to a prompt "
            f"(rollout.n={config.rollout.n}); another algorithm.filter_groups.metric than "
            f"{options.metric} (unjudged: the reward gave no such number); a smaller batch; or a larger budget. "
            "trainer.resume_mode=auto continues from the last checkpoint"
        )

    def metrics(self, step: int, chosen: Sequence[Group], dropped: Sequence[Group]) -> dict[str, Metric]:
        """Returns groups/{generated,gen_batches,wasted_tokens_frac}, and verl's training/filter_groups/* in rows."""
        generated, tokens = len(chosen) + len(dropped), [sum(map(_tokens, groups)) for groups in (chosen, dropped)]
        return {
            "groups/generated": Metric.last(generated),
            "groups/gen_batches": Metric.last(math.ceil(generated / len(chosen))),
            "groups/wasted_tokens_frac": Metric.mean(tokens[1], sum(tokens)),
            "training/filter_groups/evicted_samples": Metric.last(sum(len(rows_of(group)) for group in dropped)),
            "training/filter_groups/discarded_surplus_samples": Metric.last(0),
        }


def rows_of(group: Group) -> DataProto:
    """Returns the rows of a complete group."""
    assert group.sampled is not None
    batch, start, stop = group.sampled
    return batch.select_idxs(np.arange(start, stop))


def _tokens(group: Group) -> int:
    """Returns the number of response tokens of a group."""
    rows = rows_of(group).batch
    return int(rows["attention_mask"][:, -rows["responses"].shape[1] :].sum())


def _by_group(values: np.ndarray, groups: Sequence[Group]) -> Iterator[np.ndarray]:
    """Yields the values (B,) of the rows of each group."""
    start = 0
    for group in groups:
        stop = start + (group.sampled.stop - group.sampled.start if group.sampled is not None else 0)
        yield values[start:stop]
        start = stop
