"""Dynamic sampling, the filter of groups of answers (DAPO, arXiv:2503.14476, section 3.2).

If all answers of a group have the same outcome, their advantages are 0. With `algorithm.filter_groups`, such groups
are dropped and replaced by answers to further prompts, sampled with the same weights, until data.train_batch_size
groups are kept. DATA.md describes the cost, and the effect on epochs and checkpoints.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence

from trainer.rewards.groups import KINDS, groups_of
from trainer.rollout.sample_groups import Group, GroupFilter, Rows, assembled, filter_groups_limit
from verl_lite.config import PPOConfig
from verl_lite.errors import UserError
from verl_lite.metrics import Metric
from verl_lite.protocol import DataProto


class FilterBudgetExceeded(UserError):
    """Too few groups were kept although the budget of the step or the dataset is exhausted."""


class DynamicSampling(GroupFilter):
    """Drops groups whose answers all have the same outcome.

    Args:
        score: adds the scores to the rows of complete groups.
    """

    adds_scores = True

    def __init__(self, config: PPOConfig, score: Callable[[DataProto], DataProto]) -> None:
        self.config = config
        self.score = score

    def judge(self, groups: Sequence[Group]) -> None:
        """Sets `kind` of the groups to an entry of KINDS, and adds the scores to their rows."""
        rows = self.score(assembled(groups))
        outcomes = groups_of(rows, self.config.algorithm.filter_groups.metric)
        for kind, is_of_kind in outcomes.kinds.items():
            for number in is_of_kind.nonzero().flatten().tolist():
                groups[number].kind = kind

        # the rows are in the order of the groups, and scoring does not change their number
        sizes = outcomes.of_row.bincount(minlength=len(groups)).tolist()
        start = 0
        for group, size in zip(groups, sizes, strict=True):
            group.sampled = Rows(rows, start, start + size)
            start += size

    def max_groups(self, wanted: int) -> float:
        return filter_groups_limit(self.config.algorithm.filter_groups, wanted)

    def fill_batch(self, step: int, groups: Sequence[Group], missing: int) -> None:
        """Raises FilterBudgetExceeded, which describes the outcomes by data_source."""
        options = self.config.algorithm.filter_groups
        batch_size = self.config.data.train_batch_size

        counts_by_source: dict[str, Counter[str]] = {}
        for group in groups:
            data_source = str(group.rows.non_tensor_batch["data_source"][0])
            counts = counts_by_source.setdefault(data_source, Counter())
            counts[str(group.kind)] += 1
        lines = []
        for data_source, counts in sorted(counts_by_source.items()):
            outcomes = [f"{counts[kind]} {kind.replace('_', ' ')}" for kind in KINDS if counts[kind]]
            lines.append(f"\n  {data_source}: {counts.total()} asked: {', '.join(outcomes)}")

        total = sum(counts_by_source.values(), start=Counter())
        better_data = "easier"
        if total["all_right"] > total["all_wrong"]:
            better_data = "harder"
        reason = "all training prompts were asked"
        if len(groups) >= self.max_groups(batch_size):
            reason = "its budget of generation batches is used up"
        raise FilterBudgetExceeded(
            f"Step {step}: {reason}, and {total['kept']} of the {batch_size} groups of "
            f"data.train_batch_size have answers of different outcome, after {len(groups)} groups "
            f"(algorithm.filter_groups.max_num_gen_batches={options.max_num_gen_batches}). By data_source:"
            f"{''.join(lines)}\nGive {better_data} data, or more of it; more answers to a prompt "
            f"(rollout.n={self.config.rollout.n}); another algorithm.filter_groups.metric than "
            f"{options.metric} (unjudged: the reward gave no such number); a smaller batch; or a larger budget. "
            "trainer.resume_mode=auto continues from the last checkpoint"
        )

    def metrics(self, step: int, chosen: Sequence[Group], dropped: Sequence[Group]) -> dict[str, Metric]:
        """Returns groups/{generated,gen_batches,wasted_tokens_frac}, and verl's training/filter_groups/*, which count
        rows."""
        num_groups = len(chosen) + len(dropped)
        chosen_tokens = sum(map(_num_response_tokens, chosen))
        dropped_tokens = sum(map(_num_response_tokens, dropped))
        dropped_rows = sum(len(group.rows) for group in dropped)
        return {
            "groups/generated": Metric.last(num_groups),
            "groups/gen_batches": Metric.last(math.ceil(num_groups / len(chosen))),
            "groups/wasted_tokens_frac": Metric.mean(dropped_tokens, chosen_tokens + dropped_tokens),
            "training/filter_groups/evicted_samples": Metric.last(dropped_rows),
            # verl samples whole generation batches; here each dropped group is replaced alone, which leaves no surplus
            "training/filter_groups/discarded_surplus_samples": Metric.last(0),
        }


def _num_response_tokens(group: Group) -> int:
    """Returns the number of response tokens of a group."""
    columns = group.rows.batch
    width = columns["responses"].shape[1]
    return int(columns["attention_mask"][:, -width:].sum())
