"""Normalisation of response scores by mean and standard deviation of the batch, the group, or all previous batches.

Pure functions of scores (B,) and labels. The state for "running" is one `RunningMoments` per domain, which the caller
owns, updates with `update_running` and saves. Invalid rows (padding, a failed reward) are excluded from all statistics
and get 0.
"""

from collections.abc import Mapping, MutableMapping, Sequence

import torch
from torch import Tensor

from verl_lite.algos.masked import Labels, RunningMoments, group_ids, group_mean_std, group_sum

NORM_TYPES = ("batch", "group", "running")
_EPSILON = 1e-6


@torch.no_grad()
def normalise_scores(
    scores: Tensor,
    valid: Tensor,
    norm_mean_type: str | None = None,
    norm_std_type: str | None = None,
    *,
    groups: Labels | None = None,
    domains: Sequence[str] | None = None,
    running: Mapping[str, RunningMoments] | None = None,
) -> Tensor:
    """Returns (scores - mean) / (std + 1e-6), (B,). A type of None omits the mean or the std.

    std has Bessel's correction. If a std is undefined (a single row) or at most 1e-6 (equal scores), the result is 0,
    because such rows carry no signal. ROLL returns NaN for a group of one, numbers of order 1e6 for equal scores
    without a mean, and a wrong shape for a group's std without a group's mean.

    Args:
        scores: (B,).
        valid: (B,) bool, the rows in the statistics; others get 0.
        norm_mean_type, norm_std_type: the rows over which mean and std are computed: "batch": all valid rows; "group":
            the valid rows with the same label in `groups`; "running": all rows so far of the domain, from `running`.
        groups: (B,) label of each row's group.
        domains: (B,) domain of each row.
        running: moments by domain.

    Raises:
        ValueError: a type is unknown, or what it needs is missing.
    """
    for name, kind in (("norm_mean_type", norm_mean_type), ("norm_std_type", norm_std_type)):
        if kind is not None and kind not in NORM_TYPES:
            raise ValueError(f"{name}={kind!r}: expected one of {', '.join(NORM_TYPES)}, or null.")
        if kind == "group" and groups is None:
            raise ValueError(f"{name}={kind!r} needs groups, found None.")
        if kind == "running" and (running is None or domains is None):
            raise ValueError(f"{name}={kind!r} needs running and domains, found None.")

    valid_scores = torch.where(valid, scores.double(), 0)
    result = valid_scores
    if norm_mean_type is not None:
        means, _ = _moments(norm_mean_type, valid_scores, valid, groups, domains, running)
        result = result - means
    if norm_std_type is not None:
        _, stds = _moments(norm_std_type, valid_scores, valid, groups, domains, running)
        result = torch.where(stds > _EPSILON, result / (stds + _EPSILON), 0)
    return torch.where(valid, result, 0).to(scores.dtype)


def _moments(
    kind: str,
    scores: Tensor,
    valid: Tensor,
    groups: Labels | None,
    domains: Sequence[str] | None,
    running: Mapping[str, RunningMoments] | None,
) -> tuple[Tensor, Tensor]:
    """Returns mean and std of the set that each row belongs to, (B,) fp64; std is 0 for fewer than two valid rows."""
    if kind == "running":
        assert running is not None and domains is not None
        moments = [running[domain] for domain in domains]
        means = scores.new_tensor([float(entry.mean) for entry in moments])
        stds = scores.new_tensor([float(entry.std) for entry in moments])
        return means, stds

    labels: Labels = [0] * len(scores)
    if kind == "group" and groups is not None:
        labels = groups
    numbers, num_groups = group_ids(labels, scores.device)
    counts = group_sum(valid.double(), numbers, num_groups)
    totals = group_sum(scores, numbers, num_groups)
    # a mean of its own, because that of group_mean_std is 0 for a single row
    means = totals / counts.clamp(min=1)
    _, stds, _ = group_mean_std(scores, numbers, num_groups, valid)
    stds = torch.where(counts > 1, stds, 0)
    return means[numbers], stds[numbers]


def update_running(
    running: MutableMapping[str, RunningMoments], scores: Tensor, valid: Tensor, domains: Sequence[str]
) -> None:
    """Updates the running moments of each domain with its valid scores, and creates moments for new domains."""
    # not a set, whose order of texts differs from process to process
    for domain in dict.fromkeys(domains):
        is_in_domain = torch.tensor([label == domain for label in domains], device=valid.device)
        scores_of_domain = scores[is_in_domain & valid]
        moments = running.setdefault(domain, RunningMoments())
        moments.update(scores_of_domain)
